"""Busy-clock accounting and the paired comparison, on cases small enough to add up by hand."""

import math

import numpy as np
import pytest

from serving.demo.accounting import RequestCost, Step, request_costs, summarise
from serving.demo.compare import at_equal_batch, by_token, compare, experts_by_batch


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
    assert costs["a"].step_experts == (4, 8, 6)
    assert costs["a"].step_batches == (1, 2, 1)
    assert costs["a"].num_decode_tokens == 3
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
            step_experts=(float(value),) * tokens,
            step_batches=(1,) * tokens,
            ttft_s=0.0,
            tpot_s=0.0,
        )
        for i, value in enumerate(experts)
    }


def _compare(policy, baseline):
    ours, theirs = ([by_token(costs) for costs in rounds] for rounds in (policy, baseline))
    return compare(ours, theirs, np.random.default_rng(0))


def test_comparison_is_relative_and_paired():
    base = [_costs(np.linspace(10, 30, 40)) for _ in range(5)]
    less = [_costs(np.linspace(9, 27, 40)) for _ in range(5)]
    result = _compare(less, base)
    # Every prompt costs exactly a tenth less: pairing leaves no spread at all.
    assert result.mean_pct == pytest.approx(-10)
    assert result.low_pct == pytest.approx(-10)
    assert result.high_pct == pytest.approx(-10)
    assert result.excludes_zero


def test_comparison_of_noise_includes_zero():
    draw = np.random.default_rng(5)
    one = [_costs(draw.normal(20, 3, 60)) for _ in range(5)]
    two = [_costs(draw.normal(20, 3, 60)) for _ in range(5)]
    assert not _compare(one, two).excludes_zero


def test_rounds_without_a_common_prompt_count_for_nothing():
    lost = {"9": _costs(range(10))["9"]}
    half = _compare([_costs([9]), lost], [_costs([10]), _costs([5])])
    assert half.per_round_pct == (pytest.approx(-10),)
    assert _compare([lost], [_costs([5])]) is None
    with pytest.raises(ValueError, match="shorter"):
        _compare([lost, lost], [lost])


def test_at_equal_batch_takes_out_what_bunching_does():
    """The baseline's steps touch 4 experts a token; the policy's are bigger, but as varied."""
    spread = [_step("decode", 0.1, n, 4.0 * n, *map(str, range(n))) for n in (2, 4)] * 20
    bunched = [_step("decode", 0.1, n, 4.0 * n, *map(str, range(n))) for n in (4, 9)] * 20
    times = {str(i): (0.1, 0.1) for i in range(9)}
    base, policy = request_costs(spread, times), request_costs(bunched, times)
    expected = experts_by_batch(spread)
    assert expected == {2: 8.0, 4: 16.0}
    weighed = at_equal_batch(policy, expected)
    # Steps of 9 are no size of the baseline's, and requests 4 to 8 were in no others.
    assert weighed.keys() == {"0", "1", "2", "3"}
    assert weighed["0"] == (20 * 16.0, 20 * 16.0)
    draws = np.random.default_rng(0)
    equal = compare([weighed], [at_equal_batch(base, expected)], draws)
    assert equal.mean_pct == pytest.approx(0)
    assert compare([by_token(policy)], [by_token(base)], draws).mean_pct > 50


def test_rare_batch_sizes_say_nothing():
    steps = [_step("decode", 0.1, 3, 12.0, "a")] * 19
    assert experts_by_batch(steps) == {}
    assert experts_by_batch([*steps, *steps, _step("prefill", 0.1, 3, 50.0, "b")]) == {3: 12.0}
