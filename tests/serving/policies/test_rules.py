"""What each rule does beyond the contract all of them share."""

import dataclasses

import numpy as np
import pytest

from serving.core import objective
from serving.core.errors import ConfigError
from serving.core.experts import ExpertProfiles
from serving.core.request import SloTarget
from serving.core.worker import Phase
from serving.policies import make_policy
from serving.signatures.regions import bind
from tests.serving import decision_parts as parts


def rng(seed=0):
    return np.random.default_rng(seed)


def with_cosines(cosines, **columns):
    """A context whose signature has the given cosine with each worker's centroid."""
    num = len(cosines)
    vector = np.zeros(parts.SIZE, np.float32)
    vector[0] = 1.0
    rows = np.zeros((num, parts.SIZE), np.float32)
    rows[:, 0] = cosines
    rows[:, 1] = np.sqrt(1 - rows[:, 0] ** 2)
    return parts.context(
        parts.view(num, **columns),
        signature=parts.signature(vector=vector),
        regions=bind(rows, [f"w{i}" for i in range(num)]),
    )


def chosen(name, asked, seeds=range(40), **options):
    return {make_policy(name, **options).rank(asked, rng(seed)).chosen for seed in seeds}


def test_round_robin_takes_turns_among_the_feasible():
    feasible = np.array([True, False, True, True])
    turns = [
        make_policy("rr").rank(parts.context(sequence=n, feasible=feasible), rng()).chosen
        for n in range(7)
    ]
    assert turns == [0, 2, 3, 0, 2, 3, 0]


def test_jsq_joins_the_shortest():
    assert chosen("jsq", parts.context(parts.view(4, num_inflight=[3, 1, 2, 1]))) == {1, 3}


def test_p2c_takes_the_less_loaded_of_two():
    asked = parts.context(parts.view(3, num_inflight=[1, 2, 3]))
    answers = [make_policy("p2c").rank(asked, rng(seed)) for seed in range(300)]
    share = np.bincount([a.chosen for a in answers], minlength=3) / 300
    assert share[2] == 0
    assert share[0] == pytest.approx(2 / 3, abs=0.1)
    assert all(np.isfinite(a.score).sum() == 2 for a in answers)


def test_p2c_work_weighs_tokens_by_measured_speed():
    seen = parts.view(
        2, phase=Phase.PREFILL, queued_prefill_tokens=[1000, 1500], speed_factor=[2.0, 1.0]
    )
    assert chosen("p2c_work", parts.context(seen, phase=Phase.PREFILL)) == {1}
    busy = parts.members([0, 0, 0, 1], [100.0, 100.0, 100.0, 5.0], 1e-3, 2)
    seen = parts.view(2, num_inflight=[3, 1], members=busy)
    assert chosen("p2c_work", parts.context(seen)) == {1}


def test_p2c_work_leans_to_the_cached_prefix_but_is_bounded():
    num = 20
    asked = parts.context(
        parts.view(num, phase=Phase.PREFILL),
        phase=Phase.PREFILL,
        cached_tokens=np.array([96] + [0] * (num - 1), np.int32),
    )
    hits = [make_policy("p2c_work").rank(asked, rng(seed)).chosen == 0 for seed in range(400)]
    # Sampled with odds 1 + 4 * 0.96 against 1 it wins whenever it is sampled.
    assert 0.25 < np.mean(hits) < 0.55
    queued = np.zeros(num)
    queued[0] = 10_000
    crowded = asked._replace(
        view=parts.view(num, phase=Phase.PREFILL, queued_prefill_tokens=queued)
    )
    assert 0 not in chosen("p2c_work", crowded)


def test_eldr_takes_the_least_loaded_of_the_band():
    asked = with_cosines([0.9, 0.85, 0.79, 0.2], num_inflight=[5, 3, 0, 0])
    assert chosen("eldr_static", asked) == {1}
    assert chosen("eldr_static", asked, tau=0.0) == {0}
    assert chosen("eldr_static", asked, tau=0.15) == {2}


def test_eldr_runner_up_outside_the_band_is_the_next_most_similar():
    answer = make_policy("eldr_static").rank(
        with_cosines([0.9, 0.2, 0.5], num_inflight=[7, 0, 0]), rng()
    )
    assert (answer.chosen, answer.runner_up, answer.unit) == (0, 2, "requests")


def test_min_two_lets_the_second_best_into_a_band_of_one():
    asked = with_cosines([0.9, 0.2, 0.5], num_inflight=[7, 0, 3])
    assert chosen("eldr_online", asked) == {2}
    assert chosen("eldr_static", asked, min_two=True) == {2}
    assert chosen("eldr_static", asked) == {0}


def test_eldr_falls_back_to_jsq_and_says_why():
    asked = with_cosines([0.9, 0.1], num_inflight=[4, 1])
    cases = {
        "no_signature": asked._replace(signature=None),
        "no_regions": asked._replace(regions=None),
        "zero_signature": asked._replace(
            signature=parts.signature(vector=np.zeros(parts.SIZE, np.float32))
        ),
        "no_region_of_a_candidate": asked._replace(
            regions=bind(np.eye(1, parts.SIZE, dtype=np.float32), ["elsewhere"])
        ),
    }
    for why, case in cases.items():
        answer = make_policy("eldr_static").rank(case, rng())
        assert (answer.fallback, answer.chosen) == (why, 1)


def test_a_worker_without_a_region_waits_behind_the_others():
    asked = with_cosines([0.3, 0.1], num_inflight=[9, 9])
    newcomer = parts.view(3, num_inflight=[9, 9, 0])
    asked = parts.context(newcomer)._replace(signature=asked.signature, regions=asked.regions)
    assert make_policy("eldr_online").rank(asked, rng()).chosen in (0, 1)


def test_domain_keeps_to_the_group_of_the_label():
    labels = ("law", "code", "math")
    seen = parts.view(6, num_inflight=[9, 8, 1, 2, 5, 5])
    groups = {
        label: chosen("domain", parts.context(seen, domain=label), labels=labels)
        for label in labels
    }
    assert groups == {"law": {1}, "code": {2}, "math": {4, 5}}
    answer = make_policy("domain", labels=labels).rank(parts.context(seen, domain="x"), rng())
    assert (answer.fallback, answer.chosen) == ("no_domain", 2)
    full = parts.context(seen, domain="law", feasible=np.array([False] * 2 + [True] * 4))
    answer = make_policy("domain", labels=labels).rank(full, rng())
    assert (answer.fallback, answer.chosen) == ("domain_group_full", 2)


def test_domain_with_more_labels_than_workers_shares_groups():
    asked = parts.context(parts.view(2), domain="c")
    assert chosen("domain", asked, labels=("a", "b", "c", "d")) == {0}


def busy_view(num_inflight, **columns):
    rows = [row for row, num in enumerate(num_inflight) for _ in range(num)]
    num = len(num_inflight)
    return parts.view(
        num,
        num_inflight=num_inflight,
        members=parts.members(rows, [20.0] * len(rows), parts.TARGET.lambda_usd_per_s, num),
        **columns,
    )


def test_expert_cost_is_the_lowest_j():
    asked = parts.context(busy_view([3, 1, 2], speed_factor=[1.0, 3.0, 1.0]))
    answer = make_policy("expert_cost").rank(asked, rng())
    total = objective.price(asked).score_usd
    assert answer.chosen == total.argmin() == 2
    np.testing.assert_allclose(answer.score, total)
    assert answer.unit == "usd"


def test_interactive_classes_spread_and_batch_packs():
    # DESIGN: class A spreads, class C fills; waking an idle worker costs its whole step.
    asked = parts.context(busy_view([0, 4]))
    urgent = dataclasses.replace(asked.target, lambda_usd_per_s=1.0)
    # What the others lose is priced by their own class, here batch as well.
    batch = dataclasses.replace(asked.target, lambda_usd_per_s=1e-6)
    cheap = asked.view._replace(members=parts.members([1] * 4, [20.0] * 4, 1e-6, 2))
    policy = make_policy("expert_cost")
    assert policy.rank(asked._replace(target=urgent), rng()).chosen == 0
    assert policy.rank(asked._replace(target=batch, view=cheap), rng()).chosen == 1


def test_a_worker_that_would_break_the_class_is_set_aside_unless_all_would():
    tight = SloTarget(
        ttft_p99_s=10.0, tpot_p99_s=0.006, deadline_s=float("inf"), lambda_usd_per_s=1e-6
    )
    asked = parts.context(busy_view([0, 4]), target=tight)
    answer = make_policy("expert_cost").rank(asked, rng())
    assert answer.chosen == 0
    assert answer.excluded[0][0] == "breaks_target"
    assert answer.excluded[0][1].tolist() == [False, True]
    hopeless = asked._replace(target=dataclasses.replace(tight, tpot_p99_s=1e-6))
    answer = make_policy("expert_cost").rank(hopeless, rng())
    assert answer.fallback == "every_worker_breaks_target"
    assert np.isfinite(answer.score).all()


def test_max_spread_sets_crowded_workers_aside():
    lazy = dataclasses.replace(parts.TARGET, lambda_usd_per_s=1e-9, tpot_p99_s=9.0)
    seen = busy_view([7, 0, 0, 1])
    asked = parts.context(seen, target=lazy)
    answer = make_policy("expert_cost", max_spread=True).rank(asked, rng())
    assert [(name, out.tolist()) for name, out in answer.excluded] == [
        ("max_spread", [True, False, False, False])
    ]
    assert make_policy("expert_cost").rank(asked, rng()).excluded == ()


def test_expert_cost_joins_whoever_holds_its_experts():
    rows = parts.expert_rows(2, prior=False)
    survival = np.ones((2, parts.SIZE), np.float32)
    survival[0, :8] = survival[1, 8:] = 0.05
    rows = rows._replace(survival=survival, survival_sum=survival.sum(axis=1, dtype=np.float64))
    asked = parts.context(busy_view([2, 2], experts=rows))
    for half, wanted in ((slice(0, 8), 0), (slice(8, 16), 1)):
        keep = np.ones(parts.SIZE, np.float32)
        keep[half] = 0.3
        answer = make_policy("expert_cost").rank(asked._replace(keep=keep), rng())
        assert answer.chosen == wanted


def large(num=300, **changes):
    draw = np.random.default_rng(0)
    num_inflight = draw.integers(1, 6, num).tolist()
    centroids = np.eye(2, parts.SIZE, dtype=np.float32)
    near = np.where(np.arange(num) % 50 == 7, 0.99, 0.1).astype(np.float32)
    rows = np.stack([near, np.sqrt(1 - near**2)], axis=1)
    rows = np.concatenate([rows, np.zeros((num, parts.SIZE - 2), np.float32)], axis=1)
    ids = [f"w{i}" for i in range(num)]
    experts = ExpertProfiles(
        version="e",
        num_layers=parts.LAYERS,
        num_masked_layers=parts.MASKED,
        num_experts=parts.EXPERTS,
        top_k=parts.TOP_K,
        mean_profile=np.full(parts.SIZE, 0.25, np.float32),
        centroids=centroids,
        profiles=np.full((2, parts.SIZE), 0.25, np.float32),
    )
    return parts.context(
        busy_view(num_inflight, experts=parts.expert_rows(num)),
        keep=draw.random(parts.SIZE).astype(np.float32),
        regions=bind(rows, ids),
        experts=experts,
        cluster=0,
        **changes,
    )


def test_a_large_cell_is_sampled_by_region_and_load():
    asked = large()
    policy = make_policy("expert_cost", num_near=6, num_light=8)
    answer = policy.rank(asked, rng())
    priced = np.isfinite(answer.score).nonzero()[0]
    np.testing.assert_array_equal(priced, answer.term_rows)
    assert set(range(7, 300, 50)) <= set(priced.tolist())
    assert 8 <= len(priced) <= 14
    load = asked.view.num_inflight
    assert (load[priced] == load.min()).sum() >= 8
    assert (answer.aside, answer.excluded) == ("not_sampled", ())
    # What it says about the sampled is what pricing everybody says.
    full = make_policy("expert_cost", sample_above=1000).rank(asked, rng())
    np.testing.assert_allclose(answer.score[priced], full.score[priced])
    matrix = answer.terms.matrix()
    np.testing.assert_allclose(matrix.score_usd()[priced], answer.score[priced])


def test_a_sample_never_holds_an_infeasible_worker():
    feasible = np.random.default_rng(1).random(300) < 0.6
    answer = make_policy("expert_cost").rank(large(feasible=feasible), rng())
    assert feasible[answer.term_rows].all()


def test_without_regions_a_large_cell_is_sampled_at_random_beside_the_least_loaded():
    asked = large()._replace(regions=None)
    policy = make_policy("expert_cost", num_near=10, num_light=10)
    first, second = (policy.rank(asked, rng(seed)) for seed in (0, 1))
    assert not np.array_equal(first.term_rows, second.term_rows)
    assert 10 <= len(first.term_rows) <= 20


@pytest.mark.parametrize("name", ["num_near", "num_light"])
def test_a_sample_is_no_larger_than_the_smallest_cell_that_is_sampled(name):
    given = {"sample_above": 8, "num_near": 8, "num_light": 8}
    asked = parts.context(busy_view([1] * 9))
    assert make_policy("expert_cost", **given).rank(asked, rng()).chosen >= 0
    with pytest.raises(ConfigError, match=f"{name}=9 must be <= sample_above=8"):
        make_policy("expert_cost", **given | {name: 9})


def test_half_of_a_small_cell_can_be_sampled():
    asked = parts.context(busy_view([1, 2, 3, 4, 5]))
    policy = make_policy("expert_cost", sample_small=True, small_share=0.5)
    sizes = {np.isfinite(policy.rank(asked, rng(seed)).score).sum() for seed in range(10)}
    assert sizes == {3}
    assert len(chosen("expert_cost", asked, sample_small=True, small_share=0.5)) > 1
    fewer = make_policy("expert_cost", sample_small=True, small_share=0.4)
    assert np.isfinite(fewer.rank(asked, rng(0)).score).sum() == 2
    with pytest.raises(ConfigError, match="small_share"):
        make_policy("expert_cost", small_share=0.0)


@pytest.mark.parametrize(
    ("replicas", "unreported", "priced"),
    # 1 / (1 + 1.6 sqrt(u)) of 12, u = (R - 1) * (own + this one) / 12.
    [(1, None, 12), (4, 0, 7), (4, 3, 5), (4, 19, 3), (2, 3, 7)],
)
def test_the_sample_shrinks_with_what_other_routers_placed_unseen(replicas, unreported, priced):
    seen = busy_view([1 + i for i in range(12)])
    if unreported is not None:
        own = np.zeros(12)
        own[:2] = unreported - unreported // 2, unreported // 2
        seen = seen._replace(num_unreported=own, num_replicas=replicas)
    answer = make_policy("expert_cost", sample_small=True).rank(parts.context(seen), rng())
    assert np.isfinite(answer.score).sum() == priced
    everybody = make_policy("expert_cost").rank(parts.context(seen), rng())
    assert np.isfinite(everybody.score).all()


def test_what_lies_on_other_pools_workers_does_not_shrink_the_sample():
    feasible = np.arange(24) < 12
    seen = busy_view([1 + i for i in range(24)])
    seen = seen._replace(num_unreported=np.where(feasible, 0.0, 50.0), num_replicas=4)
    asked = parts.context(seen, feasible=feasible)
    answer = make_policy("expert_cost", sample_small=True).rank(asked, rng())
    assert np.isfinite(answer.score).sum() == 7
