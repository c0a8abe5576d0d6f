"""A fixed-capacity hash table from uint64 keys to small ids, kept in three NumPy arrays.

Open addressing with linear probing at a load of at most one half; a deletion closes its gap,
so there are no tombstones and no rebuild that would stop the event loop. Ids are 1..capacity
and stay with their key until it is deleted, so callers keep their own arrays indexed by id;
id 0 means "absent".

Batches look at every key's home cell at once, which settles most; of the rest, many take
eight cells at a time and few are walked in Python, which is cheaper than one NumPy call for
a handful. Keys must be well mixed (their low bits choose the home cell).
"""

from __future__ import annotations

import numpy as np

_WIDTH = 8
_WINDOW = np.arange(_WIDTH)
FEW = 24
"""Up to so many keys a Python loop beats NumPy's fixed cost per call."""


class KeyTable:
    """uint64 key -> id in 1..capacity.

    Attributes:
        capacity: most keys held at once.
        cells: int32 [2**b]; the id at each cell, 0 for none. Read only.
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
        self.cells = np.zeros(size, np.int32)
        self._free = np.zeros(capacity, np.int32)
        self._num_free = 0
        # Scalar access through a memoryview costs a third of NumPy's.
        self._cell_view = self.cells.data
        self._key_view = self.keys.data

    def __len__(self) -> int:
        return self.high_water - self._num_free

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays when every page of them is in use."""
        return self.keys.nbytes + self.cells.nbytes + self._free.nbytes

    def find_one(self, key: int) -> int:
        """Id of one key, 0 when absent."""
        cells, keys, mask = self._cell_view, self._key_view, self._mask
        cell = key & mask
        found = cells[cell]
        while found and keys[found] != key:
            cell = (cell + 1) & mask
            found = cells[cell]
        return found

    def insert_one(self, key: int) -> int:
        """Adds a key that is absent; the caller knows that there is room."""
        if self._num_free:
            self._num_free -= 1
            new = int(self._free[self._num_free])
        else:
            self.high_water += 1
            new = self.high_water
        self._key_view[new] = key
        self._place_one(new, key & self._mask)
        return new

    def delete_one(self, held: int) -> None:
        """Forgets one id in use; entries behind it move up where a probe needs them."""
        cells, keys, mask = self._cell_view, self._key_view, self._mask
        gap = keys[held] & mask
        while cells[gap] != held:
            gap = (gap + 1) & mask
        at = (gap + 1) & mask
        while other := cells[at]:
            if (at - keys[other]) & mask >= (at - gap) & mask:
                cells[gap] = other
                gap = at
            at = (at + 1) & mask
        cells[gap] = 0
        keys[held] = 0
        self._free[self._num_free] = held
        self._num_free += 1

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Ids of uint64 [K] keys, int32 [K], 0 where absent."""
        if len(keys) <= FEW:
            return np.array([self.find_one(key) for key in keys.tolist()], np.int32)
        home = (keys & self._key_mask).view(np.int64)
        ids = self.cells.take(home)
        wrong = self.keys.take(ids) != keys
        if np.count_nonzero(wrong):
            pending = (wrong & (ids > 0)).nonzero()[0]
            ids[wrong] = 0
            if len(pending):
                ids[pending] = self._find_behind(keys[pending], home[pending] + 1)
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
        if len(keys) <= FEW:
            return np.array([self.insert_one(key) for key in keys.tolist()], np.int32)
        reused = min(len(keys), self._num_free)
        fresh = len(keys) - reused
        ids = np.empty(len(keys), np.int32)
        self._num_free -= reused
        ids[:reused] = self._free[self._num_free : self._num_free + reused]
        ids[reused:] = np.arange(self.high_water + 1, self.high_water + 1 + fresh)
        self.high_water += fresh
        self.keys[ids] = keys
        self._place(ids, keys)
        return ids

    def delete(self, ids: np.ndarray) -> None:
        """Forgets int32 [K] ids, which must be distinct and in use."""
        if len(ids) <= FEW:
            for held in ids.tolist():
                self.delete_one(held)
            return
        gaps = self._cells_of(ids)
        self.cells[gaps] = 0
        behind = (gaps + 1) & self._mask
        runs = behind[self.cells.take(behind) > 0]
        if len(runs):
            lifted = self._lift(runs)
            self._place(lifted, self.keys.take(lifted))
        self.keys[ids] = 0
        self._free[self._num_free : self._num_free + len(ids)] = ids
        self._num_free += len(ids)

    def _find_behind(self, keys: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Ids of keys that are not in their home cells, from cells `start` on."""
        if len(keys) <= FEW:
            return np.array([self.find_one(key) for key in keys.tolist()], np.int32)
        window = self.cells.take((start[:, None] + _WINDOW) & self._mask)
        stop = (self.keys.take(window) == keys[:, None]) | (window == 0)
        first = stop.argmax(axis=1)
        rows = np.arange(len(keys))
        ids = window[rows, first]
        beyond = (~stop[rows, first]).nonzero()[0]
        if len(beyond):
            ids[beyond] = self._find_behind(keys[beyond], start[beyond] + _WIDTH)
        return ids

    def _place_one(self, new: int, cell: int) -> None:
        cells, mask = self._cell_view, self._mask
        while cells[cell]:
            cell = (cell + 1) & mask
        cells[cell] = new

    def _place(self, ids: np.ndarray, keys: np.ndarray) -> None:
        """Writes ids into the first empty cell at or after their keys' homes."""
        home = (keys & self._key_mask).view(np.int64)
        free = (self.cells.take(home) == 0).nonzero()[0]
        self.cells[home[free]] = ids[free]
        # Two may have aimed at one cell: whoever does not stand in its own goes on.
        left = (self.cells.take(home) != ids).nonzero()[0]
        while len(left) > FEW:
            cells = (home[left, None] + _WINDOW) & self._mask
            empty = self.cells.take(cells) == 0
            first = empty.argmax(axis=1)
            rows = np.arange(len(left))
            target = cells[rows, first]
            fits = empty[rows, first]
            self.cells[target[fits]] = ids[left[fits]]
            lost = self.cells[target] != ids[left]
            home[left[~fits]] += _WIDTH
            left = left[lost]
        for new, cell in zip(ids[left].tolist(), home[left].tolist(), strict=True):
            self._place_one(new, cell & self._mask)

    def _cells_of(self, ids: np.ndarray) -> np.ndarray:
        """Cell of each id in use, int64 [K]."""
        cells, mask = self._cell_view, self._mask
        where = (self.keys.take(ids) & self._key_mask).view(np.int64)
        left = (self.cells.take(where) != ids).nonzero()[0]
        while len(left) > FEW:
            window = (where[left, None] + _WINDOW) & self._mask
            hit = self.cells.take(window) == ids[left, None]
            first = hit.argmax(axis=1)
            rows = np.arange(len(left))
            found = hit[rows, first]
            where[left] = np.where(found, window[rows, first], where[left] + _WIDTH)
            left = left[~found]
        for row in left.tolist():
            cell, held = int(where[row]) & mask, int(ids[row])
            while cells[cell] != held:
                cell = (cell + 1) & mask
            where[row] = cell
        return where

    def _lift(self, start: np.ndarray) -> np.ndarray:
        """Takes out the entries from each cell up to the next empty one.

        A probe for any of them could cross the gap before it; placed again, each ends where a
        probe finds it. Runs of different gaps are disjoint: each stops at the next gap.

        Returns:
            int32 ids taken out, distinct.
        """
        lifted = []
        while len(start):
            cells = (start[:, None] + _WINDOW) & self._mask
            run = np.logical_and.accumulate(self.cells.take(cells) != 0, axis=1)
            lifted.append(cells[run])
            start = start[run[:, -1]] + _WIDTH
        cells = np.concatenate(lifted)
        ids = self.cells[cells]
        self.cells[cells] = 0
        return ids
