"""How deep each column's cache reaches into a prompt, as a compiled loop.

The store's own look-up (prefix_store.py) is the definition: it probes a few rows by binary search,
for each of which the interpreter pays more than the machine. `DEPTHS` does the same over the
arrays themselves, once it is compiled.
"""

from __future__ import annotations

import numpy as np

from serving.core.native import Kernel


def _depths_loop(hashes, cells, keys, rows):
    """Leading blocks each column reaches.

    Args:
        hashes: uint64 [n], chained.
        cells: int32 [2**b], ids by home cell.
        keys: uint64 [capacity + 1], keys by id.
        rows: uint64 [capacity + 1, words], columns that reach a block; shrinking along a prompt.

    Returns:
        int32 [64 * words].
    """
    words = rows.shape[1]
    mask, one = np.uint64(cells.shape[0] - 1), np.uint64(1)
    reached = np.zeros(64 * words, np.int32)
    # Stretches of the prompt still to be looked at: (first block, its row), (last block, its row).
    first_at, last_at = np.empty(64, np.int64), np.empty(64, np.int64)
    first_row, last_row = np.empty(64, np.int64), np.empty(64, np.int64)
    first_at[0], first_row[0], last_at[0], last_row[0] = -1, -1, hashes.shape[0], 0
    num_open = 1
    while num_open > 0:
        num_open -= 1
        low, low_row = first_at[num_open], first_row[num_open]
        high, high_row = last_at[num_open], last_row[num_open]
        if high - low <= 1:
            # Who stops between two neighbours stops after the first.
            if low >= 0:
                for word in range(words):
                    stops = rows[low_row, word] & ~rows[high_row, word]
                    column = 64 * word
                    while stops:
                        if stops & one:
                            reached[column] = low + 1
                        stops >>= one
                        column += 1
            continue
        middle = 0 if low < 0 else (low + high) // 2
        key = hashes[middle]
        cell = key & mask
        row = cells[cell]
        while row != 0 and keys[row] != key:
            cell = (cell + one) & mask
            row = cells[cell]
        like_low, like_high = low_row >= 0, True
        for word in range(words):
            if low_row >= 0 and rows[row, word] != rows[low_row, word]:
                like_low = False
            if rows[row, word] != rows[high_row, word]:
                like_high = False
        if not like_high:
            first_at[num_open], first_row[num_open] = middle, row
            last_at[num_open], last_row[num_open] = high, high_row
            num_open += 1
        if not like_low and low >= 0:
            first_at[num_open], first_row[num_open] = low, low_row
            last_at[num_open], last_row[num_open] = middle, row
            num_open += 1
    return reached


DEPTHS = Kernel(None, _depths_loop, "i4[::1](u8[::1],i4[::1],u8[::1],u8[:,::1])")
