"""Blocks a column should hold because we routed a prompt there: credited until they expire.

One pair per (block, column). A pair ends when the engine confirms or drops the block, when
it has not been routed again for the column's time to live, or when the column (or the whole
table) is over its number of pairs: then the least recently routed pair goes, deepest block
of a prompt first. Pairs are rows of arrays; each column has a log of its pairs in routing
order, so that nothing is ever searched for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from serving.fleet.key_table import KeyTable

_MIX = np.uint64(0x9E3779B97F4A7C15)
_COLUMN_SHIFT = np.uint64(32)
_FIRST_LOG = 64
_NEARLY = 1.0 - 1.0 / 16.0

_IsCurrent = Callable[[np.ndarray, np.ndarray], np.ndarray]


class PredictedBlocks:
    """Pairs of (block, column) with their last routing time.

    Attributes:
        num_pairs: int64 [columns], pairs per column.
        next_expiry_s: monotonic seconds before which no pair expires.
    """

    def __init__(self, capacity: int, num_blocks: int) -> None:
        self.num_pairs = np.zeros(1, np.int64)
        self.next_expiry_s = math.inf
        self._pairs = KeyTable(capacity)
        self._block = np.zeros(capacity + 1, np.int32)
        self._column = np.zeros(capacity + 1, np.int32)
        self._routed_s = np.zeros(capacity + 1, np.float64)
        self._next = np.zeros(capacity + 1, np.int32)
        self._previous = np.zeros(capacity + 1, np.int32)
        self._first = np.zeros(num_blocks + 1, np.int32)
        self._first_view = self._first.data
        self._logs: list[_Log] = [_Log()]
        self._limit = np.zeros(1, np.int64)
        self._ttl_s = np.zeros(1, np.float64)
        self._oldest_s = np.full(1, math.inf)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays when every page of them is in use."""
        arrays = (self._block, self._column, self._routed_s, self._next, self._previous)
        logs = sum(log.pairs.nbytes + log.routed_s.nbytes for log in self._logs)
        return self._pairs.num_bytes + sum(a.nbytes for a in (*arrays, self._first)) + logs

    def grow(self, num_columns: int) -> None:
        """Makes room for columns up to `num_columns` - 1."""
        more = num_columns - len(self._logs)
        if more > 0:
            self._logs += [_Log() for _ in range(more)]
            self.num_pairs = np.append(self.num_pairs, np.zeros(more, np.int64))
            self._limit = np.append(self._limit, np.zeros(more, np.int64))
            self._ttl_s = np.append(self._ttl_s, np.zeros(more))
            self._oldest_s = np.append(self._oldest_s, np.full(more, math.inf))

    def configure(self, column: int, *, ttl_s: float, limit: int) -> None:
        """Sets a column's time to live and its largest number of pairs."""
        self._ttl_s[column] = ttl_s
        self._limit[column] = limit
        self._set_oldest(column)

    def limit(self, column: int) -> int:
        """Most pairs a column may have."""
        return min(int(self._limit[column]), self._pairs.capacity)

    def any(self, blocks: np.ndarray) -> np.ndarray:
        """Whether any column is predicted to hold each block, bool [K]."""
        return self._first[blocks] > 0

    def any_one(self, block: int) -> bool:
        """Whether any column is predicted to hold a block."""
        return self._first_view[block] > 0

    def test(self, blocks: np.ndarray, column: int) -> np.ndarray:
        """Whether `column` is predicted to hold each block, bool [K]."""
        found = np.zeros(len(blocks), bool)
        some = self.any(blocks)
        if some.any():
            found[some] = self._pairs.find(_keys(blocks[some], column)) > 0
        return found

    def add(self, column: int, path: np.ndarray, now_s: float) -> list[tuple[int, np.ndarray]]:
        """Predicts that `column` holds `path` (int32 blocks of one prompt, first block first).

        Known pairs are as young as new ones afterwards. No more than the column's limit of
        the path is taken.

        Returns:
            (column, blocks) whose pairs were given up to make room.
        """
        path = path[: self.limit(column)]
        if not len(path):
            return []
        keys = _keys(path, column)
        pairs = self._pairs.find(keys)
        new = pairs == 0
        self._routed_s[pairs[~new]] = now_s
        num_new = int(np.count_nonzero(new))
        given_up = self._make_room(column, num_new, len(path) - num_new)
        if num_new:
            pairs[new] = self._pairs.insert(keys[new])
            self._attach(column, pairs[new], path[new], now_s)
        log = self._logs[column]
        log.append(pairs[::-1], now_s, lambda p, t: self._is_current(column, p, t))
        self._set_oldest(column)
        return given_up

    def remove(self, column: int, blocks: np.ndarray) -> None:
        """Ends the pairs of `column` with distinct `blocks`, where there are any."""
        some = blocks[self.any(blocks)]
        if len(some):
            pairs = self._pairs.find(_keys(some, column))
            self._end(pairs[pairs > 0])

    def remove_column(self, column: int) -> np.ndarray:
        """Ends all pairs of a column; returns their blocks."""
        blocks = self._take_oldest(column, int(self.num_pairs[column]))
        self._logs[column] = _Log()
        self._set_oldest(column)
        return blocks

    def remove_blocks(self, blocks: np.ndarray) -> None:
        """Ends all pairs of distinct blocks, of every column."""
        while True:
            heads = self._first[blocks]
            heads = heads[heads > 0]
            if not len(heads):
                return
            self._end(heads)

    def expire(self, now_s: float, *, max_columns: int) -> list[tuple[int, np.ndarray]]:
        """Ends every pair whose time is up, in at most so many columns.

        With them go the column's pairs whose time is up within a sixteenth of it: ending a few
        prompts at once costs hardly more than ending one. `next_expiry_s` stays in the past when
        more wait.

        Returns:
            (column, blocks) of the ended pairs.
        """
        ended = []
        due = (self._oldest_s + self._ttl_s <= now_s).nonzero()[0]
        for column in due[:max_columns].tolist():
            log = self._logs[column]
            pairs = self._current(column, *log.pop_until(now_s - _NEARLY * self._ttl_s[column]))
            ended.append((column, self._block[pairs]))
            self._end(pairs)
            self._set_oldest(column)
        return ended

    def _make_room(
        self, column: int, num_new: int, num_routed_again: int
    ) -> list[tuple[int, np.ndarray]]:
        """Gives up old pairs; those routed again just now are not in the logs to be taken."""
        given_up = []
        over = int(self.num_pairs[column]) + num_new - int(self._limit[column])
        if over > 0:
            given_up.append((column, self._take_oldest(column, over)))
        over = len(self._pairs) + num_new - self._pairs.capacity
        spare = self.num_pairs.copy()
        spare[column] -= num_routed_again
        while over > 0:
            # The largest column pays, so that one busy worker cannot push out the others.
            victim = int(spare.argmax())
            blocks = self._take_oldest(victim, min(over, int(spare[victim])))
            spare[victim] -= len(blocks)
            over -= len(blocks)
            given_up.append((victim, blocks))
        return given_up

    def _take_oldest(self, column: int, num: int) -> np.ndarray:
        log = self._logs[column]
        taken = []
        while num > 0 and len(log):
            pairs = self._current(column, *log.pop(num))
            taken.append(self._block[pairs])
            self._end(pairs)
            num -= len(pairs)
        self._set_oldest(column)
        return np.concatenate(taken) if taken else np.empty(0, np.int32)

    def _is_current(self, column: int, pairs: np.ndarray, routed_s: np.ndarray) -> np.ndarray:
        """Whether log entries still speak for their pair: not ended, not routed again."""
        return (self._column[pairs] == column) & (self._routed_s[pairs] == routed_s)

    def _current(self, column: int, pairs: np.ndarray, routed_s: np.ndarray) -> np.ndarray:
        return np.unique(pairs[self._is_current(column, pairs, routed_s)])

    def _attach(self, column: int, pairs: np.ndarray, blocks: np.ndarray, now_s: float) -> None:
        self._block[pairs] = blocks
        self._column[pairs] = column
        self._routed_s[pairs] = now_s
        heads = self._first[blocks]
        self._next[pairs] = heads
        self._previous[pairs] = 0
        self._previous[heads] = pairs
        self._first[blocks] = pairs
        self.num_pairs[column] += len(pairs)

    def _end(self, pairs: np.ndarray) -> None:
        """Ends distinct pairs of distinct blocks."""
        if not len(pairs):
            return
        before, after = self._previous[pairs], self._next[pairs]
        inner = before > 0
        self._next[before[inner]] = after[inner]
        self._first[self._block[pairs[~inner]]] = after[~inner]
        self._previous[after] = before
        np.subtract.at(self.num_pairs, self._column[pairs], 1)
        self._column[pairs] = 0
        self._pairs.delete(pairs)

    def _set_oldest(self, column: int) -> None:
        self._oldest_s[column] = self._logs[column].oldest_s()
        self.next_expiry_s = float((self._oldest_s + self._ttl_s).min())


class _Log:
    """A column's pairs in routing order; entries of pairs routed again are stale."""

    def __init__(self) -> None:
        self.pairs = np.empty(0, np.int32)
        self.routed_s = np.empty(0, np.float64)
        self.start = self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    def oldest_s(self) -> float:
        return float(self.routed_s[self.start]) if len(self) else math.inf

    def append(self, pairs: np.ndarray, now_s: float, is_current: _IsCurrent) -> None:
        if self.end + len(pairs) > len(self.pairs):
            self._make_room(len(pairs), is_current)
        end = self.end + len(pairs)
        self.pairs[self.end : end] = pairs
        self.routed_s[self.end : end] = now_s
        self.end = end

    def pop(self, num: int) -> tuple[np.ndarray, np.ndarray]:
        upto = min(self.start + num, self.end)
        taken = self.pairs[self.start : upto], self.routed_s[self.start : upto]
        self.start = upto
        return taken

    def pop_until(self, routed_s: float) -> tuple[np.ndarray, np.ndarray]:
        times = self.routed_s[self.start : self.end]
        return self.pop(int(np.searchsorted(times, routed_s, side="right")))

    def _make_room(self, num: int, is_current: _IsCurrent) -> None:
        """Drops stale entries; grows when more than half would be in use."""
        pairs = self.pairs[self.start : self.end]
        routed_s = self.routed_s[self.start : self.end]
        live = np.flatnonzero(is_current(pairs, routed_s))[::-1]
        # Routed twice at one instant: the later entry is the one to keep.
        live = np.sort(live[np.unique(pairs[live], return_index=True)[1]])
        pairs, routed_s = pairs[live], routed_s[live]
        size = max(len(self.pairs), _FIRST_LOG)
        while size < 2 * (len(pairs) + num):
            size *= 2
        self.pairs, self.routed_s = np.empty(size, np.int32), np.empty(size, np.float64)
        self.pairs[: len(pairs)], self.routed_s[: len(pairs)] = pairs, routed_s
        self.start, self.end = 0, len(pairs)


def _keys(blocks: np.ndarray, column: int) -> np.ndarray:
    """Well mixed uint64 keys, one-to-one with (block, column)."""
    keys = blocks.astype(np.uint64) | np.uint64(column) << _COLUMN_SHIFT
    keys *= _MIX
    keys ^= keys >> _COLUMN_SHIFT
    return keys
