"""The decision log on disk: JSON lines, written off the decision path.

`FileDecisionLog` takes lines on the loop and encodes and writes them in a thread of its own.
Its buffer is bounded: when the disk cannot follow, new lines are dropped and counted, since a
slow disk must never slow a decision or eat the memory. `close` writes what is buffered.

`read_lines` reads a log back; lines it cannot understand are counted, not fatal, so that a log
cut short by a crash, or written by a newer version, still answers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from serving.core.decision import LogLine, decode_line, encode_line
from serving.core.errors import ConfigError


class FileDecisionLog:
    """A `DecisionSink` that appends to a file.

    Args:
        path: the file; its folder is made. Lines are appended to what is there.
        max_buffered: lines waiting for the disk at most.
        flush_s: longest time a line waits in the buffer.

    Attributes:
        num_written: lines that reached the file.
        num_dropped: lines lost because the buffer was full or the disk refused them.

    Raises:
        ConfigError: the file cannot be opened for appending.
    """

    def __init__(
        self, path: str | Path, *, max_buffered: int = 65_536, flush_s: float = 0.2
    ) -> None:
        if max_buffered < 1:
            raise ValueError(f"{max_buffered=} must be >= 1")
        if not flush_s > 0:
            raise ValueError(f"{flush_s=} must be > 0")
        self.path = Path(path)
        self.num_written = 0
        self.num_dropped = 0
        self._max_buffered = max_buffered
        self._flush_s = flush_s
        self._buffer: deque[LogLine] = deque()
        self._wake = threading.Event()
        self._closing = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("ab")
        except OSError as error:
            raise ConfigError("decision_log", str(path), f"must be writable ({error})") from error
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    def write(self, line: LogLine) -> None:
        """Takes one line; never blocks, never raises."""
        if self._closing or len(self._buffer) >= self._max_buffered:
            self.num_dropped += 1
            return
        self._buffer.append(line)

    def close(self) -> None:
        """Writes what is buffered and closes the file; again is harmless."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._file.close()

    def __enter__(self) -> FileDecisionLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._flush_s)
            self._drain()
        self._drain()

    def _drain(self) -> None:
        lines = [self._buffer.popleft() for _ in range(len(self._buffer))]
        if not lines:
            return
        try:
            self._file.write(b"".join(map(encode_line, lines)))
            self._file.flush()
        except OSError:
            # A full disk loses lines, counted like those a slow one loses.
            self.num_dropped += len(lines)
        else:
            self.num_written += len(lines)


@dataclass(slots=True)
class ReadCounters:
    """What a reader met.

    Attributes:
        num_lines: lines understood.
        num_skipped: lines it could not understand.
    """

    num_lines: int = 0
    num_skipped: int = 0


def read_lines(path: str | Path, counters: ReadCounters | None = None) -> Iterator[LogLine]:
    """The lines of a decision log, oldest first.

    Args:
        path: the file.
        counters: filled while reading.

    Raises:
        ConfigError: the file cannot be read.
    """
    counters = counters or ReadCounters()
    try:
        with Path(path).open("rb") as file:
            for raw in file:
                try:
                    line = decode_line(raw)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    counters.num_skipped += 1
                    continue
                counters.num_lines += 1
                yield line
    except OSError as error:
        raise ConfigError("log", str(path), f"must be a readable file ({error})") from error
