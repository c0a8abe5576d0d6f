from __future__ import annotations

import pytest

from serving.core.clock import ManualClock
from serving.engines.embedded import step_log
from serving.engines.embedded.step_log import BusyClock, StepLog, StepRecord


def record(sequence: int, duration_s: float = 0.5, num_output_tokens: int = 2) -> StepRecord:
    return StepRecord(
        sequence=sequence,
        kind="decode",
        started_s=0.0,
        duration_s=duration_s,
        num_tokens=2,
        bucket_tokens=16,
        num_output_tokens=num_output_tokens,
        distinct_experts=3.0,
        request_ids=("a", "b"),
    )


def test_the_busy_clock_is_the_sum_of_its_steps():
    clock = ManualClock(100.0)
    busy = BusyClock(clock)
    clock.advance(7.0)
    assert busy.now_s() == 0.0
    assert busy.begin() == 0.0
    clock.advance(0.25)
    assert busy.now_s() == 0.25
    clock.advance(0.25)
    assert busy.end() == 0.5
    clock.advance(9.0)
    assert busy.begin() == 0.5
    assert busy.now_s() == 0.5


def test_old_steps_go_and_their_numbers_tell(monkeypatch):
    monkeypatch.setattr(step_log, "_KEPT_STEPS", 5)
    log = StepLog()
    for sequence in range(8):
        log.add(record(sequence))
    assert [step.sequence for step in log.since(0, 100)] == [3, 4, 5, 6, 7]
    assert [step.sequence for step in log.since(0, 2)] == [3, 4]
    assert [step.sequence for step in log.since(6, 100)] == [6, 7]
    assert log.since(8, 100) == []
    assert log.since(1 << 40, 100) == []
    with pytest.raises(ValueError, match="must be 8"):
        log.add(record(3))


def test_the_rate_is_over_recent_busy_seconds():
    log = StepLog()
    assert log.output_tokens_per_s() == 0.0
    log.add(record(0, duration_s=100.0, num_output_tokens=0))
    for sequence in range(1, 70):
        log.add(record(sequence))
    assert log.output_tokens_per_s() == pytest.approx(4.0)
