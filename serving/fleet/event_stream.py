"""One publisher's messages in order: duplicates dropped, gaps noticed, restarts recognised.

What is promised, relative to the publisher's own history (its cache after message s):

    EXACT      next_seq - 1 = s: every message up to s was applied, from an empty cache on.
    UNCERTAIN  a message is missing; later ones wait. Nothing may be credited.
    PARTIAL    messages were lost for good; what was known before is forgotten, what is
               credited was stored after the loss and not removed up to s. Sound, incomplete.
    SILENT     nothing was ever received; only the router's own predictions stand.

A loss shows when a later message arrives, not before. A restart is certain by a newer epoch;
without epochs by a low seq with a newer time. One case cannot be told without epochs: the new
process lost exactly the messages that hide its restart (its first seen seq equals next_seq).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from serving.fleet.kv_events import EventBatch


class StreamState(enum.Enum):
    """How far a publisher's view can be trusted; see the module's text."""

    SILENT = "silent"
    EXACT = "exact"
    PARTIAL = "partial"
    UNCERTAIN = "uncertain"


class Delivery(NamedTuple):
    """What to do with the view now: forget it first if `reset`, then apply `batches`."""

    reset: bool = False
    batches: tuple[EventBatch, ...] = ()


NOTHING = Delivery()


@dataclass(slots=True, kw_only=True)
class StreamCounters:
    """Totals of one publisher since it was first seen."""

    batches: int = 0
    duplicates: int = 0
    stale_epoch: int = 0
    gaps: int = 0
    given_up: int = 0
    restarts: int = 0


class EventStream:
    """Sequence bookkeeping of one publisher.

    Attributes:
        next_seq: the message expected next.
        epoch: process of the publisher, None until told.
        missing_since_s: monotonic seconds when the open gap was noticed, None without one.
        counters: totals.
    """

    def __init__(self, *, epoch: int | None, max_waiting: int) -> None:
        self.next_seq = 0
        self.epoch = epoch
        self.missing_since_s: float | None = None
        self.counters = StreamCounters()
        self._max_waiting = max_waiting
        self._waiting: dict[int, EventBatch] = {}
        self._heard = False
        self._lossy = False
        self._newest_s = 0.0

    @property
    def state(self) -> StreamState:
        """See `StreamState`."""
        if self._waiting:
            return StreamState.UNCERTAIN
        if not self._heard:
            return StreamState.SILENT
        return StreamState.PARTIAL if self._lossy else StreamState.EXACT

    @property
    def missing(self) -> tuple[int, int] | None:
        """First and last missing seq of the first open gap: what to ask a replay for."""
        if not self._waiting:
            return None
        return self.next_seq, min(self._waiting) - 1

    def offer(self, batch: EventBatch, now_s: float) -> Delivery:
        """Takes a message in any order at monotonic `now_s`."""
        if (
            batch.seq == self.next_seq
            and not self._waiting
            and (batch.epoch is None or batch.epoch == self.epoch)
        ):
            return self._next(batch)
        restarted = self._is_restart(batch)
        if restarted is None:
            return NOTHING
        if restarted:
            self.restart(self.epoch if batch.epoch is None else batch.epoch)
        elif batch.epoch is not None:
            self.epoch = batch.epoch
        self._heard = True
        self._newest_s = max(self._newest_s, batch.sent_at_s)
        if batch.seq in self._waiting:
            self.counters.duplicates += 1
            return NOTHING
        reset = restarted
        if batch.seq > self.next_seq and batch.clears:
            # Nothing before it matters any more, known or not.
            reset = True
            self.next_seq = batch.seq
            self._waiting = {s: b for s, b in self._waiting.items() if s > batch.seq}
        if batch.seq > self.next_seq and not self._waiting:
            self.counters.gaps += 1
            self.missing_since_s = now_s
        self._waiting[batch.seq] = batch
        if len(self._waiting) > self._max_waiting:
            return self.give_up()
        return Delivery(reset=reset, batches=self._take_ready())

    def give_up(self) -> Delivery:
        """Stops waiting for what is missing; NOTHING when nothing is.

        All that was known is to be forgotten, and of the messages that wait only those after
        the last gap are applied: earlier ones may have been undone inside it.
        """
        if not self._waiting:
            return NOTHING
        self.counters.given_up += 1
        last = max(self._waiting)
        first = last
        while first - 1 in self._waiting:
            first -= 1
        self._waiting = {s: b for s, b in self._waiting.items() if s >= first}
        self._lossy = True
        self.next_seq = first
        return Delivery(reset=True, batches=self._take_ready())

    def restart(self, epoch: int | None) -> None:
        """A new process with an empty cache: expects seq 0 again. The view is to be reset."""
        self.counters.restarts += self._heard
        self.epoch = epoch
        self.next_seq = 0
        self.missing_since_s = None
        self._waiting = {}
        self._heard = self._lossy = False

    def resync(self, next_seq: int) -> Delivery:
        """The view was set from a full listing that holds every message before `next_seq`."""
        self._heard, self._lossy = True, False
        self.next_seq = next_seq
        self._waiting = {s: b for s, b in self._waiting.items() if s >= next_seq}
        return Delivery(batches=self._take_ready())

    def _next(self, batch: EventBatch) -> Delivery:
        """The usual case: nothing waits and this message is the next."""
        self._heard = True
        self._newest_s = max(self._newest_s, batch.sent_at_s)
        self.next_seq += 1
        self.counters.batches += 1
        if self._lossy and batch.clears:
            self._lossy = False
        return Delivery(batches=(batch,))

    def _is_restart(self, batch: EventBatch) -> bool | None:
        """Whether a batch begins a new process; None when it is to be dropped."""
        if batch.epoch is not None and self.epoch is not None and batch.epoch != self.epoch:
            if batch.epoch < self.epoch:
                self.counters.stale_epoch += 1
                return None
            return True
        if batch.seq < self.next_seq:
            same_process = batch.epoch is not None and batch.epoch == self.epoch
            if same_process or batch.sent_at_s <= self._newest_s:
                self.counters.duplicates += 1
                return None
            return True
        return False

    def _take_ready(self) -> tuple[EventBatch, ...]:
        ready = []
        while (batch := self._waiting.pop(self.next_seq, None)) is not None:
            ready.append(batch)
            self.next_seq += 1
            if batch.clears:
                self._lossy = False
        self.counters.batches += len(ready)
        if not self._waiting:
            self.missing_since_s = None
        return tuple(ready)
