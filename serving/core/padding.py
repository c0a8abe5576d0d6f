"""Compiled buckets in the decision: what a prompt runs as, and what it adds to a worker's steps.

Where an engine pads STEPS, the waste depends on who else is in the step: a prompt that tips the
waiting tokens into the next bucket pays for that bucket, one that fits the padding already there
adds next to nothing. Where it pads each PROMPT, the queue does not matter. The same rule over a
pool's `BucketSet` is serving/cost/padding.py; a test holds the two together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

_MAX_TABLED_TOKENS = 1 << 15
_UNBUCKETED_STEP_TOKENS = 2048
"""Tokens of a step where nothing is compiled, for the passes a queue takes."""


class BucketTable:
    """What n tokens run as under one set of compiled buckets.

    Attributes:
        buckets: ascending; () for no padding.
        step_tokens: most tokens of a step.
    """

    def __init__(self, buckets: tuple[int, ...]) -> None:
        self.buckets = buckets
        self.step_tokens = buckets[-1] if buckets else _UNBUCKETED_STEP_TOKENS
        self._sizes = np.array(buckets, np.int64)
        # A look-up per worker instead of a division and a search.
        self._padded, self._chunks = self._compute(np.arange(_MAX_TABLED_TOKENS))

    def padded(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with padding, and chunks: int64 [n] each for int64 [n] >= 0 tokens."""
        try:
            return self._padded.take(tokens), self._chunks.take(tokens)
        except IndexError:
            return self._compute(tokens)

    def padded_one(self, tokens: int) -> tuple[int, int]:
        """The same of one number."""
        if tokens < _MAX_TABLED_TOKENS:
            return self._padded.item(tokens), self._chunks.item(tokens)
        padded, chunks = self._compute(np.array([tokens]))
        return int(padded[0]), int(chunks[0])

    def _compute(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.buckets:
            return tokens.copy(), (tokens > 0).astype(np.int64)
        largest = self.buckets[-1]
        full = tokens // largest
        rest = tokens - full * largest
        tail = np.where(rest > 0, self._sizes[self._sizes.searchsorted(rest)], 0)
        return full * largest + tail, full + (rest > 0)


BucketGroup = tuple[np.ndarray, BucketTable, bool]
"""(rows int64 [G], their buckets, whether a step is padded as a whole)."""


class PrefillCharge(NamedTuple):
    """What a prompt adds, and what runs before it; arrays [W].

    Attributes:
        computed_tokens: tokens the worker computes more because of the prompt, padding
            included; fewer than its own where it fills padding of others.
        num_chunks: forward passes it adds.
        before_tokens: tokens computed before its own, padding included.
        before_chunks: forward passes of these.
    """

    computed_tokens: np.ndarray
    num_chunks: np.ndarray
    before_tokens: np.ndarray
    before_chunks: np.ndarray


def charge(
    group: BucketGroup, tokens: np.ndarray, queued: np.ndarray, started: np.ndarray | None
) -> PrefillCharge:
    """Charges a prompt against workers of one set of buckets; see `WorkerCosts.charge`."""
    _, table, is_step = group
    if not is_step or not table.buckets or not np.count_nonzero(queued):
        computed, chunks = table.padded(tokens)
        return PrefillCharge(computed, chunks, queued, queued / table.step_tokens)
    waiting = queued.astype(np.int64)
    before_tokens = before_chunks = 0
    if started is not None:
        running = np.minimum(started.astype(np.int64), table.step_tokens)
        waiting -= running
        np.maximum(waiting, 0, out=waiting)
        before_tokens, before_chunks = table.padded(running)
    had_tokens, had_chunks = table.padded(waiting)
    waiting += tokens
    then_tokens, then_chunks = table.padded(waiting)
    return PrefillCharge(
        then_tokens - had_tokens,
        then_chunks - had_chunks,
        had_tokens + before_tokens,
        had_chunks + before_chunks,
    )


@functools.lru_cache(maxsize=256)
def bucket_table(buckets: tuple[int, ...]) -> BucketTable:
    """The table of a set of buckets, made once."""
    return BucketTable(buckets)
