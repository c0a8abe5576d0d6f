"""The monitor is quiet on the distribution it was fitted to and speaks when that drifts."""

import numpy as np
import pytest

from bucket_planner.buckets import BucketSet, powers_of_two
from bucket_planner.cost_curve import TokenCost, total_cost
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import histogram
from bucket_planner.monitor import DriftMonitor, compare
from bucket_planner.optimize import optimal_buckets

LIMIT = 4096


def draw(seed: int, median: float, num: int = 4000) -> np.ndarray:
    values = np.random.default_rng(seed).lognormal(np.log(median), 0.5, num)
    return np.clip(values, 1, LIMIT).astype(np.int64)


@pytest.fixture(scope="module")
def plan():
    fitted = optimal_buckets(
        histogram(draw(0, 400)), max_buckets=8, limit_tokens=LIMIT, curve=TokenCost()
    )
    return BucketSet(id="plan", semantics="prompt", sizes_tokens=fitted.buckets)


def monitor_of(plan, **settings):
    return DriftMonitor(plan, max_buckets=8, curve=TokenCost(), **settings)


def test_quiet_without_drift_and_loud_with_it(plan):
    monitor = monitor_of(plan, threshold_pct=5.0, window_lengths=4000)
    monitor.observe(draw(1, 400).tolist())
    calm = monitor.check()
    assert 0 <= calm.worse_pct < 2.0
    assert not calm.should_replan
    monitor.observe(draw(2, 1500).tolist())
    drifted = monitor.check()
    assert drifted.worse_pct > 5.0
    assert drifted.should_replan
    assert drifted.best_waste_tokens < drifted.waste_tokens


def test_worse_is_exactly_the_cost_over_the_best_plan(plan):
    lengths = histogram(draw(3, 1000))
    report = compare(plan, lengths, max_buckets=8, curve=TokenCost(), threshold_pct=1.0)
    running = total_cost(plan.sizes_tokens, lengths, TokenCost())
    best = optimal_buckets(lengths, max_buckets=8, limit_tokens=LIMIT, curve=TokenCost())
    assert report.best_buckets == best.buckets
    assert report.worse_pct == pytest.approx(100 * (running / best.cost - 1))
    assert report.waste_tokens - report.best_waste_tokens == pytest.approx(running - best.cost)


def test_the_best_plan_is_zero_percent_worse(plan):
    lengths = histogram(draw(0, 400))
    report = compare(plan, lengths, max_buckets=8, curve=TokenCost(), threshold_pct=1.0)
    assert report.worse_pct == pytest.approx(0.0, abs=1e-9)


def test_the_window_forgets(plan):
    monitor = monitor_of(plan, window_lengths=500)
    monitor.observe(draw(4, 2000, 3000).tolist())
    monitor.observe(draw(5, 400, 500).tolist())
    report = monitor.check()
    assert report.num_lengths == 500
    assert not report.should_replan


def test_longer_than_the_limit_runs_in_chunks():
    buckets = BucketSet(id="b", semantics="step", sizes_tokens=powers_of_two(64))
    report = compare(
        buckets,
        histogram(np.array([64 + 20, 128, 20])),
        max_buckets=3,
        curve=TokenCost(),
        threshold_pct=1.0,
    )
    # Full chunks cost the same either way; twice 20 tokens run in 32 instead of 20.
    assert report.waste_tokens == 24
    assert report.worse_pct == pytest.approx(100 * 24 / (3 * 64 + 40))
    assert report.best_buckets == (20, 64)


def test_bad_settings_are_named(plan):
    with pytest.raises(PlannerConfigError, match="threshold_pct"):
        monitor_of(plan, threshold_pct=float("nan"))
    with pytest.raises(PlannerConfigError, match="window_lengths"):
        monitor_of(plan, window_lengths=0)
    with pytest.raises(PlannerConfigError, match="length"):
        monitor_of(plan).observe([0])
    with pytest.raises(PlannerConfigError, match="at least one"):
        monitor_of(plan).check()
