"""Who gets blocks, who gets a place, and what the next step runs.

First come, first served, and never a deadlock: a request is admitted only with every block it
can ever need (prompt and max_tokens), so what runs always finishes without preemption, its
blocks come back, and the head of the queue is admitted in the end; nobody overtakes the head.
The price is that KV reserved for output that is never made lies idle.

A request whose KV comes from a prefill worker needs only blocks to be admitted: it fetches them
while others run and takes a place once they are here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from serving.engines.embedded.block_pool import BlockPool, NoFreeBlocks
from serving.engines.embedded.sequence import Sequence, State


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """Consecutive tokens of a running request to compute.

    Attributes:
        sequence: the request.
        start: position of the first token.
        token_ids: int32 [n].
        block_ids: int32, all blocks of the request.
        is_last: whether the token after these is to be drawn.
    """

    sequence: Sequence
    start: int
    token_ids: np.ndarray
    block_ids: np.ndarray
    is_last: bool


def _chunk(sequence: Sequence, num_tokens: int) -> PlannedChunk:
    start, end = sequence.num_computed, sequence.num_computed + num_tokens
    return PlannedChunk(
        sequence=sequence,
        start=start,
        token_ids=sequence.token_ids[start:end],
        block_ids=sequence.block_ids,
        is_last=end == sequence.num_tokens,
    )


def share_budget(pending: list[int], *, max_tokens: int) -> list[int]:
    """Divides a step's tokens among running requests.

    Decode tokens (pending 1) go first, so a long prompt never delays running answers; what is
    left goes to prompts in order, the last one getting a part.

    Args:
        pending: tokens each request could run now, >= 1, in order of admission.
        max_tokens: tokens of one step, >= len(pending).

    Returns:
        Tokens for each request, 0 for those that wait.
    """
    left = max_tokens - sum(count == 1 for count in pending)
    shares: list[int] = []
    for count in pending:
        share = 1 if count == 1 else min(count, left)
        shares.append(share)
        left -= share if count > 1 else 0
    return shares


class Scheduler:
    """Queues of one worker; the engine's lock guards it.

    Attributes:
        pool: its blocks.
        block_size: tokens per block.
        max_num_seqs: places.
        max_step_tokens: tokens of one step.
        running: requests with a place, in order of admission.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_step_tokens: int
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._fetching: dict[Sequence, None] = {}
        self._ready: deque[Sequence] = deque()

    @property
    def num_waiting(self) -> int:
        """Admitted or not, requests without a place."""
        return len(self._waiting) + len(self._fetching) + len(self._ready)

    @property
    def num_queued(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    def sequences(self) -> list[Sequence]:
        """Every request that is not finished."""
        return [*self.running, *self._ready, *self._fetching, *self._waiting]

    def num_uncached_waiting_tokens(self) -> int:
        """Prompt tokens that this worker still has to compute."""
        running = sum(s.num_pending for s in self.running if s.num_pending > 1)
        queued = (s for s in self._waiting if s.spec.pull is None)
        return running + sum(
            s.num_prompt_tokens - len(self._cached_prefix(s)) * self.block_size for s in queued
        )

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a request at the end of the queue."""
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Gives blocks and places to those whose turn it is.

        Returns:
            Requests that got blocks now; those that are PULLING must fetch their KV.
        """
        while self._ready and len(self.running) < self.max_num_seqs:
            self._run(self._ready.popleft())
        admitted: list[Sequence] = []
        while self._waiting:
            head = self._waiting[0]
            pulls = head.spec.pull is not None
            if not pulls and len(self.running) >= self.max_num_seqs:
                break
            try:
                self._reserve(head)
            except NoFreeBlocks:
                break
            admitted.append(self._waiting.popleft())
            if pulls:
                head.state = State.PULLING
                self._fetching[head] = None
            else:
                self._run(head)
        return admitted

    def landed(self, sequence: Sequence) -> None:
        """A pulled prompt's KV is in the pool: it may have a place."""
        del self._fetching[sequence]
        sequence.state = State.READY
        # The last prompt token is run again: its logits give the first output token.
        sequence.num_computed = sequence.num_prompt_tokens - 1
        sequence.num_counted = sequence.num_prompt_tokens
        self._ready.append(sequence)

    def plan(self) -> list[PlannedChunk]:
        """The next step; empty when nobody runs."""
        for sequence in self.running:
            self._match_again(sequence)
        shares = share_budget(
            [s.num_pending for s in self.running], max_tokens=self.max_step_tokens
        )
        return [
            _chunk(sequence, share)
            for sequence, share in zip(self.running, shares, strict=True)
            if share > 0
        ]

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks that a request has filled since findable."""
        cache = self.pool.cache
        num_full = sequence.num_computed // self.block_size
        if cache is None or num_full <= sequence.num_published:
            return
        if num_full > len(sequence.hashes):
            known = sequence.token_ids[: num_full * self.block_size]
            sequence.hashes = cache.hashes(known, sequence.spec.cache_salt)
        for index in range(sequence.num_published, num_full):
            self.pool.publish(int(sequence.block_ids[index]), sequence.hashes[index])
        sequence.num_published = num_full

    def remove(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Ends a request: it leaves every queue and gives its blocks back.

        Args:
            sequence: not part of a step under way.
            keep_blocks: a lease takes them over.
        """
        match sequence.state:
            case State.WAITING:
                self._waiting.remove(sequence)
            case State.PULLING | State.LANDING:
                del self._fetching[sequence]
            case State.READY:
                self._ready.remove(sequence)
            case State.RUNNING:
                self.running.remove(sequence)
            case State.FINISHED:
                return
        sequence.state = State.FINISHED
        if not keep_blocks:
            self.pool.release(sequence.block_ids.tolist())
        sequence.block_ids = np.empty(0, np.int32)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def _reserve(self, sequence: Sequence) -> None:
        shared = self._cached_prefix(sequence)
        total = -(-sequence.spec.num_kv_tokens // self.block_size)
        block_ids = self.pool.reserve(shared, total - len(shared))
        sequence.block_ids = np.asarray(block_ids, np.int32)
        self._begin_after(sequence, len(shared))

    def _match_again(self, sequence: Sequence) -> None:
        """Shares blocks that others have filled since admission, as long as it has not begun.

        Requests that arrive together with one prefix would otherwise all compute it.
        """
        if sequence.num_computed != sequence.num_cached_tokens:
            return
        shared = self._cached_prefix(sequence)
        held = sequence.num_published
        if len(shared) > held:
            block_ids = sequence.block_ids.copy()
            block_ids[held : len(shared)] = self.pool.reserve(shared[held:], 0)
            self.pool.release(sequence.block_ids[held : len(shared)].tolist())
            sequence.block_ids = block_ids
            self._begin_after(sequence, len(shared))

    def _begin_after(self, sequence: Sequence, num_shared: int) -> None:
        sequence.num_published = num_shared
        sequence.num_cached_tokens = num_shared * self.block_size
        sequence.num_computed = sequence.num_counted = sequence.num_cached_tokens

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its prompt; never the last token, whose logits are needed."""
        cache = self.pool.cache
        if cache is None:
            return []
        if not sequence.hashes:
            spec = sequence.spec
            sequence.hashes = cache.hashes(spec.token_ids, spec.cache_salt)
        return self.pool.match(sequence.hashes, (sequence.num_prompt_tokens - 1) // self.block_size)
