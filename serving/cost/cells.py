"""Cells: (variant, hardware, chips) and what the model says they take.

The model is a roofline: prefill bound by arithmetic, decode by memory traffic unless arithmetic
takes longer. Measurements, which routing prefers, are `measured`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from bucket_planner.hardware import Hardware
from serving.core.errors import ConfigError
from serving.cost import formulas
from serving.cost.catalogue import Catalogue, Format, Offer, Variant
from serving.cost.feasibility import Verdict, check_cell

CellKey = tuple[str, str, int]
"""(variant id, hardware id, chips)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A feasible cell and its model.

    Attributes:
        variant, hardware: what runs on what.
        format: the format it runs in.
        num_chips: chips of one worker.
        prefill_precision: precision whose peak prices prefill.
        note: departure from the rule, for the table.
    """

    variant: Variant
    hardware: Hardware
    format: Format
    num_chips: int
    prefill_precision: str
    note: str = ""

    @property
    def key(self) -> CellKey:
        """Key of the cell."""
        return self.variant.id, self.hardware.id, self.num_chips

    def prefill_tokens_per_s(self) -> float:
        """Modelled prompt tokens per second."""
        return formulas.prefill_tokens_per_s(
            num_active_params=self.variant.num_active_params,
            num_chips=self.num_chips,
            peak_flops=self.hardware.peak_flops[self.prefill_precision],
            mfu=self.hardware.prefill_mfu,
        )

    def prefill_s_per_token(self) -> float:
        """Modelled seconds per prompt token."""
        return 1.0 / self.prefill_tokens_per_s()

    def weight_bytes(self, num_requests: float, distinct_experts: float | None = None) -> float:
        """Weights one decode step loads.

        Args:
            num_requests: requests in the step.
            distinct_experts: experts they activate, summed over layers; None expects them as
                if requests chose independently.
        """
        moe = self.variant.moe
        if moe is None:
            return self.format.weight_bytes
        if distinct_experts is None:
            distinct_experts = moe.num_layers * formulas.expected_distinct_experts(
                moe.num_experts, moe.top_k, num_requests
            )
        return formulas.moe_weight_bytes(
            dense_bytes=self.format.dense_bytes,
            expert_bytes=self.format.expert_bytes,
            distinct_experts=distinct_experts,
        )

    def decode_step_s(
        self,
        num_requests: float,
        context_tokens: float,
        *,
        distinct_experts: float | None = None,
    ) -> float:
        """Modelled decode step: memory traffic, or arithmetic where that takes longer."""
        memory_s = formulas.decode_step_s(
            weight_bytes=self.weight_bytes(num_requests, distinct_experts),
            num_requests=num_requests,
            context_tokens=context_tokens,
            kv_bytes_per_token=self.format.kv_bytes_per_token,
            num_chips=self.num_chips,
            hbm_bytes_per_s=self.hardware.hbm_bytes_per_s,
            utilization=self.hardware.decode_bandwidth_utilization,
        )
        return max(memory_s, self.compute_step_s(num_requests))

    def compute_step_s(self, num_requests: float) -> float:
        """Arithmetic of a decode step, seconds."""
        return formulas.compute_step_s(
            num_active_params=self.variant.num_active_params,
            num_requests=num_requests,
            num_chips=self.num_chips,
            peak_flops=self.hardware.peak_flops[self.format.precision],
            mfu=self.hardware.prefill_mfu,
        )

    def usd_per_s(self, *, slo_class: str | None = None, basis: str = "amortised") -> float:
        """Price of the whole worker; a class with an opportunity rate pays that instead."""
        return self.num_chips * self.hardware.usd_per_chip_s(basis=basis, slo_class=slo_class)


def build_cell(catalogue: Catalogue, offer: Offer) -> tuple[Cell | None, Verdict]:
    """The cell of an offer at the catalogue's reference load, or the verdict that it is a hole.

    Raises:
        ConfigError: unknown variant or hardware, or a prefill precision that is not native.
    """
    variant = catalogue.variant(offer.variant)
    hardware = catalogue.hardware_of(offer.hardware)
    verdict = check_cell(
        variant,
        hardware,
        offer.num_chips,
        num_requests=catalogue.reference_batch,
        context_tokens=catalogue.reference_context_tokens,
    )
    if verdict.format is None:
        return None, verdict
    precision = offer.prefill_precision or verdict.format.precision
    if precision not in hardware.peak_flops:
        native = ", ".join(hardware.peak_flops)
        raise ConfigError(
            f"cells.{variant.id}.{hardware.id}.prefill_precision",
            precision,
            f"is not native on {hardware.id}; native: {native}",
        )
    cell = Cell(
        variant=variant,
        hardware=hardware,
        format=verdict.format,
        num_chips=offer.num_chips,
        prefill_precision=precision,
        note=offer.note,
    )
    return cell, verdict
