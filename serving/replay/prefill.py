"""Prefill workers: chunked prefill in token buckets, a prefix cache with eviction.

A step packs uncached tokens of the queue's first requests up to the chunk size and runs as the
smallest bucket that holds them (no buckets: as they are). Steps that one long prompt fills alone
depend on nobody else, so they run as one stretch; a slow-down takes hold at the next one. The
cache keeps full blocks, least recently used first out; blocks of prompts in the queue are not
pinned.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from serving.replay.service import PrefillTimes


class PrefixCache:
    """Block hashes a worker holds, least recently used first out.

    Attributes:
        capacity: blocks; 0 caches nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def match(self, hashes: list[int]) -> int:
        """Leading blocks held; they become the most recently used."""
        num = 0
        for block in hashes:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            num += 1
        return num

    def insert(self, hashes: list[int]) -> None:
        """Keeps a prompt's blocks, evicting what nobody asked for longest."""
        if self.capacity == 0:
            return
        # Last block first, so that a prefix outlives what hangs on it.
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything (a restart)."""
        self._blocks.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    request: int
    num_tokens: int
    hashes: list[int]
    done_tokens: int = -1  # cached or computed; -1 before the cache was asked


class PrefillWorker:
    """One prefill worker.

    Args:
        times: what a step takes.
        chunk_tokens: tokens a step may pack.
        buckets_tokens: compiled sizes, ascending; () for none.
        block_tokens: tokens per cached block.
        cache_blocks: capacity of the prefix cache.

    Attributes:
        cache: see `PrefixCache`.
        factor: slowness, 1 is as modelled.
        num_cached_tokens, num_prompt_tokens: over all prompts begun.
        num_padded_tokens: computed, padding included.
    """

    def __init__(
        self,
        times: PrefillTimes,
        *,
        chunk_tokens: int,
        buckets_tokens: tuple[int, ...] = (),
        block_tokens: int = 16,
        cache_blocks: int = 0,
    ) -> None:
        self.cache = PrefixCache(cache_blocks)
        self.factor = 1.0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_padded_tokens = 0
        self._times = times
        self._chunk_tokens = chunk_tokens
        self._buckets = np.array(buckets_tokens, np.int64)
        self._block_tokens = block_tokens
        self._queue: deque[_Job] = deque()
        self._ending: list[_Job] = []
        self._running = False

    @property
    def num_queued(self) -> int:
        """Prompts not done."""
        return len(self._queue) + len(self._ending)

    def enqueue(self, request: int, num_tokens: int, hashes: np.ndarray) -> None:
        """A prompt arrives; call `start` when no step is under way."""
        self._queue.append(_Job(request=request, num_tokens=num_tokens, hashes=hashes.tolist()))

    @property
    def idle(self) -> bool:
        """No step is under way."""
        return not self._running

    def start(self) -> float | None:
        """Begins a step, or a stretch of steps that the first prompt fills alone.

        Returns:
            Their seconds, None when nothing is queued.
        """
        seconds = self._step()
        if seconds is None:
            self._running = False
            return None
        while not self._ending and self._fills_a_step(self._queue[0]):
            seconds += self._step() or 0.0
        self._running = True
        return seconds * self.factor

    def _fills_a_step(self, job: _Job) -> bool:
        return job.num_tokens - job.done_tokens >= self._chunk_tokens

    def _step(self) -> float | None:
        """Packs a step; its seconds as modelled, None when nothing is queued."""
        left, attended = self._chunk_tokens, 0.0
        self._ending = []
        while self._queue and left > 0:
            job = self._queue[0]
            if job.done_tokens < 0:
                self._look_up(job)
            take = min(left, job.num_tokens - job.done_tokens)
            attended += take * (job.done_tokens + 0.5 * take)
            job.done_tokens += take
            left -= take
            if job.done_tokens < job.num_tokens:
                break
            self._ending.append(self._queue.popleft())
        num_tokens = self._chunk_tokens - left
        if num_tokens == 0:
            return None
        padded = num_tokens
        if self._buckets.size:
            place = min(int(self._buckets.searchsorted(num_tokens)), self._buckets.size - 1)
            padded = max(num_tokens, int(self._buckets[place]))
        self.num_padded_tokens += padded
        return self._times.step_s(padded, attended)

    def finish(self) -> list[int]:
        """Ends the step under way.

        Returns:
            Requests whose prompt is done.
        """
        done, self._ending = self._ending, []
        self._running = False
        for job in done:
            self.cache.insert(job.hashes)
        return [job.request for job in done]

    def lose(self) -> list[int]:
        """The worker is gone: its queue and its cache are empty.

        Returns:
            Requests it held.
        """
        held = [job.request for job in (*self._ending, *self._queue)]
        self._queue.clear()
        self._ending = []
        self._running = False
        self.cache.clear()
        return held

    def _look_up(self, job: _Job) -> None:
        cached = self.cache.match(job.hashes) * self._block_tokens
        # The last token is always computed: its logits are the first output token.
        job.done_tokens = min(cached, job.num_tokens - 1)
        self.num_cached_tokens += job.done_tokens
        self.num_prompt_tokens += job.num_tokens
