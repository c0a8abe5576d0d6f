"""What a worker says about its KV cache, engine-neutral: the input of the prefix index.

Adapters of real engines translate their wire into these. Hashes are the router's own
(core/block_hash.py); adapter names and cache salts are inside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlocksStored:
    """Consecutive blocks of one prompt are now in the cache.

    Attributes:
        hashes: uint64 [n], n >= 1, first block first.
        parent: hash of the block before hashes[0]; None when they start a prompt.
        medium: where they lie, in the engine's words ("GPU", "CPU" ...); "" is the device.
    """

    hashes: np.ndarray
    parent: int | None = None
    medium: str = ""

    def __post_init__(self) -> None:
        _check_hashes(self.hashes)
        if len(np.unique(self.hashes)) != len(self.hashes):
            raise ValueError(f"hashes of {len(self.hashes)} consecutive blocks must be distinct")
        if self.parent is not None:
            if not 0 <= self.parent < 1 << 64:
                raise ValueError(f"parent={self.parent} must be an unsigned 64-bit integer")
            if (self.hashes == np.uint64(self.parent)).any():
                raise ValueError(f"parent={self.parent} must not be among its own descendants")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlocksRemoved:
    """Blocks left the cache.

    Attributes:
        hashes: uint64 [n], n >= 1, any order.
        medium: from where; None from everywhere.
    """

    hashes: np.ndarray
    medium: str | None = ""

    def __post_init__(self) -> None:
        _check_hashes(self.hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared:
    """The cache is empty, on every medium."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventBatch:
    """One message of a publisher (one data-parallel rank of a worker).

    Attributes:
        worker_id, dp_rank: the publisher.
        seq: number of the message, from 0 in every process.
        events: in the order they happened.
        sent_at_s: publisher's unix seconds; tells a restart (newer, low seq) from a
            duplicate where `epoch` is not known. 0 when the wire carries none.
        epoch: process of the publisher where the wire or the registry tells, else None.
    """

    worker_id: str
    seq: int
    events: tuple[KvEvent, ...]
    dp_rank: int = 0
    sent_at_s: float = 0.0
    epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("seq", "dp_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 0")

    @property
    def clears(self) -> bool:
        """Whether what came before this batch no longer matters."""
        return any(isinstance(event, CacheCleared) for event in self.events)


def _check_hashes(hashes: np.ndarray) -> None:
    if hashes.dtype != np.uint64 or hashes.ndim != 1 or not len(hashes):
        raise ValueError(f"hashes are {hashes.dtype} {hashes.shape}, must be uint64 [n], n >= 1")
