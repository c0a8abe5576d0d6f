"""Prefix index: lookups over 256 workers, updates, memory, behaviour at its cap.

Where Dynamo's runtime is importable its RadixTree holds the same blocks, is asked the same
prompts in turns with ours, and must give the same answers. A lookup is timed as its user
pays for it: ours returns an int32 array for the workers of a view, theirs a Python dict.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibration.bench.peer import Peer
from calibration.bench.report import BenchOptions, BenchReport, Cell, Table
from serving import native_kernels
from serving.core.worker import Capabilities, Role, WorkerInfo
from serving.fleet.kv_events import BlocksRemoved, BlocksStored, EventBatch
from serving.fleet.prefix_index import PrefixIndex, PrefixIndexConfig

NUM_WORKERS = 256
_PROMPTS = 32
_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Prompts of one shape, and how deep each worker holds them.

    Attributes:
        bar: whether the peer's p50 is a bar here, or only told beside ours.
        prompts: asked in turn, uint64 [depth] each.
        held: blocks of each prompt that worker w holds, int [NUM_WORKERS].
    """

    name: str
    bar: bool
    prompts: list[np.ndarray]
    held: np.ndarray


def run(options: BenchOptions) -> BenchReport:
    """Runs the suite.

    Raises:
        ConfigError: the given peer python does not run the peer.
        AssertionError: an answer is wrong; no figure is worth anything then.
    """
    peer, why_not = Peer.start(Path(__file__).with_name("peer_radix.py"), options.peer_python)
    compiled = native_kernels.load()
    try:
        return _run(options, peer, why_not, compiled)
    finally:
        native_kernels.unload()
        if peer is not None:
            peer.close()


def _run(options: BenchOptions, peer: Peer | None, why_not: str, compiled: bool) -> BenchReport:
    rng = np.random.default_rng(options.seed)
    options.say("index: filling")
    fleet = _Fleet(peer, rng)
    stored = _fill(fleet, rng, 1 if options.quick else 8)
    cases = _cases(rng, 4 if options.quick else _PROMPTS)
    for case in cases:
        fleet.hold(case)
    lookups, missed = _lookups(fleet, cases, 2 if options.quick else 24, options.say)
    options.say("index: updates")
    updates = _updates(fleet, rng, 20 if options.quick else 200)
    options.say("index: at the cap")
    capped = _at_cap(rng, 1 << 14 if options.quick else 1 << 18)
    stats = fleet.index.stats()
    facts: dict[str, Cell] = {
        "workers": NUM_WORKERS,
        "blocks_in_index": stats.num_blocks,
        "peer": "none" if peer is None else f"ai-dynamo-runtime {peer.hello['version']}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "numpy": np.__version__,
        "compiled": "yes" if compiled else "no: numba is not installed",
    }
    return BenchReport(
        suite="index",
        facts=facts,
        tables=(lookups, stored, updates, capped),
        missed=tuple(missed),
        skipped=() if peer is not None else (f"peer RadixTree: {why_not}",),
    )


class _Fleet:
    """Our index and, if there, the peer's, fed alike."""

    def __init__(self, peer: Peer | None, rng: np.random.Generator) -> None:
        self.peer = peer
        self.index = PrefixIndex(PrefixIndexConfig(max_blocks=1 << 20))
        self.workers = tuple(_worker(number) for number in range(NUM_WORKERS))
        self._seq = [0] * NUM_WORKERS
        for worker in self.workers:
            self.index.add_worker(worker)

    def store(self, events: list[tuple[int, np.ndarray]]) -> list[int]:
        """Whole prompts stored by workers in ours; ns per event."""
        spent = []
        for number, hashes in events:
            batch = self.batch(number, BlocksStored(hashes=hashes))
            began = time.perf_counter_ns()
            self.index.apply(batch, 0.0)
            spent.append(time.perf_counter_ns() - began)
        return spent

    def store_peer(self, events: list[tuple[int, np.ndarray]]) -> list[int]:
        """The same in the peer's, a few at a time so that JSON does not fill its memory."""
        spent = []
        for start in range(0, len(events) if self.peer else 0, 16):
            request = [[w, None, hashes.tolist()] for w, hashes in events[start : start + 16]]
            spent += self.ask(op="store", events=request)["ns"]
        return spent

    def ask(self, **request: object) -> dict[str, Any]:
        """Asks the peer."""
        assert self.peer is not None
        return self.peer.ask(**request)

    def batch(self, number: int, event: BlocksStored | BlocksRemoved) -> EventBatch:
        """The next message of a worker."""
        self._seq[number] += 1
        return EventBatch(
            worker_id=self.workers[number].worker_id,
            seq=self._seq[number] - 1,
            events=(event,),
            epoch=0,
        )

    def hold(self, case: _Case) -> None:
        """Gives the workers what the case says, and checks both indexes' answers."""
        events = [
            (number, prompt[:held])
            for prompt in case.prompts
            for number, held in enumerate(case.held.tolist())
            if held
        ]
        self.store(events)
        self.store_peer(events)
        for prompt in case.prompts[:4]:
            answer = self.index.cached_blocks(prompt, self.workers)
            if answer.tolist() != case.held.tolist():
                raise AssertionError(f"{case.name}: {answer.tolist()} is not {case.held.tolist()}")
            if self.peer is not None:
                scores = dict(self.peer.ask(op="scores", hashes=prompt.tolist())["scores"])
                theirs = [scores.get(number, 0) for number in range(NUM_WORKERS)]
                if theirs != case.held.tolist():
                    raise AssertionError(f"{case.name}: the peer answers {theirs}")


def _cases(rng: np.random.Generator, num_prompts: int) -> list[_Case]:
    def make(name: str, depth: int, held: np.ndarray, bar: bool = False) -> _Case:
        prompts = [_hashes(rng, depth) for _ in range(num_prompts)]
        return _Case(name=name, bar=bar, prompts=prompts, held=held)

    def first(holders: int, depth: int) -> np.ndarray:
        return np.where(np.arange(NUM_WORKERS) < holders, depth, 0)

    cases = [
        make(f"depth {depth}, {holders} hold it", depth, first(holders, depth), bar=True)
        for depth in (8, 128)
        for holders in (1, 16, NUM_WORKERS)
    ]
    cases += [
        make("depth 128, nobody holds it", 128, first(0, 0)),
        make("depth 128, 16 hold half of it", 128, first(16, 64)),
        make("depth 128, all hold 4, one 60", 128, np.maximum(first(NUM_WORKERS, 4), first(1, 60))),
        make(
            "depth 128, 16 differ", 128, np.where(first(16, 1), np.arange(NUM_WORKERS) * 7 + 5, 0)
        ),
        make("depth 128, all differ", 128, rng.integers(1, 129, NUM_WORKERS)),
    ]
    return cases


def _fill(fleet: _Fleet, rng: np.random.Generator, prompts_per_worker: int) -> Table:
    """Private prompts of every worker; the store cost and memory come from here."""
    events = [
        (number, _hashes(rng, 128))
        for _ in range(prompts_per_worker)
        for number in range(NUM_WORKERS)
    ]
    before = _rss_bytes()
    ours = fleet.store(events)
    after = _rss_bytes()
    blocks = 128 * len(events)
    stats = fleet.index.stats()
    rows: list[tuple[Cell, ...]] = [
        (
            "ours",
            *_percentiles(ours, 128),
            None if before is None or after is None else (after - before) / blocks,
            stats.num_bytes / stats.max_blocks,
        )
    ]
    if fleet.peer is not None:
        theirs = fleet.store_peer(events)
        hello, now = fleet.peer.hello["rss_bytes"], fleet.ask(op="hello")["rss_bytes"]
        per_block = None if hello is None or now is None else (now - hello) / blocks
        rows.append(("peer", *_percentiles(theirs, 128), per_block, None))
    return Table(
        name=f"stored: {blocks} private blocks in events of 128",
        columns=("index", "p50_us_per_block", "p99_us_per_block", "rss_bytes", "array_bytes"),
        rows=tuple(rows),
        note="rss_bytes: resident memory grown per block; array_bytes: all arrays, cells of the "
        "hash table and predictions included, per block of the cap. The peer's update includes "
        "its JSON",
    )


def _lookups(
    fleet: _Fleet, cases: list[_Case], rounds: int, say: Callable[[str], None]
) -> tuple[Table, list[str]]:
    rows: list[tuple[Cell, ...]] = []
    missed = []
    for case in cases:
        say(f"index: {case.name}")
        lists = [prompt.tolist() for prompt in case.prompts]
        ours: list[int] = []
        theirs: list[int] = []
        # In turns, so that whatever else runs on the machine meets both alike.
        for _ in range(rounds):
            ours += _time_lookups(fleet, case.prompts)
            if fleet.peer is not None:
                theirs += fleet.peer.ask(op="find", prompts=lists, calls=_CALLS)["ns"]
        p50, p99 = _percentiles(ours)
        peer_p50, peer_p99 = _percentiles(theirs) if theirs else (None, None)
        ratio = None if peer_p50 is None else p50 / peer_p50
        rows.append((case.name, p50, p99, peer_p50, peer_p99, ratio))
        if case.bar and ratio is not None and ratio > 1.0:
            missed.append(f"{case.name}: {p50:.2f} us, peer {peer_p50:.2f} us")
    table = Table(
        name=f"lookup of one prompt over {NUM_WORKERS} workers",
        columns=("case", "p50_us", "p99_us", "peer_p50_us", "peer_p99_us", "ratio_p50"),
        rows=tuple(rows),
        note=f"{len(cases[0].prompts)} prompts in turn, {rounds} x {_CALLS} calls each; bar: "
        "ratio <= 1 where 1, 16 and all hold the whole prompt",
    )
    return table, missed


def _time_lookups(fleet: _Fleet, prompts: list[np.ndarray]) -> list[int]:
    lookup, workers, spent = fleet.index.cached_blocks, fleet.workers, []
    for call in range(_CALLS):
        prompt = prompts[call % len(prompts)]
        began = time.perf_counter_ns()
        answer = lookup(prompt, workers)
        spent.append(time.perf_counter_ns() - began)
        del answer
    return spent


def _updates(fleet: _Fleet, rng: np.random.Generator, repeats: int) -> Table:
    """Our own update costs, in messages of several sizes."""
    index, now_s = fleet.index, 1.0
    rows: list[tuple[Cell, ...]] = []
    for size in (1, 8, 64, 512):
        spent: dict[str, list[int]] = {}
        for repeat in range(repeats):
            number = repeat % NUM_WORKERS
            worker_id = fleet.workers[number].worker_id
            hashes = _hashes(rng, size)
            stored = BlocksStored(hashes=hashes)
            removed = BlocksRemoved(hashes=hashes[::-1].copy())
            for name, event in (("stored", stored), ("stored again", stored), ("removed", removed)):
                batch = fleet.batch(number, event)
                began = time.perf_counter_ns()
                index.apply(batch, now_s)
                spent.setdefault(name, []).append(time.perf_counter_ns() - began)
            began = time.perf_counter_ns()
            index.route(worker_id, hashes, now_s)
            spent.setdefault("routed", []).append(time.perf_counter_ns() - began)
            now_s += index.config.approximate_ttl_s
            began = time.perf_counter_ns()
            index.advance(now_s)
            spent.setdefault("expired", []).append(time.perf_counter_ns() - began)
        for name, values in spent.items():
            p50, p99 = _percentiles(values)
            rows.append((f"{name}, {size} blocks", p50, p99, p50 / size))
    return Table(
        name="updates, ours",
        columns=("event", "p50_us", "p99_us", "p50_us_per_block"),
        rows=tuple(rows),
        note="stored and removed are whole messages of new private blocks; routed credits a "
        "prompt at once, expired takes that back",
    )


def _at_cap(rng: np.random.Generator, cap: int) -> Table:
    """Twice the cap goes in: what stays, and what a full index pays per message."""
    index = PrefixIndex(PrefixIndexConfig(max_blocks=cap))
    workers = tuple(_worker(number) for number in range(NUM_WORKERS))
    for worker in workers:
        index.add_worker(worker)
    spent: list[int] = []
    newest: list[np.ndarray] = []
    most = 0
    for step in range(2 * cap // 64):
        hashes = _hashes(rng, 64)
        batch = EventBatch(
            worker_id=workers[step % NUM_WORKERS].worker_id,
            seq=step // NUM_WORKERS,
            events=(BlocksStored(hashes=hashes),),
        )
        began = time.perf_counter_ns()
        index.apply(batch, 0.0)
        spent.append(time.perf_counter_ns() - began)
        newest.append(hashes)
        most = max(most, index.stats().num_blocks)
    half = len(spent) // 2
    # The newest half of what fits must all be there: eviction took the old.
    newest = newest[-half // 2 :]
    kept = sum(int(index.cached_blocks(hashes, workers).max()) for hashes in newest)
    rows: list[tuple[Cell, ...]] = [
        ("below the cap", *_percentiles(spent[:half], 64), None, None),
        ("at the cap", *_percentiles(spent[half:], 64), most, 100.0 * kept / (64 * len(newest))),
    ]
    return Table(
        name=f"behaviour at a cap of {cap} blocks, messages of 64 new blocks",
        columns=("phase", "p50_us_per_block", "p99_us_per_block", "most_blocks", "newest_kept_pct"),
        rows=tuple(rows),
        note="newest_kept_pct: of the youngest half of the cap, blocks still credited",
    )


def _hashes(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.integers(1, 1 << 63, num, dtype=np.uint64)


def _worker(number: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"worker-{number}",
        address=f"127.0.0.1:{number}",
        role=Role.PREFILL,
        pool="pool",
        model="model",
        hardware="hardware",
        capabilities=Capabilities(
            block_size_tokens=16,
            page_size_tokens=16,
            max_num_seqs=64,
            max_context_tokens=1 << 15,
            num_kv_blocks=1 << 15,
        ),
    )


def _percentiles(spent_ns: list[int], per: int = 1) -> tuple[float, float]:
    """p50 and p99 in microseconds, divided by `per`."""
    p50, p99 = np.percentile(spent_ns, (50, 99)) / (1e3 * per)
    return float(p50), float(p99)


def _rss_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
