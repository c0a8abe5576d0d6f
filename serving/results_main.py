"""Writes the results page of the ELDR replays from their reports: to the screen, or into notes.

In a notes file the page replaces what stands between the two marker lines, so that no figure in
it is older than the reports.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from absl import app, flags

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from serving.core.errors import ArtefactError, ConfigError
from serving.replay.report import SCHEMA_VERSION, Report
from serving.replay.results import PublishedFile
from serving.replay.results_page import page

BEGIN = "<!-- replay results: begin -->"
END = "<!-- replay results: end -->"

_REPORTS = flags.DEFINE_string(
    "reports", None, "Folder of serving.replay_main --suite.", required=True
)
_PUBLISHED = flags.DEFINE_string(
    "published", "configs/replay/eldr/published.yaml", "Published figures to stand beside ours."
)
_NOTES = flags.DEFINE_string("notes", "", "File to rewrite between its markers; prints without.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsConfig:
    """What to write; see the flags of the same names."""

    reports: str
    published: str
    notes: str = ""


def run(config: ResultsConfig) -> list[str]:
    """Makes the page and, with `notes`, writes it there.

    Args:
        config: what to write.

    Returns:
        The page's lines.

    Raises:
        ConfigError, ArtefactError: an input is missing or wrong, named.
    """
    try:
        published = load_yaml(config.published, PublishedFile)
    except PlannerConfigError as error:
        field = f"{config.published}: {error.field}"
        raise ConfigError(field, error.value, error.rule) from error
    lines = page(read_reports(config.reports), published.results)
    if config.notes:
        file = Path(config.notes)
        file.write_text(replaced(file, file.read_text(encoding="utf-8"), lines), encoding="utf-8")
    return lines


def read_reports(folder: str | Path) -> list[Report]:
    """All reports one level below a folder, by name.

    Raises:
        ArtefactError: there is none, or one cannot be read.
    """
    files = sorted(Path(folder).glob("*/report.json"))
    if not files:
        raise ArtefactError(folder, "must hold folders with a report.json")
    reports = []
    for file in files:
        try:
            report = msgspec.json.decode(file.read_bytes(), type=Report)
        except msgspec.DecodeError as error:
            raise ArtefactError(file, f"must be a report of this version ({error})") from error
        if report.schema_version != SCHEMA_VERSION:
            raise ArtefactError(file, f"schema_version must be {SCHEMA_VERSION}")
        reports.append(report)
    return reports


def replaced(file: Path, text: str, lines: list[str]) -> str:
    """A notes file's text with the page between its markers.

    Raises:
        ArtefactError: the markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ArtefactError(file, f"must hold the lines {BEGIN!r} and {END!r} once, in this order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + "\n".join([BEGIN, "", *lines, "", END]) + after


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"results_main: {error}", file=sys.stderr)
        sys.exit(2)


def _main(argv: list[str]) -> None:
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "is unexpected: everything is a --flag")
        lines = run(
            ResultsConfig(reports=_REPORTS.value, published=_PUBLISHED.value, notes=_NOTES.value)
        )
    except (ArtefactError, ConfigError, OSError) as error:
        print(f"results_main: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(lines))


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
