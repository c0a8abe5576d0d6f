"""Parking: workers nobody uses stop costing, and come back when room runs short.

Placement packs by itself: waking an idle worker costs its whole step, so B and C fill a busy one
up to their TPOT and its KV before they touch an idle one. What stays idle for long is parked, as
long as those left are not filled beyond a limit; a parked worker takes no work and may be
switched off. As many are woken as bring the pool below that limit again, and one more when the
router had to break a class's target, or the allowances of packing, on all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from serving.core.placed import Placed
from serving.core.worker import FleetView, Phase, Role, WorkerState
from serving.fleet.fleet import Fleet

_BROKEN = ("every_worker_breaks_target", "over_packing_limit")
_USE_WEIGHT = 0.05
Change = tuple[str, WorkerState]
"""(worker id, the state it should have)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkingLimits:
    """When to park and to wake.

    Attributes:
        idle_after_s: a worker without work for that long is parked.
        min_awake: workers of a pool and phase that stay.
        wake_above: decode workers are woken when slots or KV of the awake ones are this full.
        wake_tokens: prefill workers are woken when more prompt tokens than this wait per awake
            one.
        prefill_use_above: prefill workers are kept and woken so that the awake ones are in use
            for at most this share of the time (smoothed over some twenty decisions); 0 looks at
            their queues only.
    """

    idle_after_s: float
    min_awake: int = 1
    wake_above: float = 0.8
    wake_tokens: float = 8192.0
    prefill_use_above: float = 0.7

    def __post_init__(self) -> None:
        if not self.idle_after_s > 0:
            raise ValueError(f"{self.idle_after_s=} must be > 0")
        if self.min_awake < 1:
            raise ValueError(f"{self.min_awake=} must be >= 1")
        if not 0.0 < self.wake_above <= 1.0:
            raise ValueError(f"{self.wake_above=} must lie in (0, 1]")
        if not 0.0 <= self.prefill_use_above <= 1.0:
            raise ValueError(f"{self.prefill_use_above=} must lie in [0, 1]")
        if not self.wake_tokens > 0:
            raise ValueError(f"{self.wake_tokens=} must be > 0")


class ParkingRule:
    """Decides whom to park and whom to wake; also a `PlacementObserver`."""

    def __init__(self, limits: ParkingLimits) -> None:
        self.limits = limits
        self._busy_at_s: dict[str, float] = {}
        self._use: dict[str, float] = {}
        self._pressed: set[tuple[str, Phase]] = set()

    def placed(self, placed: Placed, now_s: float) -> None:
        """Notes placements that no worker of a pool could take within the class's targets."""
        if placed.fallback in _BROKEN:
            self._pressed.add((placed.pool, placed.phase))

    def decide(self, fleet: Fleet, now_s: float) -> list[Change]:
        """What should change now.

        Args:
            fleet: the workers; nothing is changed here.
            now_s: monotonic seconds.
        """
        changes: list[Change] = []
        for phase in Phase:
            view = fleet.view(phase, now_s)
            pools: dict[str, list[int]] = {}
            for row, worker in enumerate(view.workers):
                if phase is Phase.DECODE or worker.role is not Role.BOTH:
                    pools.setdefault(worker.pool, []).append(row)
            for pool, rows in pools.items():
                changes += self._pool(view, phase, pool, rows, now_s)
        self._pressed.clear()
        return changes

    def _pool(
        self, view: FleetView, phase: Phase, pool: str, rows: list[int], now_s: float
    ) -> list[Change]:
        limits, workers = self.limits, view.workers
        awake = [r for r in rows if workers[r].state is WorkerState.READY]
        coming = [r for r in rows if workers[r].state is WorkerState.STARTING]
        parked = [r for r in rows if workers[r].state is WorkerState.PARKED]
        for row in rows:
            worker_id = workers[row].worker_id
            # A worker seen for the first time counts as just used, so that none is parked
            # before it had a chance.
            if view.num_inflight[row] > 0 or row not in awake:
                self._busy_at_s[worker_id] = now_s
            else:
                self._busy_at_s.setdefault(worker_id, now_s)
        there = len(awake) + len(coming)
        needed = self._needed(view, phase, awake)
        if (pool, phase) in self._pressed and not coming:
            needed = max(needed, there + 1)
        needed = max(needed, limits.min_awake)
        if needed > there:
            woken = parked[: needed - there]
            return [(workers[row].worker_id, WorkerState.READY) for row in woken]
        idle = [
            row
            for row in reversed(awake)
            if now_s - self._busy_at_s[workers[row].worker_id] >= limits.idle_after_s
        ]
        return [(workers[row].worker_id, WorkerState.PARKED) for row in idle[: there - needed]]

    def _needed(self, view: FleetView, phase: Phase, awake: list[int]) -> int:
        """Workers that hold what there is without being filled beyond the limit."""
        if not awake:
            return 1
        rows, limits = np.array(awake, np.int64), self.limits
        if phase is Phase.PREFILL:
            waiting = view.queued_prefill_tokens.take(rows)
            needed = math.ceil(float(waiting.sum()) / limits.wake_tokens)
            if limits.prefill_use_above > 0.0:
                used = sum(self._used(view, row) for row in awake)
                needed = max(needed, math.ceil(used / limits.prefill_use_above))
            return needed
        limit = [view.workers[row].capabilities for row in awake]
        slots = view.num_inflight.take(rows) / np.array([c.max_num_seqs for c in limit])
        kv = 1.0 - view.kv_blocks_free.take(rows) / np.array([c.num_kv_blocks for c in limit])
        return math.ceil(float(np.maximum(slots, kv).sum()) / limits.wake_above)

    def _used(self, view: FleetView, row: int) -> float:
        """Share of recent decisions at which a worker had work."""
        worker_id = view.workers[row].worker_id
        now = float(view.num_inflight[row] > 0)
        used = self._use.get(worker_id, now)
        self._use[worker_id] = used + _USE_WEIGHT * (now - used)
        return self._use[worker_id]
