"""Replays traces or drawn arrivals through the router's own core and compares policies."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serving.core.errors import ArtefactError, ConfigError
from serving.replay.compiled import HAS_NUMBA
from serving.replay.config import load_replay
from serving.replay.report import ReplayRunner, Report, summary

_CONFIG = flags.DEFINE_string(
    "config", None, "Replay file, e.g. configs/replay/speed.yaml.", required=True
)
_OUT = flags.DEFINE_string(
    "out", None, "Folder for report.json, decisions.jsonl and finished runs.", required=True
)
_QUICK = flags.DEFINE_bool("quick", False, "The file's small set, for a first look and for CI.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayMainConfig:
    """What to replay; see the flags of the same names."""

    config: str
    out: str
    quick: bool = False

    def __post_init__(self) -> None:
        if Path(self.out).exists() and not Path(self.out).is_dir():
            raise ConfigError("out", self.out, "must be a folder")


def run(config: ReplayMainConfig) -> Report:
    """Replays everything that is missing.

    Args:
        config: what to replay.

    Returns:
        The report written.

    Raises:
        ConfigError, ArtefactError: an input is wrong, named.
    """
    replay = load_replay(config.config, quick=config.quick)
    if not HAS_NUMBA:
        print("replay: numba is not installed (extra 'replay'): steps run slowly", file=sys.stderr)
    runner = ReplayRunner(replay, config.out)
    total = runner.num_runs()
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("replay", total=total)
            runner.on_run(lambda name, num: bar.update(task, advance=1, description=name))
            return runner.run()
    started_s, done = time.monotonic(), 0

    def told(name: str, num_requests: int) -> None:
        nonlocal done
        done += 1
        state = f"{num_requests} requests" if num_requests else "kept from before"
        elapsed_s = time.monotonic() - started_s
        print(f"replay: {done}/{total} {name}: {state} ({elapsed_s:.1f} s)", file=sys.stderr)

    runner.on_run(told)
    return runner.run()


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
        report = run(ReplayMainConfig(config=_CONFIG.value, out=_OUT.value, quick=_QUICK.value))
    except (ArtefactError, ConfigError, OSError) as error:
        print(f"replay_main: {error}", file=sys.stderr)
        sys.exit(2)
    for line in summary(report):
        print(line)
    print(f"report: {_OUT.value}/report.json")


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
