"""A full decision, from token ids to reserved workers, beside Dynamo's SelectionService.

Ours places prefill and decode with every term on: hashing, prefix look-up, step-bucket padding,
hand-over, expert signature (counts to unit vector included) and both reservations. The peer's
`select_and_reserve` hashes, looks up overlap and reserves one worker. Both are asked in turns, in
batches, with the same prompt lengths and shared halves. Ours is thread CPU time; the peer works
on threads of its own, so its CPU time is its process's, and its wall time stands beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from calibration.bench.peer import Peer
from calibration.bench.report import BenchOptions, BenchReport, Cell, Table
from serving.decision_bench import Config, DecisionBench

FLEETS = (8, 64, 1024)
LIMIT_P99_US = 1000.0
_BATCH = 25


def run(options: BenchOptions) -> BenchReport:
    """Runs the suite.

    Raises:
        ConfigError: the given peer python does not run the peer.
    """
    script = Path(__file__).with_name("peer_selection.py")
    peer, why_not = Peer.start(script, options.peer_python)
    try:
        return _run(options, peer, why_not)
    finally:
        if peer is not None:
            peer.close()


def _run(options: BenchOptions, peer: Peer | None, why_not: str) -> BenchReport:
    rows: list[tuple[Cell, ...]] = []
    missed: list[str] = []
    batches = 2 if options.quick else 24
    for num_workers in FLEETS[:2] if options.quick else FLEETS:
        peer_wall: list[int] = []
        peer_cpu: list[int] = []
        for name, changes in _WAYS.items():
            options.say(f"decision: {num_workers} workers, {name}")
            config = Config(workers=(num_workers,), seed=options.seed, **changes)
            bench = DecisionBench(config, num_workers, np.random.default_rng(options.seed))
            bench.fill(min(num_workers * config.num_inflight, 50 if options.quick else 1 << 20))
            theirs = peer if name == _MAIN else None
            if theirs is not None:
                theirs.ask(op="fleet", workers=num_workers, block_size=16, keep=8 * num_workers)
            cpu: list[int] = []
            number = 1 << 30
            for _ in range(batches):
                requests = [bench.request(number + i) for i in range(_BATCH)]
                number += _BATCH
                cpu += [sum(bench.decide(request)) for request in requests]
                if theirs is not None:
                    prompts = [request.token_ids.tolist() for request in requests]
                    told = theirs.ask(op="decide", prompts=prompts)
                    peer_wall += told["wall_ns"]
                    peer_cpu += told["cpu_ns"]
            skip = _BATCH  # the first batch warms up
            rows.append((num_workers, f"ours, {name}", *_percentiles(cpu[skip:]), None, None))
            if name == _MAIN:
                ours = _percentiles(cpu[skip:])
                if peer_cpu:
                    cells = (*_percentiles(peer_cpu[skip:]), *_percentiles(peer_wall[skip:]))
                    rows.append((num_workers, "peer, one worker", *cells))
                    half = 0.5 * cells[2]
                    if num_workers <= 64 and ours[0] > half:
                        missed.append(
                            f"{num_workers} workers: p50 {ours[0]:.0f} us CPU, half the peer's "
                            f"wall time is {half:.0f} us"
                        )
                if num_workers == FLEETS[-1] and ours[1] > LIMIT_P99_US:
                    missed.append(f"{num_workers} workers: p99 {ours[1]:.0f} us > 1 ms CPU")
    table = Table(
        name="a decision from 2,048 token ids",
        columns=("workers", "what", "cpu_p50_us", "cpu_p99_us", "wall_p50_us", "wall_p99_us"),
        rows=tuple(rows),
        note=f"{batches} batches of {_BATCH} in turns, the first left out; ours chooses two "
        "workers, the peer one; bars: p50 at most half the peer's wall at 8 and 64 workers, p99 "
        "at most 1 ms of thread CPU at 1,024",
    )
    facts: dict[str, Cell] = {
        "peer": "none" if peer is None else f"ai-dynamo-runtime {peer.hello['version']}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "numpy": np.__version__,
    }
    return BenchReport(
        suite="decision",
        facts=facts,
        tables=(table,),
        missed=tuple(missed),
        skipped=() if peer is not None else (f"peer SelectionService: {why_not}",),
    )


_MAIN = "48x128 masked to 12 layers"
_WAYS: dict[str, dict] = {
    _MAIN: {},
    "pairs priced before prefill": {"prefill_policy": "cost_p2c"},
    "48x128 unmasked": {"num_masked": 48},
}


def _percentiles(spent_ns: list[int]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.array(spent_ns) / 1e3, [50, 99])
    return float(p50), float(p99)
