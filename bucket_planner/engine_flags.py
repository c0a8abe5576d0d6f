"""Engine flags for a plan, each with the buckets the engine would really end up with.

tpu-inference always builds its base ladder and ADDS `compilation_sizes` to it, so a plan reaches
it in one of three ways, reported side by side: the ladder plus the best extra sizes, the best
`VLLM_TPU_BUCKET_PADDING_GAP`, or the plan alone where the engine reads `MIN_TOKEN_BUCKET` (the
ladder then shrinks to its limit). sgl-jax takes `--precompile-token-paddings` as the whole set,
rounds each down to a multiple of the data-parallel size and drops those outside its range.
JetStream and MaxText take the prompt buckets as they are, as a list in code (JetStream's
`DEFAULT_PREFILL_BUCKETS`); `measure_flag` makes MaxText's microbenchmark time exactly these, and
its result is a cost file.
"""

import json
from collections.abc import Sequence
from typing import Any

from bucket_planner.buckets import (
    MIN_BUCKET_TOKENS,
    Semantics,
    next_power_of_two,
    padding_gap_sizes,
    padding_tokens,
    powers_of_two,
)
from bucket_planner.cost_curve import CostCurve, total_cost
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import LengthHistogram
from bucket_planner.optimize import optimal_extra_buckets


def engine_flags(
    plan: Sequence[int],
    lengths: LengthHistogram,
    *,
    semantics: Semantics,
    max_buckets: int,
    curve: CostCurve,
    min_bucket_tokens: int = MIN_BUCKET_TOKENS,
    align_tokens: int = 1,
    data_parallel: int = 1,
) -> dict[str, Any]:
    """Flags by engine.

    Args:
      plan: planned buckets, ascending, the last one the limit.
      lengths: the distribution they are for.
      semantics: prompt or step; decides which engines the plan suits.
      max_buckets: how many buckets may be compiled.
      curve: cost of a bucket.
      min_bucket_tokens: the engine's smallest bucket.
      align_tokens: added sizes are multiples of it.
      data_parallel: sgl-jax data-parallel size.

    Returns:
      JSON-ready: engine -> flags, resulting buckets and their waste in tokens.
    """
    if semantics == "prompt":
        sizes = ",".join(str(size) for size in plan)
        return {
            "jetstream": {
                "prefill_buckets": list(plan),
                "waste_tokens": padding_tokens(plan, lengths.tokens, lengths.counts),
            },
            "maxtext": {
                "prefill_buckets": list(plan),
                "measure_flag": f"inference_microbenchmark_prefill_lengths={sizes}",
            },
        }
    return {
        "tpu_inference": _tpu_inference(
            plan, lengths, max_buckets, curve, min_bucket_tokens, align_tokens
        ),
        "sgl_jax": sgl_jax_flags(plan, lengths, data_parallel=data_parallel),
    }


def best_padding_gap(
    lengths: LengthHistogram,
    *,
    limit_tokens: int,
    max_buckets: int,
    curve: CostCurve,
    min_tokens: int = MIN_BUCKET_TOKENS,
) -> tuple[int, tuple[int, ...]]:
    """The gap (0 = powers of two) of at most `max_buckets` buckets with the least cost.

    Every multiple of `min_tokens` up to the limit is tried; 0 wins when none fits the number.

    Returns:
      the gap and the sizes the engine builds for it.
    """
    best = (0, powers_of_two(limit_tokens, min_tokens=min_tokens))
    best_cost = total_cost(best[1], lengths, curve)
    for gap in range(min_tokens, limit_tokens + 1, min_tokens):
        if limit_tokens / gap > max_buckets + 1:
            continue  # the linear part alone is too long
        sizes = padding_gap_sizes(limit_tokens, gap, min_tokens=min_tokens)
        if len(sizes) <= max_buckets:
            cost = total_cost(sizes, lengths, curve)
            if cost < best_cost:
                best, best_cost = (gap, sizes), cost
    return best


def sgl_jax_flags(
    plan: Sequence[int], lengths: LengthHistogram, *, data_parallel: int = 1
) -> dict[str, Any]:
    """`--precompile-token-paddings` for a plan; sizes are raised to multiples of the dp size.

    Raises:
      PlannerConfigError: data_parallel below 1.
    """
    if data_parallel < 1:
        raise PlannerConfigError("data_parallel", data_parallel, "must be >= 1")
    sizes = sorted({-(-size // data_parallel) * data_parallel for size in plan})
    return {
        "flags": ["--precompile-token-paddings", *(str(size) for size in sizes)],
        "chunked_prefill_size": sizes[-1],
        "buckets": sizes,
        "waste_tokens": padding_tokens(sizes, lengths.tokens, lengths.counts),
    }


def _tpu_inference(
    plan: Sequence[int],
    lengths: LengthHistogram,
    max_buckets: int,
    curve: CostCurve,
    min_tokens: int,
    align_tokens: int,
) -> dict[str, Any]:
    """The three ways to bring a plan to tpu-inference, and the one that costs least."""
    limit = plan[-1]
    ladder = powers_of_two(limit, min_tokens=min_tokens)
    num_extra = max(0, max_buckets - len(ladder))
    extras = optimal_extra_buckets(
        lengths, ladder, num_extra=num_extra, curve=curve, align_tokens=align_tokens
    )
    gap, gap_sizes = best_padding_gap(
        lengths, limit_tokens=limit, max_buckets=max_buckets, curve=curve, min_tokens=min_tokens
    )
    top = next_power_of_two(limit)
    ways: dict[str, tuple[dict[str, str], Sequence[int], tuple[int, ...]]] = {
        "ladder_plus_sizes": ({}, extras, tuple(sorted({*ladder, *extras}))),
        "padding_gap": ({"VLLM_TPU_BUCKET_PADDING_GAP": str(gap)}, (), gap_sizes),
        "plan_alone": (
            {"MIN_TOKEN_BUCKET": str(top)},
            tuple(size for size in plan if size != top),
            tuple(sorted({*plan, top})),
        ),
    }
    report: dict[str, Any] = {}
    for name, (env, sizes, result) in ways.items():
        way: dict[str, Any] = {"env": env, "compilation_sizes": list(sizes)}
        if sizes:
            way["flag"] = f"--additional-config '{json.dumps({'compilation_sizes': list(sizes)})}'"
        way["buckets"] = list(result)
        way["waste_tokens"] = padding_tokens(result, lengths.tokens, lengths.counts)
        report[name] = way
    everywhere = ("ladder_plus_sizes", "padding_gap")
    report["recommended"] = min(everywhere, key=lambda name: report[name]["waste_tokens"])
    report["note"] = "plan_alone needs an engine that reads MIN_TOKEN_BUCKET from its environment"
    return report
