"""Parking over a fleet of values: who is parked, who is woken, who stays."""

import pytest

from serving.core.worker import Phase, Role, WorkerState
from serving.fleet.parking import ParkingLimits, ParkingRule
from tests.serving import decision_parts as parts


def apply(rig, rule):
    """One decision, carried out."""
    changes = rule.decide(rig.fleet, rig.clock.now_s)
    for worker_id, state in changes:
        rig.fleet.set_state(worker_id, state)
    return changes


def states(rig, state):
    return {w.worker_id for w in rig.fleet.workers if w.state is state}


def rule(**changes):
    return ParkingRule(ParkingLimits(**({"idle_after_s": 10.0} | changes)))


def test_idle_workers_are_parked_and_one_of_each_pool_stays():
    rig, parking = parts.Rig(num_prefill=2, num_decode=3), rule()
    assert apply(rig, parking) == []
    rig.clock.advance(9.0)
    assert apply(rig, parking) == []
    rig.clock.advance(1.0)
    apply(rig, parking)
    assert states(rig, WorkerState.PARKED) == {"p1", "d1", "d2"}
    assert apply(rig, parking) == []


def test_a_busy_worker_is_not_parked_and_a_parked_one_takes_no_work():
    rig, parking = parts.Rig(num_decode=3), rule(idle_after_s=5.0)
    asked = parts.request(arrival_s=rig.clock.now_s)
    placed = rig.router.place_decode(asked, signature=None, prefill_worker_id=None)
    busy = placed.worker.worker_id
    apply(rig, parking)
    rig.clock.advance(6.0)
    apply(rig, parking)
    # The busy one is the one that stays.
    assert states(rig, WorkerState.PARKED) == {"d0", "d1", "d2", "p1"} - {busy}
    other = parts.request("other", arrival_s=rig.clock.now_s)
    again = rig.router.place_decode(other, signature=None, prefill_worker_id=None)
    assert again.worker.worker_id == busy
    rig.router.done("r", 20, 0.1, 0.01)
    rig.router.done("other", 20, 0.1, 0.01)
    assert rig.reserved() == 0.0


def test_full_slots_wake_one_at_a_time():
    rig, parking = parts.Rig(num_decode=3), rule(wake_above=0.5)
    apply(rig, parking)
    rig.clock.advance(10.0)
    apply(rig, parking)
    assert len(states(rig, WorkerState.PARKED) & {"d0", "d1", "d2"}) == 2
    for number in range(5):  # of eight slots
        asked = parts.request(str(number), arrival_s=rig.clock.now_s)
        rig.router.place_decode(asked, signature=None, prefill_worker_id=None)
    woken = [change for change in apply(rig, parking) if change[1] is WorkerState.READY]
    assert len(woken) == 1
    assert apply(rig, parking) == []


def test_waiting_prompts_wake_a_prefill_worker():
    rig, parking = parts.Rig(num_prefill=2), rule(wake_tokens=150.0)
    apply(rig, parking)
    rig.clock.advance(10.0)
    apply(rig, parking)
    assert states(rig, WorkerState.PARKED) >= {"p1"}
    for number in range(2):
        rig.router.place_prefill(parts.request(str(number), arrival_s=rig.clock.now_s))
    assert ("p1", WorkerState.READY) in apply(rig, parking)


def test_broken_targets_wake_a_worker():
    parking = rule()
    rig = parts.Rig(num_decode=2, observers=(parking,))
    apply(rig, parking)
    rig.clock.advance(10.0)
    apply(rig, parking)
    late = parts.request(arrival_s=rig.clock.now_s)
    placed = rig.router.place_decode(late, signature=None, prefill_worker_id=None)
    placed.fallback = "every_worker_breaks_target"
    rig.router.record(placed)
    assert [state for _, state in apply(rig, parking)] == [WorkerState.READY]


def test_an_aggregated_worker_is_judged_by_its_decode_work():
    rig, parking = parts.Rig(num_prefill=1, num_decode=1), rule(min_awake=1)
    rig.fleet.add(parts.worker("both", Role.BOTH, pool="q"), rig.clock.now_s)
    apply(rig, parking)
    rig.clock.advance(10.0)
    assert apply(rig, parking) == []
    assert rig.fleet.view(Phase.PREFILL, rig.clock.now_s).workers[-1].worker_id == "both"


@pytest.mark.parametrize(
    ("field", "value"),
    [("idle_after_s", 0.0), ("min_awake", 0), ("wake_above", 1.5), ("wake_tokens", 0.0)],
)
def test_limits_name_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        rule(**{field: value})
