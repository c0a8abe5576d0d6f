"""A worker's own time: its busy clock and the log of its measured steps.

Workers of one process take turns on the cores, so the wall clock says little about one of them.
The busy clock runs only while the worker's own step does: it is the sum of its measured step
durations. Latencies on it are those of a worker that has the machine for itself.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from serving.core.clock import Clock

_KEPT_STEPS = 65_536
_RATE_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One measured step.

    Attributes:
        sequence: 0, 1, 2 ... since the worker started.
        kind: "decode" when every chunk was one token of a request past its prompt, else
            "prefill".
        started_s: busy clock at its start.
        duration_s: measured seconds.
        num_tokens: real tokens.
        bucket_tokens: rows it was compiled for.
        num_output_tokens: tokens it gave to requests.
        distinct_experts: mean over layers.
        request_ids: who was in it.
    """

    sequence: int
    kind: str
    started_s: float
    duration_s: float
    num_tokens: int
    bucket_tokens: int
    num_output_tokens: int
    distinct_experts: float
    request_ids: tuple[str, ...]


class BusyClock:
    """Seconds this worker has spent in its own steps; readable from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._total_s = 0.0
        self._began_s: float | None = None

    def now_s(self) -> float:
        """Busy seconds so far, the running step's included."""
        with self._guard:
            running = 0.0 if self._began_s is None else self._clock.monotonic_s() - self._began_s
            return self._total_s + running

    def begin(self) -> float:
        """Starts the clock; returns its reading."""
        with self._guard:
            self._began_s = self._clock.monotonic_s()
            return self._total_s

    def end(self) -> float:
        """Stops the clock; returns the seconds since `begin`."""
        with self._guard:
            assert self._began_s is not None, "end without begin"
            duration_s = self._clock.monotonic_s() - self._began_s
            self._total_s += duration_s
            self._began_s = None
            return duration_s


class StepLog:
    """The latest steps, numbered; not thread-safe (the engine's lock guards it)."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self._next = 0

    @property
    def next_sequence(self) -> int:
        """Number of the step to come."""
        return self._next

    def add(self, record: StepRecord) -> None:
        """Appends the step numbered `next_sequence`."""
        if record.sequence != self._next:
            raise ValueError(f"{record.sequence=} must be {self._next}")
        self._steps.append(record)
        self._next += 1

    def since(self, sequence: int, limit: int) -> list[StepRecord]:
        """At most `limit` steps from `sequence` on; old ones may be gone (see their numbers)."""
        first = self._next - len(self._steps)
        begin = max(sequence - first, 0)
        return [self._steps[i] for i in range(begin, min(begin + limit, len(self._steps)))]

    def output_tokens_per_s(self) -> float:
        """Output tokens per busy second over the latest steps; 0 before the first."""
        recent = self.since(self._next - _RATE_STEPS, _RATE_STEPS)
        seconds = sum(step.duration_s for step in recent)
        return sum(step.num_output_tokens for step in recent) / seconds if seconds > 0 else 0.0
