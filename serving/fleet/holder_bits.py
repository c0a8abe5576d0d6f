"""One bit per (block, column): which columns hold a block.

A column is one cache (a worker, or one data-parallel rank of it); a block's row is a few
64-bit words.
"""

from __future__ import annotations

import numpy as np

WORD_BITS = 64
_WORD = (1 << WORD_BITS) - 1


class HolderBits:
    """Bit rows of blocks.

    Attributes:
        rows: uint64 [num_rows, num_words]; bit c % 64 of word c // 64 is column c.
    """

    def __init__(self, num_rows: int, num_words: int) -> None:
        self.rows = np.zeros((num_rows, num_words), np.uint64)
        self._attach()

    def _attach(self) -> None:
        self._num_words = self.rows.shape[1]
        self._flat = self.rows.reshape(-1)
        self.bytes = self.rows.view(np.uint8)
        # Slices of a memoryview are the cheapest way to compare whole rows, and its items
        # the cheapest way to touch one word.
        self.view = self.bytes.reshape(-1).data
        self._words = self._flat.data
        self.row_bytes = self._num_words * (WORD_BITS // 8)

    def widen(self, num_words: int, used_rows: int) -> None:
        """Makes room for more columns; rows from `used_rows` on hold nothing."""
        rows = np.zeros((len(self.rows), num_words), np.uint64)
        rows[:used_rows, : self._num_words] = self.rows[:used_rows]
        self.rows = rows
        self._attach()

    def test(self, ids: np.ndarray, column: int) -> np.ndarray:
        """Whether each block's row has the column's bit, bool [K]."""
        return np.not_equal(self._flat.take(self._cells(ids, column)) & _bit(column), 0)

    def set(self, ids: np.ndarray, column: int) -> None:
        """Sets the column's bit in the rows of distinct ids."""
        self._flat[self._cells(ids, column)] |= _bit(column)

    def clear(self, ids: np.ndarray, column: int) -> None:
        """Clears the column's bit in the rows of distinct ids."""
        self._flat[self._cells(ids, column)] &= ~_bit(column)

    def test_one(self, block: int, column: int) -> bool:
        """Whether a block's row has the column's bit."""
        word = self._words[block * self._num_words + column // WORD_BITS]
        return bool(word >> column % WORD_BITS & 1)

    def set_one(self, block: int, column: int) -> None:
        """Sets one bit."""
        self._words[block * self._num_words + column // WORD_BITS] |= 1 << column % WORD_BITS

    def clear_one(self, block: int, column: int) -> None:
        """Clears one bit."""
        cell, bit = block * self._num_words + column // WORD_BITS, 1 << column % WORD_BITS
        self._words[cell] &= ~bit & _WORD

    def any_one(self, block: int) -> bool:
        """Whether any column holds a block."""
        at = block * self._num_words
        return any(self._words[at : at + self._num_words])

    def wipe_one(self, block: int) -> None:
        """Clears one row."""
        for cell in range(block * self._num_words, (block + 1) * self._num_words):
            self._words[cell] = 0

    def any(self, ids: np.ndarray) -> np.ndarray:
        """Whether any column holds each block, bool [K]."""
        return np.any(self.rows.take(ids, axis=0), axis=1)

    def wipe(self, ids: np.ndarray) -> None:
        """Clears whole rows."""
        self.rows[ids] = 0

    def _cells(self, ids: np.ndarray, column: int) -> np.ndarray:
        return np.multiply(ids, self._num_words, dtype=np.int64) + column // WORD_BITS


def _bit(column: int) -> np.uint64:
    return np.uint64(1 << column % WORD_BITS)
