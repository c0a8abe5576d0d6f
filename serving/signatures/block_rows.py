"""A worker's expert counts per KV block, living exactly as long as the block does.

One row per KV block, co-indexed with the worker's pool. The write of a block's first token
resets its row, later chunks and decode steps add to it, so a row always tells of the tokens
now in the block. A request's signature is the sum over its blocks: the same whether a block
was computed for this request or found in the cache (FACTS section 1, "Signature cache").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MAX_COUNT = np.iinfo(np.uint16).max


class BlockCounts:
    """uint16 [num_blocks, L, E] counts beside a pool of KV blocks.

    Attributes:
        block_size_tokens: tokens per block; bounds every count, so uint16 holds it.
        rows: uint16 [num_blocks, L, E]; read it, write through the methods.
    """

    def __init__(
        self, *, num_blocks: int, block_size_tokens: int, num_layers: int, num_experts: int
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size_tokens", block_size_tokens),
            ("num_layers", num_layers),
            ("num_experts", num_experts),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        if block_size_tokens > _MAX_COUNT:
            raise ValueError(f"{block_size_tokens=} must be <= {_MAX_COUNT}: counts are uint16")
        self.block_size_tokens = block_size_tokens
        self.rows = np.zeros((num_blocks, num_layers, num_experts), np.uint16)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows in bytes."""
        return self.rows.nbytes

    def add_chunk(self, block_ids: Sequence[int] | np.ndarray, start: int, counts: np.ndarray):
        """Records what one step's chunk of a request touched.

        Args:
            block_ids: the request's block list from its first block on (as `Chunk.block_ids`).
            start: absolute position of the chunk's first token; inside a block it adds to that
                block's row, every further block is begun by this chunk and reset.
            counts: integer [num_touched_blocks, L, E] (as `StepResult.counts`); row 0 belongs
                to block start // block_size.

        Raises:
            ValueError: the chunk touches blocks that the list does not hold, or the shape is
                wrong.
        """
        if counts.shape[1:] != self.rows.shape[1:]:
            raise ValueError(f"counts have shape {counts.shape}, must end in {self.rows.shape[1:]}")
        first, offset = divmod(start, self.block_size_tokens)
        touched = np.asarray(block_ids[first : first + len(counts)], np.int64)
        if len(touched) != len(counts):
            raise ValueError(
                f"chunk at {start=} touches {len(counts)} blocks, the list of {len(block_ids)} "
                f"holds {len(touched)} of them"
            )
        fresh = 1 if offset else 0
        if offset:
            self.rows[touched[0]] += counts[0].astype(np.uint16)
        self.rows[touched[fresh:]] = counts[fresh:]

    def put(self, block_ids: Sequence[int] | np.ndarray, rows: np.ndarray) -> None:
        """Replaces rows: blocks pulled from another worker bring theirs.

        Args:
            block_ids: destination blocks [n].
            rows: uint16 [n, L, E].
        """
        self.rows[np.asarray(block_ids, np.int64)] = rows

    def take(self, block_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """A copy of rows, uint16 [n, L, E], to send along with their blocks."""
        return self.rows[np.asarray(block_ids, np.int64)]

    def total(
        self, block_ids: Sequence[int] | np.ndarray, layers: np.ndarray | None = None
    ) -> np.ndarray:
        """Sum over blocks: the counts of every token now in them.

        Taken when prefill ends, over the prompt's blocks, this is the prompt's exact count.

        Args:
            block_ids: the request's blocks [n].
            layers: layers to keep, in order (a signature model's mask); None for all.

        Returns:
            uint32 [L or Lm, E].
        """
        rows = self.rows[np.asarray(block_ids, np.int64)]
        if layers is not None:
            rows = rows[:, layers]
        return rows.sum(axis=0, dtype=np.uint32)
