"""What the router needs from around it: a fleet, a prefix index, a sink for its records.

Implementations live elsewhere (serving/fleet, serving/decision_log.py); the router sees only
these, so that the server, the replay and the tests hand it different ones.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from serving.core.decision import LogLine
from serving.core.lease import Lease, Reservation
from serving.core.worker import FleetView, Phase, WorkerInfo


class FleetPort(Protocol):
    """Workers and reservations (serving/fleet/fleet.py)."""

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers in registration order; the same object until the fleet changes."""
        ...

    def find(self, worker_id: str) -> WorkerInfo | None:
        """A worker by id; None when it is not in the fleet (any more)."""
        ...

    def view(self, phase: Phase, now_s: float) -> FleetView:
        """Frozen snapshot of the workers that serve `phase`."""
        ...

    def reserve(self, reservation: Reservation) -> Lease:
        """Counts a reservation; a second one for the same request and phase is the first.

        Raises:
            LeaseError: the request holds that phase on another worker.
            KeyError: no such worker.
        """
        ...

    def release(self, request_id: str, phase: Phase) -> bool:
        """Gives a reservation back; False when there was none (twice is fine)."""
        ...

    def lease_of(self, request_id: str, phase: Phase) -> Lease | None:
        """The open lease of a request's phase."""
        ...

    def started(self, request_id: str, now_s: float) -> None:
        """The first decode token of a request came at monotonic `now_s`."""
        ...

    def renew(self, lease_id: str, expires_at_s: float) -> Lease:
        """Moves a lease's expiry.

        Raises:
            LeaseError: unknown or expired.
        """
        ...

    def expire(self, now_s: float) -> list[Lease]:
        """Takes back every reservation whose time is up, oldest first."""
        ...


class PrefixIndex(Protocol):
    """Which worker holds how much of a prompt (serving/fleet/prefix_index.py)."""

    def cached_blocks(
        self, block_hashes: np.ndarray, workers: tuple[WorkerInfo, ...]
    ) -> np.ndarray:
        """Leading blocks each worker holds.

        Args:
            block_hashes: uint64 [n], the router's own chained hashes (core/block_hash.py).
            workers: W workers of one view; the tuple object is the same between joins.

        Returns:
            int32 [W], in [0, n].
        """
        ...


class DecisionSink(Protocol):
    """Where decision and outcome lines go; must not block or raise."""

    def write(self, line: LogLine) -> None:
        """Takes one line."""
        ...
