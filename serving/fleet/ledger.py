"""Reservations as leases: what this router has placed and not yet seen end.

Every sum is kept as it changes, in one row ("slot") per worker, so a snapshot is a few array
copies. Nothing here trusts the caller to come back: a lease that is not released or renewed
is returned by `expire`. Releasing twice, or something unknown, is harmless, so counts never
go below zero.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.core.errors import LeaseError
from serving.core.lease import Lease, Reservation
from serving.core.native import Kernel
from serving.core.worker import Phase

_MEMBER_FIELDS = 4  # start, rate, expected tokens, lambda


@dataclass(slots=True, eq=False)
class _Entry:
    """A reservation and where it sits."""

    reservation: Reservation
    slot: int
    expires_at_s: float
    report_count: int
    member: int
    kv_blocks: int
    kv_tokens: float
    counted: bool = True


class Ledger:
    """Open reservations of one router replica.

    Attributes:
        sums: float64 [11, capacity], one column per slot, rows named below; counts are whole
            numbers, which float64 holds exactly. STARTED_TOKENS are those queued when the
            worker last began a step, as far as reservations tell: the first prompt of an idle
            worker runs at once, the others wait until something ends.
    """

    INFLIGHT, KV_BLOCKS, UNACKED, UNACKED_KV, DECODING = range(5)
    REPORTS, QUEUED_TOKENS, KV_TOKENS, TPOT_LIMIT = range(5, 9)
    STARTED_TOKENS, DECODING_USD = range(9, 11)

    def __init__(self, capacity: int = 64) -> None:
        self.sums = np.zeros((11, capacity), np.float64)
        self.sums[self.TPOT_LIMIT] = np.inf
        # Scalar access through a memoryview costs a third of NumPy's.
        self._cells: Any = self.sums.data
        self._entries: dict[tuple[str, Phase], _Entry] = {}
        self._by_lease: dict[str, tuple[str, Phase]] = {}
        self._by_slot: dict[int, dict[tuple[str, Phase], _Entry]] = {}
        self._expiry: list[tuple[float, str]] = []
        self._member_slot = np.zeros(capacity, np.int64)
        self._members = np.zeros((_MEMBER_FIELDS, capacity), np.float64)
        self._member_keys: list[tuple[str, Phase]] = []

    def __len__(self) -> int:
        """Open reservations."""
        return len(self._entries)

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` slots."""
        more = capacity - self.sums.shape[1]
        if more > 0:
            self.sums = np.pad(self.sums, ((0, 0), (0, more)))
            self.sums[self.TPOT_LIMIT, -more:] = np.inf
            self._cells = self.sums.data

    def find(self, request_id: str, phase: Phase) -> Reservation | None:
        """The open reservation of a request's phase."""
        entry = self._entries.get((request_id, phase))
        return None if entry is None else entry.reservation

    def lease_of(self, request_id: str, phase: Phase) -> Lease | None:
        """The open lease of a request's phase, with its current expiry."""
        entry = self._entries.get((request_id, phase))
        return None if entry is None else _lease(entry)

    def reserve(self, reservation: Reservation, slot: int) -> tuple[Lease, bool]:
        """Counts a reservation on a worker's slot.

        A decode reservation on the worker that holds the same request's prefill takes over
        its KV and its place in the count: one request is one request.

        Args:
            reservation: what to count.
            slot: the worker's row.

        Returns:
            The open lease, and whether it is new (False: the request already held it).

        Raises:
            LeaseError: the request holds this phase on another worker.
        """
        key = (reservation.request_id, reservation.phase)
        known = self._entries.get(key)
        if known is not None:
            if known.reservation.worker_id != reservation.worker_id:
                raise LeaseError(
                    known.reservation.lease_id,
                    f"request {reservation.request_id!r} already holds {reservation.phase.value} "
                    f"on {known.reservation.worker_id!r}, not {reservation.worker_id!r}",
                )
            return _lease(known), False
        if reservation.phase is Phase.DECODE:
            self._hand_over(reservation.request_id, slot)
        sums = self._cells
        entry = _Entry(
            reservation,
            slot,
            reservation.expires_at_s,
            int(sums[self.REPORTS, slot]),
            -1,
            max(0, reservation.kv_blocks),
            max(0.0, reservation.kv_tokens),
        )
        sums[self.INFLIGHT, slot] += 1
        sums[self.KV_BLOCKS, slot] += entry.kv_blocks
        sums[self.UNACKED, slot] += 1
        sums[self.UNACKED_KV, slot] += entry.kv_blocks
        sums[self.KV_TOKENS, slot] += entry.kv_tokens
        if reservation.phase is Phase.DECODE:
            sums[self.DECODING, slot] += 1
            sums[self.DECODING_USD, slot] += reservation.lambda_usd_per_s
            if reservation.tpot_limit_s < sums[self.TPOT_LIMIT, slot]:
                sums[self.TPOT_LIMIT, slot] = reservation.tpot_limit_s
            entry.member = self._add_member(key, reservation, slot)
        else:
            if sums[self.QUEUED_TOKENS, slot] == 0.0:
                sums[self.STARTED_TOKENS, slot] = reservation.prefill_tokens
            sums[self.QUEUED_TOKENS, slot] += reservation.prefill_tokens
        self._entries[key] = entry
        self._by_lease[reservation.lease_id] = key
        self._by_slot.setdefault(slot, {})[key] = entry
        heapq.heappush(self._expiry, (reservation.expires_at_s, reservation.lease_id))
        return reservation.lease(), True

    def release(self, request_id: str, phase: Phase) -> Reservation | None:
        """Gives a reservation back.

        Returns:
            What was released, None when nothing was open.
        """
        key = (request_id, phase)
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        reservation, slot = entry.reservation, entry.slot
        del self._by_lease[reservation.lease_id]
        mates = self._by_slot[slot]
        del mates[key]
        self._uncount(entry)
        sums = self._cells
        if phase is Phase.DECODE:
            sums[self.DECODING, slot] -= 1
            sums[self.DECODING_USD, slot] -= reservation.lambda_usd_per_s
            self._remove_member(entry.member)
            sums[self.TPOT_LIMIT, slot] = min(
                (e.reservation.tpot_limit_s for e in mates.values() if e.member >= 0),
                default=np.inf,
            )
        else:
            sums[self.QUEUED_TOKENS, slot] -= reservation.prefill_tokens
            sums[self.STARTED_TOKENS, slot] = sums[self.QUEUED_TOKENS, slot]
        if not mates:
            # An empty worker is exactly empty, whatever floating point left behind.
            sums[self.QUEUED_TOKENS, slot] = sums[self.KV_TOKENS, slot] = 0.0
            sums[self.DECODING_USD, slot] = sums[self.STARTED_TOKENS, slot] = 0.0
            del self._by_slot[slot]
        return reservation

    def renew(self, lease_id: str, expires_at_s: float) -> Lease:
        """Moves a lease's expiry (never to an earlier time).

        Raises:
            LeaseError: no such open lease.
        """
        key = self._by_lease.get(lease_id)
        if key is None:
            raise LeaseError(lease_id, "unknown, released or expired")
        entry = self._entries[key]
        if expires_at_s > entry.expires_at_s:
            entry.expires_at_s = expires_at_s
            heapq.heappush(self._expiry, (expires_at_s, lease_id))
        return _lease(entry)

    def expired(self, now_s: float) -> list[Lease]:
        """Leases whose time is up at `now_s`, oldest first; still counted until released."""
        due: dict[str, Lease] = {}
        while self._expiry and self._expiry[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._expiry)
            key = self._by_lease.get(lease_id)
            if key is not None and self._entries[key].expires_at_s <= now_s:
                due[lease_id] = _lease(self._entries[key])
        return list(due.values())

    def open_on(self, slot: int) -> list[Reservation]:
        """Reservations on a worker's slot, oldest first."""
        return [entry.reservation for entry in self._by_slot.get(slot, {}).values()]

    def started(self, request_id: str, now_s: float) -> None:
        """The request's first decode token came: its output starts to shrink from now."""
        entry = self._entries.get((request_id, Phase.DECODE))
        if entry is not None:
            self._members[0, entry.member] = now_s

    def acknowledge(self, slot: int) -> None:
        """The worker reported: what is reserved now is taken to be in its report."""
        self.sums[self.REPORTS, slot] += 1
        self.sums[self.UNACKED, slot] = 0
        self.sums[self.UNACKED_KV, slot] = 0

    def member_rows(
        self, now_s: float, row_of_slot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The open decode reservations.

        Args:
            now_s: monotonic seconds.
            row_of_slot: int64 [capacity], a view's row of each slot.

        Returns:
            int64 [N] rows, float64 [N] remaining tokens (at least 1: a request that
            outlives its estimate is about to end, never gone), float64 [N] $/s.
        """
        return MEMBERS.run(
            self._member_slot, self._members, len(self._member_keys), now_s, row_of_slot
        )

    def _hand_over(self, request_id: str, slot: int) -> None:
        prefill = self._entries.get((request_id, Phase.PREFILL))
        if prefill is not None and prefill.slot == slot:
            self._uncount(prefill)

    def _uncount(self, entry: _Entry) -> None:
        """Takes a request's place and KV out of its slot's sums, once."""
        if not entry.counted:
            return
        entry.counted = False
        sums, slot = self._cells, entry.slot
        sums[self.INFLIGHT, slot] -= 1
        sums[self.KV_BLOCKS, slot] -= entry.kv_blocks
        if entry.report_count == sums[self.REPORTS, slot]:
            sums[self.UNACKED, slot] -= 1
            sums[self.UNACKED_KV, slot] -= entry.kv_blocks
        sums[self.KV_TOKENS, slot] -= entry.kv_tokens

    def _add_member(self, key: tuple[str, Phase], reservation: Reservation, slot: int) -> int:
        member = len(self._member_keys)
        if member == len(self._member_slot):
            self._member_slot = np.pad(self._member_slot, (0, member))
            self._members = np.pad(self._members, ((0, 0), (0, member)))
        self._member_keys.append(key)
        self._member_slot[member] = slot
        cells: Any = self._members.data
        cells[0, member] = reservation.reserved_at_s
        cells[1, member] = reservation.tokens_per_s
        cells[2, member] = reservation.decode_tokens
        cells[3, member] = reservation.lambda_usd_per_s
        return member

    def _remove_member(self, member: int) -> None:
        last = len(self._member_keys) - 1
        key = self._member_keys.pop()
        if member != last:
            self._member_keys[member] = key
            self._member_slot[member] = self._member_slot[last]
            self._members[:, member] = self._members[:, last]
            self._entries[key].member = member


def _members_numpy(
    slots: np.ndarray, members: np.ndarray, num: int, now_s: float, row_of_slot: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`Ledger.member_rows` over its arrays, of which the first `num` columns are in use."""
    start, rate, expected, price = members[:, :num]
    elapsed = now_s - start
    elapsed *= rate
    remaining = expected - elapsed
    np.maximum(remaining, 1.0, out=remaining)
    return row_of_slot.take(slots[:num]), remaining, price.copy()


def _members_loop(slots, members, num, now_s, row_of_slot):
    """`_members_numpy`, one request after another."""
    rows, remaining, price = np.empty(num, np.int64), np.empty(num), np.empty(num)
    for member in range(num):
        rows[member] = row_of_slot[slots[member]]
        done = (now_s - members[0, member]) * members[1, member]
        remaining[member] = max(members[2, member] - done, 1.0)
        price[member] = members[3, member]
    return rows, remaining, price


MEMBERS = Kernel(
    _members_numpy,
    _members_loop,
    "Tuple((i8[::1],f8[::1],f8[::1]))(i8[::1],f8[:,::1],i8,f8,i8[::1])",
)


def _lease(entry: _Entry) -> Lease:
    reservation = entry.reservation
    return Lease(
        lease_id=reservation.lease_id,
        request_id=reservation.request_id,
        phase=reservation.phase,
        worker_id=reservation.worker_id,
        expires_at_s=entry.expires_at_s,
    )
