"""Makes the runs of several replays in several processes; the reports are put together afterwards.

A run is a function of its inputs and its seed, so it does not matter which process makes it.
Processes meet in the folder of finished runs alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from serving.core.errors import EldrError
from serving.replay.config import ReplayConfig
from serving.replay.report import ReplayRunner, Told


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A cell and seed of one replay.

    Attributes:
        replay: whose cell it is.
        cell, seed: which runs.
        out: folder of the replay's report.
        runs: folder of finished runs.
        until_s: no run begins after this time on the monotonic clock; infinite for none.
    """

    replay: ReplayConfig
    cell: str
    seed: int
    out: str
    runs: str
    until_s: float


def units_of(
    replays: Sequence[ReplayConfig],
    out_of: Callable[[ReplayConfig], Path],
    runs_of: Callable[[ReplayConfig], Path],
    until_s: float,
) -> list[Unit]:
    """All units of some replays, in their order: whole seeds of every cell come first."""
    return [
        Unit(
            replay=replay,
            cell=cell.name,
            seed=seed,
            out=str(out_of(replay)),
            runs=str(runs_of(replay)),
            until_s=until_s,
        )
        for replay in replays
        for seed in replay.seeds
        for cell in replay.cells
        if seed in cell.seeds
    ]


def make_runs(units: Sequence[Unit], num_jobs: int, told: Told) -> None:
    """Makes what is missing of the units.

    Args:
        units: what to make; neighbours share banks, so processes take them in order.
        num_jobs: processes.
        told: told of each run as `ReplayRunner.on_run` is, when its unit has ended.

    Raises:
        ConfigError, ArtefactError: an input is wrong, named; units not begun are dropped.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_forget) as pool:
        waiting = [pool.submit(_tried, unit) for unit in units]
        try:
            for done in as_completed(waiting):
                made = done.result()
                if made is None:  # what is wrong is found again here, where it can be raised whole
                    made = _make(units[waiting.index(done)])
                for name, num_requests in made:
                    told(name, num_requests)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Kept:
    """The last replay's runner of this process: it holds a bank, and so there is one."""

    runner: ReplayRunner | None = None
    name = ""


def _forget() -> None:
    _Kept.runner, _Kept.name = None, ""


def _tried(unit: Unit) -> list[tuple[str, int]] | None:
    """A unit's runs; None when something is wrong with it (such errors do not pickle)."""
    try:
        return _make(unit)
    except EldrError:
        return None


def _make(unit: Unit) -> list[tuple[str, int]]:
    runner = _Kept.runner
    if runner is None or _Kept.name != unit.replay.name:
        runner = ReplayRunner(
            unit.replay,
            unit.out,
            runs=unit.runs,
            may_begin=lambda: time.monotonic() < unit.until_s,
        )
        _Kept.runner, _Kept.name = runner, unit.replay.name
    seen: list[tuple[str, int]] = []
    runner.on_run(lambda name, num: seen.append((name, num)))
    runner.fill(unit.cell, unit.seed)
    return seen
