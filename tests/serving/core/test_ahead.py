"""Pairs of prefill and decode workers: the best partner against trying every pair."""

import dataclasses

import numpy as np
import pytest

from serving.core import objective
from serving.core.ahead import SAMPLE_ABOVE, Ahead, DecodeRows, DecodeSide
from serving.core.decision import DecisionRecord, TermKind
from serving.core.draws import KeyedDraws
from serving.core.placement import PlacementContext
from serving.core.router_config import RouterConfig
from serving.core.transfer import LINKS, LinkSpeeds, TransferTimes
from serving.core.worker import Phase, Role
from serving.fleet.fleet import Fleet
from serving.fleet.registry import LoadReport
from serving.policies.registry import make_policy
from tests.serving import decision_parts as parts

SPEEDS = LinkSpeeds(latency_s=0.0, domain_bytes_per_s=1e9, network_bytes_per_s=1e7)
BYTES = 1e6


def side(view, *, max_transfer_s=np.inf, **changes) -> DecodeSide:
    times = TransferTimes(SPEEDS)
    given = {
        "context": parts.context(view),
        "rows": DecodeRows(view.workers),
        "feasible": np.ones(len(view.workers), bool),
        "hand_over_ok": lambda source: np.ones(len(view.workers), bool),
        "transfer_s": lambda source: times.seconds(BYTES, source, view.workers),
        "links": lambda source: times.kinds(source, view.workers),
        "max_transfer_s": max_transfer_s,
    }
    return DecodeSide(**(given | changes))


def prefill(name, **changes):
    return parts.worker(name, Role.PREFILL, **changes)


def test_the_partner_is_the_best_of_all_pairs():
    draw = np.random.default_rng(3)
    decoders = tuple(parts.worker(f"d{i}", ici_domain=f"s{i % 3}") for i in range(9))
    view = parts.view(9, workers=decoders, num_inflight=draw.integers(0, 6, 9))
    sources = tuple(prefill(f"p{i}", ici_domain=f"s{i % 4}") for i in range(8))
    ahead = Ahead(sources, lambda: side(view))
    alone = objective.price(parts.context(view)).score_usd
    times = TransferTimes(SPEEDS)
    price = parts.TARGET.lambda_usd_per_s
    for row, source in enumerate(sources):
        pairs = alone + price * times.seconds(BYTES, source, decoders)
        assert ahead.usd(np.array([row]))[0] == pytest.approx(pairs.min())
        matrix = ahead.matrix(np.array([row]))
        assert matrix.total_usd()[0] == pytest.approx(pairs.min())
        labels = dict(matrix.labels)
        assert labels["decode_worker"] == [decoders[int(pairs.argmin())].worker_id]
        assert labels["link"][0] == ("dcn" if row % 4 == 3 else labels["link"][0])


def test_only_workers_of_the_same_pool_are_partners():
    decoders = (parts.worker("near", pool="q"), parts.worker("own", pool="p"))
    view = parts.view(2, workers=decoders, num_inflight=[0.0, 5.0])
    ahead = Ahead((prefill("a"), prefill("b", pool="z")), lambda: side(view))
    assert dict(ahead.matrix(np.array([0])).labels)["decode_worker"] == ["own"]
    assert ahead.usd(np.array([1]))[0] == np.inf
    assert ahead.matrix(np.array([1])).total_usd()[0] == 0.0


def test_a_banned_hand_over_is_taken_only_when_all_are():
    decoders = (parts.worker("far"), parts.worker("near", ici_domain="s0"))
    # The near one is much busier, and still the only one a short limit allows.
    view = parts.view(2, workers=decoders, num_inflight=[0.0, 7.0])
    source = (prefill("a", ici_domain="s0"),)
    cheap = dataclasses.replace(parts.TARGET, lambda_usd_per_s=1e-9)
    seen = parts.context(view, target=cheap)
    free = Ahead(source, lambda: side(view, context=seen))
    strict = Ahead(source, lambda: side(view, context=seen, max_transfer_s=0.01))
    nothing = Ahead(source, lambda: side(view, context=seen, max_transfer_s=1e-9))
    found = [a.partner(0).link for a in (free, strict, nothing)]
    assert [LINKS[link] for link in found] == [LINKS[found[0]], "domain", LINKS[found[0]]]


def test_an_aggregated_worker_decodes_what_it_prefilled():
    both = parts.worker("both", Role.BOTH)
    decoders = (parts.worker("d0"), both)
    view = parts.view(2, workers=decoders, num_inflight=[0.0, 3.0])
    ahead = Ahead((both,), lambda: side(view))
    partner = ahead.partner(0)
    assert (partner.row, partner.transfer_s, LINKS[partner.link]) == (1, 0.0, "same_process")


def test_the_decode_side_is_asked_for_once_and_only_when_needed():
    asked = []
    view = parts.view(2)

    def look():
        asked.append(1)
        return side(view)

    ahead = Ahead((prefill("a"), prefill("b")), look)
    assert not asked
    ahead.usd(np.array([0, 1]))
    ahead.matrix(np.array([0]))
    assert len(asked) == 1


def test_a_large_fleet_is_sampled_and_the_sources_own_domain_stays_in():
    num = SAMPLE_ABOVE + 72
    decoders = tuple(parts.worker(f"d{i}", ici_domain=f"s{i // 20}") for i in range(num))
    load = np.full(num, 4.0)
    load[:60] = 1.0  # the least loaded ones are all far away
    load[185] = 2.0
    view = parts.view(num, workers=decoders, num_inflight=load)
    source = (prefill("a", ici_domain="s9"),)
    dear = dataclasses.replace(parts.TARGET, lambda_usd_per_s=10.0)
    ahead = Ahead(source, lambda: side(view, context=parts.context(view, target=dear)))
    ahead.usd(np.array([0]))
    assert ahead.partner(0).row == 185
    assert LINKS[ahead.partner(0).link] == "domain"


def rig(**changes) -> parts.Rig:
    """Prefill in two slices; decode in the second only."""
    fleet = Fleet()
    given = {"num_prefill": 0, "num_decode": 0, "experts": False, "prefill": "cost_p2c"}
    config = RouterConfig(record_everyone=1.0, links=SPEEDS)
    made = parts.Rig(**given, fleet=fleet, config=config, regions=None, **changes)
    for i in range(4):
        worker = parts.worker(f"p{i}", Role.PREFILL, ici_domain=f"s{i % 2}")
        fleet.add(worker, made.clock.now_s)
    for i in range(2):
        fleet.add(parts.worker(f"d{i}", ici_domain="s1"), made.clock.now_s)
    return made


def test_the_router_prefers_a_prefill_worker_near_to_decode():
    made = rig()
    slow = LoadReport(num_running=0, num_waiting=0, kv_blocks_used=0, speed_factor=1.5)
    made.fleet.update("d0", slow, made.clock.now_s)
    asked = parts.request(arrival_s=made.clock.now_s)
    placed = made.router.place_prefill(asked)
    assert placed.worker.ici_domain == "s1"
    made.router.record(placed)
    record = made.router.explain("r")[0]
    assert isinstance(record, DecisionRecord)
    links = {c.worker_id: c.labels.get("link") for c in record.stage.candidates}
    assert links == {"p0": "dcn", "p1": "domain", "p2": "dcn", "p3": "domain"}
    for candidate in record.stage.candidates:
        terms = {term.name: term for term in candidate.terms}
        costs = sum(t.usd for t in candidate.terms if t.kind is TermKind.COST)
        assert candidate.total_usd == pytest.approx(costs)
        assert candidate.score == pytest.approx(costs)
        assert terms["decode_delay"].usd > 0
        assert terms["transfer"].usd > 0
    # The decode choice that follows takes the partner that was counted on, at the same price.
    partner = next(c for c in record.stage.candidates if c.worker_id == placed.worker.worker_id)
    decode = made.router.place_decode(
        asked, signature=None, prefill_worker_id=placed.worker.worker_id
    )
    assert decode.worker.worker_id == partner.labels["decode_worker"]


def test_without_decode_workers_prefill_is_placed_by_itself():
    made = rig()
    for i in range(2):
        made.fleet.remove(f"d{i}")
    placed = made.router.place_prefill(parts.request(arrival_s=made.clock.now_s))
    assert placed.fallback == "no_decode_worker"


def test_gpu_workers_are_drawn_and_those_with_the_prefix_likelier():
    workers = tuple(
        parts.worker(f"p{i}", Role.PREFILL, capabilities=parts.capabilities(buckets_tokens=()))
        for i in range(16)
    )
    view = parts.view(16, workers=workers, phase=Phase.PREFILL)
    cached = np.zeros(16, np.int32)
    cached[5] = 99
    context: PlacementContext = parts.context(view, phase=Phase.PREFILL, cached_tokens=cached)
    policy, draws = make_policy("cost_p2c", prefix_bias=8.0), KeyedDraws(1)
    found = [policy.rank(context, draws.at(turn)) for turn in range(200)]
    assert all(np.isfinite(ranking.score).sum() == 2 for ranking in found)
    # Nine of 24 weights per draw and two draws: about two thirds; without bias one eighth.
    assert 0.5 < np.mean([np.isfinite(ranking.score[5]) for ranking in found]) < 0.8
    assert all(r.chosen == 5 for r in found if np.isfinite(r.score[5]))
