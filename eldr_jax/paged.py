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
- attention: each row walks its own KV blocks in order with a running softmax;
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

from eldr_jax import layers
from eldr_jax.config import ModelConfig
from eldr_jax.dispatch import Dispatch, run_experts
from kernels.expert_histogram import expert_histogram

ROW_TILE = 16
_NEVER = -1e30


class KvPool(NamedTuple):
    """Keys and values of every block, one array per layer.

    Attributes:
      keys: L arrays [num_blocks, B, Hkv, Dh] float32.
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
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return KvPool(
        keys=tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.num_layers)),
        values=tuple(jnp.zeros(shape, jnp.float32) for _ in range(config.num_layers)),
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
    tiles = functools.partial(_map_tiles, row_tile=row_tile)
    real = step.token_ids >= 0
    tables = step.block_tables[step.sequences]
    own_block = jnp.take_along_axis(tables, (step.positions // block_size)[:, None], axis=1)[:, 0]
    slots = own_block * block_size + step.positions % block_size
    slots = jnp.where(real, slots, num_blocks * block_size)
    x = params["embed"][jnp.maximum(step.token_ids, 0)].astype(jnp.float32)
    new_keys, new_values, all_ids = [], [], []
    for layer, keys, values in zip(params["layers"], pool.keys, pool.values, strict=True):
        q, k, v = tiles(functools.partial(_project, layer, config), x, step.positions)
        keys, values = _write(keys, slots, k), _write(values, slots, v)
        attend = functools.partial(_attend, layer, config, keys, values)
        x, normed, weights, ids = tiles(attend, x, q, step.positions, tables)
        ids = jnp.where(real[:, None], ids, -1)
        x = x + _experts(normed, weights, ids, layer, config, row_tile)
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


def _map_tiles(fn: Callable[..., Any], *rows: Rows, row_tile: int | None) -> Any:
    """Applies `fn` to `row_tile` rows at a time (to all of them when None)."""
    if row_tile is None:
        return fn(*rows)
    num_rows = rows[0].shape[0]
    if num_rows % row_tile:
        raise ValueError(f"{num_rows=} must be a multiple of {row_tile=}")
    cut = tuple(r.reshape(num_rows // row_tile, row_tile, *r.shape[1:]) for r in rows)
    out = lax.map(lambda tile: fn(*tile), cut)
    return jax.tree.map(lambda y: y.reshape(num_rows, *y.shape[2:]), out)


def _project(
    layer: dict[str, jax.Array], config: ModelConfig, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    cos, sin = layers.rope_angles(positions, config.head_dim, config.rope_theta)
    normed = layers.rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    return layers.project_qkv(
        normed, layer, cos, sin, head_dim=config.head_dim, eps=config.rms_norm_eps
    )


def _write(cache: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    flat = cache.reshape(-1, *cache.shape[2:])
    return flat.at[slots].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)


def _attend(
    layer: dict[str, jax.Array],
    config: ModelConfig,
    keys: jax.Array,
    values: jax.Array,
    x: jax.Array,
    q: jax.Array,
    positions: jax.Array,
    tables: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Attention over each row's own blocks, then the gate: (x, normed, weights, ids)."""
    num_rows, block_size, groups = q.shape[0], keys.shape[1], config.num_kv_heads
    per_group = config.num_heads // groups
    grouped = q.reshape(num_rows, groups, per_group, config.head_dim) * config.head_dim**-0.5

    def one_block(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, mass, mixed = state
        blocks = tables[:, index]
        scores = jnp.einsum("tkgd,tbkd->tkgb", grouped, keys[blocks])
        seen = (index * block_size + jnp.arange(block_size))[None, :] <= positions[:, None]
        seen = seen[:, None, None, :]
        scores = jnp.where(seen, scores, _NEVER)
        new_top = jnp.maximum(top, scores.max(-1))
        share = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        mixed = mixed * shrink[..., None] + jnp.einsum("tkgb,tbkd->tkgd", share, values[blocks])
        return new_top, mass * shrink + share.sum(-1), mixed

    flat = jnp.zeros((num_rows, groups, per_group))
    start = (flat + _NEVER, flat, jnp.zeros(grouped.shape))
    num_blocks = jnp.max(positions) // block_size + 1
    _, mass, mixed = lax.fori_loop(0, num_blocks, one_block, start)
    # Position 0 sees itself, so only rows that no block was read for (none) have no mass.
    mixed = (mixed / mass[..., None]).reshape(num_rows, config.query_width)
    x = x + mixed @ layer["wo"]
    normed = layers.rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
    weights, ids = layers.route(
        normed @ layer["gate"], config.num_experts_per_tok, config.norm_topk_prob
    )
    return x, normed, weights, ids


def _experts(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    layer: dict[str, jax.Array],
    config: ModelConfig,
    row_tile: int | None,
) -> jax.Array:
    """Weighted sum of each token's experts, [T, D]; ids of -1 contribute nothing."""
    stacked = (layer["w_gate"], layer["w_up"], layer["w_down"])
    if row_tile is None:
        real = (ids >= 0).all(axis=1, keepdims=True)
        total, _ = run_experts(x, weights, jnp.maximum(ids, 0), *stacked, Dispatch(kind="ragged"))
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
        y = layers.swiglu(rows, *(lax.dynamic_index_in_dim(w, expert, 0, False) for w in stacked))
        # Rows past the expert's last pair are overwritten by the next expert's tile.
        return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

    out = jnp.zeros((num_tokens * k + row_tile, x.shape[1]), x.dtype)
    out = lax.fori_loop(0, last_tile[-1], one_tile, out)
    picked = out[place].reshape(num_tokens, k, -1)
    return _map_tiles(_add_in_order, picked, weights, ids, row_tile=row_tile)


def _add_in_order(picked: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    total = jnp.zeros((picked.shape[0], picked.shape[2]), picked.dtype)
    for rank in range(picked.shape[1]):
        share = total + weights[:, rank, None] * picked[:, rank]
        total = jnp.where(ids[:, rank, None] >= 0, share, total)
    return total


def _head(params: dict[str, Any], config: ModelConfig, x: jax.Array) -> jax.Array:
    normed = layers.rms_norm(x, params["final_norm"], config.rms_norm_eps)
    head = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    return (normed @ head).astype(jnp.float32)
