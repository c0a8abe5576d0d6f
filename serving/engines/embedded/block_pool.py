"""Who holds which KV block: reference counts, a free list, and cached blocks in LRU order.

A block is in exactly one state: in use (referenced by running requests or by hand-overs that
wait for their pull), cached (unreferenced, but its prefix can still be found), or free. New
blocks come from the free ones first, then from the least recently used cached ones; a
referenced block is never taken. Not thread-safe: the engine calls it under its own lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from serving.engines.embedded.prefix_cache import PrefixCache


class NoFreeBlocks(Exception):
    """More blocks were asked for than are free or evictable; nothing was taken."""


class BlockPool:
    """Bookkeeping of `num_blocks` KV blocks; the bytes live elsewhere.

    Attributes:
        num_blocks: size of the pool.
        cache: index of findable blocks, or None when prefix caching is off.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks=} must be >= 1")
        self.num_blocks = num_blocks
        self.cache = cache
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks kept for prefix hits."""
        return len(self._idle)

    def references(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._references[block_id]

    def match(self, hashes: list[int], limit: int) -> list[int]:
        """Blocks of the longest cached prefix, at most `limit`; they are NOT referenced yet."""
        return [] if self.cache is None else self.cache.match(hashes, limit)

    def reserve(self, shared: Sequence[int], num_new: int) -> list[int]:
        """References `shared` blocks and takes `num_new` fresh ones, or neither.

        Args:
            shared: blocks found by `match`, in order.
            num_new: fresh blocks wanted; a cached block loses its content to them.

        Returns:
            The shared blocks, then the fresh ones.

        Raises:
            NoFreeBlocks: not enough; nothing changed.
        """
        idle_shared = sum(block in self._idle for block in shared)
        if num_new > self.num_available - idle_shared:
            raise NoFreeBlocks(
                f"{num_new} blocks wanted, {self.num_available - idle_shared} available"
            )
        for block in shared:
            if self._references[block] == 0 and block not in self._idle:
                raise ValueError(f"block {block} is free, it cannot be shared")
            self._references[block] += 1
            self._idle.pop(block, None)
        fresh = [self._take() for _ in range(num_new)]
        return [*shared, *fresh]

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block.

        Later blocks of a sequence become evictable before earlier ones: without its beginning
        the rest of a prefix could not be found.

        Raises:
            ValueError: a block has no reference (a double release).
        """
        for block in reversed(list(block_ids)):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self.cache is not None and self.cache.holds(block):
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def publish(self, block_id: int, block_hash: int) -> None:
        """Makes a full block, still held by its writer, findable under its prefix hash."""
        if self._references[block_id] < 1:
            raise ValueError(f"block {block_id} is published but nobody holds it")
        if self.cache is not None:
            self.cache.insert(block_id, block_hash)

    def flush(self) -> int:
        """Forgets every cached prefix; blocks in use stay with their holders.

        Returns:
            How many cached blocks became free.
        """
        flushed = list(self._idle)
        self._idle.clear()
        self._free.extend(reversed(flushed))
        if self.cache is not None:
            self.cache.clear()
        return len(flushed)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            assert self.cache is not None
            self.cache.forget(block)
        self._references[block] = 1
        return block
