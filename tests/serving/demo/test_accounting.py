"""Busy-clock accounting and the paired comparison, on cases small enough to add up by hand."""

import math

import numpy as np
import pytest

from serving.demo.accounting import RequestCost, Step, request_costs, summarise
from serving.demo.compare import compare_distinct_experts


def _step(kind, duration, tokens, experts, *ids):
    return Step(
        worker_id="w",
        kind=kind,
        duration_s=duration,
        num_tokens=tokens,
        distinct_experts=experts,
        request_ids=ids,
    )


STEPS = (
    _step("prefill", 0.5, 30, 40, "a"),
    _step("decode", 0.1, 1, 4, "a"),
    _step("decode", 0.3, 2, 8, "a", "b"),
    _step("decode", 0.2, 1, 6, "a"),
)
TIMES = {"a": (0.5, 0.25), "b": (0.65, math.nan), "refused": (math.nan, math.nan)}


def test_request_costs_by_hand():
    costs = request_costs(STEPS, TIMES)
    assert costs.keys() == {"a", "b"}
    assert costs["a"].distinct_experts == pytest.approx((4 + 8 + 6) / 3)
    assert costs["a"].num_decode_tokens == 3
    assert costs["a"].batch_tokens == pytest.approx((1 + 2 + 1) / 3)
    assert (costs["a"].ttft_s, costs["a"].tpot_s) == (0.5, 0.25)


def test_summary_weighs_by_tokens():
    costs = list(request_costs(STEPS, TIMES).values())
    summary = summarise(costs, STEPS, num_requests=3, num_failed=1)
    # Four decode tokens: experts 4, 8, 8, 6 of the steps that made them.
    assert summary["distinct_experts_per_step"] == pytest.approx((4 + 8 + 8 + 6) / 4)
    assert summary["mean_batch_per_worker"] == pytest.approx((1 + 2 + 2 + 1) / 4)
    assert summary["step_ms_p50"] == pytest.approx(200)
    assert summary["tpot_ms_p50"] == pytest.approx(250)
    assert (summary["num_requests"], summary["num_failed"]) == (3, 1)


def _costs(experts, tokens=10):
    return {
        str(i): RequestCost(
            request_id=str(i),
            num_decode_tokens=tokens,
            distinct_experts=float(value),
            batch_tokens=1.0,
            ttft_s=0.0,
            tpot_s=0.0,
        )
        for i, value in enumerate(experts)
    }


def test_comparison_is_relative_and_paired():
    base = [_costs(np.linspace(10, 30, 40)) for _ in range(5)]
    less = [_costs(np.linspace(9, 27, 40)) for _ in range(5)]
    result = compare_distinct_experts(less, base, np.random.default_rng(0))
    # Every prompt costs exactly a tenth less: pairing leaves no spread at all.
    assert result.mean_pct == pytest.approx(-10)
    assert result.low_pct == pytest.approx(-10)
    assert result.high_pct == pytest.approx(-10)
    assert result.excludes_zero


def test_comparison_of_noise_includes_zero():
    draw = np.random.default_rng(5)
    one = [_costs(draw.normal(20, 3, 60)) for _ in range(5)]
    two = [_costs(draw.normal(20, 3, 60)) for _ in range(5)]
    assert not compare_distinct_experts(one, two, np.random.default_rng(0)).excludes_zero


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([_costs([1])], []), ([_costs([1])], [{}])])
def test_comparison_refuses(ours, theirs):
    with pytest.raises(ValueError, match=r"round|positive"):
        compare_distinct_experts(ours, theirs, np.random.default_rng(0))
