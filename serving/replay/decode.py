"""Decode workers: continuous batching, slots, KV capacity, preemption.

Requests that find no slot or no KV wait in the worker, first come first served. When a step's
new tokens do not fit, the request that joined last gives its KV up and waits in front, and its
context is computed again in the step it comes back with, as engines that recompute do.
"""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass

import numpy as np

from serving.replay.decode_kernel import (
    FINISHED,
    NUM_BINS,
    OUT_OF_KV,
    RUNNING,
    Output,
    Requests,
    Scratch,
    Tally,
    Times,
    Workers,
    advance,
    start_step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Something that happened to a request on a decode worker.

    Attributes:
        time_s: when.
        request: which.
        finished: its last token; False for its first.
    """

    time_s: float
    request: int
    finished: bool


class DecodeFleet:
    """All decode workers of a run.

    Args:
        num_workers: W, workers that will ever exist.
        max_num_seqs: slots each.
        kv_blocks: KV blocks each.
        requests: rows of the run's requests.
        times: what steps take.
        recompute_token_s: seconds per token of context that a preempted request recomputes.

    Attributes:
        num_preempted: preemptions so far.
        tally: sums over steps.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_num_seqs: int,
        kv_blocks: int,
        requests: Requests,
        times: Times,
        window_s: tuple[float, float] = (-np.inf, np.inf),
        recompute_token_s: float = 0.0,
    ) -> None:
        self.workers = Workers(
            step_end_s=np.full(num_workers, np.inf),
            factor=np.ones(num_workers),
            num_active=np.zeros(num_workers, np.int64),
            num_pending=np.zeros(num_workers, np.int64),
            slots=np.zeros((num_workers, max_num_seqs), np.int64),
            kv_blocks=np.zeros(num_workers, np.int64),
            kv_limit=np.full(num_workers, kv_blocks, np.int64),
            someone_waits=np.zeros(num_workers, np.int64),
            stopped=np.zeros(num_workers, np.int64),
            resume_s=np.zeros(num_workers),
            extra_s=np.zeros(num_workers),
            busy_s=np.zeros(num_workers),
            modelled_s=np.zeros(num_workers),
        )
        self.requests = requests
        self.times = times
        self.num_preempted = 0
        self.tally = Tally(
            window_s=np.array(window_s, np.float64),
            sums=np.zeros(5),
            bins=np.zeros(NUM_BINS),
        )
        self._max_num_seqs = max_num_seqs
        self._recompute_token_s = recompute_token_s
        self._preempted: set[int] = set()
        self._waiting: list[deque[int]] = [deque() for _ in range(num_workers)]
        # Two things can happen to a request: its first token and its last.
        capacity = 2 * num_workers * max_num_seqs + 2
        self._out = Output(
            count=np.zeros(1, np.int64),
            kind=np.zeros(capacity, np.int64),
            request=np.zeros(capacity, np.int64),
            time_s=np.zeros(capacity),
        )
        self._scratch = Scratch(
            chosen=np.zeros(max_num_seqs, np.int64),
            words=np.zeros(times.rows.shape[1:], np.uint64),
            found=np.zeros(1, np.int64),
        )
        self._reported = np.zeros((2, num_workers))

    def advance(self, until_s: float) -> list[Ending]:
        """Runs all steps that end by `until_s`.

        Returns:
            First and last tokens since the previous call, by time.
        """
        endings: list[Ending] = []
        while True:
            num_stopped = advance(
                until_s,
                self.workers,
                self.requests,
                self.times,
                self._out,
                self.tally,
                self._scratch,
            )
            # Emptied each time: requests admitted below may begin and end in the next call.
            self._drain(endings)
            if num_stopped == 0:
                break
            for worker in np.flatnonzero(self.workers.stopped).tolist():
                self._resume(worker)
        endings.sort(key=operator.attrgetter("time_s"))
        return endings

    def join(self, worker: int, request: int, now_s: float) -> None:
        """A request's KV has arrived; it joins the next step that has room."""
        self._waiting[worker].append(request)
        self._admit(worker, now_s)

    def lose(self, worker: int) -> list[int]:
        """The worker is gone: its requests lose their KV.

        Returns:
            The requests it held, in the order they had joined.
        """
        workers = self.workers
        total = int(workers.num_active[worker] + workers.num_pending[worker])
        held = workers.slots[worker, :total].tolist() + list(self._waiting[worker])
        self._waiting[worker].clear()
        self._preempted.difference_update(held)
        for name in ("num_active", "num_pending", "kv_blocks", "someone_waits", "stopped"):
            getattr(workers, name)[worker] = 0
        workers.step_end_s[worker] = np.inf
        workers.extra_s[worker] = 0.0
        return held

    def set_factor(self, worker: int, factor: float) -> None:
        """From its next step on the worker is `factor` times as slow as modelled."""
        self.workers.factor[worker] = factor

    def running(self) -> np.ndarray:
        """Requests in each worker's steps, int64 [W]."""
        return self.workers.num_active + self.workers.num_pending

    def waiting(self) -> list[int]:
        """Requests queued inside each worker."""
        return [len(queue) for queue in self._waiting]

    def measured_factors(self) -> list[float | None]:
        """Step time over the model's since the last call; None where no step ran."""
        sums = np.stack((self.workers.busy_s, self.workers.modelled_s))
        busy_s, modelled_s = sums - self._reported
        self._reported = sums
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = busy_s / modelled_s
        ran = modelled_s > 0
        return [f if r else None for f, r in zip(factors.tolist(), ran.tolist(), strict=True)]

    def _drain(self, endings: list[Ending]) -> None:
        out = self._out
        count = int(out.count[0])
        out.count[0] = 0
        columns = out.time_s[:count], out.request[:count], out.kind[:count]
        for time_s, request, kind in zip(*(c.tolist() for c in columns), strict=True):
            endings.append(Ending(time_s=time_s, request=request, finished=kind == FINISHED))

    def _resume(self, worker: int) -> None:
        workers = self.workers
        now_s = float(workers.resume_s[worker])
        if workers.stopped[worker] == OUT_OF_KV:
            self._preempt(worker)
        workers.stopped[worker] = RUNNING
        self._admit(worker, now_s)
        self._start(worker, now_s)

    def _preempt(self, worker: int) -> None:
        workers, block = self.workers, int(self.times.block_tokens[0])
        num = int(workers.num_active[worker]) - 1
        request = int(workers.slots[worker, num])
        workers.num_active[worker] = num
        workers.kv_blocks[worker] -= -(-int(self.requests.context[request]) // block)
        self._waiting[worker].appendleft(request)
        self._preempted.add(request)
        self.num_preempted += 1

    def _admit(self, worker: int, now_s: float) -> None:
        """Moves waiting requests into free slots; starts an idle worker."""
        workers, waiting = self.workers, self._waiting[worker]
        block = int(self.times.block_tokens[0])
        while waiting:
            total = int(workers.num_active[worker] + workers.num_pending[worker])
            held = int(self.requests.context[waiting[0]])
            # A step needs room for a token more; an empty worker takes what feasibility let in.
            blocks = -(-held // block)
            free = int(workers.kv_limit[worker] - workers.kv_blocks[worker])
            if total >= self._max_num_seqs or (total > 0 and blocks + total >= free):
                break
            request = waiting.popleft()
            workers.slots[worker, total] = request
            workers.num_pending[worker] += 1
            workers.kv_blocks[worker] += blocks
            if request in self._preempted:
                self._preempted.discard(request)
                workers.extra_s[worker] += held * self._recompute_token_s
        workers.someone_waits[worker] = int(bool(waiting))
        if workers.step_end_s[worker] == np.inf and workers.stopped[worker] == RUNNING:
            self._start(worker, now_s)

    def _start(self, worker: int, now_s: float) -> None:
        if self.workers.step_end_s[worker] != np.inf:
            return
        start_step(
            worker, now_s, self.workers, self.requests, self.times, self.tally, self._scratch
        )
