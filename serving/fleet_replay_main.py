"""Replays fleets of catalogue hardware and says what a million tokens cost under each policy.

python -m serving.fleet_replay_main --config=configs/replay/fleets/mixed.yaml --out=DIR
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from serving.core.errors import ConfigError
from serving.replay.fleets.config import load_fleet_replay
from serving.replay.fleets.report import FleetReport, run_fleets, summary


def run(config: str, out: str, *, quick: bool = False) -> FleetReport:
    """Runs what is missing of a fleet replay.

    Args:
        config: its file.
        out: folder of the report and of finished runs.
        quick: the file's small set.

    Raises:
        ConfigError: an input is wrong, named.
    """
    replay, folder = load_fleet_replay(config, quick=quick), Path(out)
    if folder.exists() and not folder.is_dir():
        raise ConfigError("--out", out, "must be a folder")
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("fleets", total=None)
            return run_fleets(
                replay,
                folder,
                lambda name, done, total: bar.update(
                    task, completed=done, total=total, description=name
                ),
            )
    began_s = time.monotonic()

    def told(name: str, done: int, total: int) -> None:
        print(
            f"fleets: {done}/{total} {name} ({time.monotonic() - began_s:.0f} s)", file=sys.stderr
        )

    return run_fleets(replay, folder, told)


def _main(argv: Sequence[str]) -> None:
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "is unexpected: everything is a --flag")
        values = flags.FLAGS
        report = run(values.config, values.out, quick=values.quick)
    except (ConfigError, OSError) as error:
        print(f"fleet_replay_main: {error}", file=sys.stderr)
        sys.exit(2)
    for line in summary(report):
        print(line)
    print(f"report: {flags.FLAGS.out}/report.json")


def _parse_flags(argv: list[str]) -> list[str]:
    flags.DEFINE_string("config", None, "Fleet replay file.", required=True)
    flags.DEFINE_string("out", None, "Folder for report.json and finished runs.", required=True)
    flags.DEFINE_bool("quick", False, "The file's small set, for a first look.")
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"fleet_replay_main: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
