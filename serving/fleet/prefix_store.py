"""Which columns hold which blocks, and how deep into a prompt each column's cache reaches.

A column is one KV cache. Per tier t (0 the fastest) two bit planes are kept: `held[t]`, what
the column holds on that tier, and `reach[t]`, the blocks it holds on tiers <= t TOGETHER WITH
every block before them. Reach is what a prefix cache can use, and it only shrinks along a
prompt, so the deepest match of all columns is found with a few probes (binary search) and one
row usually answers for every column. The price is paid on updates: dropping a block takes the
reach of what hangs under it, getting it back restores that.

Columns that went away are masked out at once and swept out of the rows little by little.
"""

from __future__ import annotations

import numpy as np

from serving.fleet.block_tree import ROOT, BlockTree, Chain
from serving.fleet.depth_kernel import DEPTHS
from serving.fleet.holder_bits import WORD_BITS, HolderBits
from serving.fleet.key_table import FEW
from serving.fleet.predicted_blocks import PredictedBlocks

_BYTE_COLUMNS = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.int32)
_MAX_STEPS = 3
_SWEEP_ROWS = 4096
_EXPIRED_COLUMNS = 16


class PrefixStore:
    """Blocks x columns.

    Attributes:
        tree: the blocks.
        predicted: (block, column) pairs credited because we routed there.
    """

    def __init__(self, *, max_blocks: int, max_predicted: int, num_tiers: int) -> None:
        self.tree = BlockTree(max_blocks, is_empty=self._nobody_holds, on_release=self._forget)
        self.predicted = PredictedBlocks(max_predicted, max_blocks)
        self._num_tiers = num_tiers
        self._num_words = 1
        self.held: list[HolderBits] = []
        self.reach: list[HolderBits] = []
        self._tick = 1
        # Column 0 is nobody: rows of workers that may not be credited read it.
        self._live = [False]
        self._orphans = [False]
        self._free: list[int] = []
        self._dead: list[int] = []
        self._sweeping: list[int] = []
        self._swept = 0
        self._empty_row = b""
        self._use_tier(0)
        self.predicted.grow(1)

    @property
    def num_columns(self) -> int:
        """Columns with storage; `depths` returns one number for each."""
        return self._num_words * WORD_BITS

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays when every page of them is in use."""
        planes = sum(plane.rows.nbytes for plane in (*self.held, *self.reach))
        return self.tree.num_bytes + self.predicted.num_bytes + planes

    def add_column(self) -> int:
        """An empty column."""
        if not self._free and len(self._live) == self.num_columns:
            if len(self._dead) + len(self._sweeping) > self.num_columns // 4:
                while self._dead or self._sweeping:
                    self.sweep(self.tree.table.capacity)
            else:
                self._widen()
        if self._free:
            column = self._free.pop()
        else:
            column = len(self._live)
            self._live.append(False)
            self._orphans.append(False)
            self.predicted.grow(len(self._live))
        self._live[column] = True
        self._orphans[column] = False
        return column

    def retire(self, column: int) -> None:
        """Everything a column holds is gone, at once.

        The column is not used again before its bits are swept out.
        """
        self._live[column] = False
        self._dead.append(column)
        self.tree.prune(self.predicted.remove_column(column))

    def stored(self, column: int, tier: int, parent_hash: int | None, hashes: np.ndarray) -> int:
        """A column stored consecutive blocks on a tier.

        Args:
            column: from `add_column`.
            tier: 0 is the fastest.
            parent_hash: the block before hashes[0], None when they start a prompt.
            hashes: uint64 [n], distinct, without parent_hash.

        Returns:
            Blocks at the end that were not taken (no room, or a clash of parents).
        """
        self._use_tier(tier)
        if len(hashes) <= FEW and not self._orphans[column]:
            parent_hash, hashes = self._stored_few(column, tier, parent_hash, hashes)
            if not len(hashes):
                return 0
        chain = self._chain(parent_hash, hashes)
        ids = chain.ids
        if len(ids):
            self.held[tier].set(ids, column)
            if tier == 0:
                self.predicted.remove(column, ids)
            for plane in range(tier, len(self.reach)):
                self._extend(plane, column, chain)
        return chain.num_refused

    def removed(self, column: int, tiers: tuple[int, ...], hashes: np.ndarray) -> int:
        """A column dropped blocks from tiers (and with tier 0 our prediction of them).

        Returns:
            Blocks that the store did not know.
        """
        tiers = tuple(t for t in tiers if t < len(self.held))
        if len(hashes) <= FEW and tiers:
            return self._removed_few(column, tiers, hashes)
        ids = np.unique(self.tree.table.find(hashes))
        ids = ids[ids > 0]
        if len(ids) and tiers:
            for tier in tiers:
                self.held[tier].clear(ids, column)
            if 0 in tiers:
                self.predicted.remove(column, ids)
            self._lose(column, ids, min(tiers))
        return len(hashes) - len(ids)

    def predict(self, column: int, hashes: np.ndarray, now_s: float) -> None:
        """A prompt was routed to a column: its full blocks are credited until they expire."""
        chain = self._chain(None, hashes)
        ids = chain.ids
        if not len(ids):
            return
        path = ids[~self.held[0].test(ids, column)]
        for other, blocks in self.predicted.add(column, path, now_s):
            self._lose(other, blocks, 0)
        end = len(ids)
        if len(path) > self.predicted.limit(column):
            covered = self.held[0].test(ids, column) | self.predicted.test(ids, column)
            end = int(covered.argmin())
        if end:
            chain = Chain(ids=ids[:end], parent=ROOT, num_refused=0)
            for plane in range(len(self.reach)):
                self._extend(plane, column, chain)
        self.tree.prune(ids[end:])

    def unpredict(self, column: int, hashes: np.ndarray) -> None:
        """Takes back a column's predictions of some blocks; what it confirmed stays."""
        ids = np.unique(self.tree.table.find(hashes))
        ids = ids[ids > 0]
        if len(ids):
            self.predicted.remove(column, ids)
            self._lose(column, ids, 0)

    def expire(self, now_s: float) -> None:
        """Takes back predictions whose time is up, of a few columns at a time."""
        if now_s >= self.predicted.next_expiry_s:
            for column, blocks in self.predicted.expire(now_s, max_columns=_EXPIRED_COLUMNS):
                self._lose(column, blocks, 0)

    def sweep(self, num_rows: int = _SWEEP_ROWS) -> None:
        """Clears the bits of retired columns in the next rows; frees columns after a pass."""
        if not self._sweeping:
            if not self._dead:
                return
            self._sweeping, self._dead, self._swept = self._dead, [], 1
        high = self.tree.table.high_water + 1
        rows = slice(self._swept, min(self._swept + num_rows, high))
        mask = np.zeros(self._num_words, np.uint64)
        for column in self._sweeping:
            mask[column // WORD_BITS] |= np.uint64(1 << column % WORD_BITS)
        touched = np.zeros(rows.stop - rows.start, bool)
        for plane in self.held:
            touched |= (plane.rows[rows] & mask).any(axis=1)
        for plane in (*self.held, *self.reach):
            plane.rows[rows] &= ~mask
        ids = np.flatnonzero(touched).astype(np.int32) + np.int32(rows.start)
        self.tree.prune(ids)
        self._swept = rows.stop
        if self._swept >= high:
            self._free += self._sweeping
            self._sweeping = []

    def depths(self, hashes: np.ndarray, tier: int) -> np.ndarray:
        """Leading blocks each column can use from tiers <= `tier`.

        Args:
            hashes: uint64 [n], the chained hashes of one prompt.
            tier: slowest tier that counts.

        Returns:
            int32 [num_columns], fresh.
        """
        plane = self.reach[min(tier, len(self.reach) - 1)]
        if (compiled := DEPTHS.run) is not None:
            table = self.tree.table
            return compiled(hashes, table.cells, table.keys, plane.rows)
        num = len(hashes)
        find, view, size = self.tree.table.find_one, plane.view, plane.row_bytes
        block = find(hashes.item(0)) if num else 0
        at = block * size
        top = view[at : at + size].tobytes()
        if not block or top == self._empty_row:
            return np.zeros(self.num_columns, np.int32)
        depth, row = 1, top
        above = num + 1
        probe = num
        while probe > depth:
            lower = find(hashes.item(probe - 1))
            at = lower * size
            if lower and (found := view[at : at + size].tobytes()) != self._empty_row:
                depth, row, block = probe, found, lower
            else:
                above = probe
            probe = (depth + above) // 2
        reached = _BYTE_COLUMNS.take(plane.bytes[block], 0).reshape(-1)
        reached *= depth
        if row != top:
            self._lengthen(reached, hashes, plane, (1, top), (depth, row))
        return reached

    def _lengthen(
        self,
        reached: np.ndarray,
        hashes: np.ndarray,
        plane: HolderBits,
        first: tuple[int, bytes],
        last: tuple[int, bytes],
    ) -> None:
        """Adds the columns that stop between two depths with different rows, in place."""
        find, view, size = self.tree.table.find_one, plane.view, plane.row_bytes
        steps: list[tuple[int, bytes]] = []
        open_ = [(first, last)]
        while open_ and len(steps) + len(open_) <= _MAX_STEPS:
            upper, lower = open_.pop()
            if lower[0] - upper[0] == 1:
                steps.append(upper)
                continue
            probe = (upper[0] + lower[0]) // 2
            at = find(hashes.item(probe - 1)) * size
            middle = (probe, view[at : at + size].tobytes())
            if middle[1] != upper[1]:
                open_.append((upper, middle))
            if middle[1] != lower[1]:
                open_.append((middle, lower))
        if open_:
            return self._lengthen_ragged(reached, hashes[: last[0]], plane)
        for depth, row in steps:
            step = _BYTE_COLUMNS.take(np.frombuffer(row, np.uint8), 0).reshape(-1)
            step *= depth
            np.maximum(reached, step, out=reached)
        return None

    def _lengthen_ragged(self, reached: np.ndarray, hashes: np.ndarray, plane: HolderBits) -> None:
        """The same for many different depths: all rows at once."""
        rows = plane.rows.take(self.tree.table.find(hashes), axis=0)
        ends = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))
        bits = np.unpackbits(rows[ends].view(np.uint8), axis=1, bitorder="little")
        # Rows only shrink, so the number of rows with a column names its last one.
        count = np.add.reduce(bits, axis=0, dtype=np.uint8 if len(ends) < 256 else np.uint32)
        depth_at = np.zeros(len(ends) + 1, np.int32)
        depth_at[1:] = ends + 1
        np.maximum(reached, depth_at.take(count), out=reached)

    def _stored_few(
        self, column: int, tier: int, parent_hash: int | None, hashes: np.ndarray
    ) -> tuple[int | None, np.ndarray]:
        """`stored`, block by block, for a column without orphans; returns what is left to do."""
        tree, held, predicted = self.tree, self.held[tier], self.predicted
        parent = ROOT if parent_hash is None else tree.table.find_one(parent_hash)
        if parent_hash is not None and not parent:
            return parent_hash, hashes
        reached = [
            plane for plane in self.reach[tier:] if parent == ROOT or plane.test_one(parent, column)
        ]
        if len(reached) < len(self.reach) - tier:
            return parent_hash, hashes
        self._tick += 1
        for done, block_hash in enumerate(hashes.tolist()):
            block = tree.step(parent, block_hash, self._tick)
            if not block:
                return parent_hash, hashes[done:]
            held.set_one(block, column)
            for plane in reached:
                plane.set_one(block, column)
            if tier == 0 and predicted.any_one(block):
                predicted.remove(column, np.array([block], np.int32))
            parent, parent_hash = block, block_hash
        return parent_hash, hashes[:0]

    def _removed_few(self, column: int, tiers: tuple[int, ...], hashes: np.ndarray) -> int:
        """`removed`, block by block, deepest first where the message says it the other way."""
        tree, predicted = self.tree, self.predicted
        blocks = {tree.table.find_one(block_hash) for block_hash in hashes.tolist()} - {0}
        for block in blocks:
            for tier in tiers:
                self.held[tier].clear_one(block, column)
            if 0 in tiers and predicted.any_one(block):
                predicted.remove(column, np.array([block], np.int32))
        left = list(blocks)
        while left:
            waiting = [b for b in left if tree.in_use(b) and not self._lose_one(column, b)]
            if len(waiting) == len(left):
                self._lose(column, np.array(waiting, np.int32), min(tiers))
                break
            left = waiting[::-1]
        return len(hashes) - len(blocks)

    def _lose_one(self, column: int, block: int) -> bool:
        """`_lose` for a block under which nothing of the column hangs; False if something may."""
        children = self.tree.few_children(block)
        if children is None or self.predicted.any_one(block):
            return False
        still = False
        for held, reach in zip(self.held, self.reach, strict=True):
            still = still or held.test_one(block, column)
            if not still and reach.test_one(block, column):
                if any(reach.test_one(child, column) for child in children):
                    return False
                reach.clear_one(block, column)
        self._drop_empty(block)
        return True

    def _drop_empty(self, block: int) -> None:
        """Forgets a block without children that nobody holds, and ancestors left so."""
        while block > 0 and not self.tree.has_children(block):
            if self.predicted.any_one(block) or any(p.any_one(block) for p in self.held):
                return
            for plane in self.reach:
                # Bits of retired columns may be left.
                plane.wipe_one(block)
            above = self.tree.parent_of(block)
            self.tree.drop_leaf(block)
            block = above

    def _chain(self, parent_hash: int | None, hashes: np.ndarray) -> Chain:
        self._tick += 1
        return self.tree.chain(parent_hash, hashes, self._tick)

    def _extend(self, plane: int, column: int, chain: Chain) -> None:
        """Gives reach to a chain whose blocks are all held, if the block before it has it."""
        reach = self.reach[plane]
        before = np.array([chain.parent], np.int32)
        if chain.parent != ROOT and not (chain.parent > 0 and reach.test(before, column)[0]):
            self._orphans[column] = True
            return
        if not self._orphans[column]:
            reach.set(chain.ids, column)
            return
        gained = chain.ids[~reach.test(chain.ids, column)]
        while len(gained):
            reach.set(gained, column)
            below = self.tree.children(gained)
            below = below[self._holds(plane, column, below)]
            gained = below[~reach.test(below, column)]

    def _lose(self, column: int, ids: np.ndarray, tier: int) -> None:
        """Takes reach from distinct blocks a column may no longer hold, and from below them."""
        for plane in range(tier, len(self.reach)):
            reach = self.reach[plane]
            lost = ids[reach.test(ids, column)]
            lost = lost[~self._holds(plane, column, lost)]
            while len(lost):
                reach.clear(lost, column)
                below = self.tree.children(lost)
                lost = below[reach.test(below, column)]
                if len(lost):
                    self._orphans[column] = True
        self.tree.prune(ids)

    def _holds(self, plane: int, column: int, ids: np.ndarray) -> np.ndarray:
        """Whether a column holds each block on some tier <= plane, or is predicted to."""
        holds = self.predicted.test(ids, column)
        for tier in range(plane + 1):
            holds |= self.held[tier].test(ids, column)
        return holds

    def _nobody_holds(self, ids: np.ndarray) -> np.ndarray:
        held = self.predicted.any(ids)
        for plane in self.held:
            held |= plane.any(ids)
        return ~held

    def _forget(self, ids: np.ndarray) -> None:
        """The tree lets go of blocks: their rows serve other blocks next."""
        self.predicted.remove_blocks(ids)
        for plane in (*self.held, *self.reach):
            plane.wipe(ids)

    def _use_tier(self, tier: int) -> None:
        """Allocates the planes of slower tiers when they are first seen."""
        if not 0 <= tier < self._num_tiers:
            raise ValueError(f"{tier=} must be in [0, {self._num_tiers})")
        while len(self.held) <= tier:
            rows = self.tree.table.capacity + 1
            self.held.append(HolderBits(rows, self._num_words))
            reach = HolderBits(rows, self._num_words)
            if self.reach:
                used = self.tree.table.high_water + 1
                reach.rows[:used] = self.reach[-1].rows[:used]
            self.reach.append(reach)
        self._empty_row = bytes(self.reach[0].row_bytes)

    def _widen(self) -> None:
        # By a quarter, not by half: with column 0 taken, doubling would leave a fleet of 2**n
        # workers with twice the words it needs.
        self._num_words += max(1, self._num_words // 4)
        for plane in (*self.held, *self.reach):
            plane.widen(self._num_words, self.tree.table.high_water + 1)
        self._empty_row = bytes(self.reach[0].row_bytes)
