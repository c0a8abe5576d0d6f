"""The thread that owns a worker's KV pool: writes pulled blocks, reads leased ones, runs steps.

One thread per worker. It takes a turn on the cores for each of the three, measures steps on the
worker's busy clock, and never dies silently: what a step raises breaks the requests in it (all of
them if the KV was lost with it), and what the loop itself raises makes the worker unhealthy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as ItemsInOrder
from contextlib import AbstractContextManager
from typing import TypeVar

from eldr_jax.paged import KvPool
from eldr_jax.runner import Chunk, PagedRunner, StepResult
from serving.engines.embedded import sampling
from serving.engines.embedded.engine import Engine
from serving.engines.embedded.scheduler import PlannedChunk
from serving.engines.embedded.sequence import Sequence
from serving.engines.embedded.work import KvBlocks, Landing, Reading, StepOutcome, Work

_log = logging.getLogger(__name__)
T = TypeVar("T")


class StepLoop:
    """Runs an engine's work on a runner until the engine is closed.

    Attributes:
        name: the worker's id, for the thread and the log.
    """

    def __init__(
        self,
        engine: Engine,
        runner: PagedRunner,
        *,
        turn: AbstractContextManager[None],
        name: str,
    ) -> None:
        self.name = name
        self._engine = engine
        self._runner = runner
        self._turn = turn
        self._pool: KvPool | None = None
        self._thread: threading.Thread | None = None

    def start(self, pool: KvPool) -> None:
        """Starts the thread; `pool` is the loop's from now on."""
        self._pool = pool
        self._thread = threading.Thread(target=self._run, name=f"steps-{self.name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread to end, which it does after `Engine.close`."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (work := self._engine.next_work()) is not None:
                self._do(work)
        except BaseException as error:
            _log.exception("worker %s: the step loop stopped", self.name)
            self._engine.gave_up(error)

    def _do(self, work: Work) -> None:
        for landing in work.landings:
            if not self._guarded([landing.sequence], self._land, landing):
                return self._skip(work.readings)
        for reading in work.readings:
            self._read(reading)
        if work.chunks:
            self._guarded([chunk.sequence for chunk in work.chunks], self._step, work.chunks)
        return None

    def _guarded(
        self, sequences: ItemsInOrder[Sequence], action: Callable[[T], None], argument: T
    ) -> bool:
        """Runs one piece of work; False when the pool was lost and the rest must not run."""
        try:
            action(argument)
        except Exception as error:
            _log.exception("worker %s: work failed", self.name)
            lost = self._pool is None or _is_lost(self._pool)
            if lost:
                self._pool = self._runner.new_pool()
            self._engine.failed(sequences, error, pool_lost=lost)
            return not lost
        return True

    def _skip(self, readings: ItemsInOrder[Reading]) -> None:
        for reading in readings:
            reading.answer.set_exception(RuntimeError("the worker's KV was lost"))

    def _land(self, landing: Landing) -> None:
        blocks = landing.blocks
        with self._turn:
            self._pool = self._runner.write_blocks(
                self._own_pool(), landing.block_ids, blocks.keys, blocks.values
            )
        self._engine.landed(landing)

    def _read(self, reading: Reading) -> None:
        try:
            with self._turn:
                keys, values = self._runner.read_blocks(self._own_pool(), reading.block_ids)
            counts = self._engine.counts_of(reading.block_ids)
        except Exception as error:
            _log.exception("worker %s: reading blocks failed", self.name)
            reading.answer.set_exception(error)
        else:
            reading.answer.set_result(KvBlocks(keys=keys, values=values, counts=counts))

    def _step(self, planned: tuple[PlannedChunk, ...]) -> None:
        chunks = [
            Chunk(token_ids=c.token_ids, start=c.start, block_ids=c.block_ids) for c in planned
        ]
        busy = self._engine.busy
        with self._turn:
            started_s = busy.begin()
            try:
                self._pool, result = self._runner.step(self._own_pool(), chunks)
            finally:
                duration_s = busy.end()
        tokens, logprobs = _draw(planned, result)
        outcome = StepOutcome(
            counts=result.counts,
            tokens=tokens,
            logprobs=logprobs,
            started_s=started_s,
            duration_s=duration_s,
            num_tokens=result.num_tokens,
            bucket_tokens=result.bucket,
            distinct_experts=result.distinct_experts,
        )
        self._engine.stepped(planned, outcome)

    def _own_pool(self) -> KvPool:
        if self._pool is None:
            raise RuntimeError("the step loop has no pool before `start`")
        return self._pool


def _is_lost(pool: KvPool) -> bool:
    """Whether a failed call had taken the pool's buffers already (they are donated)."""
    return any(array.is_deleted() for array in (*pool.keys, *pool.values))


def _draw(
    planned: tuple[PlannedChunk, ...], result: StepResult
) -> tuple[tuple[int | None, ...], tuple[sampling.TokenLogprobs | None, ...]]:
    """The next token of each chunk that reached its end, and its log-probabilities."""
    logits = None
    tokens: list[int | None] = []
    reports: list[sampling.TokenLogprobs | None] = []
    for index, chunk in enumerate(planned):
        token_id = report = None
        if chunk.is_last:
            wanted = chunk.sequence.spec.sampling
            banned = chunk.sequence.banned()
            plain = wanted.greedy and not banned
            if logits is None and not (plain and wanted.num_logprobs is None):
                logits = result.logits()
            position = chunk.start + len(chunk.token_ids)
            if plain or logits is None:
                token_id = int(result.next_tokens[index])
            else:
                token_id = sampling.choose(logits[index], wanted, position, banned)
            if wanted.num_logprobs is not None and logits is not None:
                report = sampling.logprobs(logits[index], token_id, wanted.num_logprobs)
        tokens.append(token_id)
        reports.append(report)
    return tuple(tokens), tuple(reports)
