"""Which KV block holds which prefix: chained block hash -> block id, one to one.

The hash is our own chained one (serving/core/block_hash.py), so a match of block i implies a
match of everything before it. Lifetimes are not this module's business: `BlockPool` forgets a
block here before it gives the block new content.
"""

from __future__ import annotations

import numpy as np

from serving.core.block_hash import BlockHasher


class PrefixCache:
    """The index of full, finished blocks.

    Attributes:
        hasher: hashes prompts; its block size is the pool's.
    """

    def __init__(self, hasher: BlockHasher) -> None:
        self.hasher = hasher
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def hashes(self, token_ids: np.ndarray, salt: str) -> list[int]:
        """Hashes of the full blocks of `token_ids` (integer [n]), as Python ints."""
        return self.hasher.hashes(token_ids, salt=salt).tolist()

    def match(self, hashes: list[int], limit: int) -> list[int]:
        """Blocks of the longest known prefix, at most `limit` of them."""
        blocks: list[int] = []
        for block_hash in hashes[:limit]:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_id: int, block_hash: int) -> bool:
        """Makes a block findable.

        Returns:
            False when another block already holds that prefix, or this block has a name; then
            nothing changes (two requests computed the same prefix side by side).
        """
        if block_hash in self._block_of or block_id in self._hash_of:
            return False
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash
        return True

    def holds(self, block_id: int) -> bool:
        """Whether the block can be found."""
        return block_id in self._hash_of

    def forget(self, block_id: int) -> None:
        """Makes a block unfindable; nothing happens when it was not findable."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def clear(self) -> None:
        """Forgets every block."""
        self._block_of.clear()
        self._hash_of.clear()
