"""Which worker holds how much of a prompt, from KV events and from our own routing.

Implements `serving.core.ports.PrefixIndex`. One event loop owns it; nothing blocks and
nothing is a Python object per block. Every answer is bounded by what a worker can really
hold (see `event_stream` for what is promised when messages are lost):

    confirmed  the worker said so and has not taken it back, in a stream without a hole;
    predicted  we routed the prompt there: credited at once, so that its siblings follow, and
               only until the worker confirms or drops it, or the time to live is over. For
               workers that send no events (or lost some) this is all there is, limited to
               their KV capacity, least recently routed first.

Slower tiers (host memory, disk) count with their credit: blocks reached on tier t but not on
a faster one are worth `credit` of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from serving.core.worker import WorkerInfo
from serving.fleet.event_stream import Delivery, EventStream, StreamCounters, StreamState
from serving.fleet.kv_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch
from serving.fleet.prefix_store import PrefixStore

_MAX_RANKS = 64
_KEPT_ROSTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place KV blocks lie in.

    Attributes:
        name: for reports.
        mediums: engines' words for it, upper case.
        credit: what a block there is worth of one on the device, in [0, 1].
    """

    name: str
    mediums: tuple[str, ...]
    credit: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.credit <= 1.0:
            raise ValueError(f"credit={self.credit!r} of tier {self.name!r} must be in [0, 1]")


DEFAULT_TIERS = (
    Tier(name="device", mediums=("", "GPU", "HBM", "TPU"), credit=1.0),
    Tier(name="host", mediums=("CPU", "CPU_PINNED", "HOST", "DRAM"), credit=0.5),
    Tier(name="disk", mediums=("DISK", "SSD", "NVME"), credit=0.2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixIndexConfig:
    """Limits of the index.

    Attributes:
        max_blocks: distinct blocks known at once; the least recently used go first.
        max_predicted: (block, worker) pairs credited on prediction at once.
        predicted_ttl_s: life of a prediction for a worker whose events confirm it; up to a
            sixteenth of it may be cut off, so that several end together.
        approximate_ttl_s: the same for a worker without (complete) events.
        max_waiting: messages of one publisher held back behind a missing one.
        gap_timeout_s: after that the missing message is given up.
        tiers: fastest first.
    """

    max_blocks: int = 1 << 20
    max_predicted: int = 1 << 18
    predicted_ttl_s: float = 10.0
    approximate_ttl_s: float = 120.0
    max_waiting: int = 256
    gap_timeout_s: float = 2.0
    tiers: tuple[Tier, ...] = DEFAULT_TIERS

    def __post_init__(self) -> None:
        for name in ("max_blocks", "max_predicted", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")
        for name in ("predicted_ttl_s", "approximate_ttl_s", "gap_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be > 0")
        mediums = [medium for tier in self.tiers for medium in tier.mediums]
        if not mediums or len(set(mediums)) != len(mediums):
            raise ValueError(f"tiers name {mediums}, which must be distinct and not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """A publisher as the index sees it, for metrics and operators.

    Attributes:
        missing: first and last seq of the open gap, None without one.
        missing_for_s: seconds since the gap was noticed, 0 without one.
    """

    worker_id: str
    dp_rank: int
    epoch: int | None
    state: StreamState
    next_seq: int
    missing: tuple[int, int] | None
    missing_for_s: float
    counters: StreamCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStats:
    """Totals; `num_bytes` is what the arrays take once every page of them is in use."""

    num_workers: int
    num_blocks: int
    max_blocks: int
    num_predicted: int
    num_evicted: int
    num_refused: int
    num_unknown_removed: int
    num_unknown_medium: int
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Rank:
    stream: EventStream
    column: int


@dataclass(slots=True, kw_only=True)
class _Worker:
    info: WorkerInfo
    ranks: dict[int, _Rank]


@dataclass(slots=True, kw_only=True, eq=False)
class _Roster:
    """Columns of the workers of one view; `starts` splits them where ranks share a worker."""

    workers: tuple[WorkerInfo, ...]
    version: int
    columns: np.ndarray | slice
    starts: np.ndarray | None


class PrefixIndex:
    """KV events and routing decisions in, matched prefixes out."""

    def __init__(self, config: PrefixIndexConfig | None = None) -> None:
        self.config = config or PrefixIndexConfig()
        tiers = self.config.tiers
        self._store = PrefixStore(
            max_blocks=self.config.max_blocks,
            max_predicted=self.config.max_predicted,
            num_tiers=len(tiers),
        )
        self._tier_of = {m.upper(): t for t, tier in enumerate(tiers) for m in tier.mediums}
        credits = np.array([tier.credit for tier in tiers])
        # Depths per tier are cumulative: sum_t credit_t * (depth_t - depth_{t-1}).
        self._weights = credits - np.append(credits[1:], 0.0)
        self._credits = credits
        self._workers: dict[str, _Worker] = {}
        self._version = 0
        self._rosters: dict[int, _Roster] = {}
        self._now_s = -math.inf
        self._next_gap_s = math.inf
        self._num_refused = 0
        self._num_unknown_removed = 0
        self._num_unknown_medium = 0

    def add_worker(self, worker: WorkerInfo) -> None:
        """A worker joins or changes; a changed epoch drops everything known about it."""
        known = self._workers.get(worker.worker_id)
        if known is None:
            self._workers[worker.worker_id] = _Worker(info=worker, ranks={})
            self._rank(worker.worker_id, 0)
            return
        restarted = known.info.epoch != worker.epoch
        known.info = worker
        for rank in known.ranks.values():
            if restarted and rank.stream.epoch != worker.epoch:
                rank.stream.restart(worker.epoch)
                self._reset(known, rank)
        self._version += 1

    def remove_worker(self, worker_id: str) -> None:
        """A worker leaves.

        Raises:
            KeyError: not known.
        """
        for rank in self._workers.pop(worker_id).ranks.values():
            self._store.retire(rank.column)
        self._version += 1

    def apply(self, batch: EventBatch, now_s: float) -> StreamState:
        """Takes a publisher's message in any order at monotonic `now_s`.

        Returns:
            The publisher's state afterwards; UNCERTAIN means `streams` says what is missing.

        Raises:
            KeyError: no such worker.
        """
        self.advance(now_s)
        rank = self._rank(batch.worker_id, batch.dp_rank)
        before = rank.stream.state
        delivery = rank.stream.offer(batch, now_s)
        self._deliver(self._workers[batch.worker_id], rank, delivery, before)
        return rank.stream.state

    def give_up(self, worker_id: str, dp_rank: int = 0) -> None:
        """Stops waiting for a publisher's missing messages (its replay cannot help).

        Raises:
            KeyError: no such worker.
        """
        rank = self._rank(worker_id, dp_rank)
        before = rank.stream.state
        self._deliver(self._workers[worker_id], rank, rank.stream.give_up(), before)

    def resync(
        self, worker_id: str, *, next_seq: int, stored: Iterable[BlocksStored], dp_rank: int = 0
    ) -> None:
        """Sets a publisher's view from a full listing of its cache.

        Args:
            worker_id: the worker.
            next_seq: first message that the listing does not contain.
            stored: the listing, parents before children.
            dp_rank: its data-parallel rank.

        Raises:
            KeyError: no such worker.
        """
        rank = self._rank(worker_id, dp_rank)
        worker = self._workers[worker_id]
        self._reset(worker, rank)
        for event in stored:
            self._apply_event(rank, event)
        before = rank.stream.state
        self._deliver(worker, rank, rank.stream.resync(next_seq), before)
        self._version += 1

    def route(
        self, worker_id: str, block_hashes: np.ndarray, now_s: float, *, dp_rank: int = 0
    ) -> None:
        """A prompt was sent to a worker: credits its full blocks until told otherwise.

        Args:
            worker_id: where it went.
            block_hashes: uint64 [n], chained.
            now_s: monotonic seconds.
            dp_rank: data-parallel rank it went to.

        Raises:
            KeyError: no such worker.
        """
        self.advance(now_s)
        rank = self._rank(worker_id, dp_rank)
        if len(block_hashes):
            self._store.predict(rank.column, block_hashes, self._now_s)

    def forget(self, worker_id: str, block_hashes: np.ndarray, *, dp_rank: int = 0) -> None:
        """Takes back what `route` credited a worker with; what it confirmed itself stays.

        Raises:
            KeyError: no such worker.
        """
        self._store.unpredict(self._rank(worker_id, dp_rank).column, block_hashes)

    def advance(self, now_s: float) -> None:
        """Lets time pass: predictions end, gaps time out, retired columns are swept.

        Call it before decisions and from a timer; without work it costs a few compares.
        """
        self._now_s = now_s = max(self._now_s, now_s)
        self._store.expire(now_s)
        self._store.sweep()
        if now_s >= self._next_gap_s:
            timeout_s = self.config.gap_timeout_s
            for worker in self._workers.values():
                for rank in worker.ranks.values():
                    since_s = rank.stream.missing_since_s
                    if since_s is not None and now_s >= since_s + timeout_s:
                        before = rank.stream.state
                        self._deliver(worker, rank, rank.stream.give_up(), before)
            self._set_next_gap()

    def cached_blocks(
        self, block_hashes: np.ndarray, workers: tuple[WorkerInfo, ...]
    ) -> np.ndarray:
        """Leading blocks each worker holds, those on slower tiers at their credit.

        Args:
            block_hashes: uint64 [n], chained hashes of a prompt's full blocks.
            workers: W workers of one view; keep handing in the same tuple object. One that
                is unknown here, of another epoch, or UNCERTAIN gets 0.

        Returns:
            int32 [W], rounded down, in [0, n]; the best of a worker's ranks.
        """
        roster = self._rosters.get(id(workers))
        if roster is None or roster.version != self._version:
            roster = self._resolve(workers)
        store = self._store
        if len(store.reach) > 1:
            return np.floor(self._credit(block_hashes, roster)).astype(np.int32)
        return _pick(store.depths(block_hashes, 0), roster)

    def cached_by_tier(
        self, block_hashes: np.ndarray, workers: tuple[WorkerInfo, ...]
    ) -> np.ndarray:
        """Leading blocks each worker holds on each tier or a faster one, int32 [tiers, W]."""
        roster = self._resolve(workers)
        tiers = range(len(self.config.tiers))
        return np.stack([_pick(self._store.depths(block_hashes, t), roster) for t in tiers])

    def cached_by_rank(self, block_hashes: np.ndarray, worker_id: str) -> dict[int, int]:
        """Leading blocks of each data-parallel rank of a worker, any tier.

        Raises:
            KeyError: no such worker.
        """
        depths = self._store.depths(block_hashes, len(self.config.tiers) - 1)
        ranks = self._workers[worker_id].ranks
        return {number: int(depths[_column_of(rank)]) for number, rank in sorted(ranks.items())}

    def streams(self) -> list[StreamReport]:
        """Every publisher, for metrics; ask replays for what is missing."""
        return [
            StreamReport(
                worker_id=worker_id,
                dp_rank=number,
                epoch=rank.stream.epoch,
                state=rank.stream.state,
                next_seq=rank.stream.next_seq,
                missing=rank.stream.missing,
                missing_for_s=self._missing_for_s(rank.stream),
                counters=rank.stream.counters,
            )
            for worker_id, worker in self._workers.items()
            for number, rank in sorted(worker.ranks.items())
        ]

    def stats(self) -> IndexStats:
        """Totals of the index."""
        tree = self._store.tree
        return IndexStats(
            num_workers=len(self._workers),
            num_blocks=len(tree.table),
            max_blocks=tree.table.capacity,
            num_predicted=len(self._store.predicted),
            num_evicted=tree.num_evicted,
            num_refused=self._num_refused,
            num_unknown_removed=self._num_unknown_removed,
            num_unknown_medium=self._num_unknown_medium,
            num_bytes=self._store.num_bytes,
        )

    def _missing_for_s(self, stream: EventStream) -> float:
        return 0.0 if stream.missing_since_s is None else self._now_s - stream.missing_since_s

    def _rank(self, worker_id: str, number: int) -> _Rank:
        worker = self._workers[worker_id]
        rank = worker.ranks.get(number)
        if rank is None:
            if not 0 <= number < _MAX_RANKS:
                raise ValueError(f"dp_rank={number} must be in [0, {_MAX_RANKS})")
            stream = EventStream(epoch=worker.info.epoch, max_waiting=self.config.max_waiting)
            rank = _Rank(stream=stream, column=self._store.add_column())
            worker.ranks[number] = rank
            self._set_lifetimes(worker, rank)
            self._version += 1
        return rank

    def _reset(self, worker: _Worker, rank: _Rank) -> None:
        self._store.retire(rank.column)
        rank.column = self._store.add_column()
        self._set_lifetimes(worker, rank)
        self._version += 1

    def _set_lifetimes(self, worker: _Worker, rank: _Rank) -> None:
        exact = rank.stream.state is StreamState.EXACT
        config = self.config
        self._store.predicted.configure(
            rank.column,
            ttl_s=config.predicted_ttl_s if exact else config.approximate_ttl_s,
            limit=worker.info.capabilities.num_kv_blocks,
        )

    def _deliver(
        self, worker: _Worker, rank: _Rank, delivery: Delivery, before: StreamState
    ) -> None:
        if delivery.reset:
            self._reset(worker, rank)
        for batch in delivery.batches:
            for event in batch.events:
                if isinstance(event, CacheCleared):
                    self._reset(worker, rank)
                else:
                    self._apply_event(rank, event)
        if rank.stream.state is not before:
            self._set_lifetimes(worker, rank)
            self._version += 1
        if StreamState.UNCERTAIN in (before, rank.stream.state):
            self._set_next_gap()

    def _apply_event(self, rank: _Rank, event: BlocksStored | BlocksRemoved) -> None:
        if event.medium is None:
            tiers = tuple(range(len(self.config.tiers)))
        else:
            tier = self._tier_of.get(event.medium.upper())
            if tier is None:
                self._num_unknown_medium += 1
                return
            tiers = (tier,)
        if isinstance(event, BlocksStored):
            refused = self._store.stored(rank.column, tiers[0], event.parent, event.hashes)
            self._num_refused += refused
        else:
            self._num_unknown_removed += self._store.removed(rank.column, tiers, event.hashes)

    def _set_next_gap(self) -> None:
        since_s = [
            rank.stream.missing_since_s
            for worker in self._workers.values()
            for rank in worker.ranks.values()
            if rank.stream.missing_since_s is not None
        ]
        self._next_gap_s = min(since_s, default=math.inf) + self.config.gap_timeout_s

    def _credit(self, block_hashes: np.ndarray, roster: _Roster) -> np.ndarray:
        """Credited blocks per worker, float64 [W]."""
        used = len(self._store.reach)
        depths = np.stack([self._store.depths(block_hashes, t) for t in range(used)])
        weights = self._weights[:used].copy()
        weights[-1] = self._credits[used - 1]
        return _pick(weights @ depths, roster)

    def _resolve(self, workers: tuple[WorkerInfo, ...]) -> _Roster:
        columns, starts = [], []
        for worker in workers:
            starts.append(len(columns))
            known = self._workers.get(worker.worker_id)
            if known is None or known.info.epoch != worker.epoch:
                columns.append(0)
            else:
                columns += [_column_of(rank) for rank in known.ranks.values()]
        first = columns[0] if columns else 0
        consecutive = columns == list(range(first, first + len(columns)))
        roster = _Roster(
            workers=workers,
            version=self._version,
            columns=slice(first, first + len(columns))
            if consecutive
            else np.array(columns, np.int64),
            starts=None if len(columns) == len(workers) else np.array(starts, np.int64),
        )
        # Keyed by identity; the roster keeps its tuple alive, so an id is never reused.
        self._rosters.pop(id(workers), None)
        while len(self._rosters) >= _KEPT_ROSTERS:
            del self._rosters[next(iter(self._rosters))]
        self._rosters[id(workers)] = roster
        return roster


def _column_of(rank: _Rank) -> int:
    """Column to read a rank's depth from; column 0 is nobody's."""
    return 0 if rank.stream.state is StreamState.UNCERTAIN else rank.column


def _pick(by_column: np.ndarray, roster: _Roster) -> np.ndarray:
    chosen = by_column[roster.columns]
    if roster.starts is not None:
        chosen = np.maximum.reduceat(chosen, roster.starts)
    return chosen
