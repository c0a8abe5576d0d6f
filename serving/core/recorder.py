"""Records of what a router decided: made after the answer, kept for Explain, sent to the sink."""

from __future__ import annotations

from collections import deque

from serving.core.decision import LogLine
from serving.core.placed import Placed, PlacementObserver
from serving.core.placing import passed_over
from serving.core.ports import DecisionSink
from serving.core.recording import decision_line
from serving.core.ring import LineRing
from serving.core.router_config import RouterConfig


class Recorder:
    """Turns placed stages into lines, at the latest when too many wait.

    Args:
        config: shares recorded, and how much is kept.
        sink: takes the lines; None keeps them in the ring only.
        observers: told of each placement once it is recorded.
    """

    def __init__(
        self,
        config: RouterConfig,
        sink: DecisionSink | None,
        observers: tuple[PlacementObserver, ...],
    ) -> None:
        self._config = config
        self._sink = sink
        self._observers = observers
        self._waiting: deque[Placed] = deque()
        self._ring = LineRing(config.explain_requests)

    def everyone(self, sequence: int) -> bool:
        """Whether a decision is recorded with every candidate."""
        return _on_sample(sequence, self._config.record_everyone)

    def add(self, placed: Placed) -> None:
        """A stage whose record may wait; the oldest is made now when too many do."""
        self._waiting.append(placed)
        if len(self._waiting) > self._config.max_unrecorded:
            self.record(self._waiting.popleft())

    def record(self, placed: Placed) -> None:
        """Makes a stage's record; doing it again is harmless."""
        evidence = placed.evidence
        if evidence is None:
            return
        placed.passed_over, placed.passed_over_tokens = passed_over(evidence)
        if _on_sample(placed.sequence, self._config.record_share):
            self.write(decision_line(placed, evidence, self._config.router_id))
        placed.evidence = None
        for observer in self._observers:
            observer.placed(placed, evidence.context.view.taken_at_s)

    def write(self, line: LogLine) -> None:
        """Keeps a line and hands it to the sink."""
        self._ring.add(line)
        if self._sink is not None:
            self._sink.write(line)

    def lines(self, request_id: str) -> list[LogLine]:
        """Lines of a recent request, oldest first; [] when unknown."""
        self._record_waiting()
        return self._ring.lines(request_id)

    def request_ids(self) -> list[str]:
        """Requests whose lines are kept, longest untouched first."""
        self._record_waiting()
        return self._ring.request_ids()

    def _record_waiting(self) -> None:
        while self._waiting:
            self.record(self._waiting.popleft())


def _on_sample(sequence: int, share: float) -> bool:
    """Whether a decision is among a share of all: a hash of its number, so replays agree."""
    mixed = (sequence * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    return mixed < share * 2.0**64
