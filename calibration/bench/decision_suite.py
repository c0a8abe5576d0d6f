"""A full decision, from token ids to reserved workers, beside Dynamo's SelectionService.

Ours places prefill and decode with every term on: hashing, prefix look-up, step-bucket padding,
hand-over, expert signature (counts to unit vector included) and both reservations. The peer's
`select_and_reserve` hashes, looks up overlap and reserves one worker; a disaggregated deployment
of it asks twice, once for prefill and once for decode, and is asked so too. All are asked in
turns, in batches, with the same prompt lengths and shared halves. Ours is thread CPU time; the
peer works on threads of its own, so its CPU time is its process's, and its wall time stands
beside it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibration.bench.peer import Peer
from calibration.bench.report import BenchOptions, BenchReport, Cell, Table
from serving import native_kernels
from serving.core import native
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
    num_batches = 2 if options.quick else 24
    try:
        for num_workers in FLEETS[:2] if options.quick else FLEETS:
            for name, way in _WAYS.items():
                options.say(f"decision: {num_workers} workers, {name}")
                if way.compiled and not native_kernels.load():
                    continue
                if not way.compiled:
                    native_kernels.unload()
                theirs = peer if way.beside else None
                spent = _in_turns(options, num_workers, way, theirs, num_batches)
                ours = _percentiles(spent.cpu)
                rows.append((num_workers, f"ours, {name}", *ours, None, None))
                for choices, (cpu, wall) in spent.peer.items():
                    cells = (*_percentiles(cpu), *_percentiles(wall))
                    rows.append((num_workers, f"peer, {_CHOICES[choices]}", *cells))
                    half_us = 0.5 * cells[2]
                    if choices == 2 and num_workers <= 64 and ours[0] > half_us:
                        missed.append(
                            f"{num_workers} workers, {name}: p50 {ours[0]:.0f} us CPU, half the "
                            f"peer's wall time for {_CHOICES[choices]} is {half_us:.0f} us"
                        )
                if way.beside and num_workers == FLEETS[-1] and ours[1] > LIMIT_P99_US:
                    missed.append(f"{num_workers} workers, {name}: p99 {ours[1]:.0f} us > 1 ms CPU")
    finally:
        native_kernels.unload()
    table = Table(
        name="a decision from 2,048 token ids",
        columns=("workers", "what", "cpu_p50_us", "cpu_p99_us", "wall_p50_us", "wall_p99_us"),
        rows=tuple(rows),
        note=f"{num_batches} batches of {_BATCH} in turns, the first left out; ours chooses a "
        "prefill and a decode worker; bars: p50 at most half the peer's wall for two workers at 8 "
        "and 64, p99 at most 1 ms of thread CPU at 1,024",
    )
    facts: dict[str, Cell] = {
        "peer": "none" if peer is None else f"ai-dynamo-runtime {peer.hello['version']}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "numpy": np.__version__,
        "numba": "yes" if native.is_available() else "none",
    }
    skipped = () if peer is not None else (f"peer SelectionService: {why_not}",)
    if not native.is_available():
        skipped += ("compiled loops: numba is not installed",)
    return BenchReport(
        suite="decision", facts=facts, tables=(table,), missed=tuple(missed), skipped=skipped
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to decide: over compiled loops or NumPy, beside the peer or not."""

    compiled: bool = True
    beside: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Nanoseconds: our CPU, and the peer's (CPU, wall) by how many choices it made."""

    cpu: list[int]
    peer: dict[int, tuple[list[int], list[int]]]


_CHOICES = {1: "one worker", 2: "two workers"}


def _in_turns(
    options: BenchOptions, num_workers: int, way: _Way, peer: Peer | None, num_batches: int
) -> _Spent:
    """Our decisions in batches, between them the peer's over the same prompts."""
    config = Config(workers=(num_workers,), seed=options.seed, **way.changes)
    spent = _Spent([], {})
    # The peer's fleets live in its process one after the other: one, then two choices.
    for choices in _CHOICES if peer is not None else (0,):
        bench = DecisionBench(config, num_workers, np.random.default_rng(options.seed))
        bench.fill(min(num_workers * config.num_inflight, 50 if options.quick else 1 << 20))
        if peer is not None:
            shape = {"workers": num_workers, "block_size": 16, "keep": 8 * num_workers}
            peer.ask(op="fleet", choices=choices, **shape)
        number = 1 << 30
        for batch in range(num_batches):
            requests = [bench.request(number + i) for i in range(_BATCH)]
            number += _BATCH
            cpu = [sum(bench.decide(request)) for request in requests]
            told = {}
            if peer is not None:
                prompts = [request.token_ids.tolist() for request in requests]
                told = peer.ask(op="decide", prompts=prompts)
            if batch == 0:
                continue  # warms up
            spent.cpu.extend(cpu)
            if told:
                cpu_ns, wall_ns = spent.peer.setdefault(choices, ([], []))
                cpu_ns += told["cpu_ns"]
                wall_ns += told["wall_ns"]
    return spent


_WAYS: dict[str, _Way] = {
    "compiled": _Way(beside=True),
    "NumPy alone": _Way(compiled=False, beside=True),
    "compiled, pairs priced before prefill": _Way(changes={"prefill_policy": "cost_p2c"}),
    "compiled, 48x128 unmasked": _Way(changes={"num_masked": 48}),
}


def _percentiles(spent_ns: list[int]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.array(spent_ns) / 1e3, [50, 99])
    return float(p50), float(p99)
