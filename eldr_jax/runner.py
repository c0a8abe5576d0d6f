"""The host side of the paged step: packs chunks into the smallest compiled bucket.

A bucket is a number of token rows and a number of requests: tokens set the cost of everything but
the head, requests that of the head and of the step's tables.

One `PagedRunner` is one compiled model; any number of workers with pools of the same shape
share it, and with it one jit cache. The runner holds no pool: the caller owns it and gets the
new one back from each step (the old one is donated).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from eldr_jax.config import ModelConfig
from eldr_jax.model import Params
from eldr_jax.paged import (
    ROW_TILE,
    KvPool,
    StepInput,
    StepOutput,
    init_pool,
    paged_step,
)

MAX_CHUNKS = ROW_TILE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Consecutive tokens of one sequence to run in a step.

    Attributes:
      token_ids: int32 [n], n >= 1; a decode row has n = 1.
      start: position of the first token; earlier positions are already in the pool.
      block_ids: int32 [>= ceil((start + n) / B)]; the sequence's pool blocks in order.
    """

    token_ids: np.ndarray
    start: int
    block_ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step gave, per chunk in the order given.

    Attributes:
      next_tokens: int32 [num_chunks]; greedy choice after each chunk's last token.
      counts: per chunk unsigned [num_touched_blocks, L, E]; row 0 is block start // B.
      num_tokens: real tokens in the step.
      bucket: token rows the step was compiled for.
      distinct_experts: mean over layers of the experts touched by the step's real tokens.
      hidden: float32 [num_tokens, D] in chunk order (debug only).
      expert_ids: int32 [L, K, num_tokens] in chunk order (debug only).
    """

    next_tokens: np.ndarray
    counts: tuple[np.ndarray, ...]
    num_tokens: int
    bucket: int
    distinct_experts: float
    device_logits: jax.Array
    hidden: np.ndarray | None = None
    expert_ids: np.ndarray | None = None

    def logits(self) -> np.ndarray:
        """float32 [num_chunks, V], copied from the device when asked for."""
        return np.asarray(self.device_logits)[: len(self.counts)]


class PagedRunner:
    """Runs steps of one model.

    Attributes:
      config: geometry.
      num_blocks: KV blocks of every pool.
      block_size: tokens per block.
      token_buckets: compiled step sizes in tokens, ascending multiples of the row tile.
      request_buckets: compiled numbers of chunks per step, ascending multiples of the row tile.
      max_blocks_per_seq: longest sequence in blocks.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        num_blocks: int,
        block_size: int = 16,
        token_buckets: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
        request_buckets: tuple[int, ...] = (MAX_CHUNKS,),
        max_blocks_per_seq: int = 64,
        row_tile: int | None = ROW_TILE,
        debug: bool = False,
    ) -> None:
        for name, buckets in (
            ("token_buckets", token_buckets),
            ("request_buckets", request_buckets),
        ):
            if not buckets or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name}={buckets} must be ascending and distinct")
            if any(bucket < 1 or bucket % ROW_TILE for bucket in buckets):
                raise ValueError(f"{name}={buckets} must be positive multiples of {ROW_TILE}")
        if request_buckets[-1] > token_buckets[-1]:
            raise ValueError(
                f"{request_buckets=} must not exceed the largest of {token_buckets=}, "
                "every request has a token"
            )
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("max_blocks_per_seq", max_blocks_per_seq),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be >= 1")
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.token_buckets = token_buckets
        self.request_buckets = request_buckets
        self.max_blocks_per_seq = max_blocks_per_seq
        self._params = jax.tree.map(jnp.asarray, params)
        self._row_tile = row_tile
        self._debug = debug

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return min(self.max_blocks_per_seq * self.block_size, self.config.max_position_embeddings)

    def new_pool(self) -> KvPool:
        """An empty pool; blocks 0 .. num_blocks - 1 are all usable."""
        return init_pool(self.config, self.num_blocks, self.block_size)

    def warm_up(self, pool: KvPool, progress: Callable[[int, int], None] | None = None) -> KvPool:
        """Compiles every bucket on padding rows; `progress(done, total)` after each."""
        pool = self.write_blocks(pool, np.arange(1), *self.read_blocks(pool, np.arange(1)))
        sizes = self.step_sizes()
        for done, size in enumerate(sizes, start=1):
            pool, output = self._run(pool, self._empty_step(*size))
            jax.block_until_ready(output.next_tokens)
            if progress is not None:
                progress(done, len(sizes))
        return pool

    def step_sizes(self) -> list[tuple[int, int]]:
        """Every (token rows, requests) a step can be compiled for: requests have a token each."""
        sizes = []
        fewest = 1
        for requests in self.request_buckets:
            sizes += [(tokens, requests) for tokens in self.token_buckets if tokens >= fewest]
            fewest = requests + 1
        return sizes

    def step(self, pool: KvPool, chunks: Sequence[Chunk]) -> tuple[KvPool, StepResult]:
        """Runs one step over `chunks`.

        Args:
          pool: donated; use only the returned one.
          chunks: chunks of different sequences, at most the largest request bucket.

        Returns:
          The new pool and the result; the result is ready (the device has finished).

        Raises:
          ValueError: no chunk, too many, tokens beyond the largest bucket, a chunk without
            enough blocks, or a block id outside the pool.
        """
        spans = self._check(chunks)
        num_tokens = spans[-1]
        bucket = _smallest("num_tokens", num_tokens, self.token_buckets)
        requests = _smallest("num_chunks", len(chunks), self.request_buckets)
        inputs = self._empty_step(bucket, requests)
        first_count = [0]
        for row, (chunk, begin) in enumerate(zip(chunks, spans, strict=False)):
            length = len(chunk.token_ids)
            rows = slice(begin, begin + length)
            positions = np.arange(chunk.start, chunk.start + length, dtype=np.int32)
            inputs.token_ids[rows] = chunk.token_ids
            inputs.positions[rows] = positions
            inputs.sequences[rows] = row
            blocks = chunk.block_ids[: self._blocks_of(chunk)]
            inputs.block_tables[row, : len(blocks)] = blocks
            inputs.logit_rows[row] = begin + length - 1
            inputs.count_rows[rows] = (
                first_count[-1] + positions // self.block_size - chunk.start // self.block_size
            )
            first_count.append(int(inputs.count_rows[begin + length - 1]) + 1)
        pool, output = self._run(pool, inputs)
        counts = np.asarray(output.counts)
        touched = counts[: first_count[-1]]
        pairs = itertools.pairwise(first_count)
        debug = self._debug
        return pool, StepResult(
            next_tokens=np.asarray(output.next_tokens)[: len(chunks)],
            counts=tuple(counts[low:high] for low, high in pairs),
            num_tokens=num_tokens,
            bucket=bucket,
            distinct_experts=float(touched.any(axis=0).sum() / self.config.num_layers),
            device_logits=output.logits,
            hidden=np.asarray(output.hidden)[:num_tokens] if debug else None,
            expert_ids=np.asarray(output.expert_ids)[..., :num_tokens] if debug else None,
        )

    def read_blocks(self, pool: KvPool, block_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of `block_ids`, float32 [n, L, B, Hkv, Dh] each.

        Hkv and Dh are the most of any layer; a layer with less leaves the rest zero.
        """
        # Whole arrays are viewed without a copy on the host; a device gather would compile
        # anew for every n.
        index = np.asarray(block_ids)
        shape = self._blocks_shape(len(index))
        keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for out, caches in ((keys, pool.keys), (values, pool.values)):
            for layer, cache in enumerate(caches):
                blocks = np.asarray(cache)[index]
                out[:, layer, :, : blocks.shape[2], : blocks.shape[3]] = blocks
        return keys, values

    def write_blocks(
        self, pool: KvPool, block_ids: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> KvPool:
        """Puts keys and values (shapes of `read_blocks`) into `block_ids`; `pool` is donated."""
        shape = self._blocks_shape(len(block_ids))
        if keys.shape != shape or values.shape != shape:
            raise ValueError(f"{keys.shape=} and {values.shape=} must be {shape}")
        # One compiled size: a sequence has any number of blocks, each would compile anew.
        pad = self.max_blocks_per_seq - len(block_ids)
        if pad < 0:
            raise ValueError(f"{len(block_ids)=} must be <= {self.max_blocks_per_seq=}")
        ids = np.full(self.max_blocks_per_seq, self.num_blocks, np.int32)
        ids[: len(block_ids)] = block_ids
        padding = ((0, pad), *((0, 0),) * 4)
        return _write_blocks(pool, ids, np.pad(keys, padding), np.pad(values, padding))

    def _blocks_shape(self, num_blocks: int) -> tuple[int, ...]:
        config = self.config
        return (num_blocks, config.num_layers, self.block_size, *config.max_kv_shape)

    def _run(self, pool: KvPool, inputs: StepInput) -> tuple[KvPool, StepOutput]:
        return paged_step(
            self._params,
            pool,
            inputs,
            config=self.config,
            row_tile=self._row_tile,
            debug=self._debug,
        )

    def _empty_step(self, bucket: int, requests: int) -> StepInput:
        """A step of padding only, in NumPy arrays the caller may fill."""
        return StepInput(
            token_ids=np.full(bucket, -1, np.int32),
            positions=np.zeros(bucket, np.int32),
            sequences=np.zeros(bucket, np.int32),
            block_tables=np.zeros((requests, self.max_blocks_per_seq), np.int32),
            logit_rows=np.zeros(requests, np.int32),
            count_rows=np.full(bucket, -1, np.int32),
        )

    def _blocks_of(self, chunk: Chunk) -> int:
        return -(-(chunk.start + len(chunk.token_ids)) // self.block_size)

    def _check(self, chunks: Sequence[Chunk]) -> list[int]:
        """First token row of each chunk, and the total at the end."""
        most = self.request_buckets[-1]
        if not 1 <= len(chunks) <= most:
            raise ValueError(f"num_chunks={len(chunks)} must be in [1, {most}]")
        spans = [0]
        for index, chunk in enumerate(chunks):
            if len(chunk.token_ids) < 1 or chunk.start < 0:
                raise ValueError(
                    f"chunk {index}: {len(chunk.token_ids)} tokens from {chunk.start} "
                    "must be at least one token from position 0 on"
                )
            needed = self._blocks_of(chunk)
            if len(chunk.block_ids) < needed or needed > self.max_blocks_per_seq:
                raise ValueError(
                    f"chunk {index}: {needed} blocks needed, {len(chunk.block_ids)} given, "
                    f"{self.max_blocks_per_seq} allowed"
                )
            blocks = np.asarray(chunk.block_ids[:needed])
            if blocks.min() < 0 or blocks.max() >= self.num_blocks:
                raise ValueError(f"chunk {index}: block ids must lie in [0, {self.num_blocks})")
            spans.append(spans[-1] + len(chunk.token_ids))
        return spans


def _smallest(name: str, count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count`."""
    for bucket in buckets:
        if bucket >= count:
            return bucket
    raise ValueError(f"{name}={count} exceeds the largest bucket {buckets[-1]}")


@jax.jit(donate_argnames=("pool",))
def _write_blocks(pool: KvPool, block_ids: jax.Array, keys: jax.Array, values: jax.Array) -> KvPool:
    def put(caches: tuple[jax.Array, ...], blocks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            cache.at[block_ids].set(
                blocks[:, i, :, : cache.shape[2], : cache.shape[3]], mode="drop"
            )
            for i, cache in enumerate(caches)
        )

    return KvPool(put(pool.keys, keys), put(pool.values, values))
