"""The pipeline end to end on a fleet of values: no I/O, a clock that moves when told."""

import dataclasses

import numpy as np
import pytest

from serving.core.decision import DecisionRecord, OutcomeRecord, OutcomeStatus
from serving.core.errors import (
    InvalidRequest,
    LeaseError,
    Rejected,
    RejectReason,
    UnknownModel,
)
from serving.core.router_config import RouterConfig
from serving.core.routing_table import RoutingTable, TableCell, TableEntry
from serving.core.worker import Phase, Role, WorkerState
from serving.fleet.fleet import Fleet
from serving.fleet.registry import LoadReport
from serving.policies.registry import make_policy
from tests.serving import decision_parts as parts


def decode(rig, asked, **changes):
    given = {"signature": None, "prefill_worker_id": None}
    return rig.router.place_decode(asked, **(given | changes))


def outcomes(rig):
    return [line for line in rig.lines if isinstance(line, OutcomeRecord)]


def test_a_request_from_arrival_to_outcome():
    rig = parts.Rig()
    asked = parts.request()
    prefill = rig.router.place_prefill(asked)
    assert prefill.worker.role is Role.PREFILL
    assert prefill.lease.expires_at_s == rig.clock.now_s + 120.0
    assert rig.router.view(Phase.PREFILL).queued_prefill_tokens.sum() == 100
    rig.router.prefill_done("r")
    assert rig.router.view(Phase.PREFILL).queued_prefill_tokens.sum() == 0
    placed = decode(rig, asked, signature=parts.signature())
    seen = rig.router.view(Phase.DECODE)
    row = seen.index_of(placed.worker.worker_id)
    assert seen.num_inflight[row] == 1
    assert seen.kv_blocks_free[row] == 1000 - 9
    assert placed.runner_up is not None
    assert placed.runner_up is not placed.worker
    rig.router.first_token("r")
    rig.router.record(prefill)
    rig.router.record(placed)
    rig.clock.advance(0.5)
    rig.router.done("r", 20, 0.1, 0.02, usd=1e-4)
    assert rig.reserved() == 0.0
    assert rig.router.num_open == 0
    kinds = [type(line) for line in rig.lines]
    assert kinds == [DecisionRecord, DecisionRecord, OutcomeRecord]
    assert rig.router.explain("r") == rig.lines
    assert outcomes(rig)[0].status is OutcomeStatus.OK
    assert outcomes(rig)[0].usd == 1e-4
    assert outcomes(rig)[0].ended_at_s == pytest.approx(1e9 + 1000.5)


def test_the_same_id_and_prompt_is_the_same_reservation():
    rig = parts.Rig()
    first = rig.router.place_prefill(parts.request())
    assert rig.router.place_prefill(parts.request()) is first
    placed = decode(rig, parts.request())
    assert decode(rig, parts.request()) is placed
    assert rig.router.view(Phase.DECODE).num_inflight.sum() == 1


def test_the_same_id_with_another_prompt_is_refused():
    rig = parts.Rig()
    rig.router.place_prefill(parts.request())
    with pytest.raises(InvalidRequest, match="another prompt"):
        rig.router.place_prefill(
            parts.request(token_ids=np.full(100, 9, np.int32)),
        )


def test_a_continued_prompt_is_placed_anew_as_one_retry():
    rig = parts.Rig()
    rig.serve(parts.request(), end=False)
    longer = parts.request(num_tokens=110)
    rig.serve(longer, end=False)
    assert rig.router.view(Phase.DECODE).num_inflight.sum() == 1
    rig.router.done("r", 30, 0.1, 0.02)
    assert outcomes(rig)[0].retries == 1
    assert rig.reserved() == 0.0


def test_a_lost_decode_worker_is_replaced_and_counted():
    rig = parts.Rig()
    asked = parts.request()
    first = decode(rig, asked)
    lost = first.worker.worker_id
    second = decode(rig, asked, exclude=frozenset({lost}))
    assert second.worker.worker_id != lost
    assert rig.router.view(Phase.DECODE).num_inflight.sum() == 1
    rig.router.done("r", 3, None, None)
    assert outcomes(rig)[0].retries == 1
    decisions = [line for line in rig.lines if isinstance(line, DecisionRecord)]
    assert [line.stage.winner for line in decisions] == [lost, second.worker.worker_id]


def test_a_worker_declared_lost_gives_back_what_it_held():
    rig = parts.Rig()
    asked = parts.request()
    placed = decode(rig, asked)
    released = rig.fleet.set_state(placed.worker.worker_id, WorkerState.LOST)
    assert [lease.request_id for lease in released] == ["r"]
    # Its lease is gone, so asking again chooses anew, without being told whom to avoid.
    again = decode(rig, asked)
    assert again.worker.worker_id != placed.worker.worker_id


def test_only_one_worker_may_be_allowed():
    rig = parts.Rig(num_decode=4)
    assert decode(rig, parts.request(), only="d2").worker.worker_id == "d2"


def test_an_aggregated_worker_counts_a_request_once():
    rig = parts.Rig(num_prefill=0, num_decode=0)
    rig.fleet.add(parts.worker("both", Role.BOTH), rig.clock.now_s)
    asked = parts.request()
    rig.router.place_prefill(asked)
    decode(rig, asked, prefill_worker_id="both", only="both")
    seen = rig.router.view(Phase.DECODE)
    assert (seen.num_inflight[0], seen.kv_blocks_free[0]) == (1, 1000 - 9)
    rig.router.done("r", 1, None, None)
    assert rig.reserved() == 0.0


def test_kv_moves_to_equal_pages_only_and_stays_where_it_is_anyway():
    rig = parts.Rig(num_decode=1)
    pages = parts.capabilities(page_size_tokens=64)
    rig.fleet.add(parts.worker("both", Role.BOTH, capabilities=pages), rig.clock.now_s)
    asked = parts.request()
    for source, wanted in (("p0", "d0"), ("both", "both")):
        placed = decode(
            rig, dataclasses.replace(asked, request_id=source), prefill_worker_id=source
        )
        assert placed.worker.worker_id == wanted
    assert decode(rig, parts.request("r3"), prefill_worker_id="left already").worker is not None


def test_the_hand_over_takes_time_over_the_link_it_has():
    rig = parts.Rig(num_decode=0, decode="expert_cost")
    rig.fleet.add(parts.worker("p9", Role.PREFILL, host="h1"), rig.clock.now_s)
    for name, host in (("near", "h1"), ("far", "h2")):
        rig.fleet.add(parts.worker(name, host=host), rig.clock.now_s)
    placed = decode(rig, parts.request(), prefill_worker_id="p9")
    assert placed.worker.worker_id == "near"
    line = rig.router.explain("r")[0]
    seconds = {c.worker_id: c.terms[0].seconds for c in line.stage.candidates}
    # 100 tokens of 1e4 bytes: the network's 12.5 GB/s or the machine's 20 GB/s, and 0.5 ms.
    assert seconds == pytest.approx({"near": 5e-4 + 5e-5, "far": 5e-4 + 8e-5})


def test_rejections():
    rig = parts.Rig(num_prefill=0)
    with pytest.raises(Rejected) as caught:
        rig.router.place_prefill(parts.request())
    assert caught.value.why is RejectReason.NO_LIVE_WORKER
    with pytest.raises(UnknownModel):
        rig.router.place_prefill(parts.request("x", model="other"))
    small = parts.Rig(num_decode=1)
    for i in range(8):
        decode(small, parts.request(f"r{i}"))
    with pytest.raises(Rejected) as caught:
        decode(small, parts.request("r8"))
    assert caught.value.why is RejectReason.NO_CAPACITY
    assert small.router.num_open == 8
    small.router.failed("r8", OutcomeStatus.REJECTED, "NO_CAPACITY")
    assert outcomes(small)[0].error == "NO_CAPACITY"


def test_silent_workers_take_nothing():
    rig = parts.Rig(fleet=Fleet(stale_after_s=5.0), experts=False)
    rig.clock.advance(6.0)
    with pytest.raises(Rejected) as caught:
        rig.router.place_prefill(parts.request())
    assert caught.value.why is RejectReason.NO_LIVE_WORKER
    report = LoadReport(num_running=0, num_waiting=0, kv_blocks_used=0)
    rig.fleet.update("p1", report, rig.clock.now_s)
    assert rig.router.place_prefill(parts.request()).worker.worker_id == "p1"


def test_a_hole_in_the_table_is_stepped_over():
    cells = tuple(TableCell(variant="m", pool=pool) for pool in ("empty", "p"))
    table = RoutingTable("t7", [TableEntry(model="", cells=cells)])
    rig = parts.Rig(table=table)
    placed = rig.router.place_prefill(parts.request())
    assert (placed.pool, placed.table_version) == ("p", "t7")
    rig.router.set_switch("routing_table", False)
    assert rig.router.place_prefill(parts.request("r2")).table_version == "static"
    rig.router.set_switch("routing_table", True)
    rig.router.set_table(None)
    assert rig.router.place_prefill(parts.request("r3")).table_version == "static"


def test_decode_stays_in_the_cell_of_prefill():
    rig = parts.Rig()
    rig.fleet.add(parts.worker("p9", Role.PREFILL, pool="q"), rig.clock.now_s)
    rig.fleet.add(parts.worker("d9", Role.DECODE, pool="q"), rig.clock.now_s)
    only_q = RoutingTable("q", [TableEntry(model="", cells=(TableCell(variant="m", pool="q"),))])
    rig.router.set_table(only_q)
    asked = parts.request()
    rig.router.place_prefill(asked)
    rig.router.set_table(None)
    assert decode(rig, asked).worker.worker_id == "d9"


def test_leases_expire_renew_and_end_the_request():
    rig = parts.Rig(config=RouterConfig(lease_s=10.0, record_everyone=0.0))
    placed = rig.router.place_prefill(parts.request())
    rig.clock.advance(8.0)
    lease = rig.router.renew(placed.lease.lease_id, 10.0)
    assert lease.expires_at_s == rig.clock.now_s + 10.0
    assert placed.lease == lease
    rig.clock.advance(5.0)
    assert rig.router.expire(rig.clock.now_s) == []
    rig.clock.advance(5.0)
    assert [gone.request_id for gone in rig.router.expire(rig.clock.now_s)] == ["r"]
    assert outcomes(rig)[0].status is OutcomeStatus.LEASE_EXPIRED
    assert rig.reserved() == 0.0
    with pytest.raises(LeaseError):
        rig.router.renew(placed.lease.lease_id, 10.0)


@pytest.mark.parametrize("extend_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_is_extended_by_a_real_time(extend_s):
    rig = parts.Rig()
    placed = rig.router.place_prefill(parts.request())
    with pytest.raises(LeaseError, match="extend_s"):
        rig.router.renew(placed.lease.lease_id, extend_s)


def test_a_client_that_vanishes_after_prefill_is_not_kept():
    rig = parts.Rig(config=RouterConfig(lease_s=10.0))
    rig.router.place_prefill(parts.request())
    rig.router.prefill_done("r")
    rig.clock.advance(9.0)
    rig.router.expire(rig.clock.now_s)
    assert rig.router.num_open == 1
    rig.clock.advance(1.5)
    rig.router.expire(rig.clock.now_s)
    assert rig.router.num_open == 0
    assert outcomes(rig)[0].status is OutcomeStatus.LEASE_EXPIRED


def test_ending_twice_or_something_unknown_writes_nothing_more():
    rig = parts.Rig()
    rig.serve(parts.request())
    before = len(rig.lines)
    rig.router.done("r", 1, None, None)
    rig.router.failed("nobody", OutcomeStatus.FAILED, "WORKER_LOST")
    rig.router.prefill_done("nobody")
    rig.router.first_token("nobody")
    assert len(rig.lines) == before


def test_switches_act_on_the_next_decision():
    rig = parts.Rig(decode="eldr_static", fallback_policy=make_policy("rr"))
    told = {}
    for i, name in enumerate(["", "signature", "regions", "experts", "policy"]):
        if name:
            rig.router.set_switch(name, False)
        _, placed = rig.serve(parts.request(f"r{i}"), end=False)
        told[name] = placed
        rig.router.record(placed)
        if name:
            assert name in rig.router.switches_off
            rig.router.set_switch(name, True)
    assert told[""].fallback == ""
    assert told["signature"].fallback == "no_signature"
    assert told["regions"].fallback == "no_regions"
    assert told["policy"].policy == "rr"
    lines = [x for x in rig.lines if isinstance(x, DecisionRecord) and x.stage.phase == "decode"]
    assert "experts" not in lines[3].versions
    assert lines[3].switches == ("experts",)
    with pytest.raises(InvalidRequest, match="must be one of"):
        rig.router.set_switch("nonsense", False)


def test_signatures_of_another_model_version_are_not_trusted():
    sign = parts.signature(seed=3)
    mixed = [parts.Rig(), parts.Rig(), parts.Rig()]
    for rig, used in zip(
        mixed, (sign, dataclasses.replace(sign, version="old"), None), strict=True
    ):
        decode(rig, parts.request(), signature=used)
    rows = [rig.router.view(Phase.DECODE).experts.survival for rig in mixed]
    np.testing.assert_array_equal(rows[1], rows[2])
    assert not np.array_equal(rows[0], rows[2])


def test_trust_in_signatures_can_be_lowered_live():
    rig = parts.Rig()
    rig.router.set_signature_weight(0.0)
    decode(rig, parts.request(), signature=parts.signature())
    mean = parts.Rig()
    decode(mean, parts.request())
    np.testing.assert_array_equal(
        rig.router.view(Phase.DECODE).experts.survival,
        mean.router.view(Phase.DECODE).experts.survival,
    )
    with pytest.raises(ValueError, match="weight"):
        rig.router.set_signature_weight(1.5)


class FixedIndex:
    """Says the second prefill worker holds four blocks."""

    def __init__(self):
        self.hashes = None

    def cached_blocks(self, block_hashes, workers):
        self.hashes = block_hashes
        return np.array([4 if w.worker_id == "p1" else 0 for w in workers], np.int32)


def test_a_cached_prefix_is_credited_and_can_be_switched_off():
    index = FixedIndex()
    rig = parts.Rig(prefill="expert_cost", prefix_index=index)
    placed = rig.router.place_prefill(parts.request())
    assert (placed.worker.worker_id, placed.cached_tokens) == ("p1", 64)
    assert placed.block_hashes.shape == (6,)
    np.testing.assert_array_equal(index.hashes, placed.block_hashes)
    assert rig.router.view(Phase.PREFILL).queued_prefill_tokens.sum() == 36
    rig.router.set_switch("prefix_index", False)
    again = rig.router.place_prefill(parts.request("r2"))
    assert (again.worker.worker_id, again.cached_tokens) == ("p0", 0)


def test_the_salt_separates_prefixes():
    index = FixedIndex()
    rig = parts.Rig(prefix_index=index)
    plain = rig.router.place_prefill(parts.request()).block_hashes
    salted = rig.router.place_prefill(parts.request("r2", cache_salt="x")).block_hashes
    assert not (plain == salted).any()


def test_records_that_nobody_fetched_are_made_anyway():
    rig = parts.Rig(config=RouterConfig(max_unrecorded=3))
    for i in range(3):
        rig.router.place_prefill(parts.request(f"r{i}"))
    assert rig.lines == []
    rig.router.place_prefill(parts.request("r3"))
    assert [line.request_id for line in rig.lines] == ["r0"]
    assert len(rig.router.explain("r3")) == 1
    assert rig.router.recent_ids() == ["r0", "r1", "r2", "r3"]


def test_placements_are_observed_once_recorded():
    seen = []

    class Observer:
        def placed(self, placed, now_s):
            seen.append((placed.phase, placed.recorded, now_s))

    rig = parts.Rig(observers=(Observer(),))
    prefill, placed = rig.serve(parts.request(), end=False)
    rig.router.record(prefill)
    rig.router.record(placed)
    rig.router.record(placed)
    assert seen == [(Phase.PREFILL, True, 1000.0), (Phase.DECODE, True, 1000.0)]


def test_equal_seeds_repeat_and_nothing_leaks():
    def run(seed):
        config = RouterConfig(seed=seed, record_everyone=0.1)
        rig = parts.Rig(decode="p2c", prefill="random", config=config, num_decode=5)
        went = []
        for i in range(60):
            prefill, placed = rig.serve(parts.request(f"r{i}"), seed=i, end=i % 3 == 0)
            went.append((prefill.worker.worker_id, placed.worker.worker_id))
            if i % 3 == 1:
                rig.router.failed(f"r{i}", OutcomeStatus.CANCELLED, "CANCELLED")
        for i in range(2, 60, 3):
            rig.router.done(f"r{i}", 1, None, None)
        assert rig.reserved() == 0.0
        return went

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_decide_time_is_recorded_when_cpu_time_is_given():
    ticks = iter(np.arange(0.0, 1.0, 50e-6).tolist())
    rig = parts.Rig(cpu_s=lambda: next(ticks))
    rig.serve(parts.request())
    decisions = [line for line in rig.lines if isinstance(line, DecisionRecord)]
    assert [line.stage.decide_us for line in decisions] == pytest.approx([50.0, 50.0])


def test_config_rules():
    for bad in ({"lease_s": 0.0}, {"record_everyone": 2.0}, {"targets": {}}, {"router_id": ""}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            RouterConfig(**bad)


def test_a_worker_is_priced_by_the_layer_scale_of_who_runs_there():
    rig = parts.Rig(num_decode=1)
    rig.router.set_experts(
        dataclasses.replace(parts.profiles(), layer_scale=np.full(3, 6.0, np.float32))
    )
    decode(rig, parts.request(), signature=parts.signature())
    # 2 by geometry, as eight pseudo-members, and 6 of the one that is there.
    scale = rig.router.view(Phase.DECODE).experts.layer_scale
    np.testing.assert_allclose(scale, (8 * parts.LAYERS / parts.MASKED + 6.0) / 9)
    rig.router.done(parts.request().request_id, 20, 0.1, 0.01)
    assert rig.router.view(Phase.DECODE).experts.layer_scale[0] == parts.LAYERS / parts.MASKED
    # Without a signature nobody knows what it touches.
    decode(rig, parts.request("other"))
    assert rig.router.view(Phase.DECODE).experts.layer_scale[0] == parts.LAYERS / parts.MASKED
