"""Who is in the fleet and what each worker last said about itself.

Big state is arrays with one row ("slot") per worker; a worker keeps its slot while it stays.
`phase_index` is rebuilt only when somebody joins, leaves or changes state, so the tuple of
workers in a view is the same object in between.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from serving.core.worker import Phase, WorkerInfo, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a worker says about its load (GetLoads, metrics scrape).

    Attributes:
        num_running: requests in its steps.
        num_waiting: requests queued inside it.
        kv_blocks_used: KV blocks that running requests or unpulled hand-overs hold; cached
            blocks nobody refers to are free.
        speed_factor: measured step time over the model's; None when not measured.
    """

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    speed_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_running", "num_waiting", "kv_blocks_used"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 0")
        if self.speed_factor is not None and not 0.0 < self.speed_factor < float("inf"):
            raise ValueError(f"speed_factor={self.speed_factor!r} must be finite and > 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseIndex:
    """The workers of one phase between two joins.

    Attributes:
        workers: W workers in registration order.
        slots: int64 [W], their rows.
        ready: bool [W], READY, and nobody of its slice is lost or draining.
        whole: bool [W], the slice part of that; None where nothing is in a slice.
        row_of_slot: int64 [capacity], view row of a slot, -1 for slots of other phases.
    """

    workers: tuple[WorkerInfo, ...]
    slots: np.ndarray
    ready: np.ndarray
    whole: np.ndarray | None
    row_of_slot: np.ndarray


class FleetRegistry:
    """Workers and their telemetry.

    Attributes:
        version: grows with every join, leave and change of state.
        reported: float64 [7, capacity], one column per slot, rows named below; counts are
            whole numbers, REPORTED_AT is monotonic seconds.
    """

    RUNNING, WAITING, OTHERS, OTHERS_KV, KV_TOTAL, REPORTED_AT, SPEED = range(7)

    def __init__(self, capacity: int = 64) -> None:
        self.version = 0
        self.reported = np.zeros((7, capacity), np.float64)
        self._workers: dict[str, WorkerInfo] = {}
        self._slot_of: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._index: dict[Phase, PhaseIndex] = {}
        self._all: tuple[WorkerInfo, ...] | None = None

    def __len__(self) -> int:
        """Workers known, whatever their state."""
        return len(self._workers)

    def __contains__(self, worker_id: str) -> bool:
        """Whether a worker is registered."""
        return worker_id in self._workers

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return self.reported.shape[1]

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers in registration order; the same object until the fleet changes."""
        if self._all is None:
            self._all = tuple(self._workers.values())
        return self._all

    def get(self, worker_id: str) -> WorkerInfo:
        """A worker.

        Raises:
            KeyError: not registered.
        """
        return self._workers[worker_id]

    def slot(self, worker_id: str) -> int:
        """A worker's row.

        Raises:
            KeyError: not registered.
        """
        return self._slot_of[worker_id]

    def add(self, worker: WorkerInfo, now_s: float) -> None:
        """A worker joins, or an existing one changes; joining counts as telemetry."""
        known = self._workers.get(worker.worker_id)
        if known == worker:
            return
        if known is None:
            if not self._free:
                self._grow()
            self._slot_of[worker.worker_id] = self._free.pop()
        slot = self._slot_of[worker.worker_id]
        if known is None or known.epoch != worker.epoch:
            self.reported[:, slot] = 0
            self.reported[self.REPORTED_AT, slot] = now_s
            self.reported[self.SPEED, slot] = 1.0
        self.reported[self.KV_TOTAL, slot] = worker.capabilities.num_kv_blocks
        self._workers[worker.worker_id] = worker
        self._changed()

    def remove(self, worker_id: str) -> int:
        """A worker leaves.

        Returns:
            The slot it had.

        Raises:
            KeyError: not registered.
        """
        del self._workers[worker_id]
        slot = self._slot_of.pop(worker_id)
        self._free.append(slot)
        self._changed()
        return slot

    def set_state(self, worker_id: str, state: WorkerState) -> None:
        """Changes a worker's state.

        Raises:
            KeyError: not registered.
        """
        worker = self._workers[worker_id]
        if worker.state is not state:
            self._workers[worker_id] = dataclasses.replace(worker, state=state)
            self._changed()

    def update(
        self, worker_id: str, report: LoadReport, now_s: float, *, own: int = 0, own_kv: int = 0
    ) -> None:
        """Takes a worker's report.

        Args:
            worker_id: who reports.
            report: what it says.
            now_s: monotonic seconds.
            own: this router's open reservations on it, which the report contains.
            own_kv: KV blocks of those reservations.

        Raises:
            KeyError: not registered.
        """
        slot = self._slot_of[worker_id]
        reported = self.reported
        reported[self.RUNNING, slot] = report.num_running
        reported[self.WAITING, slot] = report.num_waiting
        reported[self.OTHERS, slot] = max(0, report.num_running + report.num_waiting - own)
        reported[self.OTHERS_KV, slot] = max(0, report.kv_blocks_used - own_kv)
        reported[self.REPORTED_AT, slot] = now_s
        if report.speed_factor is not None:
            reported[self.SPEED, slot] = report.speed_factor

    def phase_index(self, phase: Phase) -> PhaseIndex:
        """The workers of a phase; the same object until the fleet changes."""
        index = self._index.get(phase)
        if index is None:
            workers = tuple(w for w in self._workers.values() if w.role.serves(phase))
            slots = np.array([self._slot_of[w.worker_id] for w in workers], np.int64)
            row_of_slot = np.full(self.capacity, -1, np.int64)
            row_of_slot[slots] = np.arange(len(workers))
            ready = np.array([w.state is WorkerState.READY for w in workers], bool)
            whole = self._whole(workers)
            index = PhaseIndex(
                workers=workers,
                slots=slots,
                ready=ready if whole is None else ready & whole,
                whole=whole,
                row_of_slot=row_of_slot,
            )
            self._index[phase] = index
        return index

    def unit_of(self, worker_id: str) -> tuple[str, ...]:
        """Workers that fail and drain with one, itself included.

        Raises:
            KeyError: not registered.
        """
        mine = self._workers[worker_id].slice_id
        if not mine:
            return (worker_id,)
        return tuple(w.worker_id for w in self._workers.values() if w.slice_id == mine)

    def _whole(self, workers: tuple[WorkerInfo, ...]) -> np.ndarray | None:
        """Whose slice has no worker down, whatever its phase."""
        if not any(worker.slice_id for worker in workers):
            return None
        gone = (WorkerState.LOST, WorkerState.DRAINING)
        down = {w.slice_id for w in self._workers.values() if w.slice_id and w.state in gone}
        return np.array([worker.slice_id not in down for worker in workers], bool)

    def _changed(self) -> None:
        self.version += 1
        self._index.clear()
        self._all = None

    def _grow(self) -> None:
        had = self.capacity
        self.reported = np.pad(self.reported, ((0, 0), (0, had)))
        self._free = list(range(2 * had - 1, had - 1, -1))
