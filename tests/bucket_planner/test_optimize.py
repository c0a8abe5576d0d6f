"""Plans equal the exhaustive optimum, with and without compile budgets."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.buckets import padding_tokens
from bucket_planner.compile_budget import CompileBudget
from bucket_planner.cost_curve import CompileCost, MeasuredCost, TokenCost, total_cost
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import histogram
from bucket_planner.optimize import optimal_buckets, optimal_extra_buckets

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=25)
CURVES = st.one_of(
    st.just(TokenCost()),
    st.lists(st.integers(1, 50), min_size=2, max_size=5).map(
        lambda ms: MeasuredCost(
            tokens=tuple(16 * (i + 1) for i in range(len(ms))), ms=tuple(float(m) for m in ms)
        )
    ),
)
LIMIT = 64


def hist(values):
    return histogram(np.array(values, np.int64))


def exhaustive(lengths, max_buckets, curve, *, fits=lambda sizes: True, first=1):
    """Cheapest of every set of at most `max_buckets` sizes that ends in the limit."""
    candidates = sorted({max(first, int(t)) for t in lengths.tokens} - {LIMIT})
    best = np.inf
    for num in range(max_buckets):
        for inner in combinations(candidates, num):
            sizes = (*inner, LIMIT)
            if fits(sizes):
                best = min(best, total_cost(sizes, lengths, curve))
    return best


@settings(max_examples=80, deadline=None)
@given(values=LENGTHS, max_buckets=st.integers(1, 5), curve=CURVES)
def test_plan_is_the_exhaustive_optimum(values, max_buckets, curve):
    lengths = hist(values)
    plan = optimal_buckets(
        lengths, max_buckets=max_buckets, limit_tokens=LIMIT, curve=curve, min_bucket_tokens=1
    )
    assert plan.exact
    assert len(plan.buckets) <= max_buckets
    assert plan.buckets[-1] == LIMIT
    assert plan.cost == pytest.approx(exhaustive(lengths, max_buckets, curve))
    assert plan.cost == pytest.approx(total_cost(plan.buckets, lengths, curve))
    assert plan.waste_tokens == padding_tokens(plan.buckets, lengths.tokens, lengths.counts)


@settings(max_examples=40, deadline=None)
@given(
    values=LENGTHS,
    max_buckets=st.integers(1, 5),
    curve=CURVES,
    compile_s=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    program_bytes=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    spare=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_budgeted_plan_is_the_exhaustive_optimum(
    values, max_buckets, curve, compile_s, program_bytes, spare
):
    lengths = hist(values)
    cost = CompileCost(
        tokens=(8, 32, 64),
        compile_s=tuple(float(s) for s in compile_s),
        program_bytes=tuple(float(b) for b in program_bytes),
    )
    limit = np.array([LIMIT])
    budget = CompileBudget(
        compile_s=float(cost.seconds(limit)[0]) + spare[0],
        program_bytes=float(cost.num_bytes(limit)[0]) + spare[1],
        cost=cost,
    )

    def fits(sizes):
        return bool((budget.needs(np.array(sizes)).sum(axis=1) <= budget.limits()).all())

    plan = optimal_buckets(
        lengths,
        max_buckets=max_buckets,
        limit_tokens=LIMIT,
        curve=curve,
        min_bucket_tokens=1,
        budget=budget,
    )
    best = exhaustive(lengths, max_buckets, curve, fits=fits)
    assert fits(plan.buckets)
    assert plan.exact
    assert plan.cost == pytest.approx(best)
    assert plan.compile_s <= budget.compile_s
    assert plan.program_bytes <= budget.program_bytes


def test_a_capped_search_still_bounds_the_optimum(monkeypatch):
    """With too little room to prove the optimum, the bound lies under it and the plan fits."""
    monkeypatch.setattr("bucket_planner.compile_budget.MAX_PARTIAL_PLANS", 1)
    rng = np.random.default_rng(3)
    cost = CompileCost(tokens=(8, 24, 64), compile_s=(2.0, 3.0, 9.0), program_bytes=None)
    loose = 0
    for _ in range(12):
        lengths = hist(rng.integers(1, 60, 20))
        budget = CompileBudget(compile_s=float(rng.integers(12, 26)), cost=cost)
        plan = optimal_buckets(
            lengths, max_buckets=4, limit_tokens=LIMIT, curve=TokenCost(), budget=budget
        )

        def fits(sizes, budget=budget):
            return bool(budget.needs(np.array(sizes)).sum(axis=1)[0] <= budget.compile_s)

        best = exhaustive(lengths, 4, TokenCost(), fits=fits, first=16)
        assert fits(plan.buckets)
        assert plan.lower_bound <= best + 1e-6 <= plan.cost + 2e-6
        loose += not plan.exact
    assert loose > 0


@settings(max_examples=60, deadline=None)
@given(
    values=LENGTHS,
    num_extra=st.integers(0, 3),
    base=st.sets(st.integers(1, 63), max_size=3),
    curve=CURVES,
)
def test_extra_buckets_are_the_exhaustive_optimum(values, num_extra, base, curve):
    lengths = hist(values)
    ladder = (*sorted(base), LIMIT)
    extra = optimal_extra_buckets(lengths, ladder, num_extra=num_extra, curve=curve)
    assert len(extra) <= num_extra
    candidates = sorted({int(t) for t in lengths.tokens if t > ladder[0]} - set(ladder))
    best = min(
        total_cost(sorted({*ladder, *added}), lengths, curve)
        for num in range(num_extra + 1)
        for added in combinations(candidates, num)
    )
    assert total_cost(sorted({*ladder, *extra}), lengths, curve) == pytest.approx(best)


@settings(max_examples=40, deadline=None)
@given(values=LENGTHS, align=st.sampled_from([1, 4, 8, 16]), first=st.sampled_from([1, 8, 16]))
def test_alignment_and_smallest_bucket_are_kept(values, align, first):
    plan = optimal_buckets(
        hist(values),
        max_buckets=4,
        limit_tokens=LIMIT,
        curve=TokenCost(),
        min_bucket_tokens=first,
        align_tokens=align,
    )
    assert all(size % align == 0 and size >= first for size in plan.buckets)


def test_enough_buckets_leave_no_padding():
    plan = optimal_buckets(
        hist([20, 30, 30, 64]), max_buckets=9, limit_tokens=LIMIT, curve=TokenCost()
    )
    assert plan.buckets == (20, 30, 64)
    assert plan.waste_tokens == 0


def test_more_buckets_never_cost_more():
    lengths = histogram(np.random.default_rng(0).integers(1, 4000, 500))
    costs = [
        optimal_buckets(lengths, max_buckets=n, limit_tokens=4096, curve=TokenCost()).cost
        for n in range(1, 20)
    ]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ({"max_buckets": 0}, "max_buckets"),
        ({"limit_tokens": 32}, "2 are longer, up to 60"),
        ({"align_tokens": 0}, "align_tokens"),
        ({"min_bucket_tokens": 128}, "min_bucket_tokens"),
    ],
)
def test_bad_settings_are_named(setting, rule):
    settings_ = {"max_buckets": 2, "limit_tokens": 64, "curve": TokenCost(), **setting}
    with pytest.raises(PlannerConfigError, match=rule):
        optimal_buckets(hist([10, 50, 60]), **settings_)


def test_a_budget_must_pay_for_the_limit():
    cost = CompileCost(tokens=(64,), compile_s=(10.0,), program_bytes=None)
    with pytest.raises(PlannerConfigError, match=r"compile_s.*which takes 10"):
        optimal_buckets(
            hist([10]),
            max_buckets=2,
            limit_tokens=64,
            curve=TokenCost(),
            budget=CompileBudget(compile_s=9.0, cost=cost),
        )
    with pytest.raises(PlannerConfigError, match="program_bytes"):
        CompileBudget(program_bytes=1.0, cost=cost)
    with pytest.raises(PlannerConfigError, match="finite"):
        CompileBudget(compile_s=float("nan"), cost=cost)
