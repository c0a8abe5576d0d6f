"""Flags reproduce, through the engines' own rules, the buckets they promise."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.buckets import padding_gap_sizes, padding_tokens, powers_of_two
from bucket_planner.cost_curve import TokenCost, total_cost
from bucket_planner.engine_flags import best_padding_gap, engine_flags, sgl_jax_flags
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import histogram
from bucket_planner.optimize import optimal_buckets

RNG = np.random.default_rng(5)
LENGTHS = histogram(np.clip(RNG.lognormal(6.0, 1.0, 3000), 1, 2048).astype(np.int64))


def tpu_inference_engine(env, additional_config, limit):
    """What the engine builds: its ladder, plus the extra sizes, sorted."""
    first = int(env.get("MIN_TOKEN_BUCKET", 16))
    gap = int(env.get("VLLM_TPU_BUCKET_PADDING_GAP", 0))
    ladder = padding_gap_sizes(limit, gap, min_tokens=first)
    return sorted([*ladder, *additional_config.get("compilation_sizes", [])])


def sgl_jax_engine(paddings, *, data_parallel, max_batch, max_tokens):
    """What the engine keeps of `--precompile-token-paddings`."""
    kept = sorted(
        item // data_parallel * data_parallel
        for item in paddings
        if max_batch <= item // data_parallel * data_parallel <= max_tokens
    )
    return kept if kept and kept[-1] == max_tokens else [*kept, max_tokens]


@pytest.fixture(scope="module")
def flags():
    plan = optimal_buckets(LENGTHS, max_buckets=14, limit_tokens=2048, curve=TokenCost())
    found = engine_flags(plan.buckets, LENGTHS, semantics="step", max_buckets=14, curve=TokenCost())
    return plan, found


@pytest.mark.parametrize("way", ["ladder_plus_sizes", "padding_gap", "plan_alone"])
def test_tpu_inference_builds_what_is_promised(flags, way):
    plan, found = flags
    promised = found["tpu_inference"][way]
    config = {}
    if "flag" in promised:
        prefix = "--additional-config '"
        assert promised["flag"].startswith(prefix)
        config = json.loads(promised["flag"].removeprefix(prefix).removesuffix("'"))
    built = tpu_inference_engine(promised["env"], config, 2048)
    assert built == promised["buckets"]
    assert len(set(built)) == len(built) <= 14
    assert promised["waste_tokens"] == padding_tokens(built, LENGTHS.tokens, LENGTHS.counts)
    assert promised["waste_tokens"] >= plan.waste_tokens


def test_the_plan_alone_reaches_the_plan_and_the_recommendation_is_the_better_way(flags):
    plan, found = flags
    ways = found["tpu_inference"]
    assert ways["plan_alone"]["buckets"] == list(plan.buckets)
    wastes = {name: ways[name]["waste_tokens"] for name in ("ladder_plus_sizes", "padding_gap")}
    assert wastes[ways["recommended"]] == min(wastes.values())
    default = padding_tokens(powers_of_two(2048), LENGTHS.tokens, LENGTHS.counts)
    assert max(wastes.values()) < default


def test_extra_sizes_come_on_top_of_the_ladder(flags):
    _, found = flags
    extra = found["tpu_inference"]["ladder_plus_sizes"]["compilation_sizes"]
    assert len(extra) == 14 - len(powers_of_two(2048))
    assert not set(extra) & set(powers_of_two(2048))


def test_best_gap_is_the_best_of_all_gaps():
    gap, sizes = best_padding_gap(LENGTHS, limit_tokens=2048, max_buckets=14, curve=TokenCost())
    allowed = [padding_gap_sizes(2048, g) for g in (0, *range(16, 2049, 16))]
    costs = [total_cost(s, LENGTHS, TokenCost()) for s in allowed if len(s) <= 14]
    assert sizes == padding_gap_sizes(2048, gap)
    assert total_cost(sizes, LENGTHS, TokenCost()) == min(costs)


def test_no_gap_fits_few_buckets():
    gap, sizes = best_padding_gap(LENGTHS, limit_tokens=2048, max_buckets=3, curve=TokenCost())
    assert (gap, sizes) == (0, powers_of_two(2048))


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(17, 2000), min_size=1, max_size=8), st.sampled_from([1, 2, 3, 4, 8]))
def test_sgl_jax_keeps_what_is_promised(sizes, data_parallel):
    plan = (*sorted(sizes), 2048)
    found = sgl_jax_flags(plan, LENGTHS, data_parallel=data_parallel)
    assert found["flags"][0] == "--precompile-token-paddings"
    given_sizes = [int(text) for text in found["flags"][1:]]
    built = sgl_jax_engine(
        given_sizes,
        data_parallel=data_parallel,
        max_batch=16,
        max_tokens=found["chunked_prefill_size"],
    )
    assert built == found["buckets"]
    assert all(size % data_parallel == 0 for size in built)
    assert all(any(0 <= b - size < data_parallel for b in built) for size in plan)


def test_prompt_plans_go_to_jetstream_and_maxtext():
    found = engine_flags((100, 2048), LENGTHS, semantics="prompt", max_buckets=2, curve=TokenCost())
    assert set(found) == {"jetstream", "maxtext"}
    assert found["jetstream"]["prefill_buckets"] == [100, 2048]
    assert found["maxtext"]["prefill_buckets"] == [100, 2048]
    assert found["maxtext"]["measure_flag"].endswith("prefill_lengths=100,2048")


def test_bad_settings_are_named():
    with pytest.raises(PlannerConfigError, match="data_parallel"):
        sgl_jax_flags((16, 2048), LENGTHS, data_parallel=0)
