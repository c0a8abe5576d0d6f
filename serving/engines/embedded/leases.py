"""Finished prefills that wait for a decode worker to fetch their KV.

A lease pins the blocks of one prompt. It ends exactly once: pulled, released or expired, and
whoever comes later learns which. Its id is a nonce and a digest of the prompt, so a decode
worker can tell parameters of another request before it asks for anything.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from serving.core.errors import KvLost, LeaseError

_REMEMBERED_ENDS = 1024


class KvUnavailable(LeaseError):
    """The KV that a decode request points to cannot be had: prefill again.

    Its reason tells a router that the prompt's KV is lost and this worker is not.
    """

    reason = KvLost.reason


def prompt_digest(token_ids: np.ndarray, salt: str) -> str:
    """16 hex characters that name a prompt (integer [P]) and its cache salt."""
    digest = hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=8)
    digest.update(salt.encode())
    return digest.hexdigest()


def new_lease_id(token_ids: np.ndarray, salt: str) -> str:
    """An id nobody can guess, bound to the prompt."""
    return f"{secrets.token_hex(12)}.{prompt_digest(token_ids, salt)}"


def check_binding(lease_id: str, token_ids: np.ndarray, salt: str) -> None:
    """Refuses a lease that was given for another prompt.

    Raises:
        KvUnavailable: the digest in the id is not this prompt's.
    """
    if lease_id.rpartition(".")[2] != prompt_digest(token_ids, salt):
        raise KvUnavailable(lease_id, "was given for another request's prompt")


@dataclass(slots=True, kw_only=True)
class Lease:
    """KV of one prompt under a lease.

    Attributes:
        lease_id: see `new_lease_id`.
        remote_request_id: name under which decode asks for it.
        block_ids: the prompt's blocks in order, each held once by this lease.
        num_tokens: prompt tokens in them.
        expires_at_s: monotonic seconds.
        pulling: a pull is under way; expiry waits for its end.
    """

    lease_id: str
    remote_request_id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    expires_at_s: float
    pulling: bool = False


class LeaseTable:
    """Open leases; methods that end one return the blocks to give back."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Lease] = OrderedDict()
        self._ended: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, lease: Lease) -> None:
        """Opens a lease."""
        if lease.lease_id in self._open:
            raise ValueError(f"lease {lease.lease_id!r} is open already")
        self._open[lease.lease_id] = lease

    def find(self, lease_id: str, remote_request_id: str, now_s: float) -> Lease:
        """The open lease with that id.

        Raises:
            LeaseError: unknown, ended, expired, or another request's.
        """
        lease = self._open.get(lease_id)
        if lease is None:
            raise LeaseError(lease_id, self._ended.get(lease_id, "is unknown"))
        if lease.remote_request_id != remote_request_id:
            raise LeaseError(lease_id, f"does not belong to request {remote_request_id!r}")
        if now_s >= lease.expires_at_s and not lease.pulling:
            raise LeaseError(lease_id, "has expired")
        return lease

    def begin_pull(self, lease_id: str, remote_request_id: str, now_s: float) -> Lease:
        """Starts the one pull of a lease.

        Raises:
            LeaseError: as `find`, or it is being pulled already.
        """
        lease = self.find(lease_id, remote_request_id, now_s)
        if lease.pulling:
            raise LeaseError(lease_id, "is being pulled already")
        lease.pulling = True
        return lease

    def end_pull(self, lease: Lease, *, completed: bool) -> tuple[int, ...]:
        """Ends a pull; a broken-off one leaves the lease open until it expires.

        Returns:
            Blocks to give back, none when the lease stays open (or was voided meanwhile).
        """
        lease.pulling = False
        if not completed or self._open.get(lease.lease_id) is not lease:
            return ()
        return self._end(lease, "was pulled already")

    def release(self, lease_id: str, remote_request_id: str, now_s: float) -> tuple[int, ...]:
        """Ends a lease unpulled.

        Raises:
            LeaseError: as `find`, or it is being pulled.
        """
        lease = self.find(lease_id, remote_request_id, now_s)
        if lease.pulling:
            raise LeaseError(lease_id, "is being pulled")
        return self._end(lease, "was released")

    def withdraw(self, lease: Lease) -> tuple[int, ...]:
        """Ends a lease nobody was told of; nothing when it has ended."""
        is_open = self._open.get(lease.lease_id) is lease
        return self._end(lease, "was withdrawn") if is_open else ()

    def expire(self, now_s: float) -> list[int]:
        """Ends every lease whose time is over; returns all their blocks."""
        over = [x for x in self._open.values() if now_s >= x.expires_at_s and not x.pulling]
        return [block for lease in over for block in self._end(lease, "has expired")]

    def void(self, why: str) -> list[int]:
        """Ends every lease, pulls under way included; returns all their blocks."""
        return [b for lease in list(self._open.values()) for b in self._end(lease, why)]

    def next_expiry_s(self) -> float | None:
        """When the first open lease expires, monotonic seconds; None without one."""
        waiting = (lease.expires_at_s for lease in self._open.values() if not lease.pulling)
        return min(waiting, default=None)

    def _end(self, lease: Lease, why: str) -> tuple[int, ...]:
        del self._open[lease.lease_id]
        self._ended[lease.lease_id] = why
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        return lease.block_ids
