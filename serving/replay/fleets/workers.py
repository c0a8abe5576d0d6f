"""Prefill and decode workers of a fleet replay, step by step."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from serving.replay.fleets.machines import Machine
from serving.replay.prefill import PrefixCache


@dataclass(slots=True, eq=False)
class Meter:
    """What a worker costs between two times.

    Attributes:
        window_s: only time inside counts.
        busy_s, powered_s: seconds in steps, and switched on.
        on_since_s: when it was switched on, None while it is off.
    """

    window_s: tuple[float, float]
    busy_s: float = 0.0
    powered_s: float = 0.0
    on_since_s: float | None = 0.0

    def busy(self, begin_s: float, end_s: float) -> None:
        """A step ran."""
        self.busy_s += self._inside(begin_s, end_s)

    def switch(self, on: bool, now_s: float) -> None:
        """Switched on or off; the same again changes nothing."""
        if on and self.on_since_s is None:
            self.on_since_s = now_s
        elif not on and self.on_since_s is not None:
            self.powered_s += self._inside(self.on_since_s, now_s)
            self.on_since_s = None

    def _inside(self, begin_s: float, end_s: float) -> float:
        first, last = self.window_s
        return max(0.0, min(end_s, last) - max(begin_s, first))


@dataclass(slots=True, eq=False)
class _Prompt:
    request: int
    num_tokens: int
    hashes: list[int]
    done_tokens: int = -1


class PrefillSide:
    """Chunked prefill: a step packs the queue up to a chunk and runs in the next bucket.

    Attributes:
        num_cached_tokens, num_prompt_tokens: over all prompts begun.
        num_computed_tokens: padding included.
    """

    def __init__(self, machine: Machine) -> None:
        pool, cost = machine.pool, machine.cost
        self.cache = PrefixCache(pool.cache_blocks)
        self.num_cached_tokens = self.num_prompt_tokens = self.num_computed_tokens = 0
        self._block = pool.block_tokens
        self._chunk = min(pool.chunk_tokens, *pool.buckets_tokens[-1:] or (pool.chunk_tokens,))
        self._buckets = np.array(pool.buckets_tokens, np.int64)
        self._token_s, self._pass_s = cost.prefill.token_s, cost.prefill.chunk_s
        self._queue: deque[_Prompt] = deque()
        self._ending: list[_Prompt] = []
        self.running = False

    def enqueue(self, request: int, num_tokens: int, hashes: np.ndarray) -> None:
        """A prompt arrives."""
        self._queue.append(_Prompt(request, num_tokens, hashes.tolist()))

    def start(self) -> float | None:
        """Begins a step: its seconds, None when nothing waits."""
        left = self._chunk
        while self._queue and left > 0:
            prompt = self._queue[0]
            if prompt.done_tokens < 0:
                cached = self.cache.match(prompt.hashes) * self._block
                prompt.done_tokens = min(cached, prompt.num_tokens - 1)
                self.num_cached_tokens += prompt.done_tokens
                self.num_prompt_tokens += prompt.num_tokens
            taken = min(left, prompt.num_tokens - prompt.done_tokens)
            prompt.done_tokens += taken
            left -= taken
            if prompt.done_tokens < prompt.num_tokens:
                break
            self._ending.append(self._queue.popleft())
        tokens = self._chunk - left
        self.running = tokens > 0
        if not tokens:
            return None
        if self._buckets.size:
            tokens = int(self._buckets[self._buckets.searchsorted(tokens)])
        self.num_computed_tokens += tokens
        return tokens * self._token_s + self._pass_s

    def finish(self) -> list[int]:
        """Ends the step: requests whose prompt is done."""
        done, self._ending = self._ending, []
        for prompt in done:
            self.cache.insert(prompt.hashes)
        return [prompt.request for prompt in done]


@dataclass(slots=True, eq=False)
class DecodeSide:
    """Continuous batching; a request joins at the next step and leaves after its last token.

    The distinct experts of a step are their expectation over the batch's own chances,
    E - sum_e prod_j (1 - q_j[e]), which changes only when somebody joins or leaves.
    """

    machine: Machine
    log_keep: np.ndarray | None
    layer_scale: float = 1.0
    running: bool = False
    num_active: int = 0
    kv_tokens: float = 0.0
    step: int = 0
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _waiting: deque[tuple[int, int, int, np.ndarray | None]] = field(default_factory=deque)
    _held: dict[int, tuple[int, int, np.ndarray | None]] = field(default_factory=dict)
    _log: np.ndarray | None = None
    _experts: float = 0.0

    def join(self, request: int, context: int, tokens: int, log_keep: np.ndarray | None) -> None:
        """A request's KV has arrived; it still has `tokens` to produce."""
        self._waiting.append((request, context, tokens, log_keep))

    def start(self) -> float | None:
        """Begins a step: its seconds, None when nobody decodes."""
        changed = False
        while self._waiting and self.num_active < self.machine.pool.max_num_seqs:
            request, context, tokens, log_keep = self._waiting.popleft()
            heapq.heappush(self._ends, (self.step + tokens, request))
            self._held[request] = (context, self.step, log_keep)
            self.num_active += 1
            self.kv_tokens += context
            if log_keep is not None:
                self._log = log_keep.copy() if self._log is None else self._log + log_keep
            changed = True
        self.running = self.num_active > 0
        if not self.running:
            return None
        if changed:
            self._count()
        model = self.machine.cost.step
        return model.step_s(
            num_requests=self.num_active,
            distinct_experts=self._experts,
            kv_tokens=self.kv_tokens,
        )

    def finish(self) -> list[int]:
        """Ends the step: requests whose last token it made."""
        self.step += 1
        self.kv_tokens += self.num_active
        done = []
        while self._ends and self._ends[0][0] <= self.step:
            _, request = heapq.heappop(self._ends)
            context, began, log_keep = self._held.pop(request)
            self.num_active -= 1
            self.kv_tokens -= context + self.step - began
            if log_keep is not None and self._log is not None:
                self._log = self._log - log_keep
            done.append(request)
        if not self.num_active:
            self._log, self.kv_tokens = None, 0.0
        if done:
            self._count()
        return done

    def _count(self) -> None:
        model = self.machine.cost.step
        if self._log is None:
            self._experts = model.mean_experts(self.num_active)
        else:
            missed = float(np.exp(self._log).sum())
            self._experts = self.layer_scale * (self._log.size - missed)
