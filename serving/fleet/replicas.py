"""Copies of hot prefixes: when affinity gives way to load, said aloud, and taken back.

A prefix is worth what it saves (`prefix_saving`); once its worker's queue costs more, the prompt
goes elsewhere and is computed again there, which makes a copy: the next prompts may go to either.
That bounds affinity. Every copy is noted when it is made, with whom it was copied from; one that
nobody used for a while is taken back, so that its prompts gather on the first holder again and
the copy's blocks are free to go. What an engine's own events confirm stays credited: the engine
holds it, whatever we expect of it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from serving.core.placed import Placed
from serving.core.worker import Phase
from serving.fleet.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """What counts as a copy and how long it lives.

    Attributes:
        min_tokens: shorter prefixes are not worth a note.
        undo_after_s: a copy nobody used for that long is taken back.
        max_copies: copies watched at once; beyond it the one unused longest is taken back.
        max_events: events kept.
    """

    min_tokens: int = 256
    undo_after_s: float = 60.0
    max_copies: int = 4096
    max_events: int = 1024

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_copies", "max_events"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")
        if not self.undo_after_s > 0:
            raise ValueError(f"{self.undo_after_s=} must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEvent:
    """A copy was made or taken back.

    Attributes:
        at_s: monotonic seconds.
        kind: which of the two.
        prefix: hash of its last block.
        num_tokens: its length.
        holder: worker it was copied from.
        worker_id: worker of the copy.
        request_id: the request that made it, "" when it was taken back.
    """

    at_s: float
    kind: Literal["made", "undone"]
    prefix: int
    num_tokens: int
    holder: str
    worker_id: str
    request_id: str = ""


@dataclass(slots=True, eq=False)
class _Copy:
    hashes: np.ndarray
    num_tokens: int
    holder: str
    used_at_s: float


class PrefixReplicas:
    """Watches placements for copies of prefixes (a `PlacementObserver`).

    Attributes:
        events: the latest, oldest first.
    """

    def __init__(self, index: PrefixIndex, limits: ReplicaLimits | None = None) -> None:
        self.limits = limits or ReplicaLimits()
        self.events: deque[ReplicaEvent] = deque(maxlen=self.limits.max_events)
        self._index = index
        self._copies: dict[tuple[int, str], _Copy] = {}

    def __len__(self) -> int:
        """Copies in use."""
        return len(self._copies)

    def placed(self, placed: Placed, now_s: float) -> None:
        """Notes what a prefill placement copies or uses."""
        if placed.phase is not Phase.PREFILL or not len(placed.block_hashes):
            return
        worker_id = placed.worker.worker_id
        if self._copies:
            for block in placed.block_hashes.tolist():
                copy = self._copies.pop((block, worker_id), None)
                if copy is not None:  # used: the youngest now
                    copy.used_at_s = now_s
                    self._copies[block, worker_id] = copy
        more = placed.passed_over_tokens - placed.cached_tokens
        if not placed.passed_over or more < self.limits.min_tokens:
            return
        block = placed.worker.capabilities.block_size_tokens
        hashes = placed.block_hashes[: placed.passed_over_tokens // block]
        if not len(hashes):
            return
        key = int(hashes[-1]), worker_id
        self._copies[key] = _Copy(hashes, placed.passed_over_tokens, placed.passed_over, now_s)
        self._note("made", key, now_s, request_id=placed.request_id)
        if len(self._copies) > self.limits.max_copies:
            self._undo(next(iter(self._copies)), now_s)

    def sweep(self, now_s: float) -> int:
        """Takes back copies nobody used.

        Returns:
            How many.
        """
        num = 0
        # In the order of their last use.
        while self._copies:
            key, copy = next(iter(self._copies.items()))
            if now_s - copy.used_at_s < self.limits.undo_after_s:
                break
            self._undo(key, now_s)
            num += 1
        return num

    def _undo(self, key: tuple[int, str], now_s: float) -> None:
        self._note("undone", key, now_s)
        copy = self._copies.pop(key)
        with contextlib.suppress(KeyError):  # the worker left in the meantime
            self._index.forget(key[1], copy.hashes)

    def _note(
        self,
        kind: Literal["made", "undone"],
        key: tuple[int, str],
        now_s: float,
        *,
        request_id: str = "",
    ) -> None:
        copy = self._copies[key]
        self.events.append(
            ReplicaEvent(
                at_s=now_s,
                kind=kind,
                prefix=key[0],
                num_tokens=copy.num_tokens,
                holder=copy.holder,
                worker_id=key[1],
                request_id=request_id,
            )
        )
