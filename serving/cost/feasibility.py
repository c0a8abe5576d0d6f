"""Which (variant, hardware, chips) can exist at all; a hole in the matrix says why.

Rules, in the order they are told: the hardware computes one of the variant's formats natively (no
fp8 below Ironwood: an INT8 stand-in with its own quality id takes its place, or nothing does);
weights and KV fit the memory; the worker spans at least the smallest tensor-parallel degree its
engine supports and at most one ICI or NVLink domain.
"""

from __future__ import annotations

from dataclasses import dataclass

from bucket_planner.hardware import Hardware
from serving.cost.catalogue import Format, Variant

HBM_USABLE = 0.9
"""Share of memory that weights and KV may take; programs, activations and fragments need the
rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a cell can exist.

    Attributes:
        format: the format it would run, None when it is a hole.
        rule: the rule it breaks, "" when it breaks none.
        detail: the facts, for people.
    """

    format: Format | None
    rule: str = ""
    detail: str = ""

    @property
    def feasible(self) -> bool:
        """Whether no rule is broken."""
        return not self.rule


def check_cell(
    variant: Variant,
    hardware: Hardware,
    num_chips: int,
    *,
    num_requests: int,
    context_tokens: int,
    tensor_parallel: int | None = None,
) -> Verdict:
    """Applies the rules to one cell.

    Args:
        variant: what would be served.
        hardware: on what.
        num_chips: chips of one worker.
        num_requests: requests it should hold at once.
        context_tokens: their mean context.
        tensor_parallel: JAX devices (TPU) or GPUs one replica spans; None = all of its chips'.
    """
    native = [item for item in variant.formats if item.precision in hardware.peak_flops]
    if not native:
        wanted = "/".join(item.precision for item in variant.formats)
        return Verdict(
            format=None,
            rule="native_precision",
            detail=f"{wanted} is not native on {hardware.id} ({', '.join(hardware.peak_flops)})",
        )
    chosen = native[0]
    devices = num_chips * hardware.jax_devices_per_chip
    spans = devices if tensor_parallel is None else tensor_parallel
    if spans < hardware.min_tensor_parallel:
        return Verdict(
            format=None,
            rule="min_tensor_parallel",
            detail=f"tensor parallel {spans} < {hardware.min_tensor_parallel} on {hardware.id}",
        )
    if spans > devices:
        return Verdict(
            format=None,
            rule="tensor_parallel",
            detail=f"tensor parallel {spans} needs more than the {devices} devices of "
            f"{num_chips} chips",
        )
    if num_chips > hardware.pod_chips:
        return Verdict(
            format=None,
            rule="domain_chips",
            detail=f"{num_chips} chips > {hardware.pod_chips} of one domain on {hardware.id}",
        )
    needed = chosen.weight_bytes + num_requests * context_tokens * chosen.kv_bytes_per_token
    usable = num_chips * hardware.hbm_bytes * HBM_USABLE
    if needed > usable:
        return Verdict(
            format=None,
            rule="hbm_capacity",
            detail=f"{needed / 1e9:.1f} GB of weights and KV > {usable / 1e9:.1f} GB usable on "
            f"{num_chips} {hardware.id}",
        )
    return Verdict(format=chosen)


def max_kv_tokens(fmt: Format, hardware: Hardware, num_chips: int) -> int:
    """Context tokens that fit beside the weights; 0 when the weights alone do not fit."""
    free = num_chips * hardware.hbm_bytes * HBM_USABLE - fmt.weight_bytes
    return max(0, int(free // fmt.kv_bytes_per_token))
