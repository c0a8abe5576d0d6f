"""One serving step over a paged KV cache: prefill chunks and decode rows are the same program.

A step takes T token rows (a compiled bucket). Each row is a token of some sequence at some
position; a prefill chunk brings many rows of one sequence, a decode step one row of each, and
both may share a step. The program writes the rows' keys and values into the pool, attends,
routes, runs the active experts and returns logits of the asked rows and expert counts per KV
block. Padding rows (`token_ids` < 0) write nowhere, count nowhere and change nothing.

Batch- and bucket-invariant by construction (`row_tile` set, the CPU serving path): everything
with a reduction in it runs on tiles of exactly `row_tile` rows, whatever T is, so a row meets
the same instructions with the same shapes alone and in company:
- projections, norms, gate and head: `lax.map` over tiles;
- attention: each row walks its own KV blocks in order with a running softmax; a block of which a
  row sees nothing (after its end, or before its window) leaves that row's state as it was, so a
  tile may walk any range that covers its rows;
- experts: (token, expert) pairs sorted by expert and cut into tiles of one expert each. The
  loop's trip count is the number of such tiles, so a decode step's time grows with the number
  of DISTINCT experts its rows activate, as on real hardware;
- a token's experts are added in ascending id.
With `row_tile=None` the same step runs whole matrix products and `lax.ragged_dot` (TPU).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eldr_jax import attention, layers
from eldr_jax.architecture import LayerAttention
from eldr_jax.config import ModelConfig
from eldr_jax.dispatch import Dispatch, run_experts
from kernels.expert_histogram import expert_histogram

ROW_TILE = 16
_NEVER = -1e30
_LITTLE = 1e-30


class KvPool(NamedTuple):
    """Keys and values of every block, one array per layer.

    Attributes:
      keys: L arrays [num_blocks, B, Hkv, Dh] float32, Hkv and Dh those of the layer.
      values: the same shapes.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


Rows = jax.Array | np.ndarray


class StepInput(NamedTuple):
    """What one step works on.

    Attributes:
      token_ids: int32 [T]; -1 marks padding.
      positions: int32 [T]; place of the token in its sequence.
      sequences: int32 [T]; row of `block_tables` the token belongs to.
      block_tables: int32 [R, NB]; pool block of each of a sequence's blocks.
      logit_rows: int32 [R]; token rows whose logits are wanted.
      count_rows: int32 [T]; row of the returned counts a token's experts go to, not falling
        over real tokens; -1 for none.
    """

    token_ids: Rows
    positions: Rows
    sequences: Rows
    block_tables: Rows
    logit_rows: Rows
    count_rows: Rows


class StepOutput(NamedTuple):
    """What one step returns beside the pool.

    Attributes:
      next_tokens: int32 [R]; argmax of `logits`.
      logits: float32 [R, V].
      counts: [num_counts, L, E] unsigned; tokens of each touched block per expert.
      hidden: float32 [T, D] before the final norm; None unless `debug`.
      expert_ids: int32 [L, K, T], -1 on padding; None unless `debug`.
    """

    next_tokens: jax.Array
    logits: jax.Array
    counts: jax.Array
    hidden: jax.Array | None
    expert_ids: jax.Array | None


def num_count_rows(num_tokens: int, num_sequences: int, block_size: int) -> int:
    """Static capacity of a step's counts: every full block plus one partial per sequence."""
    return -(-num_tokens // block_size) + num_sequences


def init_pool(config: ModelConfig, num_blocks: int, block_size: int) -> KvPool:
    """An empty pool of `num_blocks` blocks of `block_size` tokens."""
    shapes = [
        (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        for layer in map(config.layer_attention, range(config.num_layers))
    ]
    return KvPool(
        keys=tuple(jnp.zeros(shape, jnp.float32) for shape in shapes),
        values=tuple(jnp.zeros(shape, jnp.float32) for shape in shapes),
    )


@functools.partial(
    jax.jit, static_argnames=("config", "row_tile", "debug"), donate_argnames=("pool",)
)
def paged_step(
    params: dict[str, Any],
    pool: KvPool,
    step: StepInput,
    *,
    config: ModelConfig,
    row_tile: int | None = ROW_TILE,
    debug: bool = False,
) -> tuple[KvPool, StepOutput]:
    """Runs one step; see the module's text.

    Args:
      params: tree of `eldr_jax.model.params_of`.
      pool: the cache; donated, so only the returned one may be used afterwards.
      step: the rows. T and R must be multiples of `row_tile`.
      config: geometry (static).
      row_tile: rows of every matrix product; None for whole products (static).
      debug: also return hidden states and expert ids (static).

    Returns:
      The pool with the rows' keys and values written, and the output.
    """
    num_blocks, block_size = pool.keys[0].shape[:2]
    num_tokens, num_sequences = step.token_ids.shape[0], step.block_tables.shape[0]
    tiles = functools.partial(
        _map_tiles, row_tile=row_tile, no_more_tiles=_no_more_tiles(config, step.positions)
    )
    real = step.token_ids >= 0
    tables = step.block_tables[step.sequences]
    own_block = jnp.take_along_axis(tables, (step.positions // block_size)[:, None], axis=1)[:, 0]
    slots = own_block * block_size + step.positions % block_size
    slots = jnp.where(real, slots, num_blocks * block_size)
    embed = functools.partial(_embed, params["embed"], config)
    x = tiles(embed, step.token_ids) if config.scale_embeddings else embed(step.token_ids)
    new_keys, new_values, all_ids = [], [], []
    for index, layer in enumerate(params["layers"]):
        own = config.layer_attention(index)
        q, k, v = tiles(functools.partial(_project, layer, config, own), x, step.positions)
        keys, values = _write(pool.keys[index], slots, k), _write(pool.values[index], slots, v)
        attend = functools.partial(_attend, layer, config, own, keys, values)
        x, normed, weights, ids = tiles(attend, x, q, step.positions, real, tables)
        ids = jnp.where(real[:, None], ids, -1)
        out = _experts(normed, weights, ids, layer, config, tiles, row_tile)
        add = functools.partial(_add_experts, layer, config)
        # A sum alone rounds the same everywhere; it needs no tiles.
        x = tiles(add, x, out) if config.block.post_norms else add(x, out)
        new_keys.append(keys)
        new_values.append(values)
        all_ids.append(ids.T)
    expert_ids = jnp.stack(all_ids)
    counts = expert_histogram(
        expert_ids,
        jnp.asarray(step.count_rows),
        num_blocks=num_count_rows(num_tokens, num_sequences, block_size),
        num_experts=config.num_experts,
        block_size=block_size,
    )
    logits = tiles(functools.partial(_head, params, config), x[step.logit_rows])
    output = StepOutput(
        next_tokens=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        logits=logits,
        counts=counts,
        hidden=x if debug else None,
        expert_ids=expert_ids if debug else None,
    )
    return KvPool(tuple(new_keys), tuple(new_values)), output


def _map_tiles(
    fn: Callable[..., Any], *rows: Rows, row_tile: int | None, no_more_tiles: int | jax.Array
) -> Any:
    """Applies `fn` to `row_tile` rows at a time (to all of them when None)."""
    if row_tile is None:
        return fn(*rows)
    num_rows = rows[0].shape[0]
    if num_rows % row_tile:
        raise ValueError(f"{num_rows=} must be a multiple of {row_tile=}")
    num_tiles = num_rows // row_tile
    cut = tuple(r.reshape(num_tiles, row_tile, *r.shape[1:]) for r in map(jnp.asarray, rows))

    def one_tile(index: jax.Array, out: Any) -> Any:
        tile = fn(*(lax.dynamic_index_in_dim(r, index, 0, False) for r in cut))
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_index_in_dim(whole, part, index, 0), out, tile
        )

    like = jax.eval_shape(fn, *(jax.eval_shape(lambda r: r[0], r) for r in cut))
    out = jax.tree.map(lambda part: jnp.zeros((num_tiles, *part.shape), part.dtype), like)
    out = lax.fori_loop(0, num_tiles + no_more_tiles, one_tile, out)
    return jax.tree.map(lambda y: y.reshape(num_rows, *y.shape[2:]), out)


def _no_more_tiles(config: ModelConfig, positions: Rows) -> int | jax.Array:
    """Zero, and where it matters one that the compiler cannot know (positions are never negative).

    A loop of one turn is merged with what stands around it. Where that lets a scale meet a sum, the
    two round once instead of twice, and a row in the smallest bucket differs from the same row in a
    larger one. Blocks that scale nothing they add keep the merged loop: it is a tenth faster, and
    the tests hold it to the same bits.
    """
    if config.block.post_norms or config.block.output_scale or config.scale_embeddings:
        return jnp.minimum(jnp.max(jnp.asarray(positions)), 0)
    return 0


def _embed(embedding: jax.Array, config: ModelConfig, token_ids: Rows) -> jax.Array:
    return layers.embed(jnp.maximum(token_ids, 0), embedding, config).astype(jnp.float32)


def _project(
    layer: dict[str, jax.Array],
    config: ModelConfig,
    own: LayerAttention,
    x: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    options, eps = config.attention, config.rms_norm_eps
    cos, sin = attention.rope_angles(
        positions,
        own.head_dim,
        own.rope_theta,
        rotary_fraction=own.rotary_fraction,
        yarn=options.yarn,
    )
    normed = layers.rms_norm(x, layer["attn_norm"], eps)
    return attention.project_qkv(normed, layer, cos, sin, attention=own, options=options, eps=eps)


def _write(cache: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    flat = cache.reshape(-1, *cache.shape[2:])
    return flat.at[slots].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)


def _attend(
    layer: dict[str, jax.Array],
    config: ModelConfig,
    own: LayerAttention,
    keys: jax.Array,
    values: jax.Array,
    x: jax.Array,
    q: jax.Array,
    positions: jax.Array,
    real: jax.Array,
    tables: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Attention over each row's own blocks, then the gate: (x, normed, weights, ids)."""
    num_rows, block_size, groups = q.shape[0], keys.shape[1], own.num_kv_heads
    per_group = own.num_heads // groups
    grouped = q.reshape(num_rows, groups, per_group, own.head_dim) * own.scale

    def one_block(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, mass, mixed = state
        blocks = tables[:, index]
        scores = jnp.einsum("tkgd,tbkd->tkgb", grouped, keys[blocks])
        places = (index * block_size + jnp.arange(block_size))[None, :]
        seen = places <= positions[:, None]
        if own.window is not None:
            seen &= places > positions[:, None] - own.window
        seen = seen[:, None, None, :]
        scores = jnp.where(seen, scores, _NEVER)
        new_top = jnp.maximum(top, scores.max(-1))
        share = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        mixed = mixed * shrink[..., None] + jnp.einsum("tkgb,tbkd->tkgd", share, values[blocks])
        return new_top, mass * shrink + share.sum(-1), mixed

    flat = jnp.zeros((num_rows, groups, per_group))
    if config.attention.sinks:
        # The sink is the first thing a row sees: its whole mass so far, and it brings no value.
        sinks = layer["sinks"].astype(flat.dtype).reshape(groups, per_group)
        start = (flat + sinks, flat + 1.0, jnp.zeros(grouped.shape))
    else:
        start = (flat + _NEVER, flat, jnp.zeros(grouped.shape))
    first_block = jnp.int32(0)
    if own.window is not None:
        first_seen = jnp.where(real, positions, jnp.max(positions)) - own.window + 1
        first_block = jnp.maximum(jnp.min(first_seen), 0) // block_size
    num_blocks = jnp.max(positions) // block_size + 1
    _, mass, mixed = lax.fori_loop(first_block, num_blocks, one_block, start)
    # A real row sees itself. Padding that saw nothing would divide zero by zero.
    mixed = mixed / (mass if own.window is None else jnp.maximum(mass, _LITTLE))[..., None]
    x = layers.add_attention(x, mixed.reshape(num_rows, own.query_width), layer, config)
    normed = layers.rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    logits = layers.gate_logits(x, normed, layer, config)
    weights, ids = layers.choose_experts(logits, layer, config)
    return x, normed, weights, ids


def _experts(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    layer: dict[str, jax.Array],
    config: ModelConfig,
    tiles: Callable[..., Any],
    row_tile: int | None,
) -> jax.Array:
    """Weighted sum of each token's experts, [T, D]; ids of -1 contribute nothing."""
    stacked = layers.expert_leaves(layer)
    if row_tile is None:
        real = (ids >= 0).all(axis=1, keepdims=True)
        ragged = Dispatch(kind="ragged")
        total, _ = run_experts(x, weights, jnp.maximum(ids, 0), stacked, ragged, config.expert)
        return jnp.where(real, total, 0.0)
    num_tokens, k = ids.shape
    # Padding sorts behind the last expert and belongs to no tile.
    by_id = jnp.argsort(jnp.where(ids < 0, config.num_experts, ids), axis=1, stable=True)
    ids = jnp.take_along_axis(ids, by_id, axis=1)
    weights = jnp.take_along_axis(weights, by_id, axis=1)
    flat = jnp.where(ids < 0, config.num_experts, ids).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(num_tokens * k, dtype=order.dtype))
    pairs = jnp.sum(flat[:, None] == jnp.arange(config.num_experts), axis=0, dtype=jnp.int32)
    first_pair = jnp.cumsum(pairs) - pairs
    tiles_of = -(-pairs // row_tile)
    last_tile = jnp.cumsum(tiles_of)
    token_of = jnp.concatenate([order // k, jnp.zeros(row_tile, order.dtype)])

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.sum(last_tile <= index)
        within = index - (last_tile[expert] - tiles_of[expert])
        start = first_pair[expert] + within * row_tile
        rows = x[lax.dynamic_slice_in_dim(token_of, start, row_tile)]
        own = {
            name: lax.dynamic_index_in_dim(weight, expert, 0, False)
            for name, weight in stacked.items()
        }
        y = layers.expert_mlp(rows, own, config.expert)
        # Rows past the expert's last pair are overwritten by the next expert's tile.
        return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    out = jnp.zeros((num_tokens * k + row_tile, x.shape[1]), x.dtype)
    out = lax.fori_loop(0, last_tile[-1], one_tile, out)
    picked = out[place].reshape(num_tokens, k, -1)
    return tiles(_add_in_order, picked, weights, ids)


def _add_in_order(picked: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    total = jnp.zeros((picked.shape[0], picked.shape[2]), picked.dtype)
    for rank in range(picked.shape[1]):
        share = total + weights[:, rank, None] * picked[:, rank]
        total = jnp.where(ids[:, rank, None] >= 0, share, total)
    return total


def _add_experts(
    layer: dict[str, jax.Array], config: ModelConfig, x: jax.Array, out: jax.Array
) -> jax.Array:
    return layers.add_experts(x, out, layer, config)


def _head(params: dict[str, Any], config: ModelConfig, x: jax.Array) -> jax.Array:
    normed = layers.rms_norm(x, params["final_norm"], config.rms_norm_eps)
    head = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    return layers.soften_logits((normed @ head).astype(jnp.float32), config)
