"""What running one bucket costs: tokens, an analytic roofline, or measured milliseconds.

A curve maps bucket sizes to a nondecreasing cost, so that a smaller bucket is never dearer. The
compiler's own figures (`CompilerReport`) are a cross-check of the roofline's FLOPs only: a
compiler's predicted seconds are no price.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import Hardware
from bucket_planner.lengths import FloatArray, IntArray, LengthHistogram

Unit = Literal["tokens", "ms"]


class CostCurve(Protocol):
    """Cost of one run of a bucket."""

    @property
    def unit(self) -> Unit:
        """Unit of the cost."""
        ...

    def cost(self, tokens: IntArray) -> FloatArray:
        """float64[n] cost of buckets of int64[n] tokens; nondecreasing in tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """A bucket costs its tokens: padding is counted in tokens."""

    unit: Unit = "tokens"

    def cost(self, tokens: IntArray) -> FloatArray:
        """The tokens themselves."""
        return tokens.astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Milliseconds of a bucket: the larger of its arithmetic and its memory traffic.

    ms(n) = 1e3 * (overhead + max(flops(n) / flops_per_s, bytes(n) / bytes_per_s)), with
    flops(n) = flops_per_token * n + attention_flops_per_pair * n^2 / 2 and
    bytes(n) = dense_bytes + expert_bytes * (1 - (1 - top_k / num_experts)^n): a step loads each
    distinct expert once.

    Attributes:
      flops_per_token: 2 x active parameters.
      attention_flops_per_pair: 4 x layers x heads x head width; 0 to leave attention out.
      dense_bytes: weights every token uses.
      expert_bytes: weights of all experts of all layers.
      num_experts: experts per layer; 1 for a dense model.
      top_k: experts per token.
      flops_per_s: reachable FLOP/s of the whole worker.
      bytes_per_s: reachable memory bandwidth of the whole worker.
      overhead_s: fixed time of a run.
    """

    flops_per_token: float
    attention_flops_per_pair: float = 0.0
    dense_bytes: float
    expert_bytes: float = 0.0
    num_experts: int = 1
    top_k: int = 1
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = 0.0
    unit: Unit = "ms"

    def __post_init__(self) -> None:
        for name in ("flops_per_token", "flops_per_s", "bytes_per_s"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise PlannerConfigError(name, value, "must be a finite number > 0")
        for name in ("attention_flops_per_pair", "dense_bytes", "expert_bytes", "overhead_s"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise PlannerConfigError(name, value, "must be a finite number >= 0")
        if not 1 <= self.top_k <= self.num_experts:
            raise PlannerConfigError("top_k", self.top_k, f"must be 1..{self.num_experts}")

    def flops(self, tokens: IntArray) -> FloatArray:
        """float64[n] FLOPs of buckets of int64[n] tokens."""
        n = tokens.astype(np.float64)
        return self.flops_per_token * n + self.attention_flops_per_pair * n * n / 2.0

    def cost(self, tokens: IntArray) -> FloatArray:
        """float64[n] milliseconds."""
        touched = 1.0 - (1.0 - self.top_k / self.num_experts) ** tokens.astype(np.float64)
        traffic = self.dense_bytes + self.expert_bytes * touched
        busy_s = np.maximum(self.flops(tokens) / self.flops_per_s, traffic / self.bytes_per_s)
        return 1e3 * (self.overhead_s + busy_s)


# Qwen3-30B-A3B in bf16 on four v6e chips (3.3e9 active of 30.5e9 parameters, 48 layers of 128
# experts, top 8): the step time a replay uses when no cost file says better.
DEFAULT_STEP_COST = RooflineCost(
    flops_per_token=2 * 3.3e9,
    dense_bytes=3.1e9,
    expert_bytes=57.9e9,
    num_experts=128,
    top_k=8,
    flops_per_s=4 * 918e12 * 0.55,
    bytes_per_s=4 * 1.64e12 * 0.65,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """Measured milliseconds per bucket, joined by straight lines.

    Below the first measurement the cost stays flat (a small run is all overhead); above the last
    it follows the last slope. A measurement below an earlier one is noise: the running maximum
    keeps the curve nondecreasing.

    Attributes:
      tokens: measured bucket sizes, ascending.
      ms: milliseconds of each.
    """

    tokens: tuple[int, ...]
    ms: tuple[float, ...]
    unit: Unit = "ms"

    def __post_init__(self) -> None:
        check_points("bucket_ms", self.tokens, self.ms)

    def cost(self, tokens: IntArray) -> FloatArray:
        """float64[n] milliseconds."""
        return _interpolate(self.tokens, self.ms, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCost:
    """What compiling a bucket takes, by measured size and straight lines between.

    Attributes:
      tokens: compiled bucket sizes, ascending.
      compile_s: seconds of each, or None where not measured.
      program_bytes: size of each program, or None where not measured.
    """

    tokens: tuple[int, ...]
    compile_s: tuple[float, ...] | None
    program_bytes: tuple[float, ...] | None

    def __post_init__(self) -> None:
        for name in ("compile_s", "program_bytes"):
            values = getattr(self, name)
            if values is not None:
                check_points(name, self.tokens, values)

    def seconds(self, tokens: IntArray) -> FloatArray:
        """float64[n] compile seconds of buckets of int64[n] tokens; zeros where not measured."""
        if self.compile_s is None:
            return np.zeros(tokens.size)
        return _interpolate(self.tokens, self.compile_s, tokens)

    def num_bytes(self, tokens: IntArray) -> FloatArray:
        """float64[n] program bytes of buckets of int64[n] tokens; zeros where not measured."""
        if self.program_bytes is None:
            return np.zeros(tokens.size)
        return _interpolate(self.tokens, self.program_bytes, tokens)


def roofline_on(
    hardware: Hardware,
    *,
    num_chips: int,
    precision: str,
    num_active_params: float,
    dense_bytes: float,
    expert_bytes: float = 0.0,
    num_experts: int = 1,
    top_k: int = 1,
    attention_flops_per_pair: float = 0.0,
) -> RooflineCost:
    """The roofline of a model on `num_chips` of one hardware type.

    Raises:
      PlannerConfigError: the precision is not native, or a number breaks a rule.
    """
    if precision not in hardware.peak_flops:
        native = ", ".join(hardware.peak_flops)
        raise PlannerConfigError(
            "precision", precision, f"is not native on {hardware.id}; native: {native}"
        )
    if num_chips < 1:
        raise PlannerConfigError("chips", num_chips, "must be >= 1")
    return RooflineCost(
        flops_per_token=2.0 * num_active_params,
        attention_flops_per_pair=attention_flops_per_pair,
        dense_bytes=dense_bytes,
        expert_bytes=expert_bytes,
        num_experts=num_experts,
        top_k=top_k,
        flops_per_s=num_chips * hardware.peak_flops[precision] * hardware.prefill_mfu,
        bytes_per_s=num_chips * hardware.hbm_bytes_per_s * hardware.decode_bandwidth_utilization,
    )


def flops_divergence_pct(
    curve: RooflineCost, compiler_flops: Mapping[int, float]
) -> dict[int, float]:
    """Per bucket, how far the compiler's FLOPs lie above the roofline's, in percent.

    A cross-check, never a price: large values mean the model figures in the cost file are wrong.
    """
    return {
        tokens: 100.0 * (flops / float(curve.flops(np.array([tokens], np.int64))[0]) - 1.0)
        for tokens, flops in compiler_flops.items()
    }


def total_cost(sizes_tokens: Sequence[int], lengths: LengthHistogram, curve: CostCurve) -> float:
    """Cost of all runs when each length runs in the smallest of `sizes_tokens` that holds it.

    The last size must hold the longest length.
    """
    sizes = np.asarray(sizes_tokens, np.int64)
    padded = sizes[np.searchsorted(sizes, lengths.tokens)]
    return float((curve.cost(padded) * lengths.counts).sum())


def check_points(name: str, tokens: tuple[int, ...], values: tuple[float, ...]) -> None:
    """Checks measured points: one value per size, sizes ascending, values finite and > 0.

    Raises:
      PlannerConfigError: naming the point.
    """
    if not tokens or len(tokens) != len(values):
        raise PlannerConfigError(name, list(values), "needs one value per bucket, at least one")
    previous = 0
    for size, value in zip(tokens, values, strict=True):
        if size <= previous:
            raise PlannerConfigError(name, size, "bucket sizes must be >= 1 and ascend")
        if not (np.isfinite(value) and value > 0):
            raise PlannerConfigError(f"{name}[{size}]", value, "must be a finite number > 0")
        previous = size


def _interpolate(sizes: tuple[int, ...], values: tuple[float, ...], tokens: IntArray) -> FloatArray:
    x = np.asarray(sizes, np.float64)
    y = np.maximum.accumulate(np.asarray(values, np.float64))
    at = tokens.astype(np.float64)
    inside = np.interp(at, x, y)
    if x.size == 1:  # one point: proportional above it
        return np.where(at > x[0], y[0] * at / x[0], inside)
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.where(at > x[-1], y[-1] + slope * (at - x[-1]), inside)
