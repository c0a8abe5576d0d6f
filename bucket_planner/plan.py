"""From a trace to a plan: fit, compare with the engine's default, prove it on held-out requests.

The plan to deploy is fitted on the whole trace. The held-out figures fit the first half and score
the second, against powers of two and against the best plan hindsight could have made for it.
"""

from dataclasses import dataclass, replace
from typing import Any

from bucket_planner.buckets import (
    MIN_BUCKET_TOKENS,
    BucketSet,
    Semantics,
    next_power_of_two,
    padding_tokens,
    powers_of_two,
)
from bucket_planner.compile_budget import CompileBudget
from bucket_planner.cost_curve import DEFAULT_STEP_COST, CostCurve, TokenCost, total_cost
from bucket_planner.engine_flags import engine_flags
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import LengthHistogram, Trace, histogram
from bucket_planner.optimize import BucketPlan, optimal_buckets
from bucket_planner.packer import PackerConfig, pack_trace, workers_for

SCHEMA_VERSION = 1

_TOKENS = TokenCost()
_PACKER = PackerConfig(max_num_batched_tokens=8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What to plan.

    Attributes:
      semantics: prompt or step.
      max_buckets: how many buckets may be compiled.
      curve: cost of a bucket; tokens unless a cost file gives milliseconds.
      cost_source: provenance of the curve.
      limit_tokens: largest bucket; 0 = next power of two above the longest prompt, or the next
        above max_num_batched_tokens for steps.
      min_bucket_tokens: smallest bucket.
      align_tokens: buckets are multiples of it.
      budget: compile budget, or None.
      packer: step packing; used with step semantics.
      data_parallel: data-parallel size for sgl-jax.
    """

    semantics: Semantics
    max_buckets: int
    curve: CostCurve = _TOKENS
    cost_source: str = "tokens"
    limit_tokens: int = 0
    min_bucket_tokens: int = MIN_BUCKET_TOKENS
    align_tokens: int = 1
    budget: CompileBudget | None = None
    packer: PackerConfig = _PACKER
    data_parallel: int = 1

    def __post_init__(self) -> None:
        if self.max_buckets < 1:
            raise PlannerConfigError("max_buckets", self.max_buckets, "must be >= 1")
        if self.limit_tokens < 0:
            raise PlannerConfigError("limit_tokens", self.limit_tokens, "must be >= 0")


def build_plan(trace: Trace, config: PlanConfig) -> dict[str, Any]:
    """Plans one trace.

    Returns:
      JSON-ready report: buckets, waste_tokens, default, optimal_waste_tokens, engine_flags,
      heldout and the settings.

    Raises:
      PlannerConfigError: a setting breaks a rule, or the trace has fewer than two requests.
    """
    if len(trace) < 2:
        raise PlannerConfigError("trace", len(trace), "needs at least two requests to hold out")
    limit = config.limit_tokens or _default_limit(trace, config)
    default = powers_of_two(limit, min_tokens=config.min_bucket_tokens)
    if config.semantics == "step":  # one number of workers for the whole trace and its halves
        steps, curve = _replay_setting(config, limit)
        num_workers = workers_for(trace, config.packer, buckets=steps, curve=curve)
        config = replace(config, packer=replace(config.packer, num_workers=num_workers))
    lengths = _lengths(trace, config, limit)
    plan = _fit(lengths, config, limit)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "trace": trace.name,
        "semantics": config.semantics,
        "num_requests": len(trace),
        "num_runs": int(lengths.counts.sum()),
        "total_tokens": lengths.total_tokens,
        "limit_tokens": limit,
        "max_buckets": config.max_buckets,
        "cost": {"unit": config.curve.unit, "source": config.cost_source},
        **_plan_fields(plan, config),
        "default": {
            "buckets": list(default),
            "waste_tokens": padding_tokens(default, lengths.tokens, lengths.counts),
            "total_cost": total_cost(default, lengths, config.curve),
        },
        "optimal_waste_tokens": _optimal_waste(lengths, config, limit),
        "engine_flags": engine_flags(
            plan.buckets,
            lengths,
            semantics=config.semantics,
            max_buckets=config.max_buckets,
            curve=config.curve,
            min_bucket_tokens=config.min_bucket_tokens,
            align_tokens=config.align_tokens,
            data_parallel=config.data_parallel,
        ),
        "heldout": _heldout(trace, config, limit, default),
    }
    if config.semantics == "step":
        report["max_num_batched_tokens"] = config.packer.max_num_batched_tokens
        report["role"] = config.packer.role
        report["num_workers"] = config.packer.num_workers
    return report


def _default_limit(trace: Trace, config: PlanConfig) -> int:
    longest = (
        int(trace.prompt_tokens.max())
        if config.semantics == "prompt"
        else config.packer.max_num_batched_tokens
    )
    return max(next_power_of_two(longest), config.min_bucket_tokens)


def _lengths(trace: Trace, config: PlanConfig, limit: int) -> LengthHistogram:
    """What gets padded: prompts, or the steps a replay under the default buckets makes."""
    if config.semantics == "prompt":
        return histogram(trace.prompt_tokens)
    buckets, curve = _replay_setting(config, limit)
    return pack_trace(trace, config.packer, buckets=buckets, curve=curve)


def _replay_setting(config: PlanConfig, limit: int) -> tuple[BucketSet, CostCurve]:
    """The default buckets and the step time a replay runs with."""
    sizes = powers_of_two(limit, min_tokens=config.min_bucket_tokens)
    curve = config.curve if config.curve.unit == "ms" else DEFAULT_STEP_COST
    return BucketSet(id="default", semantics="step", sizes_tokens=sizes), curve


def _fit(lengths: LengthHistogram, config: PlanConfig, limit: int) -> BucketPlan:
    """The plan the configuration asks for."""
    return optimal_buckets(
        lengths,
        max_buckets=config.max_buckets,
        limit_tokens=limit,
        curve=config.curve,
        min_bucket_tokens=config.min_bucket_tokens,
        align_tokens=config.align_tokens,
        budget=config.budget,
    )


def _optimal_waste(lengths: LengthHistogram, config: PlanConfig, limit: int) -> int:
    """Padded tokens of the best plan when tokens alone count and compiling is free."""
    return optimal_buckets(
        lengths,
        max_buckets=config.max_buckets,
        limit_tokens=limit,
        curve=TokenCost(),
        min_bucket_tokens=config.min_bucket_tokens,
        align_tokens=config.align_tokens,
    ).waste_tokens


def _plan_fields(plan: BucketPlan, config: PlanConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "buckets": list(plan.buckets),
        "waste_tokens": plan.waste_tokens,
        "total_cost": plan.cost,
        "exact": plan.exact,
    }
    if config.budget is not None:
        fields["compile_s"] = plan.compile_s
        fields["program_bytes"] = plan.program_bytes
        fields["total_cost_lower_bound"] = plan.lower_bound
    return fields


def _heldout(
    trace: Trace, config: PlanConfig, limit: int, default: tuple[int, ...]
) -> dict[str, Any]:
    """Fits the first half of the requests, scores the second."""
    middle = len(trace) // 2
    fitted = _lengths(trace.slice(0, middle), config, limit)
    scored = _lengths(trace.slice(middle, len(trace)), config, limit)
    plan = _fit(fitted, config, limit)
    hindsight = _fit(scored, config, limit)

    def waste(buckets: tuple[int, ...], lengths: LengthHistogram) -> int:
        return padding_tokens(buckets, lengths.tokens, lengths.counts)

    base = waste(default, scored)
    cut_pct = _cut_pct(waste(plan.buckets, scored), base)
    best_cut_pct = _cut_pct(hindsight.waste_tokens, base)
    return {
        "num_fitted": middle,
        "num_scored": len(trace) - middle,
        "buckets": list(plan.buckets),
        "fitted_waste_tokens": plan.waste_tokens,
        "fitted_optimal_waste_tokens": _optimal_waste(fitted, config, limit),
        "waste_tokens": waste(plan.buckets, scored),
        "default_waste_tokens": base,
        "scored_tokens": scored.total_tokens,
        "hindsight_waste_tokens": hindsight.waste_tokens,
        "cost_cut_pct": _cut_pct(
            total_cost(plan.buckets, scored, config.curve),
            total_cost(default, scored, config.curve),
        ),
        "cut_pct": cut_pct,
        "hindsight_cut_pct": best_cut_pct,
        "points_from_hindsight": best_cut_pct - cut_pct,
    }


def _cut_pct(waste: float, default_waste: float) -> float:
    """What is saved against the default, percent; 0 where the default wastes nothing."""
    return 100.0 * (1.0 - waste / default_waste) if default_waste else 0.0
