"""The blocks the prefix index knows, as a tree: who follows whom, and which to forget first.

A block is an id of a `KeyTable` over chained hashes; its parent is the block before it in
the prompt. Everything is int arrays indexed by id. Children of a block form a doubly linked
list so that they can be walked without a scan; blocks that start a prompt hang under ROOT
and are not listed (nothing ever walks them).

Least recently used leaves go first, and a block is as young as its youngest descendant:
only leaves are evicted, and with a leaf its private ancestors that are no younger. Up to
`_EXACT_BELOW` ids the order is exact, above it the oldest quarter of a spread-out sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serving.fleet.key_table import KeyTable

ROOT = 0
UNKNOWN = -1
_EXACT_BELOW = 1024
_SAMPLED_PASSES = 8
_CAPACITY_SHARE = 1024
_LISTED_CHILDREN = 64
_FEW_CHILDREN = 16
_STRIDE = 2_654_435_761


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Consecutive blocks of one prompt as the tree holds them.

    Attributes:
        ids: int32 [n]; ids[i] is the parent of ids[i + 1].
        parent: id before ids[0], ROOT, or UNKNOWN when no room was left for it.
        num_refused: blocks at the end that were not taken: no room, or the tree already
            knows another parent for one of them.
    """

    ids: np.ndarray
    parent: int
    num_refused: int


class BlockTree:
    """Blocks, their order in prompts, their age.

    Its owner says which blocks nobody holds (`is_empty`, bool per id) and is told which are
    let go of (`on_release`).

    Attributes:
        table: hash -> id.
        parent: int32 [capacity + 1]; id, ROOT or UNKNOWN.
        num_children: int32 [capacity + 1], listed children.
        used_at: int64 [capacity + 1]; tick of the last use, 0 for ids not in use.
        num_evicted: blocks forgotten to make room.
    """

    def __init__(
        self,
        capacity: int,
        *,
        is_empty: Callable[[np.ndarray], np.ndarray],
        on_release: Callable[[np.ndarray], None],
    ) -> None:
        self.table = KeyTable(capacity)
        self.parent = np.zeros(capacity + 1, np.int32)
        self.num_children = np.zeros(capacity + 1, np.int32)
        self.used_at = np.zeros(capacity + 1, np.int64)
        self._first = np.zeros(capacity + 1, np.int32)
        self._next = np.zeros(capacity + 1, np.int32)
        self._previous = np.zeros(capacity + 1, np.int32)
        # One cell more than ids: UNKNOWN parents (-1) land in it and are never read.
        self._scratch = np.zeros(capacity + 2, np.int32)
        self._parent_view = self.parent.data
        self._num_children_view = self.num_children.data
        self._used_at_view = self.used_at.data
        self._first_view = self._first.data
        self._next_view = self._next.data
        self._previous_view = self._previous.data
        self._kept = np.zeros(capacity + 1, bool)
        self._is_empty = is_empty
        self._on_release = on_release
        self._hand = 0
        self.num_evicted = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays when every page of them is in use."""
        arrays = (self.parent, self.num_children, self.used_at, self._first, self._next)
        arrays = (*arrays, self._previous, self._scratch, self._kept)
        return self.table.num_bytes + sum(array.nbytes for array in arrays)

    def chain(self, parent_hash: int | None, hashes: np.ndarray, tick: int) -> Chain:
        """Finds or adds consecutive blocks and marks them used.

        Evicts to make room, never the blocks of this chain; what does not fit is cut off at
        the end.

        Args:
            parent_hash: hash of the block before hashes[0]; None when it starts a prompt.
                An unseen one is added as a block of unknown origin.
            hashes: uint64 [n], distinct and without parent_hash.
            tick: use counter, >= 1, never falling.
        """
        ids = self.table.find(hashes)
        missing = ids == 0
        parent = ROOT if parent_hash is None else self.table.find_one(parent_hash)
        adopt = parent_hash is not None and parent == 0
        before = np.empty_like(ids)
        before[0], before[1:] = (UNKNOWN if adopt else parent), ids[:-1]
        known = self.parent[ids]
        clash = (known != before) & (known != UNKNOWN) & ~missing
        clash[1:] |= missing[:-1] & ~missing[1:] & (known[1:] != UNKNOWN)
        end = int(clash.argmax()) if clash.any() else len(ids)
        need = int(np.count_nonzero(missing[:end])) + adopt
        room = self.table.capacity - len(self.table)
        keep = ids[:0]
        if need > room:
            keep = np.append(ids[:end][~missing[:end]], np.int32(max(parent, 0)))
            # More than is needed at once: looking for old leaves is what costs.
            self._evict(max(need - room, self.table.capacity // _CAPACITY_SHARE), keep)
            room = self.table.capacity - len(self.table)
        if adopt and end and room >= 1 + missing[0]:
            parent = self._adopt(parent_hash, tick)
            room -= 1
        elif adopt:
            # Not even the first block fits beside its parent.
            self.prune(keep[keep > 0])
            return Chain(ids=ids[:0], parent=UNKNOWN, num_refused=len(ids))
        if need - adopt > room:
            end = int(np.searchsorted(np.cumsum(missing[:end]), room, side="right"))
        refused = len(ids) - end
        ids, missing, hashes = ids[:end], missing[:end], hashes[:end]
        if missing.any():
            ids[missing] = self.table.insert(hashes[missing])
        self.used_at[ids] = tick
        if end:
            linked = self._link(ids, missing, parent)
            refused += end - linked
            ids = ids[:linked]
        if parent > 0:
            self.used_at[parent] = tick
        if len(keep):
            # Kept from eviction, but cut off: with its children gone it may be of no use.
            self.prune(np.setdiff1d(keep[keep > 0], ids))
        return Chain(ids=ids, parent=parent, num_refused=refused)

    def step(self, parent: int, block_hash: int, tick: int) -> int:
        """One block under `parent` (an id or ROOT), found or added, and marked used.

        Returns:
            Its id; 0 when `chain` is needed: no room, or another parent is known.
        """
        block = self.table.find_one(block_hash)
        if block:
            if self._parent_view[block] != parent:
                return 0
        elif len(self.table) == self.table.capacity:
            return 0
        else:
            block = self.table.insert_one(block_hash)
            self._parent_view[block] = parent
            if parent:
                head = self._first_view[parent]
                self._next_view[block] = head
                self._previous_view[head] = block
                self._first_view[parent] = block
                self._num_children_view[parent] += 1
        self._used_at_view[block] = tick
        return block

    def in_use(self, block: int) -> bool:
        """Whether an id stands for a block."""
        return self._used_at_view[block] > 0

    def has_children(self, block: int) -> bool:
        """Whether anything listed hangs under a block."""
        return self._first_view[block] > 0

    def few_children(self, block: int) -> list[int] | None:
        """Children of one block; None when there are many, see `children`."""
        found = []
        child = self._first_view[block]
        while child:
            if len(found) == _FEW_CHILDREN:
                return None
            found.append(child)
            child = self._next_view[child]
        return found

    def parent_of(self, block: int) -> int:
        """Id of the block before; ROOT or UNKNOWN."""
        return self._parent_view[block]

    def drop_leaf(self, block: int) -> None:
        """Forgets one block without children that its owner has let go of already."""
        if self._parent_view[block] > 0:
            self._num_children_view[self._parent_view[block]] -= 1
            self._unlist(block)
        self._parent_view[block] = self._next_view[block] = self._previous_view[block] = 0
        self._used_at_view[block] = 0
        self.table.delete_one(block)

    def children(self, ids: np.ndarray) -> np.ndarray:
        """All children of distinct ids, int32, in no particular order."""
        found = []
        at = self._first[ids]
        for _ in range(_LISTED_CHILDREN):
            at = at[at > 0]
            if not len(at):
                break
            found.append(at)
            at = self._next[at]
        else:
            # A popular block: one pass over all parents beats a walk along its list.
            crowded = np.zeros(len(self._scratch), bool)
            crowded[ids] = True
            return np.flatnonzero(crowded[self.parent] & (self.used_at > 0)).astype(np.int32)
        return np.concatenate(found) if found else ids[:0]

    def prune(self, ids: np.ndarray) -> None:
        """Forgets blocks that nobody holds and nothing hangs under, and ancestors left so.

        Args:
            ids: int32 [n] distinct ids; those no longer in use are passed over.
        """
        ids = ids[self.used_at[ids] > 0]
        while len(ids):
            ids = self._without_outer_children(ids[self._is_empty(ids) & ~self._kept[ids]])
            if not len(ids):
                return
            parents = self.parent[ids]
            self._release(ids)
            ids = self._bare(parents)

    def _adopt(self, parent_hash: int | None, tick: int) -> int:
        """Adds a block whose own parent is not known yet."""
        new = self.table.insert(np.array([parent_hash], np.uint64))
        self.parent[new] = UNKNOWN
        self.used_at[new] = tick
        return int(new[0])

    def _link(self, ids: np.ndarray, missing: np.ndarray, parent: int) -> int:
        """Sets the parents that are not set; returns how many of `ids` form a chain then."""
        before = np.empty_like(ids)
        before[0], before[1:] = parent, ids[:-1]
        late = np.flatnonzero((self.parent[ids] == UNKNOWN) & ~missing)
        self.parent[ids[missing]] = before[missing]
        self._list(ids[missing], before[missing])
        for row in late.tolist():
            if self._descends(int(before[row]), int(ids[row])):
                return row
            self.parent[ids[row]] = before[row]
            self._list(ids[row : row + 1], before[row : row + 1])
        return len(ids)

    def _list(self, ids: np.ndarray, parents: np.ndarray) -> None:
        """Puts each id at the head of its parent's list; parents distinct, ROOT skipped."""
        if len(parents) and parents[0] == ROOT:
            ids, parents = ids[1:], parents[1:]
        heads = self._first[parents]
        self._next[ids] = heads
        self._previous[heads] = ids
        self._first[parents] = ids
        self.num_children[parents] += 1

    def _bare(self, parents: np.ndarray) -> np.ndarray:
        """Those of some blocks' parents that are in use and have no children, distinct."""
        parents = parents[parents > 0]
        bare = (self.used_at[parents] > 0) & (self.num_children[parents] == 0)
        return np.unique(parents[bare])

    def _descends(self, block: int, ancestor: int) -> bool:
        """Whether `ancestor` is `block` or above it (a malformed event could close a ring)."""
        while block > 0:
            if block == ancestor:
                return True
            block = int(self.parent[block])
        return False

    def _without_outer_children(self, ids: np.ndarray) -> np.ndarray:
        """Drops ids that have a child outside the set, until none is left."""
        while len(ids):
            parents = self.parent[ids]
            np.add.at(self._scratch, parents, 1)
            blocked = self._scratch[ids] != self.num_children[ids]
            self._scratch[parents] = 0
            if not blocked.any():
                break
            ids = ids[~blocked]
        return ids

    def _release(self, ids: np.ndarray) -> None:
        """Forgets ids whose children, if any, are all among them."""
        self._on_release(ids)
        parents = self.parent[ids]
        self.used_at[ids] = 0
        listed = parents > 0
        np.subtract.at(self.num_children, parents[listed], 1)
        staying = listed & (self.used_at[parents] > 0)
        for child in ids[staying].tolist():
            self._unlist(child)
        for array in (self.parent, self.num_children, self._first, self._next, self._previous):
            array[ids] = 0
        self.table.delete(ids)

    def _unlist(self, child: int) -> None:
        before, after = self._previous_view[child], self._next_view[child]
        if before:
            self._next_view[before] = after
        else:
            self._first_view[self._parent_view[child]] = after
        if after:
            self._previous_view[after] = before

    def _evict(self, need: int, keep: np.ndarray) -> None:
        """Evicts `need` blocks if it can, oldest leaves first, none of `keep`."""
        kept = self._kept
        kept[keep] = True
        goal = len(self.table) - need
        passes = 0
        while (need := len(self.table) - goal) > 0:
            sample, exact = self._sample(need, passes)
            passes += 1
            old = (self.used_at[sample] > 0) & (self.num_children[sample] == 0)
            leaves = sample[old & ~kept[sample]]
            leaves = leaves[np.argsort(self.used_at[leaves], kind="stable")]
            if not exact:
                leaves = leaves[: (len(leaves) + 3) // 4]
            victims = self._with_ancestors(leaves, need, kept)
            if not len(victims):
                if exact:
                    break
                continue
            parents = self.parent[victims]
            self._release(victims)
            self.num_evicted += len(victims)
            # A block of unknown origin has no holder of its own to be evicted for.
            bare = self._bare(parents)
            self.prune(bare)
        kept[keep] = False

    def _sample(self, need: int, passes: int) -> tuple[np.ndarray, bool]:
        """Ids to look for old leaves in, and whether they are all there are."""
        high = self.table.high_water
        size = max(_EXACT_BELOW, 8 * need)
        if size >= high or passes >= _SAMPLED_PASSES:
            return np.arange(1, high + 1, dtype=np.int32), True
        # Distinct: the stride is a prime larger than any capacity.
        spread = (np.arange(self._hand, self._hand + size) * _STRIDE) % high + 1
        self._hand = (self._hand + size) % (1 << 30)
        return spread, False

    def _with_ancestors(self, leaves: np.ndarray, need: int, kept: np.ndarray) -> np.ndarray:
        """Leaves and, with each, the only-child ancestors that are no younger."""
        parent, num_children = self._parent_view, self._num_children_view
        used_at, is_kept = self._used_at_view, kept.data
        victims: list[int] = []
        for leaf in leaves.tolist():
            age = used_at[leaf]
            block = leaf
            while len(victims) < need:
                victims.append(block)
                block = parent[block]
                if block <= 0 or is_kept[block] or num_children[block] != 1:
                    break
                if used_at[block] > age:
                    break
            if len(victims) >= need:
                break
        return np.array(victims, np.int32)
