"""Attention over a paged cache for accelerators: whole tiles of queries meet whole tiles of keys.

The same result as the row by row walk of `eldr_jax.paged`, in matrix products large enough for a
matrix unit. Softmax runs along the key tiles (arXiv 2205.14135, algorithm 1), so no score outlives
its tile; how many tiles are read depends on the longest sequence at run time, not on the bucket.

Shapes: T rows, H query heads, Hkv key/value heads, Dh head width, B tokens per block, NB blocks of
the cache, R sequences, M blocks per sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

QUERY_TILE_ROWS = 256
KEY_TILE_TOKENS = 512
_NEVER = -1e30


class Cache(NamedTuple):
    """Keys and values that queries look at.

    Attributes:
      keys: [NB, B, Hkv, Dh].
      values: [NB, B, Hkv, Dh].
      tables: int32 [R, M]; cache block of each of a sequence's blocks.
    """

    keys: jax.Array
    values: jax.Array
    tables: jax.Array


class _Softmax(NamedTuple):
    """Running softmax: largest score, sum of shares and weighted sum of values, float32."""

    top: jax.Array
    mass: jax.Array
    mixed: jax.Array


def prefill_attention(
    q: jax.Array,
    cache: Cache,
    positions: jax.Array,
    sequences: jax.Array,
    real: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of packed prefill chunks; each row sees its own sequence up to itself.

    Args:
      q: [T, H, Dh].
      cache: holds the rows' own keys and values already.
      positions: int32 [T].
      sequences: int32 [T], not falling over real rows.
      real: bool [T]; rows that are not padding.
      scale: factor of the scores.
      window: tokens that a row sees, itself included; None for all.
      sinks: float32 [H]; a score per head that takes its share and brings nothing.

    Returns:
      [T, H*Dh] in the type of `q`; rows that are not real hold zeros.
    """
    num_rows, num_heads, head_dim = q.shape
    tile_rows = min(QUERY_TILE_ROWS, num_rows)
    num_tiles = -(-num_rows // tile_rows)
    pad = num_tiles * tile_rows - num_rows
    if pad:
        q = jnp.pad(q, ((0, pad), (0, 0), (0, 0)))
        positions, sequences = jnp.pad(positions, (0, pad)), jnp.pad(sequences, (0, pad))
        real = jnp.pad(real, (0, pad))
    num_kv_heads, per_tile = cache.keys.shape[2], _blocks_per_tile(cache)
    cache = cache._replace(tables=_padded_tables(cache.tables, per_tile))
    key_tile = per_tile * cache.keys.shape[1]
    group = num_heads // num_kv_heads
    start = _first_state((num_kv_heads, group, tile_rows), head_dim, sinks, (group, 1))

    def one_tile(rows: tuple[jax.Array, ...]) -> jax.Array:
        queries, places, owners, valid = rows
        queries = queries.reshape(tile_rows, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)

        def one_sequence(sequence: jax.Array, state: _Softmax) -> _Softmax:
            mine = valid & (owners == sequence)
            last = jnp.max(jnp.where(mine, places, -1))
            first = jnp.min(jnp.where(mine, places, last))
            oldest = 0 if window is None else jnp.maximum(first - window + 1, 0)

            def one_key_tile(index: jax.Array, state: _Softmax) -> _Softmax:
                row = lax.dynamic_index_in_dim(cache.tables, sequence, keepdims=False)
                blocks = lax.dynamic_slice_in_dim(row, index * per_tile, per_tile)
                keys = cache.keys[blocks].reshape(key_tile, num_kv_heads, head_dim)
                values = cache.values[blocks].reshape(key_tile, num_kv_heads, head_dim)
                scores = jnp.einsum(
                    "kgqd,skd->kgqs", queries, keys, preferred_element_type=jnp.float32
                )
                seen = _seen(index * key_tile + jnp.arange(key_tile), places[:, None], window)
                return _add(state, scores * scale, seen & mine[:, None], values, "kgqs,skd->kgqd")

            return lax.fori_loop(oldest // key_tile, last // key_tile + 1, one_key_tile, state)

        lowest = jnp.min(jnp.where(valid, owners, cache.tables.shape[0]))
        highest = jnp.max(jnp.where(valid, owners, -1))
        state = lax.fori_loop(lowest, highest + 1, one_sequence, start)
        return _mean(state).transpose(2, 0, 1, 3).astype(q.dtype)

    cut = [
        array.reshape(num_tiles, tile_rows, *array.shape[1:])
        for array in (q, positions, sequences, real)
    ]
    out = lax.map(one_tile, tuple(cut))
    return out.reshape(num_tiles * tile_rows, num_heads * head_dim)[:num_rows]


def decode_attention(
    q: jax.Array,
    cache: Cache,
    positions: jax.Array,
    real: jax.Array,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one row per sequence.

    Args:
      q: [R, H, Dh]; row r belongs to sequence r of the tables.
      cache: holds the rows' own keys and values already.
      positions: int32 [R].
      real: bool [R]; rows that are not padding.
      scale: factor of the scores.
      window: as in `prefill_attention`.
      sinks: as in `prefill_attention`.

    Returns:
      [R, H*Dh] in the type of `q`; rows that are not real hold zeros.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, per_tile = cache.keys.shape[2], _blocks_per_tile(cache)
    tables = _padded_tables(cache.tables, per_tile)
    key_tile = per_tile * cache.keys.shape[1]
    group = num_heads // num_kv_heads
    queries = q.reshape(num_rows, num_kv_heads, group, head_dim)

    def one_key_tile(index: jax.Array, state: _Softmax) -> _Softmax:
        blocks = lax.dynamic_slice_in_dim(tables, index * per_tile, per_tile, axis=1)
        shape = (num_rows, key_tile, num_kv_heads, head_dim)
        keys, values = cache.keys[blocks].reshape(shape), cache.values[blocks].reshape(shape)
        scores = jnp.einsum("rkgd,rskd->rkgs", queries, keys, preferred_element_type=jnp.float32)
        seen = _seen(index * key_tile + jnp.arange(key_tile), positions[:, None], window)
        seen = (seen & real[:, None])[:, None, None, :]
        return _add(state, scores * scale, seen, values, "rkgs,rskd->rkgd")

    last = jnp.max(jnp.where(real, positions, -1))
    oldest = jnp.int32(0)
    if window is not None:
        first = jnp.min(jnp.where(real, positions, last))
        oldest = jnp.maximum(first - window + 1, 0)
    start = _first_state((num_rows, num_kv_heads, group), head_dim, sinks, (group,))
    state = lax.fori_loop(oldest // key_tile, last // key_tile + 1, one_key_tile, start)
    return _mean(state).reshape(num_rows, num_heads * head_dim).astype(q.dtype)


def _blocks_per_tile(cache: Cache) -> int:
    return max(1, KEY_TILE_TOKENS // cache.keys.shape[1])


def _padded_tables(tables: jax.Array, per_tile: int) -> jax.Array:
    """Whole tiles of blocks: a slice that reached over the end would be moved back."""
    pad = -tables.shape[1] % per_tile
    return jnp.pad(tables, ((0, 0), (0, pad))) if pad else tables


def _first_state(
    shape: tuple[int, ...], head_dim: int, sinks: jax.Array | None, per_head: tuple[int, ...]
) -> _Softmax:
    """The state before any key: empty, or the sinks' share. `per_head` follows the kv heads."""
    mixed = jnp.zeros((*shape, head_dim), jnp.float32)
    if sinks is None:
        return _Softmax(jnp.full(shape, _NEVER), jnp.zeros(shape, jnp.float32), mixed)
    top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(-1, *per_head), shape)
    return _Softmax(top, jnp.ones(shape, jnp.float32), mixed)


def _seen(keys_at: jax.Array, queries_at: jax.Array, window: jax.Array | int | None) -> jax.Array:
    seen = keys_at <= queries_at
    return seen if window is None else seen & (keys_at > queries_at - window)


def _add(
    state: _Softmax, scores: jax.Array, seen: jax.Array, values: jax.Array, mix: str
) -> _Softmax:
    scores = jnp.where(seen, scores, _NEVER)
    top = jnp.maximum(state.top, scores.max(-1))
    share = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    shrink = jnp.exp(state.top - top)
    mixed = jnp.einsum(mix, share.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return _Softmax(
        top, state.mass * shrink + share.sum(-1), state.mixed * shrink[..., None] + mixed
    )


def _mean(state: _Softmax) -> jax.Array:
    # Rows that saw no key, padding, have no mass.
    return state.mixed / jnp.where(state.mass > 0, state.mass, 1.0)[..., None]
