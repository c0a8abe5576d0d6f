"""Busy-clock accounting and the paired comparison, on cases small enough to add up by hand."""

import math

import numpy as np
import pytest

from serving.demo.accounting import RequestCost, Step, request_costs, summarise
from serving.demo.compare import compare_distinct_experts


def _step(worker, kind, started, duration, tokens, experts, *ids):
    return Step(
        worker_id=worker,
        kind=kind,
        started_s=started,
        duration_s=duration,
        num_tokens=tokens,
        distinct_experts=experts,
        request_ids=ids,
    )


STEPS = (
    _step("p0", "prefill", 0.0, 0.5, 30, 40, "a"),
    _step("p0", "prefill", 0.5, 0.25, 10, 20, "b"),
    _step("d0", "decode", 0.0, 0.1, 1, 4, "a"),
    _step("d0", "decode", 0.1, 0.3, 2, 8, "a", "b"),
    _step("d0", "decode", 0.4, 0.2, 1, 6, "a"),
)


def test_request_costs_by_hand():
    costs = request_costs(STEPS, {"a": 0.0, "b": 0.1})
    assert costs["a"].tpot_s == pytest.approx((0.6 - 0.1) / 2)
    assert costs["a"].ttft_s == pytest.approx(0.5)
    assert costs["a"].distinct_experts == pytest.approx((4 + 8 + 6) / 3)
    assert costs["b"].ttft_s == pytest.approx(0.65)
    assert math.isnan(costs["b"].tpot_s)


def test_summary_weighs_by_tokens():
    costs = list(request_costs(STEPS, {"a": 0.0, "b": 0.1}).values())
    summary = summarise(costs, STEPS, num_requests=2, num_failed=0)
    # Four decode tokens: experts 4, 8, 8, 6 of the steps that made them.
    assert summary["distinct_experts_per_step"] == pytest.approx((4 + 8 + 8 + 6) / 4)
    assert summary["mean_batch_per_worker"] == pytest.approx((1 + 2 + 2 + 1) / 4)
    assert summary["step_ms_p50"] == pytest.approx(200)
    assert summary["num_requests"] == 2


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
