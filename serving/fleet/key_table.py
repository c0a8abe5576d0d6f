"""A fixed-capacity hash table from uint64 keys to small ids, kept in three NumPy arrays.

Open addressing with linear probing at a load of at most one half; a deletion re-places the
entries that followed it, so there are no tombstones and no rebuild that would stop the event
loop. Ids are 1..capacity and stay with their key until it is deleted, so callers keep their
own arrays indexed by id; id 0 means "absent". Batches are vectorised: an eight-cell window
per key settles almost every key in one round.

Keys must be well mixed (their low bits choose the home cell).
"""

from __future__ import annotations

import numpy as np

_WIDTH = 8
_WINDOW = np.arange(_WIDTH)


class KeyTable:
    """uint64 key -> id in 1..capacity.

    Attributes:
        capacity: most keys held at once.
        keys: uint64 [capacity + 1]; the key of each id (0 for ids not in use). Read only.
        high_water: largest id ever handed out; ids above it were never in use.
    """

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity < 1 << 30:
            raise ValueError(f"{capacity=} must be in [1, 2**30)")
        self.capacity = capacity
        self.keys = np.zeros(capacity + 1, np.uint64)
        self.high_water = 0
        size = 1 << (2 * capacity - 1).bit_length()
        self._mask = size - 1
        self._key_mask = np.uint64(size - 1)
        self._cells = np.zeros(size, np.int32)
        self._free = np.zeros(capacity, np.int32)
        self._num_free = 0
        # Scalar reads through a memoryview cost a third of NumPy's.
        self._cell_view = self._cells.data
        self._key_view = self.keys.data

    def __len__(self) -> int:
        return self.high_water - self._num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays when every page of them is in use."""
        return self.keys.nbytes + self._cells.nbytes + self._free.nbytes

    def find_one(self, key: int) -> int:
        """Id of one key, 0 when absent."""
        cells, keys, mask = self._cell_view, self._key_view, self._mask
        cell = key & mask
        found = cells[cell]
        while found and keys[found] != key:
            cell = (cell + 1) & mask
            found = cells[cell]
        return found

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Ids of uint64 [K] keys, int32 [K], 0 where absent."""
        ids = np.zeros(len(keys), np.int32)
        home = (keys & self._key_mask).view(np.int64)
        pending = None
        while len(keys):
            window = self._cells.take((home[:, None] + _WINDOW) & self._mask)
            stop = (self.keys.take(window) == keys[:, None]) | (window == 0)
            first = stop.argmax(axis=1)
            rows = np.arange(len(keys))
            found = window[rows, first]
            settled = stop[rows, first]
            if settled.all():
                ids[slice(None) if pending is None else pending] = found
                break
            pending = rows if pending is None else pending
            ids[pending[settled]] = found[settled]
            pending, keys, home = pending[~settled], keys[~settled], home[~settled] + _WIDTH
        return ids

    def insert(self, keys: np.ndarray) -> np.ndarray:
        """Adds uint64 [K] keys, which must be distinct and absent.

        Returns:
            int32 [K] new ids.

        Raises:
            ValueError: the table has no room for K more keys.
        """
        room = self.capacity - len(self)
        if len(keys) > room:
            raise ValueError(f"{len(keys)} keys must be <= the {room=} left")
        reused = min(len(keys), self._num_free)
        fresh = len(keys) - reused
        ids = np.empty(len(keys), np.int32)
        self._num_free -= reused
        ids[:reused] = self._free[self._num_free : self._num_free + reused]
        ids[reused:] = np.arange(self.high_water + 1, self.high_water + 1 + fresh)
        self.high_water += fresh
        self.keys[ids] = keys
        self._place(ids)
        return ids

    def delete(self, ids: np.ndarray) -> None:
        """Forgets int32 [K] ids, which must be distinct and in use."""
        if not len(ids):
            return
        gaps = self._cells_of(ids)
        self._cells[gaps] = 0
        self._place(self._lift_runs(gaps))
        self.keys[ids] = 0
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _place(self, ids: np.ndarray) -> None:
        """Writes ids into the first empty cell at or after their homes."""
        home = (self.keys[ids] & self._key_mask).view(np.int64)
        while len(ids):
            cells = (home[:, None] + _WINDOW) & self._mask
            empty = self._cells.take(cells) == 0
            first = empty.argmax(axis=1)
            rows = np.arange(len(ids))
            target = cells[rows, first]
            fits = empty[rows, first]
            self._cells[target[fits]] = ids[fits]
            # Two ids may have aimed at one cell: the loser sees the other there, tries again.
            lost = self._cells[target] != ids
            home = np.where(fits, home, home + _WIDTH)[lost]
            ids = ids[lost]

    def _cells_of(self, ids: np.ndarray) -> np.ndarray:
        """Cell of each id in use, int64 [K]."""
        where = np.empty(len(ids), np.int64)
        home = (self.keys[ids] & self._key_mask).view(np.int64)
        pending = np.arange(len(ids))
        while len(pending):
            cells = (home[:, None] + _WINDOW) & self._mask
            hit = self._cells.take(cells) == ids[:, None]
            first = hit.argmax(axis=1)
            rows = np.arange(len(ids))
            settled = hit[rows, first]
            where[pending[settled]] = cells[rows, first][settled]
            open_ = ~settled
            pending, ids, home = pending[open_], ids[open_], home[open_] + _WIDTH
        return where

    def _lift_runs(self, gaps: np.ndarray) -> np.ndarray:
        """Takes out the entries between each emptied cell and the next empty one.

        A probe for any of them could cross the gap; placed again, each ends where a probe
        finds it. Runs of different gaps are disjoint: each stops at the next gap.

        Returns:
            int32 ids taken out, distinct.
        """
        lifted = []
        start = gaps + 1
        while len(start):
            cells = (start[:, None] + _WINDOW) & self._mask
            run = np.logical_and.accumulate(self._cells.take(cells) != 0, axis=1)
            lifted.append(cells[run])
            start = start[run[:, -1]] + _WIDTH
        cells = np.concatenate(lifted)
        ids = self._cells[cells]
        self._cells[cells] = 0
        return ids
