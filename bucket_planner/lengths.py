"""Traces in, request lengths out.

Three formats, told apart by the file's name and first line:

* Azure LLM inference trace, `*.csv` with `TIMESTAMP,ContextTokens,GeneratedTokens`;
* Mooncake trace, `*.jsonl` with `timestamp` (ms), `input_length`, `output_length`;
* anything else: one prompt length per line.

A malformed row is an error naming file, line, field and rule; nothing is skipped in silence.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bucket_planner.errors import PlannerConfigError, TraceFormatError

MAX_TOKENS = 1 << 24  # above any context window: a larger number is a misread column

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in file order.

    Attributes:
      name: the file's name.
      prompt_tokens: int64[num_requests].
      arrival_s: float64[num_requests] seconds since the first arrival, or None if not recorded.
      output_tokens: int64[num_requests] generated tokens, or None if not recorded.
    """

    name: str
    prompt_tokens: IntArray
    arrival_s: FloatArray | None = None
    output_tokens: IntArray | None = None

    def __len__(self) -> int:
        return int(self.prompt_tokens.size)

    def slice(self, start: int, stop: int) -> "Trace":
        """Requests `start` to `stop` (exclusive) as a trace of their own."""
        return Trace(
            name=self.name,
            prompt_tokens=self.prompt_tokens[start:stop],
            arrival_s=None if self.arrival_s is None else self.arrival_s[start:stop],
            output_tokens=None if self.output_tokens is None else self.output_tokens[start:stop],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthHistogram:
    """How often each length occurs.

    Attributes:
      tokens: int64[num_lengths] distinct lengths, ascending.
      counts: int64[num_lengths] occurrences of each.
    """

    tokens: IntArray
    counts: IntArray

    @property
    def total_tokens(self) -> int:
        """Sum of all lengths."""
        return int((self.tokens * self.counts).sum())


def histogram(lengths: IntArray) -> LengthHistogram:
    """Counts each distinct length of an int64[num_requests] array."""
    tokens, counts = np.unique(lengths.astype(np.int64), return_counts=True)
    return LengthHistogram(tokens=tokens, counts=counts.astype(np.int64))


def read_trace(path: str | Path) -> Trace:
    """Reads a trace in any of the three formats.

    Raises:
      PlannerConfigError: the file cannot be read or holds no request.
      TraceFormatError: a malformed header or row.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerConfigError("trace", str(path), f"must be readable text ({error})") from error
    if path.suffix == ".csv" or (lines and "ContextTokens" in lines[0]):
        rows = _azure_rows(str(path), lines)
    elif path.suffix in (".jsonl", ".json") or (lines and lines[0].startswith("{")):
        rows = _mooncake_rows(str(path), lines)
    else:
        rows = _plain_rows(str(path), lines)
    table = list(rows)
    if not table:
        raise PlannerConfigError("trace", str(path), "must hold at least one request")
    arrivals, prompts, outputs = zip(*table, strict=True)
    has_arrivals = arrivals[0] is not None
    start = min(arrivals) if has_arrivals else 0.0
    return Trace(
        name=path.name,
        prompt_tokens=np.array(prompts, np.int64),
        arrival_s=np.array(arrivals, np.float64) - start if has_arrivals else None,
        output_tokens=np.array(outputs, np.int64) if has_arrivals else None,
    )


_Row = tuple[float | None, int, int | None]


def _azure_rows(file: str, lines: list[str]) -> Iterator[_Row]:
    header = lines[0].split(",") if lines else []
    columns: dict[str, int] = {}
    for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        if name not in header:
            raise TraceFormatError(file, 1, name, header, "the header must name this column")
        columns[name] = header.index(name)
    for number, row in enumerate(csv.reader(lines[1:]), start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise TraceFormatError(
                file, number, "row", ",".join(row), f"must have {len(header)} columns"
            )
        stamp = row[columns["TIMESTAMP"]]
        try:
            arrival_s = datetime.fromisoformat(stamp).timestamp()
        except ValueError:
            rule = "must be a date and time like 2023-11-16 18:17:03.97"
            raise TraceFormatError(file, number, "TIMESTAMP", stamp, rule) from None
        yield (
            arrival_s,
            _tokens(file, number, "ContextTokens", row[columns["ContextTokens"]], 1),
            _tokens(file, number, "GeneratedTokens", row[columns["GeneratedTokens"]], 0),
        )


def _mooncake_rows(file: str, lines: list[str]) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: Any = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceFormatError(file, number, "row", line[:80], f"bad JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceFormatError(file, number, "row", line[:80], "must be a JSON object")
        stamp = row.get("timestamp")
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or stamp < 0:
            raise TraceFormatError(file, number, "timestamp", stamp, "must be milliseconds >= 0")
        yield (
            stamp / 1e3,
            _tokens(file, number, "input_length", row.get("input_length"), 1),
            _tokens(file, number, "output_length", row.get("output_length"), 0),
        )


def _plain_rows(file: str, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield None, _tokens(file, number, "prompt_tokens", line.strip(), 1), None


def _tokens(file: str, line: int, field: str, value: object, low: int) -> int:
    """Checks one token count: a whole number from `low` to MAX_TOKENS."""
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        number = int(value)
    if number is None or not low <= number <= MAX_TOKENS:
        rule = f"must be a whole number from {low} to {MAX_TOKENS}"
        raise TraceFormatError(file, line, field, value, rule)
    return number
