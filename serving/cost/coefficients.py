"""A cell's model as the coefficients the router's objective computes with.

Where nobody has calibrated a cell, the roofline's own numbers stand in: the dense weights are the
step's base, one expert's weights the price of a distinct expert, one token's KV the price of a
context token.
"""

from __future__ import annotations

from bucket_planner.hardware import Hardware
from serving.core.costs import CellCost, PrefillTimeModel, StepTimeModel
from serving.core.errors import ConfigError
from serving.core.request import SloClass
from serving.cost.cells import Cell


def modelled_cost(cell: Cell, *, slo_class: str | None = None) -> CellCost:
    """The prior of a cell in the core's type.

    Args:
        cell: a feasible cell.
        slo_class: whose opportunity rate prices the chips, None for the amortised price.
    """
    hardware, moe = cell.hardware, cell.variant.moe
    bytes_per_s = cell.num_chips * hardware.hbm_bytes_per_s * hardware.decode_bandwidth_utilization
    return CellCost(
        usd_per_chip_hour=3600.0 * hardware.usd_per_chip_s(slo_class=slo_class),
        prefill=PrefillTimeModel(chunk_s=0.0, token_s=cell.prefill_s_per_token()),
        step=StepTimeModel(
            base_s=cell.format.dense_bytes / bytes_per_s,
            c0_s=0.0,
            c2_s=cell.format.expert_bytes / bytes_per_s,
            c3_s=0.0,
            attention_s=cell.format.kv_bytes_per_token / bytes_per_s,
            num_moe_layers=moe.num_layers if moe else 0,
            num_experts=moe.num_experts if moe else 1,
            top_k=moe.top_k if moe else 1,
        ),
        kv_bytes_per_token=cell.format.kv_bytes_per_token,
        needs_equal_tensor_parallel=hardware.kind == "tpu",
        class_usd_per_chip_hour=_class_rates(hardware),
        version=f"roofline-{cell.variant.id}-{hardware.id}-{cell.num_chips}",
    )


def _class_rates(hardware: Hardware) -> dict[SloClass, float]:
    rates = {}
    for name, usd in hardware.opportunity_usd_per_chip_hour.items():
        if name not in SloClass.__members__:
            raise ConfigError(
                f"{hardware.id}.usd_per_chip_hour.opportunity", name, "must be one of A, B, C"
            )
        rates[SloClass(name)] = usd
    return rates
