"""What a benchmark suite gives back: tables a person reads and a file a program reads."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

SCHEMA_VERSION = 1

Cell = str | int | float | None


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows under named columns; a unit is part of the column's name.

    Attributes:
        name: of the table.
        columns: names, in printing order.
        rows: one cell per column; None where a figure was not measured.
        note: how to read it.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A suite's result.

    Attributes:
        suite: its name.
        facts: what the figures depend on (sizes, versions, number of cores ...).
        tables: the figures.
        missed: bars that were measured and not reached, in words; () is a pass.
        skipped: what could not be measured here and why.
    """

    suite: str
    facts: dict[str, Cell]
    tables: tuple[Table, ...]
    missed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every suite is given.

    Attributes:
        quick: fewer repeats; checks that the suite works, not a figure to quote.
        seed: of every draw.
        peer_python: python of an environment with the peer's package, "" for this one.
        say: takes a line of progress.
    """

    quick: bool
    seed: int
    peer_python: str
    say: Callable[[str], None]


def render(report: BenchReport) -> str:
    """The report as plain text."""
    lines = [f"suite {report.suite}"]
    lines += [f"  {name}: {_text(value)}" for name, value in report.facts.items()]
    for table in report.tables:
        lines += ["", table.name]
        cells = [table.columns, *(tuple(map(_text, row)) for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            first, *rest = (
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(["", first, *rest]).rstrip())
        if table.note:
            lines.append(f"  ({table.note})")
    lines += ["", *(f"skipped: {text}" for text in report.skipped)]
    lines += [f"missed: {text}" for text in report.missed]
    return "\n".join(lines).rstrip()


def _text(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
