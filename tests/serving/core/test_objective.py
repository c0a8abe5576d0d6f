"""J against sums done by hand, against its own terms, and against the brief's figures."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core import objective
from serving.core.costs import CellCost, CostBook, PrefillTimeModel
from serving.core.decision import TermKind
from serving.core.request import LengthBand, SloClass, SloTarget
from serving.core.router_config import DEFAULT_TARGETS
from serving.core.worker import Phase
from tests.serving import decision_parts as parts

RATE = 3.6 / 3600.0
PRICE = parts.TARGET.lambda_usd_per_s


def term(matrix, name, row=0):
    at = matrix.names.index(name)
    return matrix.seconds[row, at], matrix.usd[row, at]


def test_prefill_by_hand():
    seen = parts.view(
        2, phase=Phase.PREFILL, queued_prefill_tokens=[500.0, 0.0], speed_factor=[1.0, 2.0]
    )
    asked = parts.context(seen, phase=Phase.PREFILL, cached_tokens=np.array([0, 80], np.int32))
    prices = objective.price(asked)
    matrix = prices.matrix()
    # The 500 waiting tokens run as 256 + 256; token_s 1e-4, chunk_s 1e-3.
    assert term(matrix, "queue") == pytest.approx((0.0532, 0.0532 * PRICE))
    # 600 run as 3 x 256: 100 tokens add a step of 256, 156 of it padding.
    assert term(matrix, "prefill_delay") == pytest.approx((0.011, 0.011 * PRICE))
    assert term(matrix, "prefill_compute") == pytest.approx((0.011, 0.011 * RATE))
    assert term(matrix, "padding") == pytest.approx((0.0156, 0.0156 * (RATE + PRICE)))
    assert term(matrix, "prefix_saving") == (0.0, 0.0)
    assert term(matrix, "ttft") == pytest.approx((0.0798, 0.0798 * PRICE))
    # 20 uncached tokens run in the bucket of 64, twice as slowly.
    assert term(matrix, "prefill_compute", 1) == pytest.approx((0.006, 0.006 * RATE))
    assert term(matrix, "padding", 1) == pytest.approx((0.0088, 0.0088 * (RATE + PRICE)))
    assert term(matrix, "prefix_saving", 1) == pytest.approx((0.016, 0.016 * (RATE + PRICE)))
    assert prices.score_usd[0] == pytest.approx(0.0532 * PRICE + 0.0266 * (RATE + PRICE))
    np.testing.assert_allclose(dict(matrix.facts)["ttft_s"], [0.0798, 0.0148])


def test_waste_is_charged_to_the_prompt_that_causes_it_and_slack_is_free():
    # 200 tokens wait on both; on the second a step took them up already and cannot be joined.
    seen = parts.view(
        2,
        phase=Phase.PREFILL,
        queued_prefill_tokens=[200.0, 200.0],
        started_prefill_tokens=np.array([0.0, 200.0]),
    )
    asked = parts.context(seen, phase=Phase.PREFILL, request=parts.request(num_tokens=50))
    prices = objective.price(asked)
    matrix = prices.matrix()
    # 250 still run in the bucket of 256: the 50 cost nothing; alone they run in 64.
    assert term(matrix, "padding", 0)[0] == pytest.approx(-0.005)
    assert term(matrix, "prefill_compute", 0)[0] == pytest.approx(0.005)
    assert term(matrix, "padding", 1)[0] == pytest.approx(0.0014)
    assert matrix.total_usd()[0] == pytest.approx(0.0266 * PRICE)
    assert prices.score_usd[0] < prices.score_usd[1]


def test_a_class_pays_its_opportunity_rate():
    cheap = dataclasses.replace(parts.CELL, class_usd_per_chip_hour={SloClass.C: 0.36})
    costs = CostBook({("m", "h"): cheap}).rows(parts.view().workers)
    np.testing.assert_allclose(costs.rate_for(SloClass.B), RATE)
    np.testing.assert_allclose(costs.rate_for(SloClass.C), RATE / 10)
    asked = parts.context(costs=costs, request=parts.request(slo=SloClass.C))
    seconds, usd = term(objective.price(asked).matrix(), "decode_compute")
    assert usd == pytest.approx(seconds * RATE / 10)


def test_prefill_beside_decode_pays_for_those_it_holds_up():
    seen = parts.view(2, phase=Phase.PREFILL, decoding_usd_per_s=np.array([5e-3, 0.0]))
    matrix = objective.price(parts.context(seen, phase=Phase.PREFILL)).matrix()
    run_s = dict(matrix.facts)["ttft_s"][0]
    assert term(matrix, "interference") == pytest.approx((run_s, run_s * 5e-3))
    assert term(matrix, "interference", 1)[1] == 0.0


def test_expert_locality_is_what_the_signature_changes_in_j():
    rows = parts.expert_rows(3, prior=False)
    keep = np.full(parts.SIZE, 0.9, np.float32)
    keep[:4] = 0.1
    seen = parts.view(3, num_inflight=[2.0, 2.0, 3.0], experts=rows)
    known = objective.price(parts.context(seen, keep=keep)).matrix()
    blind = objective.price(parts.context(seen._replace(experts=None))).matrix()
    saved = known.usd[:, known.names.index("expert_locality")]
    np.testing.assert_allclose(known.total_usd() + saved, blind.total_usd())


def test_the_last_prompt_token_is_computed_even_when_all_is_cached():
    asked = parts.context(phase=Phase.PREFILL, cached_tokens=np.full(4, 100, np.int32))
    matrix = objective.price(asked).matrix()
    np.testing.assert_array_equal(dict(matrix.facts)["uncached_tokens"], 1)


def test_decode_on_an_idle_worker_costs_its_whole_step():
    matrix = objective.price(parts.context()).matrix()
    facts = dict(matrix.facts)
    # One request: L * E * (k / E) = 8 experts; base + 4 c0 + 8 c2 + 4 c3 + attention * 110.
    step = 2e-3 + 4 * 5e-4 + 8 * 1e-4 + 4 * 2e-5 + 1e-7 * 110
    assert facts["step_s"].tolist() == [0.0] * 4
    np.testing.assert_allclose(facts["step_with_s"], step)
    assert term(matrix, "decode_delay") == pytest.approx((20 * step, 20 * step * PRICE))
    assert term(matrix, "decode_compute") == pytest.approx((20 * step, 20 * step * RATE))
    assert term(matrix, "externality") == (0.0, 0.0)


def test_decode_beside_others_by_hand():
    seen = parts.view(
        2,
        num_inflight=[2.0, 0.0],
        kv_tokens=[300.0, 0.0],
        speed_factor=[1.5, 1.0],
        members=parts.members([0, 0], [5.0, 50.0], 4e-3, 2),
    )
    asked = parts.context(seen, transfer_s=np.array([0.25, 0.0]))
    matrix = objective.price(asked).matrix()
    facts = dict(matrix.facts)

    def step(num, kv):
        experts = 32 * (1 - 0.75**num)
        return 1.5 * (2e-3 + 4 * (5e-4 + 2e-5 * num) + 1e-4 * experts + 1e-7 * kv)

    before, after = step(2, 300), step(3, 410)
    assert facts["step_s"][0] == pytest.approx(before)
    assert facts["step_with_s"][0] == pytest.approx(after)
    others = (5 + 20) * (after - before)  # min(20, 5) + min(20, 50) tokens
    assert term(matrix, "transfer") == pytest.approx((0.25, 0.25 * PRICE))
    assert term(matrix, "externality") == pytest.approx((others, others * 4e-3))
    assert term(matrix, "decode_compute") == pytest.approx(
        (20 * (after - before), 20 * (after - before) * RATE)
    )


def test_requests_of_other_routers_count_as_this_class_half_done():
    seen = parts.view(1, num_inflight=[3.0])
    matrix = objective.price(parts.context(seen)).matrix()
    added = dict(matrix.facts)["step_with_s"][0] - dict(matrix.facts)["step_s"][0]
    seconds, usd = term(matrix, "externality")
    assert seconds == pytest.approx(3 * 10 * added)
    assert usd == pytest.approx(3 * 10 * added * PRICE)


def test_expected_experts_follow_the_survival_product():
    rows = parts.expert_rows(3, prior=False)
    seen = parts.view(3, num_inflight=[2.0, 2.0, 4.0], experts=rows)
    keep = np.random.default_rng(3).random(parts.SIZE).astype(np.float32)
    facts = dict(objective.price(parts.context(seen, keep=keep)).matrix().facts)
    # A_l = sum_e [1 - prod_j (1 - q_j)], scaled from the masked to all layers; the two
    # requests of the third worker that are not modelled miss each expert with 0.75 each.
    missed = np.array([1.0, 1.0, 0.75**2])
    before = (1 - missed[:, None] * rows.survival).sum(axis=1) * 2
    after = (1 - missed[:, None] * rows.survival * keep).sum(axis=1) * 2
    np.testing.assert_allclose(facts["experts"], before, rtol=1e-5)
    np.testing.assert_allclose(facts["experts_with"], after, rtol=1e-5)


def test_a_worker_that_holds_the_experts_is_cheaper():
    rows = parts.expert_rows(2, prior=False)
    survival = np.ones((2, parts.SIZE), np.float32)
    survival[0, :4] = survival[1, 8:12] = 0.01
    rows = rows._replace(survival=survival, survival_sum=survival.sum(axis=1, dtype=np.float64))
    keep = np.ones(parts.SIZE, np.float32)
    keep[:4] = 0.1
    seen = parts.view(2, num_inflight=[2.0, 2.0], experts=rows)
    score = objective.price(parts.context(seen, keep=keep)).score_usd
    assert score[0] < score[1]


def test_region_prior_draws_to_the_region_and_leaves_j_alone():
    rows = parts.expert_rows(2)
    survival = np.ones((2, parts.SIZE), np.float32)
    prior = survival.copy()
    prior[0, :4] = prior[1, 4:8] = 0.1
    rows = rows._replace(
        survival=survival,
        survival_sum=survival.sum(axis=1, dtype=np.float64),
        num_modelled=np.zeros(2),
        survival_prior=prior,
        survival_prior_sum=prior.sum(axis=1, dtype=np.float64),
    )
    keep = np.ones(parts.SIZE, np.float32)
    keep[:4] = 0.2
    asked = parts.context(parts.view(2, experts=rows), keep=keep)
    plain = objective.price(asked)
    with_prior = objective.price(asked, objective.ScoreOptions(region_prior=True))
    assert plain.score_usd[0] == plain.score_usd[1]
    assert with_prior.score_usd[0] < with_prior.score_usd[1]
    np.testing.assert_allclose(with_prior.matrix().total_usd(), plain.score_usd)
    assert term(with_prior.matrix(), "region_prior", 0)[1] < 0


def test_tail_power_keeps_plain_seconds_beside_the_weighted():
    seen = parts.view(2, num_inflight=[1.0, 6.0])
    options = objective.ScoreOptions(
        even_from_requests=None, tail_power=2.0, tail_reference_s=0.005
    )
    weighted, plain = (
        objective.price(parts.context(seen), options),
        objective.price(parts.context(seen)),
    )
    before, after = dict(plain.matrix().facts)["step_s"], dict(plain.matrix().facts)["step_with_s"]
    squared0, squared1 = before**2 / 0.005, after**2 / 0.005
    others = np.array([10.0, 60.0])
    expected = 20 * PRICE * squared1 + (20 * RATE + others * PRICE) * (squared1 - squared0)
    np.testing.assert_allclose(weighted.score_usd, expected)
    np.testing.assert_allclose(weighted.matrix().total_usd(), plain.score_usd)


@pytest.mark.parametrize(
    ("mean", "factor"),
    [(0.0, 1.0), (3.9, 1.0), (4.0, 0.5), (16.0, 1.0), (19.36, 1.1), (400.0, 1.2)],
)
def test_own_delay_counts_for_more_where_many_share_a_worker(mean, factor):
    seen = parts.view(3, num_inflight=[0.5 * mean, 1.5 * mean, 9000.0])
    asked = parts.context(seen, feasible=np.array([True, True, False]))
    options = objective.ScoreOptions(region_prior=False, even_from_requests=16.0)
    even, plain = objective.price(asked, options), objective.price(asked)
    own = 20 * dict(plain.matrix().facts)["step_with_s"] * PRICE
    np.testing.assert_allclose(even.score_usd, plain.score_usd + (factor - 1.0) * own)
    np.testing.assert_allclose(even.matrix().total_usd(), plain.score_usd)
    if factor == 1.0:
        assert "even_steps" not in even.matrix().names
    else:
        assert term(even.matrix(), "even_steps")[1] == pytest.approx((factor - 1.0) * own[0])


def test_even_steps_keep_a_slow_worker_from_filling_up_because_it_is_full():
    # Sixty share each worker; experts saturate, so the last joins the fuller one for less.
    seen = parts.view(2, num_inflight=[58.0, 62.0])
    rows = parts.expert_rows(2, prior=False)
    few = np.full((2, parts.SIZE), 0.5, np.float32)
    few[1] = 0.02
    rows = rows._replace(
        survival=few,
        survival_sum=few.sum(axis=1, dtype=np.float64),
        num_modelled=np.array([58.0, 62.0]),
    )
    asked = parts.context(seen._replace(experts=rows), keep=np.full(parts.SIZE, 0.8, np.float32))
    plain = objective.price(asked, objective.ScoreOptions(even_from_requests=None))
    even = objective.price(asked, objective.ScoreOptions())
    slower = dict(plain.matrix().facts)["step_with_s"]
    assert slower[1] > slower[0]
    assert plain.score_usd[1] < plain.score_usd[0]
    assert even.score_usd[1] - even.score_usd[0] > plain.score_usd[1] - plain.score_usd[0]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    phase=st.sampled_from(list(Phase)),
    prior=st.booleans(),
    power=st.sampled_from([1.0, 2.0, 3.0]),
    even=st.sampled_from([None, 2.0, 16.0]),
    modelled=st.booleans(),
)
def test_the_score_is_the_sum_of_its_terms(seed, phase, prior, power, even, modelled):
    draw = np.random.default_rng(seed)
    num = int(draw.integers(1, 9))
    rows = draw.integers(0, num, 12).tolist()
    seen = parts.view(
        num,
        phase=phase,
        num_inflight=np.bincount(rows, minlength=num) + draw.integers(0, 3, num),
        queued_prefill_tokens=draw.integers(0, 4000, num),
        kv_tokens=draw.integers(0, 9000, num),
        speed_factor=draw.uniform(0.5, 2.0, num),
        members=parts.members(rows, (draw.random(12) * 90 + 1).tolist(), 3e-3, num)
        if phase is Phase.DECODE
        else None,
        experts=parts.expert_rows(num, seed=seed) if modelled else None,
    )
    asked = parts.context(
        seen,
        phase=phase,
        cached_tokens=draw.integers(0, 120, num).astype(np.int32),
        transfer_s=draw.random(num),
        keep=draw.random(parts.SIZE).astype(np.float32) if modelled else None,
    )
    options = objective.ScoreOptions(region_prior=prior, tail_power=power, even_from_requests=even)
    prices = objective.price(asked, options)
    matrix = prices.matrix()
    np.testing.assert_allclose(matrix.score_usd(), prices.score_usd, rtol=1e-9)
    cost = [kind is TermKind.COST for kind in matrix.kinds]
    np.testing.assert_allclose(matrix.total_usd(), matrix.usd[:, cost].sum(axis=1))
    # Only padding may be negative (it fills slack of others), and J never is.
    whole = [
        is_cost and name != "padding" for is_cost, name in zip(cost, matrix.names, strict=True)
    ]
    assert (matrix.usd[:, whole] >= 0).all()
    assert (matrix.total_usd() >= 0).all()


def test_without_coefficients_nothing_is_priced():
    with pytest.raises(ValueError, match="costs=None"):
        objective.price(parts.context(costs=None))


def test_class_targets_are_told_when_broken():
    seen = parts.view(2, num_inflight=[7.0, 1.0], tpot_limit_s=[np.inf, 0.004])
    tight = SloTarget(
        ttft_p99_s=1.0, tpot_p99_s=0.0068, deadline_s=float("inf"), lambda_usd_per_s=PRICE
    )
    asked = parts.context(seen, target=tight)
    # Seven others: too slow for the request; one other, whose own promise is tighter.
    assert objective.price(asked).breaks_target().tolist() == [True, True]
    easy = asked._replace(view=parts.view(2, num_inflight=[7.0, 1.0]))
    assert objective.price(easy).breaks_target().tolist() == [True, False]


def test_time_already_waited_counts_towards_the_first_token():
    asked = parts.context(parts.view(1, phase=Phase.PREFILL, taken_at_s=9.98), phase=Phase.PREFILL)
    assert objective.price(asked).breaks_target().tolist() == [True]
    early = asked._replace(view=parts.view(1, phase=Phase.PREFILL, taken_at_s=9.9))
    assert objective.price(early).breaks_target().tolist() == [False]


def test_the_briefs_prefix_break_even():
    # 4K tokens lost = 254 ms at 16.1K tok/s = $3.5e-4 (FACTS section 2): lambda of class B.
    lost_s = 4096 / 16.1e3
    assert lost_s * DEFAULT_TARGETS[SloClass.B].lambda_usd_per_s == pytest.approx(3.5e-4, rel=0.02)


def test_the_briefs_worked_example():
    # Class B, 2,048 tokens, 1,600 shared: Ironwood warm, 120 ms queue, against B200 cold, 20 ms.
    # Prefill rates from the cost model: 2P / (peak * MFU), P = 70e9 at 8 bit.
    ironwood = CellCost(
        usd_per_chip_hour=6.0,
        prefill=PrefillTimeModel(chunk_s=0.0, token_s=2 * 70e9 / (4614e12 * 0.55)),
        step=parts.STEP,
    )
    b200 = CellCost(
        usd_per_chip_hour=5.0,
        prefill=PrefillTimeModel(chunk_s=0.0, token_s=2 * 70e9 / (4500e12 * 0.50)),
        step=parts.STEP,
    )
    book = CostBook({("m", "tpu7x"): ironwood, ("m", "b200"): b200})
    unpadded = parts.capabilities(buckets_tokens=())
    workers = (
        parts.worker("tpu", hardware="tpu7x", capabilities=unpadded),
        parts.worker("gpu", hardware="b200", capabilities=unpadded),
    )
    costs = book.rows(workers)
    queued = np.array([0.120, 0.020]) / costs.prefill_token_s
    seen = parts.view(2, workers=workers, phase=Phase.PREFILL, queued_prefill_tokens=queued)
    # Compute alone, as the brief prices it: delay is free here.
    free = dataclasses.replace(parts.TARGET, lambda_usd_per_s=1e-30)
    asked = parts.context(
        seen,
        phase=Phase.PREFILL,
        target=free,
        costs=costs,
        request=parts.request(num_tokens=2048, length=LengthBand(mean_tokens=300, p95_tokens=500)),
        cached_tokens=np.array([1600, 0], np.int32),
    )
    prices = objective.price(asked)
    ttft_ms = prices.ttft_s * 1e3
    assert [round(float(ms)) for ms in ttft_ms] == [145, 147]
    assert prices.score_usd == pytest.approx([4.1e-5, 1.76e-4], rel=0.01)
    assert prices.score_usd[1] / prices.score_usd[0] == pytest.approx(4.3, rel=0.01)
