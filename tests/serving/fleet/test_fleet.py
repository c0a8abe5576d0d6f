import numpy as np
import pytest

from serving.core.errors import Rejected
from serving.core.lease import Reservation
from serving.core.worker import Phase, Role, WorkerState
from serving.fleet.fleet import Fleet
from serving.fleet.registry import LoadReport
from serving.fleet.survival import SurvivalRows
from tests.serving import decision_parts as parts


def fleet(num=2, **changes):
    made = Fleet(**changes)
    for i in range(num):
        made.add(parts.worker(f"d{i}"), 0.0)
    return made


def reserve(made, request_id, worker_id="d0", *, phase=Phase.DECODE, keep=None, **changes):
    given = {
        "reserved_at_s": 0.0,
        "expires_at_s": 100.0,
        "kv_blocks": 10,
        "decode_tokens": 20.0,
        "keep": keep,
    }
    return made.reserve(
        Reservation(
            lease_id=f"{request_id}/{phase.value}",
            request_id=request_id,
            phase=phase,
            worker_id=worker_id,
            **(given | changes),
        )
    )


def report(running, kv=0, waiting=0):
    return LoadReport(num_running=running, num_waiting=waiting, kv_blocks_used=kv)


def row(made, now_s=0.0, worker_id="d0"):
    seen = made.view(Phase.DECODE, now_s)
    at = seen.index_of(worker_id)
    return int(seen.num_inflight[at]), int(seen.kv_blocks_free[at])


def test_own_reservations_are_not_counted_twice_when_reported():
    made = fleet()
    reserve(made, "a")
    reserve(made, "b")
    assert row(made) == (2, 980)
    made.update("d0", report(running=2, kv=15), 1.0)
    assert row(made) == (2, 980)


def test_what_others_run_stays_when_ours_end():
    made = fleet()
    reserve(made, "a")
    made.update("d0", report(running=3, kv=70, waiting=1), 1.0)
    assert row(made) == (4, 930)
    made.release("a", Phase.DECODE)
    assert row(made) == (3, 940)
    made.update("d0", report(running=0), 2.0)
    assert row(made) == (0, 1000)


def test_unreported_dispatches_count_once_per_replica():
    made = fleet(num_replicas=3)
    reserve(made, "a")
    assert row(made) == (3, 970)
    made.update("d0", report(running=1, kv=10), 1.0)
    assert row(made) == (1, 990)
    reserve(made, "b")
    made.release("a", Phase.DECODE)
    assert row(made) == (3, 970)
    made.release("b", Phase.DECODE)
    assert row(made) == (0, 1000)


def test_a_view_tells_what_reports_do_not_hold_yet():
    made = fleet(num_replicas=3)
    reserve(made, "a")
    reserve(made, "b", "d1")
    made.update("d0", report(running=1, kv=10), 1.0)
    seen = made.view(Phase.DECODE, 1.0)
    assert (seen.num_replicas, seen.num_unreported.tolist()) == (3, [0.0, 1.0])
    assert seen.take(np.array([1])).num_unreported.tolist() == [1.0]
    assert seen.take(np.array([1])).num_replicas == 3
    alone = fleet().view(Phase.DECODE, 1.0)
    assert (alone.num_replicas, alone.num_unreported) == (1, None)


def test_free_blocks_never_go_below_zero():
    made = fleet()
    made.update("d0", report(running=1, kv=5000), 1.0)
    assert row(made) == (1, 0)


def test_silence_makes_a_worker_stale():
    made = fleet(stale_after_s=5.0)
    made.update("d1", report(running=0), 4.0)
    seen = made.view(Phase.DECODE, 6.0)
    assert seen.accepts.tolist() == [False, True]
    assert seen.age_s.tolist() == [6.0, 2.0]
    made.set_state("d1", WorkerState.DRAINING)
    assert not made.view(Phase.DECODE, 6.0).accepts.any()


def test_a_view_is_frozen_while_the_fleet_goes_on():
    made = fleet(survival=SurvivalRows(parts.SIZE))
    reserve(made, "a")
    seen = made.view(Phase.DECODE, 0.0)
    before = seen.num_inflight.copy(), seen.remaining_decode_tokens
    reserve(made, "b")
    made.release("a", Phase.DECODE)
    made.update("d0", report(running=9), 1.0)
    np.testing.assert_array_equal(seen.num_inflight, before[0])
    np.testing.assert_array_equal(seen.remaining_decode_tokens, before[1])
    assert made.view(Phase.DECODE, 1.0).workers is seen.workers


@pytest.mark.parametrize("how", ["lost", "removed", "restarted", "changed role"])
def test_a_worker_that_goes_gives_everything_back(how):
    made = fleet(survival=SurvivalRows(parts.SIZE))
    keep = np.full(parts.SIZE, 0.5, np.float32)
    reserve(made, "a", keep=keep)
    reserve(made, "b", "d1", keep=keep)
    dropped = {
        "lost": lambda: made.set_state("d0", WorkerState.LOST),
        "removed": lambda: made.remove("d0"),
        "restarted": lambda: made.add(parts.worker("d0", epoch=1), 1.0),
        "changed role": lambda: made.add(parts.worker("d0", Role.PREFILL), 1.0),
    }[how]()
    assert [lease.request_id for lease in dropped] == ["a"]
    assert made.lease_of("a", Phase.DECODE) is None
    assert not made.release("a", Phase.DECODE)
    seen = made.view(Phase.DECODE, 1.0)
    at = seen.index_of("d1")
    assert seen.num_inflight.sum() == seen.num_inflight[at] == 1
    np.testing.assert_allclose(seen.experts.survival[at], 0.5)
    assert (np.delete(seen.experts.survival, at, axis=0) == 1.0).all()


def test_survival_rows_follow_the_decode_view():
    made = fleet(3, survival=SurvivalRows(parts.SIZE))
    keep = np.full(parts.SIZE, 0.5, np.float32)
    reserve(made, "a", "d2", keep=keep)
    made.remove("d0")
    made.add(parts.worker("p", Role.PREFILL), 1.0)
    seen = made.view(Phase.DECODE, 1.0)
    assert [w.worker_id for w in seen.workers] == ["d1", "d2"]
    np.testing.assert_allclose(seen.experts.survival[1], 0.5)
    assert seen.experts.num_modelled.tolist() == [0.0, 1.0]
    assert made.view(Phase.PREFILL, 1.0).experts is None


def test_expiry_returns_everything():
    made = fleet(survival=SurvivalRows(parts.SIZE))
    reserve(made, "a", keep=np.full(parts.SIZE, 0.5, np.float32))
    made.renew("a/decode", 150.0)
    assert made.expire(120.0) == []
    assert [lease.request_id for lease in made.expire(150.0)] == ["a"]
    assert row(made, 150.0) == (0, 1000)
    assert (made.view(Phase.DECODE, 150.0).experts.survival == 1.0).all()


def test_finding_workers():
    made = fleet()
    assert made.find("d1").worker_id == "d1"
    assert made.find("nobody") is None
    assert made.workers is made.workers
    with pytest.raises(KeyError):
        reserve(made, "a", "nobody")


@pytest.mark.parametrize("bad", [{"stale_after_s": 0.0}, {"num_replicas": 0}])
def test_rules(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Fleet(**bad)


def test_a_slice_is_lost_and_drains_as_one_and_wakes_one_by_one():
    rig = parts.Rig(num_prefill=0, num_decode=0)
    for name, slice_id in (("a", "s0"), ("b", "s0"), ("c", "s1"), ("alone", "")):
        rig.fleet.add(parts.worker(name, slice_id=slice_id), rig.clock.now_s)
    rig.fleet.add(parts.worker("p", Role.PREFILL, slice_id="s0"), rig.clock.now_s)

    def accepting():
        view = rig.fleet.view(Phase.DECODE, rig.clock.now_s)
        return {w.worker_id for w, ok in zip(view.workers, view.accepts, strict=True) if ok}

    assert accepting() == {"a", "b", "c", "alone"}
    asked = parts.request(arrival_s=rig.clock.now_s)
    others = frozenset({"a", "c", "alone"})
    rig.router.place_decode(asked, signature=None, prefill_worker_id=None, exclude=others)
    released = rig.fleet.set_state("p", WorkerState.LOST)
    assert [lease.worker_id for lease in released] == ["b"]
    assert accepting() == {"c", "alone"}
    rig.fleet.set_state("p", WorkerState.READY)
    rig.fleet.set_state("a", WorkerState.DRAINING)
    assert accepting() == {"c", "alone"}
    with pytest.raises(Rejected, match="2 live decode workers"):
        rig.router.place_decode(
            parts.request("r2", arrival_s=rig.clock.now_s),
            signature=None,
            prefill_worker_id=None,
            exclude=frozenset({"c", "alone"}),
        )
    # Parking and waking one of a slice's workers is no maintenance of the slice.
    rig.fleet.set_state("a", WorkerState.PARKED)
    assert accepting() == {"b", "c", "alone"}
    rig.fleet.set_state("a", WorkerState.STARTING)
    assert accepting() == {"b", "c", "alone"}
