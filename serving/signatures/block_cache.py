"""The router's own memory of block counts: a signature before any worker has answered.

Rows are keyed by the router's chained block hash (`serving/core/block_hash.py`), so a hit on
block i vouches for the whole prefix up to it. Two kinds of rows, each a fixed slab of memory
that throws out its least recently used row when full:

- block rows: masked counts of one block, from engines that tell counts per block or token;
- prompt rows: masked counts of a whole prompt (`eldr_sig`), under its last full block's hash:
  the next turn of a chat, or the same prompt again, finds them.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from serving.core.signature import Signature, SignatureSource
from serving.signatures.model import SignatureModel

_MAX_UINT8 = np.iinfo(np.uint8).max
_MAX_UINT16 = np.iinfo(np.uint16).max
_PROMPT_SHARE = 0.5


class BlockSignatureCache:
    """Bounded cache of block hash -> masked expert counts, for one block size and one model.

    Attributes:
        model: masks and weighs; rows are [Lm, E] in its layer order.
        block_size_tokens: tokens per block behind the hashes.
    """

    def __init__(self, model: SignatureModel, *, block_size_tokens: int, max_bytes: int) -> None:
        if block_size_tokens < 1:
            raise ValueError(f"{block_size_tokens=} must be >= 1")
        block_dtype = np.uint8 if block_size_tokens <= _MAX_UINT8 else np.uint16
        row_bytes = model.size * np.dtype(block_dtype).itemsize
        num_blocks = int(max_bytes * (1 - _PROMPT_SHARE)) // row_bytes
        num_prompts = int(max_bytes * _PROMPT_SHARE) // (model.size * 4)
        if min(num_blocks, num_prompts) < 1:
            raise ValueError(f"{max_bytes=} must hold at least one row of {model.size} counts")
        self.model = model
        self.block_size_tokens = block_size_tokens
        self._blocks = _Slab(num_blocks, model.size, block_dtype)
        self._prompts = _Slab(num_prompts, model.size, np.uint32)
        self._prompt_tokens = np.zeros(num_prompts, np.int64)

    @property
    def num_bytes(self) -> int:
        """Memory of the slabs in bytes; never grows."""
        return self._blocks.rows.nbytes + self._prompts.rows.nbytes

    def __len__(self) -> int:
        return len(self._blocks.slots) + len(self._prompts.slots)

    def put_blocks(self, hashes: np.ndarray, rows: np.ndarray) -> None:
        """Remembers counts per block.

        Args:
            hashes: uint64 [n], chained hashes of full blocks.
            rows: integer [n, Lm, E]; each layer of a row sums to block_size * k.

        Raises:
            ValueError: wrong shape, or counts no full block can have.
        """
        if rows.shape != (len(hashes), *self.model.idf.shape):
            raise ValueError(
                f"rows have shape {rows.shape}, must be {(len(hashes), *self.model.idf.shape)}"
            )
        wanted = self.block_size_tokens * self.model.top_k
        if len(rows) and not (rows.sum(axis=2, dtype=np.int64) == wanted).all():
            raise ValueError(f"every layer of a full block's counts must sum to {wanted}")
        for key, row in zip(hashes.tolist(), rows, strict=True):
            self._blocks.put(key, row.ravel())

    def put_prompt(self, hashes: np.ndarray, signature: Signature) -> None:
        """Remembers a whole prompt's exact counts.

        Args:
            hashes: uint64 [n] of the prompt's full blocks; with none there is nothing to key by.
            signature: of the same prompt; predictions are not remembered.
        """
        if len(hashes) and signature.source is SignatureSource.LIVE:
            slot = self._prompts.put(int(hashes[-1]), signature.counts.ravel())
            self._prompt_tokens[slot] = signature.num_tokens

    def lookup(self, hashes: np.ndarray, num_prompt_tokens: int) -> Signature | None:
        """The signature of the longest remembered prefix.

        Args:
            hashes: uint64 [n] of the prompt's full blocks.
            num_prompt_tokens: the whole prompt's length.

        Returns:
            A CACHED_BLOCKS signature, or None when no prefix is known. Its confidence is the
            share of the prompt that the hashes vouch for: 1 means exact.
        """
        keys = hashes.tolist()
        slots = []
        for key in keys:
            slot = self._blocks.find(key)
            if slot is None:
                break
            slots.append(slot)
        # A remembered prompt only helps where it reaches further than the block rows do.
        for depth in range(len(keys), len(slots), -1):
            slot = self._prompts.find(keys[depth - 1])
            if slot is not None:
                counts = self._prompts.rows[slot].copy()
                num_tokens = int(self._prompt_tokens[slot])
                return self._signature(counts, num_tokens, depth, num_prompt_tokens)
        if not slots:
            return None
        num_tokens = len(slots) * self.block_size_tokens
        # No count exceeds num_tokens; the narrower sum is three times as fast.
        dtype = np.uint16 if num_tokens <= _MAX_UINT16 else np.uint32
        counts = self._blocks.rows[slots].sum(axis=0, dtype=dtype)
        return self._signature(counts, num_tokens, len(slots), num_prompt_tokens)

    def _signature(
        self, counts: np.ndarray, num_tokens: int, depth: int, num_prompt_tokens: int
    ) -> Signature:
        return self.model.signature(
            counts.reshape(self.model.idf.shape),
            num_tokens,
            source=SignatureSource.CACHED_BLOCKS,
            confidence=min(1.0, depth * self.block_size_tokens / num_prompt_tokens),
        )


class _Slab:
    """Fixed rows, least recently used first out.

    Attributes:
        rows: [num_rows, width]; unused rows hold nothing of meaning.
        slots: key -> row, least recently used first.
    """

    def __init__(self, num_rows: int, width: int, dtype: type) -> None:
        # Pages are only backed by memory once a row is written.
        self.rows = np.empty((num_rows, width), dtype)
        self.slots: OrderedDict[int, int] = OrderedDict()

    def find(self, key: int) -> int | None:
        """Row of `key`, now the most recently used; None when absent."""
        slot = self.slots.get(key)
        if slot is not None:
            self.slots.move_to_end(key)
        return slot

    def put(self, key: int, row: np.ndarray) -> int:
        """Writes `row` under `key`, evicting if full; returns its slot."""
        slot = self.find(key)
        if slot is None:
            if len(self.slots) < len(self.rows):
                slot = len(self.slots)
            else:
                _, slot = self.slots.popitem(last=False)
            self.slots[key] = slot
        self.rows[slot] = row
        return slot
