"""Progress of the demo: one moving line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

_PLAIN_EVERY_S = 10.0


class Progress:
    """Use it as a context manager; `say` may be called from any thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._stage = ""
        self._said_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` of a stage are done; a new stage always shows."""
        text = f"{stage}: {done}/{total}"
        if self._status is not None:
            self._status.update(text)
            return
        now_s = time.monotonic()
        if stage != self._stage or done == total or now_s - self._said_s > _PLAIN_EVERY_S:
            self._stage, self._said_s = stage, now_s
            self._console.print(text)
