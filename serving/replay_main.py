"""Replays traces or drawn arrivals through the router's own core and compares policies."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serving.core.errors import ArtefactError, ConfigError
from serving.replay.compiled import HAS_NUMBA
from serving.replay.config import load_replay, load_suite
from serving.replay.report import ReplayRunner, Report, summary

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

    def __post_init__(self) -> None:
        if bool(self.config) == bool(self.suite):
            raise ConfigError("config", self.config, f"or {self.suite=} must be given, not both")
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

    def may_begin() -> bool:
        limit_s = 60.0 * config.max_minutes
        return not limit_s or time.monotonic() - started_s < limit_s

    if config.suite:
        runners = [
            ReplayRunner(replay, out / replay.name, runs=out / "runs", may_begin=may_begin)
            for replay in load_suite(config.suite, quick=config.quick)
        ]
    else:
        replay = load_replay(config.config, quick=config.quick)
        runners = [ReplayRunner(replay, out, may_begin=may_begin)]
    total = sum(runner.num_runs() for runner in runners)
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("replay", total=total)
            return _run_all(
                runners, lambda name, num: bar.update(task, advance=1, description=name)
            )
    done = 0

    def told(name: str, num_requests: int) -> None:
        nonlocal done
        done += 1
        state = f"{num_requests} requests" if num_requests else "kept from before"
        elapsed_s = time.monotonic() - started_s
        print(f"replay: {done}/{total} {name}: {state} ({elapsed_s:.1f} s)", file=sys.stderr)

    return _run_all(runners, told)


def _run_all(runners: list[ReplayRunner], told: Callable[[str, int], None]) -> list[Report]:
    reports = []
    for runner in runners:
        runner.on_run(told)
        reports.append(runner.run())
    return reports


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
