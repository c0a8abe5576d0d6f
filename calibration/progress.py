"""Progress of long work: a rich bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_INTERVAL_S = 10.0

Advance = Callable[[int], None]


@contextmanager
def progress(
    label: str,
    total: int,
    *,
    stream: TextIO | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Shows how far a piece of work is.

    Args:
        label: what is being done.
        total: units of work, >= 0.
        stream: where to show it; standard error when None.
        now_s: clock in seconds.

    Yields:
        A function that adds finished units.
    """
    out = sys.stderr if stream is None else stream
    if out.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=out)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda units: bar.advance(task, units)
        return
    done = 0
    started = last = now_s()

    def advance(units: int) -> None:
        nonlocal done, last
        done += units
        now = now_s()
        if done >= total or now - last >= _PLAIN_INTERVAL_S:
            last = now
            print(f"{label}: {done}/{total} ({last - started:.0f} s)", file=out, flush=True)

    yield advance
