import dataclasses

import numpy as np
import pytest

from serving.core.worker import Phase, Role, WorkerState
from serving.fleet.registry import FleetRegistry, LoadReport
from tests.serving import decision_parts as parts

REPORT = LoadReport(num_running=3, num_waiting=1, kv_blocks_used=40, speed_factor=1.25)


def test_views_are_in_registration_order_whatever_slot_a_worker_has():
    registry = FleetRegistry(capacity=2)
    for name in "abc":
        registry.add(parts.worker(name), 0.0)
    registry.remove("a")
    registry.add(parts.worker("d", Role.BOTH), 0.0)
    registry.add(parts.worker("p", Role.PREFILL), 0.0)
    decode, prefill = (registry.phase_index(phase) for phase in (Phase.DECODE, Phase.PREFILL))
    assert [w.worker_id for w in decode.workers] == ["b", "c", "d"]
    assert [w.worker_id for w in prefill.workers] == ["d", "p"]
    for index in (decode, prefill):
        np.testing.assert_array_equal(index.row_of_slot[index.slots], np.arange(len(index.workers)))
    assert len(set(decode.slots.tolist()) | set(prefill.slots.tolist())) == 4


def test_the_index_is_the_same_object_until_somebody_changes():
    registry = FleetRegistry()
    registry.add(parts.worker("a"), 0.0)
    index, everybody, version = (
        registry.phase_index(Phase.DECODE),
        registry.workers,
        registry.version,
    )
    registry.add(parts.worker("a"), 5.0)
    registry.update("a", REPORT, 1.0)
    registry.set_state("a", WorkerState.READY)
    assert registry.phase_index(Phase.DECODE) is index
    assert registry.workers is everybody
    assert registry.version == version
    registry.set_state("a", WorkerState.DRAINING)
    changed = registry.phase_index(Phase.DECODE)
    assert changed is not index
    assert changed.ready.tolist() == [False]


def test_reports_are_told_apart_from_our_own_reservations():
    registry = FleetRegistry()
    registry.add(parts.worker("a"), 0.0)
    registry.update("a", REPORT, 2.0, own=1, own_kv=50)
    column = registry.reported[:, registry.slot("a")]
    assert column[FleetRegistry.OTHERS] == 3
    assert column[FleetRegistry.OTHERS_KV] == 0
    assert column[FleetRegistry.REPORTED_AT] == 2.0
    assert column[FleetRegistry.SPEED] == 1.25
    registry.update("a", dataclasses.replace(REPORT, speed_factor=None), 3.0)
    assert column[FleetRegistry.SPEED] == 1.25


def test_a_restarted_worker_starts_over_and_a_changed_one_does_not():
    registry = FleetRegistry()
    registry.add(parts.worker("a"), 0.0)
    registry.update("a", REPORT, 2.0)
    column = registry.reported[:, registry.slot("a")]
    registry.add(parts.worker("a", pool="q"), 4.0)
    assert column[FleetRegistry.RUNNING] == 3
    assert registry.get("a").pool == "q"
    registry.add(parts.worker("a", pool="q", epoch=1), 4.0)
    assert column[FleetRegistry.RUNNING] == 0
    assert column[FleetRegistry.REPORTED_AT] == 4.0
    assert column[FleetRegistry.SPEED] == 1.0


def test_unknown_workers_are_key_errors():
    registry = FleetRegistry()
    for call in (
        lambda: registry.get("x"),
        lambda: registry.slot("x"),
        lambda: registry.remove("x"),
        lambda: registry.set_state("x", WorkerState.READY),
        lambda: registry.update("x", REPORT, 0.0),
    ):
        with pytest.raises(KeyError):
            call()
    assert "x" not in registry
    assert len(registry) == 0


@pytest.mark.parametrize(
    "bad", [{"num_running": -1}, {"kv_blocks_used": -1}, {"speed_factor": float("nan")}]
)
def test_reports_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dataclasses.replace(REPORT, **bad)
