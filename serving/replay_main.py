"""Replays traces or drawn arrivals through the router's own core and compares policies."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serving.core.errors import ArtefactError, ConfigError
from serving.replay.compiled import HAS_NUMBA
from serving.replay.config import ReplayConfig, load_replay, load_suite
from serving.replay.parallel import make_runs, units_of
from serving.replay.report import ReplayRunner, Report, Told, summary

_CONFIG = flags.DEFINE_string("config", "", "Replay file, e.g. configs/replay/speed.yaml.")
_SUITE = flags.DEFINE_string(
    "suite", "", "Instead: a list of replay files, e.g. configs/replay/eldr/all.yaml."
)
_OUT = flags.DEFINE_string(
    "out",
    None,
    "Folder for report.json, decisions.jsonl and finished runs; of a suite, for a folder each.",
    required=True,
)
_QUICK = flags.DEFINE_bool("quick", False, "The file's small set, for a first look and for CI.")
_JOBS = flags.DEFINE_integer("jobs", 0, "Processes; 0 is one for each core.")
_MAX_MINUTES = flags.DEFINE_float(
    "max_minutes", 0.0, "Begin no run after this long and report what is there; 0 runs them all."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayMainConfig:
    """What to replay; see the flags of the same names.

    Raises:
        ConfigError: a field breaks its rule.
    """

    out: str
    config: str = ""
    suite: str = ""
    quick: bool = False
    max_minutes: float = 0.0
    jobs: int = 1

    def __post_init__(self) -> None:
        if bool(self.config) == bool(self.suite):
            raise ConfigError("config", self.config, f"or {self.suite=} must be given, not both")
        if self.jobs < 0:
            raise ConfigError("jobs", self.jobs, "must be >= 0")
        if not 0 <= self.max_minutes < float("inf"):
            raise ConfigError("max_minutes", self.max_minutes, "must be finite and >= 0")
        if Path(self.out).exists() and not Path(self.out).is_dir():
            raise ConfigError("out", self.out, "must be a folder")


def run(config: ReplayMainConfig) -> list[Report]:
    """Replays everything that is missing.

    Args:
        config: what to replay.

    Returns:
        The reports written.

    Raises:
        ConfigError, ArtefactError: an input is wrong, named.
    """
    if not HAS_NUMBA:
        print("replay: numba is not installed (extra 'replay'): steps run slowly", file=sys.stderr)
    out, started_s = Path(config.out), time.monotonic()
    until_s = started_s + 60.0 * config.max_minutes if config.max_minutes else math.inf
    if config.suite:
        replays = load_suite(config.suite, quick=config.quick)
    else:
        replays = [load_replay(config.config, quick=config.quick)]

    def folder_of(replay: ReplayConfig) -> Path:
        return out / replay.name if config.suite else out

    def runner_of(replay: ReplayConfig, may_begin: Callable[[], bool]) -> ReplayRunner:
        return ReplayRunner(replay, folder_of(replay), runs=out / "runs", may_begin=may_begin)

    with _progress(sum(replay.num_runs for replay in replays), started_s) as told:
        units = units_of(replays, folder_of, lambda replay: out / "runs", until_s)
        jobs = min(config.jobs or len(os.sched_getaffinity(0)), len(units))
        if jobs <= 1:
            runners = [runner_of(replay, lambda: time.monotonic() < until_s) for replay in replays]
            for runner in runners:
                runner.on_run(told)
            return [runner.run() for runner in runners]
        make_runs(units, jobs, told)
    # Nothing is left to make but what the time did not suffice for.
    return [runner_of(replay, lambda: False).run() for replay in replays]


@contextmanager
def _progress(total: int, started_s: float) -> Iterator[Told]:
    """Shows each finished run: a bar on a terminal, a line elsewhere."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("replay", total=total)
            yield lambda name, num: bar.update(task, advance=1, description=name)
        return
    done = 0

    def told(name: str, num_requests: int) -> None:
        nonlocal done
        done += 1
        state = f"{num_requests} requests" if num_requests else "kept from before"
        elapsed_s = time.monotonic() - started_s
        print(f"replay: {done}/{total} {name}: {state} ({elapsed_s:.1f} s)", file=sys.stderr)

    yield told


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"replay_main: {error}", file=sys.stderr)
        sys.exit(2)


def _main(argv: list[str]) -> None:
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "is unexpected: everything is a --flag")
        reports = run(
            ReplayMainConfig(
                config=_CONFIG.value,
                suite=_SUITE.value,
                out=_OUT.value,
                quick=_QUICK.value,
                max_minutes=_MAX_MINUTES.value,
                jobs=_JOBS.value,
            )
        )
    except (ArtefactError, ConfigError, OSError) as error:
        print(f"replay_main: {error}", file=sys.stderr)
        sys.exit(2)
    for report in reports:
        for line in summary(report):
            print(line)
        if report.num_missing:
            print(f"{report.name}: {report.num_missing} runs are missing; run again to go on")
        folder = f"{_OUT.value}/{report.name}" if _SUITE.value else _OUT.value
        print(f"report: {folder}/report.json")


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
