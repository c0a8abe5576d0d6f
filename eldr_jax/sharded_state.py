"""The cache, the input and the output of the sharded step: tuples of arrays and their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eldr_jax.config import ModelConfig
from eldr_jax.paged import StepInput
from eldr_jax.sharding import MeshPlan, cache_spec, held_kv_heads, pattern_length


class ShardedCache(NamedTuple):
    """Keys and values of every block; one entry per layer of the repeating pattern.

    Attributes:
      keys: arrays [L/pattern, data*NB, B, Hkv, Dh].
      values: the same shapes.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class ShardedOutput(NamedTuple):
    """What one step returns beside the cache.

    Attributes:
      next_tokens: int32 [data*R]; argmax of `logits`.
      logits: float32 [data*R, V].
      counts: [data*C, Lc, E] unsigned, C = `num_count_rows`; Lc is L rounded up to the devices
        of a replica, the rows beyond L are zero. None where they are not counted.
      expert_ids: int32 [L, K, data*T], -1 on padding; None unless `debug`.
    """

    next_tokens: jax.Array
    logits: jax.Array
    counts: jax.Array | None
    expert_ids: jax.Array | None


def cache_shapes(
    config: ModelConfig,
    plan: MeshPlan,
    mesh: Mesh,
    *,
    num_blocks: int,
    block_size: int,
    dtype: Any,
) -> ShardedCache:
    """Shapes and shardings of a cache of `num_blocks` blocks per replica."""
    length = pattern_length(config)
    sharding = NamedSharding(mesh, cache_spec(config, plan))

    def shape_of(layer: int) -> jax.ShapeDtypeStruct:
        heads, head_dim = held_kv_heads(config, layer, plan), config.layer_attention(layer).head_dim
        shape = (config.num_layers // length, plan.data * num_blocks, block_size, heads, head_dim)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    # A shape stands in for its array.
    places: Any = tuple(shape_of(layer) for layer in range(length))
    return ShardedCache(keys=places, values=places)


def step_shapes(
    plan: MeshPlan, mesh: Mesh, *, num_tokens: int, num_sequences: int, max_blocks: int
) -> StepInput:
    """Shapes and shardings of a step of T rows and R sequences in each replica."""
    rows, sequences = plan.data * num_tokens, plan.data * num_sequences

    def struct(*shape: int) -> Any:
        spec = P("data", *(None,) * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

    return StepInput(
        token_ids=struct(rows),
        positions=struct(rows),
        sequences=struct(rows),
        block_tables=struct(sequences, max_blocks),
        logit_rows=struct(sequences),
        count_rows=struct(rows),
    )
