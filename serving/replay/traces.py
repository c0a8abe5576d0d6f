"""When requests arrive and how long they are: published traces, or drawn processes.

A malformed row is an error that names file, line, field and rule: a trace that is silently
shorter replays another day.
"""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from serving.core.errors import ArtefactError

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_HASH_BLOCK_TOKENS = 512
_MAX_HASH_ID = 1 << 34


class TraceError(ArtefactError):
    """A trace cannot be read.

    Attributes:
        line: 1-based, 0 for the file as a whole.
        field: which field of the line, "" for the line as a whole.
    """

    reason = "BAD_TRACE"

    def __init__(self, path: object, line: int, field: str, rule: str) -> None:
        self.line = line
        self.field = field
        place = f"line {line}" if line else "file"
        super().__init__(path, f"{place}{f', field {field!r}' if field else ''}: {rule}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """N requests by arrival.

    Attributes:
        arrival_s: float64 [N], ascending, from 0.
        prompt_tokens: int64 [N]; 0 where the prompt's own length is to be taken.
        output_tokens: int64 [N]; 0 where the run's fixed length is to be taken.
        hash_ids: int64 [...] ids of the prompts' blocks, end to end, or empty.
        hash_starts: int64 [N + 1].
        block_tokens: tokens per hash id.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    hash_ids: np.ndarray
    hash_starts: np.ndarray
    block_tokens: int = _HASH_BLOCK_TOKENS

    def __len__(self) -> int:
        """N."""
        return len(self.arrival_s)

    def first(self, num: int) -> Arrivals:
        """The first `num` requests."""
        num = min(num, len(self))
        return Arrivals(
            arrival_s=self.arrival_s[:num],
            prompt_tokens=self.prompt_tokens[:num],
            output_tokens=self.output_tokens[:num],
            hash_ids=self.hash_ids[: self.hash_starts[num]],
            hash_starts=self.hash_starts[: num + 1],
            block_tokens=self.block_tokens,
        )

    def scaled(self, factor: float) -> Arrivals:
        """The same requests `factor` times as fast."""
        return Arrivals(
            arrival_s=self.arrival_s / factor,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            hash_ids=self.hash_ids,
            hash_starts=self.hash_starts,
            block_tokens=self.block_tokens,
        )


def read_azure(path: str | Path) -> Arrivals:
    """Azure's LLM inference trace of 2023: TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        TraceError: unreadable, or a malformed row.
    """
    seconds, prompts, outputs = [], [], []
    try:
        with Path(path).open(encoding="utf-8", newline="") as stream:
            reader = csv.reader(stream)
            header = next(reader, [])
            if tuple(header) != _AZURE_COLUMNS:
                raise TraceError(path, 1, "", f"columns must be {','.join(_AZURE_COLUMNS)}")
            for line, row in enumerate(reader, start=2):
                if len(row) != len(_AZURE_COLUMNS):
                    raise TraceError(path, line, "", f"has {len(row)} fields, must have 3")
                seconds.append(_timestamp(path, line, row[0]))
                prompts.append(_count(path, line, "ContextTokens", row[1]))
                outputs.append(_count(path, line, "GeneratedTokens", row[2]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(path, 0, "", f"must be a readable CSV file ({error})") from error
    return _ordered(path, seconds, prompts, outputs, [])


def read_mooncake(path: str | Path, *, rng: np.random.Generator) -> Arrivals:
    """Mooncake's trace: timestamp (ms), input_length, output_length, hash_ids per 512 tokens.

    Rows share ticks of about 3 s; each is moved by a uniform draw inside its tick (the time to
    the next tick), since thousands of prompts at one instant are the recorder's doing.

    Args:
        path: JSON lines.
        rng: draws the moves.

    Raises:
        TraceError: unreadable, or a malformed row.
    """
    ticks, prompts, outputs, hashes = [], [], [], []
    decoder = msgspec.json.Decoder()
    try:
        with Path(path).open("rb") as stream:
            for line, raw in enumerate(stream, start=1):
                try:
                    row = decoder.decode(raw)
                except msgspec.DecodeError as error:
                    raise TraceError(path, line, "", f"must be JSON ({error})") from error
                if not isinstance(row, dict):
                    raise TraceError(path, line, "", "must be a JSON object")
                ticks.append(_count(path, line, "timestamp", row.get("timestamp"), least=0))
                prompts.append(_count(path, line, "input_length", row.get("input_length")))
                outputs.append(_count(path, line, "output_length", row.get("output_length")))
                hashes.append(_hash_ids(path, line, row.get("hash_ids"), prompts[-1]))
    except OSError as error:
        raise TraceError(path, 0, "", f"must be readable ({error})") from error
    return _ordered(path, _spread(np.array(ticks) / 1000.0, rng), prompts, outputs, hashes)


def poisson(num: int, rate_per_s: float, rng: np.random.Generator) -> Arrivals:
    """Independent arrivals at a mean rate."""
    return _drawn(np.cumsum(rng.standard_exponential(num)) / rate_per_s)


def bursty(
    num: int,
    rate_per_s: float,
    rng: np.random.Generator,
    *,
    peak: float = 3.0,
    busy_share: float = 0.2,
    mean_busy_s: float = 5.0,
) -> Arrivals:
    """Poisson arrivals whose rate switches between two levels, the mean kept.

    Args:
        num: N.
        rate_per_s: mean rate.
        rng: every draw.
        peak: busy rate over the mean rate, in [1, 1 / busy_share].
        busy_share: share of time that is busy.
        mean_busy_s: mean length of a busy spell; both kinds are exponential.
    """
    if not 1.0 <= peak <= 1.0 / busy_share:
        raise ValueError(f"{peak=} must lie in [1, {1.0 / busy_share}]")
    quiet = (1.0 - busy_share * peak) / (1.0 - busy_share)
    mean_quiet_s = mean_busy_s * (1.0 - busy_share) / busy_share
    times: list[float] = []
    now_s, busy = 0.0, False
    until_s = float(rng.standard_exponential()) * mean_quiet_s
    while len(times) < num:
        rate = rate_per_s * (peak if busy else quiet)
        gap_s = float(rng.standard_exponential()) / rate if rate > 0 else np.inf
        if now_s + gap_s < until_s:
            now_s += gap_s
            times.append(now_s)
        else:  # memoryless: what is left of the gap starts anew
            now_s, busy = until_s, not busy
            until_s += float(rng.standard_exponential()) * (mean_busy_s if busy else mean_quiet_s)
    return _drawn(np.array(times))


def _drawn(arrival_s: np.ndarray) -> Arrivals:
    num = len(arrival_s)
    return Arrivals(
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=np.zeros(num, np.int64),
        output_tokens=np.zeros(num, np.int64),
        hash_ids=np.zeros(0, np.int64),
        hash_starts=np.zeros(num + 1, np.int64),
    )


def _ordered(
    path: object,
    seconds: list[float] | np.ndarray,
    prompts: list[int],
    outputs: list[int],
    hashes: list[list[int]],
) -> Arrivals:
    arrival_s = np.asarray(seconds, np.float64)
    if not len(arrival_s):
        raise TraceError(path, 0, "", "must hold at least one request")
    order = np.argsort(arrival_s, kind="stable")
    kept = [hashes[i] for i in order] if hashes else [[] for _ in order]
    lengths = np.array([len(ids) for ids in kept], np.int64)
    return Arrivals(
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        prompt_tokens=np.array(prompts, np.int64)[order],
        output_tokens=np.array(outputs, np.int64)[order],
        hash_ids=np.array([i for ids in kept for i in ids], np.int64),
        hash_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _spread(ticks_s: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves each row into its tick: uniform between its time and the next distinct one."""
    if not len(ticks_s):
        return ticks_s
    distinct = np.unique(ticks_s)
    gaps = np.diff(distinct)
    usual_s = float(np.median(gaps)) if len(gaps) else 0.0
    width = np.append(gaps, usual_s)
    return ticks_s + rng.random(len(ticks_s)) * width[np.searchsorted(distinct, ticks_s)]


def _timestamp(path: object, line: int, text: str) -> float:
    """Unix seconds of a wall clock time with up to 7 fractional digits, read as UTC."""
    whole, _, fraction = text.partition(".")
    try:
        moment = datetime.datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
        part = int(fraction) / 10 ** len(fraction) if fraction else 0.0
    except ValueError as error:
        raise TraceError(
            path, line, "TIMESTAMP", f"{text!r} must read YYYY-MM-DD HH:MM:SS.fffffff"
        ) from error
    return moment.replace(tzinfo=datetime.UTC).timestamp() + part


def _count(path: object, line: int, field: str, value: object, *, least: int = 1) -> int:
    if isinstance(value, str) and value.isascii() and value.strip().isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TraceError(path, line, field, f"{value!r} must be a whole number >= {least}")
    return value


def _hash_ids(path: object, line: int, value: object, num_tokens: int) -> list[int]:
    if not isinstance(value, list):
        raise TraceError(path, line, "hash_ids", "must be a list")
    wanted = -(-num_tokens // _HASH_BLOCK_TOKENS)
    if len(value) != wanted:
        raise TraceError(
            path,
            line,
            "hash_ids",
            f"has {len(value)} ids, must have {wanted}: one per {_HASH_BLOCK_TOKENS} tokens",
        )
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < _MAX_HASH_ID:
            raise TraceError(path, line, "hash_ids", f"{item!r} must be a whole number >= 0")
    return value
