"""The serving step over a mesh: whole matrix products, experts apart, one program per size.

What `eldr_jax.paged` computes on one device, `sharded_step` computes on (data, expert, tensor)
devices under one `shard_map`: each device runs the heads and the experts it holds on all rows of
its replica and the partial results are summed. Layers are scanned, so a program's size does not
grow with depth. A program is either for prefill (packed chunks, any context) or for decode (row r
belongs to sequence r); both write keys and values into the paged cache first.

The experts of the rows are counted per KV block inside the program; each device counts some of
the layers. Ids are logical: the expert's number in the checkpoint, wherever it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eldr_jax import attention, layers
from eldr_jax.config import ModelConfig
from eldr_jax.dispatch import Dispatch, StackPart, run_experts
from eldr_jax.paged import StepInput, num_count_rows
from eldr_jax.sharded_state import ShardedCache, ShardedOutput
from eldr_jax.sharding import (
    MODEL_AXES,
    MeshPlan,
    attention_shards,
    cache_spec,
    param_specs,
    pattern_length,
)
from eldr_jax.tiled_attention import Cache, decode_attention, prefill_attention
from kernels.expert_histogram import expert_histogram

Phase = Literal["prefill", "decode"]
_RAGGED = Dispatch(kind="ragged")


def sharded_step(
    config: ModelConfig,
    plan: MeshPlan,
    mesh: Mesh,
    phase: Phase,
    *,
    histogram: str | None = None,
    count_experts: bool = True,
    debug: bool = False,
) -> jax.stages.Wrapped:
    """Builds the step.

    Args:
      config: geometry.
      plan: the mesh's plan, checked here.
      mesh: the mesh.
      phase: what the rows are; "decode" has one row for each sequence, in order.
      histogram: backend that counts experts, None for the platform's own; ahead of time it must
        be named, because the platform is then not the one compiled for.
      count_experts: without it the step returns no counts, to see what they cost.
      debug: also return expert ids.

    Returns:
      Jitted `(params, cache, step) -> (cache, output)`: `stack_params`' tree, a `ShardedCache`
      (donated) and a `StepInput` whose block ids, sequences and rows count within each replica.

    Raises:
      ShardingError: the model cannot be cut this way.
    """
    plan.check(config)
    # These tuples hold an array's spec in its place.
    places: Any = (cache_spec(config, plan),) * pattern_length(config)
    cache_specs = ShardedCache(keys=places, values=places)
    rows: Any = P("data")
    tables: Any = P("data", None)
    specs = StepInput(rows, rows, rows, tables, rows, rows)
    logits: Any = P("data", MODEL_AXES)
    counts: Any = P("data", MODEL_AXES, None) if count_experts else None
    ids: Any = P(None, None, "data") if debug else None
    out_specs = ShardedOutput(next_tokens=rows, logits=logits, counts=counts, expert_ids=ids)
    body = functools.partial(
        _local_step,
        config=config,
        plan=plan,
        phase=phase,
        histogram=histogram,
        count_experts=count_experts,
        debug=debug,
    )
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(param_specs(config, plan), cache_specs, specs),
        out_specs=(cache_specs, out_specs),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=1)


def _local_step(
    params: dict[str, Any],
    cache: ShardedCache,
    step: StepInput,
    *,
    config: ModelConfig,
    plan: MeshPlan,
    phase: Phase,
    histogram: str | None,
    count_experts: bool,
    debug: bool,
) -> tuple[ShardedCache, ShardedOutput]:
    """One device's part; all shapes are those of its shard."""
    shapes = [array.shape for array in cache.keys]
    length, num_repeats, block_size = len(shapes), shapes[0][0], shapes[0][2]
    rows = _rows_of(step, block_size)
    angles = [_angles(config, place, rows.positions) for place in range(length)]
    x = _embed(params["embed"], step.token_ids, config)

    # The experts of all layers of a place are one stack, and their caches one pool: a layer is
    # where it begins in them, so that no slice of either is ever copied.
    experts = [
        {
            name: array.reshape(-1, *array.shape[2:])
            for name, array in layers.expert_leaves(w).items()
        }
        for w in params["layers"]
    ]
    others = tuple(
        {name: array for name, array in w.items() if name not in layers.EXPERT_LEAVES}
        for w in params["layers"]
    )

    def pattern(carry: Any, scanned: tuple[jax.Array, Any]) -> tuple[Any, jax.Array]:
        x, caches = carry
        repeat, weights = scanned
        ids, written = [], []
        for place in range(length):
            x, kept, chosen = _layer(
                x,
                caches[place],
                weights[place],
                experts[place],
                rows,
                repeat,
                angles[place],
                config=config,
                plan=plan,
                place=place,
                num_repeats=num_repeats,
                phase=phase,
            )
            written.append(kept)
            ids.append(chosen.T)
        return (x, tuple(written)), jnp.stack(ids)

    flat = tuple(
        (keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:]))
        for keys, values in zip(*cache, strict=True)
    )
    index = jnp.arange(num_repeats, dtype=jnp.int32)
    (x, flat), ids = lax.scan(pattern, (x, flat), (index, others))
    ids = ids.reshape(config.num_layers, *ids.shape[2:])
    counts = _counts(ids, step, block_size, config, plan, histogram) if count_experts else None
    next_tokens, logits = _head(params, x[step.logit_rows], config)
    output = ShardedOutput(
        next_tokens=next_tokens,
        logits=logits,
        counts=counts,
        expert_ids=ids if debug else None,
    )
    keys, values = (
        tuple(array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True))
        for arrays in zip(*flat, strict=True)
    )
    return ShardedCache(keys, values), output


def _angles(config: ModelConfig, place: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    kind = config.layer_attention(place)
    return attention.rope_angles(
        positions,
        kind.head_dim,
        kind.rope_theta,
        rotary_fraction=kind.rotary_fraction,
        yarn=config.attention.yarn,
    )


def _embed(table: jax.Array, token_ids: Any, config: ModelConfig) -> jax.Array:
    """[T, D]; each device looks up the tokens that it holds, the others bring zeros."""
    num_held = table.shape[0]
    local = jnp.maximum(token_ids, 0) - lax.axis_index(MODEL_AXES) * num_held
    held = (local >= 0) & (local < num_held)
    found = layers.embed(jnp.clip(local, 0, num_held - 1), table, config)
    return lax.psum(jnp.where(held[:, None], found, 0), MODEL_AXES)


class _Rows(NamedTuple):
    """What the layers need to know of a step's rows.

    Attributes:
      step: the input.
      positions: int32 [T].
      real: bool [T].
      own_block: int32 [T]; cache block of each row.
    """

    step: StepInput
    positions: jax.Array
    real: jax.Array
    own_block: jax.Array


def _rows_of(step: StepInput, block_size: int) -> _Rows:
    positions = jnp.asarray(step.positions)
    own_block = jnp.asarray(step.block_tables)[step.sequences, positions // block_size]
    return _Rows(step, positions, jnp.asarray(step.token_ids) >= 0, own_block)


def _layer(
    x: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    weights: dict[str, jax.Array],
    experts: dict[str, jax.Array],
    rows: _Rows,
    repeat: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    *,
    config: ModelConfig,
    plan: MeshPlan,
    place: int,
    num_repeats: int,
    phase: Phase,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
    """One block, the `repeat`-th of its place: (x, (keys, values), ids [T, K])."""
    kind, eps = config.layer_attention(place), config.rms_norm_eps
    normed = layers.rms_norm(x, weights["attn_norm"], eps)
    q, k, v = attention.project_qkv(
        normed, weights, *angles, attention=kind, options=config.attention, eps=eps
    )
    num_blocks, block_size = cache[0].shape[:2]
    first_block = repeat * (num_blocks // num_repeats)
    slots = (first_block + rows.own_block) * block_size + rows.positions % block_size
    # Padding goes past the end, where nothing is written.
    slots = jnp.where(rows.real, slots, num_blocks * block_size)
    keys, values = _write(cache[0], slots, k), _write(cache[1], slots, v)
    seen = Cache(keys=keys, values=values, tables=first_block + rows.step.block_tables)
    options = {"scale": kind.scale, "window": kind.window, "sinks": weights.get("sinks")}
    if phase == "decode":
        mixed = decode_attention(q, seen, rows.positions, rows.real, **options)
    else:
        owners = jnp.asarray(rows.step.sequences)
        mixed = prefill_attention(q, seen, rows.positions, owners, rows.real, **options)
    axes = MODEL_AXES if attention_shards(config, plan) > 1 else ()
    x = layers.add_attention(x, mixed, weights, config, total=_sum_over(axes))
    normed = layers.rms_norm(x, weights["mlp_norm"], eps)
    logits = layers.gate_logits(x, normed, weights, config)
    shares, ids = layers.choose_experts(logits, weights, config)
    ids = jnp.where(rows.real[:, None], ids, -1)
    out = lax.psum(_own_experts(normed, shares, ids, experts, repeat, config, plan), MODEL_AXES)
    x = layers.add_experts(x, out, weights, config, total=_sum_over(MODEL_AXES))
    return x, (keys, values), ids


def _sum_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda partial: lax.psum(partial, axes) if axes else partial


def _write(cache: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    flat = cache.reshape(-1, *cache.shape[2:])
    return flat.at[slots].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)


def _own_experts(
    x: jax.Array,
    shares: jax.Array,
    ids: jax.Array,
    experts: dict[str, jax.Array],
    repeat: jax.Array,
    config: ModelConfig,
    plan: MeshPlan,
) -> jax.Array:
    """[T, D] weighted sum over those of each row's experts that this device holds."""
    num_held = config.num_experts // plan.expert
    local = ids - lax.axis_index("expert") * num_held
    held = (ids >= 0) & (local >= 0) & (local < num_held)
    # What is computed elsewhere, and padding, has no expert here.
    local = jnp.where(held, local, -1)
    part = StackPart(first=repeat * num_held, num_experts=num_held)
    out, _ = run_experts(x, shares, local, experts, _RAGGED, config.expert, part)
    return out


def _counts(
    ids: jax.Array,
    step: StepInput,
    block_size: int,
    config: ModelConfig,
    plan: MeshPlan,
    histogram: str | None,
) -> jax.Array:
    """[C, L/shards, E] counts of the layers that this device counts."""
    num_layers = -(-config.num_layers // plan.num_shards)
    pad = num_layers * plan.num_shards - config.num_layers
    ids = jnp.pad(ids, ((0, pad), (0, 0), (0, 0)), constant_values=-1)
    first = lax.axis_index(MODEL_AXES) * num_layers
    return expert_histogram(
        lax.dynamic_slice_in_dim(ids, first, num_layers),
        jnp.asarray(step.count_rows),
        num_blocks=num_count_rows(step.token_ids.shape[0], step.block_tables.shape[0], block_size),
        num_experts=config.num_experts,
        block_size=block_size,
        backend=histogram,
    )


def _head(params: dict[str, Any], x: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Next tokens [R], and logits [R, V/shards] of the vocabulary that this device holds."""
    normed = layers.rms_norm(x, params["final_norm"], config.rms_norm_eps)
    head = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    logits = jnp.matmul(normed, head, preferred_element_type=jnp.float32)
    logits = layers.soften_logits(logits, config)
    num_held = logits.shape[-1]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32) + lax.axis_index(MODEL_AXES) * num_held
    # Shards follow the vocabulary, so the first of equal maxima is the lowest token.
    tops = lax.all_gather(logits.max(axis=-1), MODEL_AXES)
    choice = jnp.argmax(tops, axis=0)
    candidates = lax.all_gather(best, MODEL_AXES)
    return jnp.take_along_axis(candidates, choice[None], axis=0)[0], logits
