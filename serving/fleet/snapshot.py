"""The numbers of a fleet view, out of the ledger's and the registry's, in one pass.

`SNAPSHOT` is a hot loop (core/native.py): its NumPy definition comes first, the loop that is
compiled after it.
"""

from __future__ import annotations

import numpy as np

from serving.core.native import Kernel
from serving.fleet.ledger import Ledger
from serving.fleet.registry import FleetRegistry

_INFLIGHT, _KV_BLOCKS = Ledger.INFLIGHT, Ledger.KV_BLOCKS
_UNACKED, _UNACKED_KV = Ledger.UNACKED, Ledger.UNACKED_KV
_QUEUED, _KV_TOKENS, _TPOT_LIMIT = Ledger.QUEUED_TOKENS, Ledger.KV_TOKENS, Ledger.TPOT_LIMIT
_STARTED, _DECODING_USD, _DECODING = Ledger.STARTED_TOKENS, Ledger.DECODING_USD, Ledger.DECODING
_RUNNING, _WAITING, _OTHERS = FleetRegistry.RUNNING, FleetRegistry.WAITING, FleetRegistry.OTHERS
_OTHERS_KV, _KV_TOTAL = FleetRegistry.OTHERS_KV, FleetRegistry.KV_TOTAL
_REPORTED_AT, _SPEED = FleetRegistry.REPORTED_AT, FleetRegistry.SPEED


def _snapshot_numpy(
    sums: np.ndarray,
    reported: np.ndarray,
    slots: np.ndarray,
    ready: np.ndarray,
    now_s: float,
    stale_after_s: float,
    num_others: float,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """A view's columns, copied.

    Args:
        sums: float64 [11, capacity], the ledger's.
        reported: float64 [7, capacity], the registry's.
        slots: int64 [W], the view's workers.
        ready: bool [W].
        now_s: monotonic seconds.
        stale_after_s: a worker silent for longer accepts nothing.
        num_others: other routers that do what this one does, unseen.

    Returns:
        bool [W] who accepts, and twelve of float64 [W], in the order of `FleetView`: age,
        running, waiting, in flight, queued prefill tokens, KV tokens, KV blocks free, speed
        factor, strictest TPOT, started prefill tokens, $/s decoding, requests decoding.
    """
    sums, reported = sums.take(slots, axis=1), reported.take(slots, axis=1)
    age_s = now_s - reported[_REPORTED_AT]
    inflight = sums[_INFLIGHT] + reported[_OTHERS]
    kv_free = reported[_KV_TOTAL] - sums[_KV_BLOCKS]
    kv_free -= reported[_OTHERS_KV]
    if num_others > 0.0:
        inflight += num_others * sums[_UNACKED]
        kv_free -= num_others * sums[_UNACKED_KV]
    np.maximum(kv_free, 0.0, out=kv_free)
    accepts = age_s <= stale_after_s
    accepts &= ready
    return accepts, (
        age_s,
        reported[_RUNNING],
        reported[_WAITING],
        inflight,
        sums[_QUEUED],
        sums[_KV_TOKENS],
        kv_free,
        reported[_SPEED],
        sums[_TPOT_LIMIT],
        sums[_STARTED],
        sums[_DECODING_USD],
        sums[_DECODING],
    )


def _snapshot_loop(sums, reported, slots, ready, now_s, stale_after_s, num_others):
    """`_snapshot_numpy`, one worker after another; float64 [12, W] for the twelve."""
    num_rows = slots.shape[0]
    accepts, out = np.empty(num_rows, np.bool_), np.empty((12, num_rows))
    for row in range(num_rows):
        slot = slots[row]
        age_s = now_s - reported[_REPORTED_AT, slot]
        inflight = sums[_INFLIGHT, slot] + reported[_OTHERS, slot]
        kv_free = reported[_KV_TOTAL, slot] - sums[_KV_BLOCKS, slot] - reported[_OTHERS_KV, slot]
        if num_others > 0.0:
            inflight += num_others * sums[_UNACKED, slot]
            kv_free -= num_others * sums[_UNACKED_KV, slot]
        accepts[row] = age_s <= stale_after_s and ready[row]
        out[0, row], out[1, row] = age_s, reported[_RUNNING, slot]
        out[2, row], out[3, row] = reported[_WAITING, slot], inflight
        out[4, row], out[5, row] = sums[_QUEUED, slot], sums[_KV_TOKENS, slot]
        out[6, row], out[7, row] = max(kv_free, 0.0), reported[_SPEED, slot]
        out[8, row], out[9, row] = sums[_TPOT_LIMIT, slot], sums[_STARTED, slot]
        out[10, row], out[11, row] = sums[_DECODING_USD, slot], sums[_DECODING, slot]
    return accepts, out


SNAPSHOT = Kernel(
    _snapshot_numpy,
    _snapshot_loop,
    "Tuple((b1[::1],f8[:,::1]))(f8[:,::1],f8[:,::1],i8[::1],b1[::1],f8,f8,f8)",
)
