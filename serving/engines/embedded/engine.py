"""A worker's state: queues, blocks, leases, counts. No thread and no device of its own.

Two sides meet here under one lock that is held for bookkeeping only, never during a step: the
event loop (submit, abort, pulls, questions) and the step loop (`next_work` and what became of
it). Blocks that a step, a write or a read under way may touch are given back only after it, so
an abort at any moment is safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np

from serving.core.block_hash import BlockHasher
from serving.core.clock import Clock
from serving.core.errors import (
    EldrError,
    Rejected,
    RejectReason,
    WorkerLost,
)
from serving.engines.embedded.block_pool import BlockPool
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.engines.embedded.generate_request import GenerateSpec
from serving.engines.embedded.leases import Lease, LeaseTable, new_lease_id
from serving.engines.embedded.prefix_cache import PrefixCache
from serving.engines.embedded.scheduler import PlannedChunk, Scheduler
from serving.engines.embedded.sequence import (
    Broken,
    Ended,
    Event,
    FinishReason,
    PullWanted,
    Sequence,
    Sink,
    State,
    TokenMade,
)
from serving.engines.embedded.step_log import BusyClock, StepLog, StepRecord
from serving.engines.embedded.work import (
    Accounting,
    DuplicateRequest,
    Geometry,
    KvBlocks,
    Landing,
    Reading,
    StepFailed,
    StepOutcome,
    Work,
)
from serving.signatures.block_rows import BlockCounts

Emit = Callable[[list[tuple[Sink, Event]]], None]


class Engine:
    """Bookkeeping of one worker; every public method is thread-safe.

    Attributes:
        busy: the worker's busy clock.
        draining: new requests are refused.
        unhealthy: why the worker takes nothing any more; "" while it is well.
    """

    def __init__(
        self, config: EmbeddedWorkerConfig, geometry: Geometry, *, clock: Clock, emit: Emit
    ) -> None:
        cache = None
        if config.prefix_cache:
            cache = PrefixCache(BlockHasher(geometry.block_size, seed=config.hash_seed))
        self._config = config
        self._clock = clock
        self._emit = emit
        self._pool = BlockPool(geometry.num_blocks, cache)
        self._scheduler = Scheduler(
            self._pool,
            block_size=geometry.block_size,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=geometry.max_step_tokens,
        )
        self._counts = BlockCounts(
            num_blocks=geometry.num_blocks,
            block_size_tokens=geometry.block_size,
            num_layers=geometry.num_layers,
            num_experts=geometry.num_experts,
        )
        self._leases = LeaseTable()
        self._steps = StepLog()
        self._changed = threading.Condition()
        self._by_id: dict[str, Sequence] = {}
        self._landings: list[Landing] = []
        self._readings: list[Reading] = []
        self._in_step: set[Sequence] = set()
        self._events: list[tuple[Sink, Event]] = []
        self._num_failures = 0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_cached_prompt_tokens = 0
        self._closed = False
        self.busy = BusyClock(clock)
        self.draining = False
        self.unhealthy = ""

    # The event loop's side.

    def submit(self, spec: GenerateSpec, sink: Sink) -> Sequence:
        """Takes a request in; its events go to `sink`.

        Raises:
            WorkerLost: the worker is unhealthy or closed.
            Rejected: draining, or the queue is full.
            DuplicateRequest: a request of that id is running.
        """
        with self._changed:
            if self.unhealthy or self._closed:
                raise WorkerLost(self._config.worker_id, self.unhealthy or "it has stopped")
            if self.draining:
                raise Rejected(RejectReason.DRAINING, f"worker {self._config.worker_id!r} drains")
            if spec.request_id in self._by_id:
                rule = "a request of this id is running, ids must be unique"
                raise DuplicateRequest("request_id", spec.request_id, rule)
            sequence = Sequence(spec, sink, arrived_busy_s=self.busy.now_s())
            self._by_id[spec.request_id] = sequence
            self._scheduler.enqueue(sequence)
            self._settle()
            queued = sequence.state is State.WAITING
            if queued and self._scheduler.num_queued > self._config.max_waiting:
                self._drop(sequence)
                free = self._pool.num_available
                raise Rejected(
                    RejectReason.QUEUE_FULL,
                    f"{self._config.max_waiting} requests wait already; {spec.num_kv_tokens} "
                    f"tokens of KV wanted, {free} of {self._pool.num_blocks} blocks free, "
                    f"{len(self._scheduler.running)} of {self._config.max_num_seqs} places taken",
                )
            return sequence

    def leave(self, sequence: Sequence, *, keep_lease: bool) -> None:
        """Its client is done with a request, for good or ill: what it holds goes back.

        Args:
            sequence: ended as soon as nothing under way uses its blocks.
            keep_lease: the client knows of the lease and will have the KV pulled or released.
        """
        with self._changed:
            self._cancel(sequence)
            if sequence.lease is not None and not keep_lease:
                self._pool.release(self._leases.withdraw(sequence.lease))
            self._settle()

    def abort_ids(self, request_ids: Iterable[str]) -> None:
        """Aborts the requests of those ids; unknown ids are none of our business."""
        with self._changed:
            for request_id in request_ids:
                if (sequence := self._by_id.get(request_id)) is not None:
                    self._cancel(sequence)
            self._settle()

    def deliver(self, sequence: Sequence, first_block: int, blocks: KvBlocks) -> None:
        """The prompt's KV is here: write it and run."""
        with self._changed:
            if sequence.state is State.PULLING:
                sequence.state = State.LANDING
                block_ids = sequence.block_ids[first_block : first_block + len(blocks.keys)]
                self._landings.append(
                    Landing(sequence=sequence, block_ids=block_ids, blocks=blocks)
                )
                self._settle()

    def begin_pull(self, lease_id: str, remote_request_id: str) -> Lease:
        """Starts the pull of a lease.

        Raises:
            LeaseError: unknown, ended, expired, being pulled, or another request's.
        """
        with self._changed:
            self._settle()
            return self._leases.begin_pull(lease_id, remote_request_id, self._clock.monotonic_s())

    def read(self, block_ids: np.ndarray) -> Future[KvBlocks]:
        """Asks for the content of blocks that a pull under way holds."""
        reading = Reading(block_ids=block_ids, answer=Future())
        with self._changed:
            if self._closed or self.unhealthy:
                error = WorkerLost(self._config.worker_id, self.unhealthy or "it has stopped")
                reading.answer.set_exception(error)
            else:
                self._readings.append(reading)
                self._changed.notify()
        return reading.answer

    def end_pull(self, lease: Lease, *, completed: bool) -> None:
        """Ends a pull; a completed one gives the blocks back."""
        with self._changed:
            self._pool.release(self._leases.end_pull(lease, completed=completed))
            self._settle()

    def release_lease(self, lease_id: str, remote_request_id: str) -> None:
        """Ends a lease unpulled.

        Raises:
            LeaseError: as `begin_pull`.
        """
        with self._changed:
            self._settle()
            now_s = self._clock.monotonic_s()
            self._pool.release(self._leases.release(lease_id, remote_request_id, now_s))
            self._settle()

    def flush_cache(self) -> bool:
        """Forgets cached prefixes; False when requests are in flight, then nothing changes."""
        with self._changed:
            if self._scheduler.sequences():
                return False
            self._pool.flush()
            self._settle()
            return True

    def accounting(self) -> Accounting:
        """The state of the moment."""
        with self._changed:
            self._settle()
            return Accounting(
                blocks_total=self._pool.num_blocks,
                blocks_in_use=self._pool.num_in_use,
                blocks_cached=self._pool.num_cached,
                leases_open=len(self._leases),
                num_running=len(self._scheduler.running),
                num_waiting=self._scheduler.num_waiting,
                num_uncached_waiting_tokens=self._scheduler.num_uncached_waiting_tokens(),
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_prompt_tokens=self._num_cached_prompt_tokens,
            )

    def steps_since(self, sequence: int, limit: int) -> tuple[list[StepRecord], int]:
        """Steps from that number on, and the number of the step to come."""
        with self._changed:
            return self._steps.since(sequence, limit), self._steps.next_sequence

    def output_tokens_per_s(self) -> float:
        """Output tokens per busy second of late."""
        with self._changed:
            return self._steps.output_tokens_per_s()

    def close(self) -> None:
        """Ends every request and lease; the step loop stops after what it is doing."""
        with self._changed:
            self._closed = True
            self._break_all(WorkerLost(self._config.worker_id, "it has stopped"))
            self._flush_events()
            self._changed.notify_all()

    # The step loop's side.

    def next_work(self, *, wait: bool = True) -> Work | None:
        """What to do next; None when the engine is closed or unhealthy.

        Args:
            wait: sleep until there is something; False may return work of nothing.
        """
        with self._changed:
            while True:
                self._settle()
                if self._closed or self.unhealthy:
                    return None
                # From here on a reader that gives up can no longer cancel its answer.
                readings = (r for r in self._readings if r.answer.set_running_or_notify_cancel())
                work = Work(
                    landings=tuple(self._landings),
                    readings=tuple(readings),
                    chunks=tuple(self._scheduler.plan()),
                )
                self._landings.clear()
                self._readings.clear()
                if not wait or work.landings or work.readings or work.chunks:
                    self._in_step.update(landing.sequence for landing in work.landings)
                    self._in_step.update(chunk.sequence for chunk in work.chunks)
                    return work
                expiry_s = self._leases.next_expiry_s()
                wait_s = None if expiry_s is None else expiry_s - self._clock.monotonic_s()
                self._changed.wait(None if wait_s is None else max(wait_s, 0.001))

    def counts_of(self, block_ids: np.ndarray) -> np.ndarray:
        """Expert counts of blocks, uint16 [n, L, E]."""
        with self._changed:
            return self._counts.take(block_ids)

    def landed(self, landing: Landing) -> None:
        """A pulled prompt is in the pool."""
        sequence = landing.sequence
        with self._changed:
            self._in_step.discard(sequence)
            if self._gone(sequence):
                return
            self._counts.put(landing.block_ids, landing.blocks.counts)
            self._scheduler.landed(sequence)
            self._scheduler.publish(sequence)
            self._settle()

    def stepped(self, chunks: tuple[PlannedChunk, ...], outcome: StepOutcome) -> None:
        """A step is done: count, publish, hand out tokens, end who is finished."""
        with self._changed:
            kind = "decode" if all(_decodes(chunk) for chunk in chunks) else "prefill"
            busy_s = outcome.started_s + outcome.duration_s
            num_output_tokens = 0
            for index, chunk in enumerate(chunks):
                sequence = chunk.sequence
                self._in_step.discard(sequence)
                if self._gone(sequence):
                    continue
                if chunk.start >= sequence.num_counted:
                    self._counts.add_chunk(chunk.block_ids, chunk.start, outcome.counts[index])
                sequence.num_computed += len(chunk.token_ids)
                sequence.num_counted = max(sequence.num_counted, sequence.num_computed)
                self._scheduler.publish(sequence)
                token_id = outcome.tokens[index]
                if token_id is not None:
                    num_output_tokens += 1
                    sequence.append(token_id, busy_s)
                    made = TokenMade(token_id=token_id, logprobs=outcome.logprobs[index])
                    self._events.append((sequence.sink, made))
                    self._end_if_finished(sequence)
            self._steps.add(
                StepRecord(
                    sequence=self._steps.next_sequence,
                    kind=kind,
                    started_s=outcome.started_s,
                    duration_s=outcome.duration_s,
                    num_tokens=outcome.num_tokens,
                    bucket_tokens=outcome.bucket_tokens,
                    num_output_tokens=num_output_tokens,
                    distinct_experts=outcome.distinct_experts,
                    request_ids=tuple(chunk.sequence.spec.request_id for chunk in chunks),
                )
            )
            self._num_failures = 0
            self._settle()

    def failed(
        self, sequences: Iterable[Sequence], error: BaseException, *, pool_lost: bool
    ) -> None:
        """Work under way raised: break its requests, or all when the KV went with it.

        Args:
            sequences: who took part.
            error: what was raised.
            pool_lost: the pool's content is gone, with every request, lease and cached prefix.
        """
        told = StepFailed(self._config.worker_id, error)
        with self._changed:
            for sequence in sequences:
                self._in_step.discard(sequence)
                self._break(sequence, told)
            self._num_failures += 1
            if self._num_failures >= self._config.max_step_failures:
                self.unhealthy = f"{self._num_failures} steps failed in a row, last: {told.problem}"
                self._break_all(WorkerLost(self._config.worker_id, self.unhealthy))
            elif pool_lost:
                self._in_step.clear()
                self._break_all(told, but_waiting=True)
            self._settle()

    def gave_up(self, error: BaseException) -> None:
        """The step loop itself raised: nothing will run any more, and everybody is told."""
        with self._changed:
            self.unhealthy = f"the step loop stopped: {type(error).__name__}: {error}"
            self._break_all(WorkerLost(self._config.worker_id, self.unhealthy))
            self._flush_events()

    # Under the lock.

    def _settle(self) -> None:
        """Brings everything up to date: expiry, admission, events, the step loop's waking."""
        self._pool.release(self._leases.expire(self._clock.monotonic_s()))
        for sequence in self._scheduler.admit():
            if sequence.state is State.PULLING:
                wanted = PullWanted(first_block=sequence.num_published)
                self._events.append((sequence.sink, wanted))
        self._flush_events()
        self._changed.notify()

    def _flush_events(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)

    def _cancel(self, sequence: Sequence) -> None:
        if sequence.state is State.FINISHED:
            return
        sequence.cancelled = True
        # The id is free at once, for a retry that overtakes the step under way.
        self._forget_id(sequence)
        if sequence not in self._in_step:
            self._landings = [x for x in self._landings if x.sequence is not sequence]
            self._gone(sequence)

    def _gone(self, sequence: Sequence) -> bool:
        """Whether a request is over, ending it if it was cancelled meanwhile."""
        if sequence.cancelled and sequence.state is not State.FINISHED:
            self._drop(sequence)
            self._events.append((sequence.sink, Ended(reason=FinishReason.ABORT)))
        return sequence.state is State.FINISHED

    def _drop(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        if sequence.state is not State.WAITING:
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._num_cached_prompt_tokens += sequence.num_cached_tokens
        self._scheduler.remove(sequence, keep_blocks=keep_blocks)
        self._forget_id(sequence)

    def _forget_id(self, sequence: Sequence) -> None:
        if self._by_id.get(sequence.spec.request_id) is sequence:
            del self._by_id[sequence.spec.request_id]

    def _break(self, sequence: Sequence, error: EldrError) -> None:
        if sequence.state is not State.FINISHED:
            self._drop(sequence)
            self._events.append((sequence.sink, Broken(error=error)))

    def _break_all(self, error: EldrError, *, but_waiting: bool = False) -> None:
        self._landings.clear()
        for reading in self._readings:
            if reading.answer.set_running_or_notify_cancel():
                reading.answer.set_exception(error)
        self._readings.clear()
        for sequence in self._scheduler.sequences():
            if not (but_waiting and sequence.state is State.WAITING):
                self._break(sequence, error)
        self._pool.release(self._leases.void("was lost with the worker's KV"))
        self._pool.flush()

    def _end_if_finished(self, sequence: Sequence) -> None:
        finish = sequence.finish_reason()
        if finish is None:
            return
        reason, matched_stop = finish
        lease = counts = None
        if sequence.spec.hands_over:
            counts = self._counts.total(sequence.block_ids)
            lease = sequence.lease = self._open_lease(sequence)
        self._drop(sequence, keep_blocks=lease is not None)
        ended = Ended(reason=reason, matched_stop=matched_stop, lease=lease, counts=counts)
        self._events.append((sequence.sink, ended))

    def _open_lease(self, sequence: Sequence) -> Lease:
        spec = sequence.spec
        self._num_requests += 1
        lease = Lease(
            lease_id=new_lease_id(spec.token_ids, spec.cache_salt),
            remote_request_id=f"{spec.request_id}-{self._num_requests:x}",
            block_ids=tuple(sequence.block_ids.tolist()),
            num_tokens=sequence.num_prompt_tokens,
            expires_at_s=self._clock.monotonic_s() + self._config.lease_s,
        )
        self._leases.add(lease)
        return lease


def _decodes(chunk: PlannedChunk) -> bool:
    """Whether a chunk runs a request past its prompt (a pulled prompt's last token included)."""
    sequence = chunk.sequence
    return chunk.start >= sequence.num_prompt_tokens or sequence.spec.pull is not None
