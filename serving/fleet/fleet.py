"""The fleet as the router asks about it: registry, ledger and survival vectors together.

Implements `serving.core.ports.FleetPort`. One event loop owns it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from serving.core.lease import Lease, Reservation
from serving.core.worker import FleetView, Members, Phase, WorkerInfo, WorkerState
from serving.fleet.ledger import Ledger
from serving.fleet.registry import FleetRegistry, LoadReport
from serving.fleet.snapshot import SNAPSHOT
from serving.fleet.survival import SurvivalRows


class Fleet:
    """Workers, their telemetry and this router's reservations.

    Attributes:
        registry: who there is and what they reported.
        ledger: what is reserved.
        survival: expected experts, None without an expert model.
        stale_after_s: a worker silent for longer takes no new work.
        num_replicas: R router replicas share the fleet; dispatches a worker has not reported
            yet are counted once per replica ("xR"), since the others do the same unseen.
    """

    def __init__(
        self,
        *,
        stale_after_s: float = 10.0,
        num_replicas: int = 1,
        survival: SurvivalRows | None = None,
    ) -> None:
        if not stale_after_s > 0:
            raise ValueError(f"{stale_after_s=} must be > 0")
        if num_replicas < 1:
            raise ValueError(f"{num_replicas=} must be >= 1")
        self.registry = FleetRegistry()
        self.ledger = Ledger()
        self.survival = survival
        self.stale_after_s = stale_after_s
        self.num_replicas = num_replicas
        self._arranged = -1

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """All workers in registration order; the same object until the fleet changes."""
        return self.registry.workers

    def add(self, worker: WorkerInfo, now_s: float) -> list[Lease]:
        """A worker joins or changes.

        Returns:
            Leases dropped because the worker restarted (its epoch changed) or changed role.
        """
        dropped: list[Lease] = []
        if worker.worker_id in self.registry:
            known = self.registry.get(worker.worker_id)
            if (known.epoch, known.role) != (worker.epoch, worker.role):
                dropped = self._drop(worker.worker_id)
        self.registry.add(worker, now_s)
        self.ledger.grow(self.registry.capacity)
        return dropped

    def remove(self, worker_id: str) -> list[Lease]:
        """A worker leaves.

        Returns:
            The leases it held, released.

        Raises:
            KeyError: not registered.
        """
        dropped = self._drop(worker_id)
        slot = self.registry.remove(worker_id)
        self.ledger.acknowledge(slot)
        return dropped

    def set_state(self, worker_id: str, state: WorkerState) -> list[Lease]:
        """Changes a worker's state; LOST releases what it held, and what its slice held.

        Returns:
            Leases released.

        Raises:
            KeyError: not registered.
        """
        dropped: list[Lease] = []
        if state is WorkerState.LOST:
            for mate in self.registry.unit_of(worker_id):
                dropped += self._drop(mate)
        self.registry.set_state(worker_id, state)
        return dropped

    def update(self, worker_id: str, report: LoadReport, now_s: float) -> None:
        """Takes a worker's report at monotonic `now_s`.

        Raises:
            KeyError: not registered.
        """
        slot = self.registry.slot(worker_id)
        sums = self.ledger.sums
        self.registry.update(
            worker_id,
            report,
            now_s,
            own=int(sums[Ledger.INFLIGHT, slot]),
            own_kv=int(sums[Ledger.KV_BLOCKS, slot]),
        )
        self.ledger.acknowledge(slot)

    def set_profiles(
        self,
        profiles: Mapping[str, np.ndarray] | None,
        layer_scale: Mapping[str, float] | None = None,
    ) -> None:
        """Gives decode workers their region's profile (see `SurvivalRows.set_profiles`)."""
        if self.survival is not None:
            self._arrange(self.survival)
            self.survival.set_profiles(profiles, layer_scale)

    def find(self, worker_id: str) -> WorkerInfo | None:
        """A worker by id; None when it is not in the fleet (any more)."""
        return self.registry.get(worker_id) if worker_id in self.registry else None

    def view(self, phase: Phase, now_s: float) -> FleetView:
        """Frozen snapshot of the workers that serve `phase` (a few array copies)."""
        index = self.registry.phase_index(phase)
        accepts, columns = SNAPSHOT.run(
            self.ledger.sums,
            self.registry.reported,
            index.slots,
            index.ready,
            now_s,
            self.stale_after_s,
            self.num_replicas - 1.0,
        )
        members = experts = unreported = None
        if self.num_replicas > 1:
            unreported = self.ledger.sums[Ledger.UNACKED].take(index.slots)
        if phase is Phase.DECODE:
            members = Members(*self.ledger.member_rows(now_s, index.row_of_slot), columns[-1])
            if self.survival is not None:
                self._arrange(self.survival)
                experts = self.survival.rows(columns[3] if self.num_replicas > 1 else None)
        # In the order of the view's fields, which the snapshot's columns are in too.
        age_s, *others = columns[:-1]
        return FleetView(
            index.workers,
            now_s,
            age_s,
            accepts,
            *others,
            slice_whole=index.whole,
            members=members,
            experts=experts,
            num_unreported=unreported,
            num_replicas=self.num_replicas,
        )

    def reserve(self, reservation: Reservation) -> Lease:
        """Counts a reservation; idempotent by request and phase.

        Raises:
            LeaseError: the request holds that phase on another worker.
            KeyError: no such worker.
        """
        slot = self.registry.slot(reservation.worker_id)
        lease, is_new = self.ledger.reserve(reservation, slot)
        keep = reservation.keep
        if is_new and keep is not None and self.survival is not None:
            self._arrange(self.survival)
            self.survival.add(reservation.worker_id, keep, reservation.layer_scale)
        return lease

    def release(self, request_id: str, phase: Phase) -> bool:
        """Gives a reservation back; False when there was none."""
        reservation = self.ledger.release(request_id, phase)
        if reservation is None:
            return False
        if reservation.keep is not None and self.survival is not None:
            self.survival.remove(reservation.worker_id, reservation.keep, reservation.layer_scale)
        return True

    def lease_of(self, request_id: str, phase: Phase) -> Lease | None:
        """The open lease of a request's phase."""
        return self.ledger.lease_of(request_id, phase)

    def started(self, request_id: str, now_s: float) -> None:
        """The first decode token of a request came."""
        self.ledger.started(request_id, now_s)

    def renew(self, lease_id: str, expires_at_s: float) -> Lease:
        """Moves a lease's expiry.

        Raises:
            LeaseError: unknown or expired.
        """
        return self.ledger.renew(lease_id, expires_at_s)

    def expire(self, now_s: float) -> list[Lease]:
        """Takes back every reservation whose time is up, oldest first."""
        due = self.ledger.expired(now_s)
        for lease in due:
            self.release(lease.request_id, lease.phase)
        return due

    def _drop(self, worker_id: str) -> list[Lease]:
        held = self.ledger.open_on(self.registry.slot(worker_id))
        for reservation in held:
            self.release(reservation.request_id, reservation.phase)
        return [reservation.lease() for reservation in held]

    def _arrange(self, survival: SurvivalRows) -> None:
        """Brings survival rows into the decode view's order after the fleet changed."""
        if self._arranged != self.registry.version:
            index = self.registry.phase_index(Phase.DECODE)
            survival.arrange(tuple(worker.worker_id for worker in index.workers))
            self._arranged = self.registry.version
