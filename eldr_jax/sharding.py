"""Where the weights and the cache of a model lie on a mesh of (data, expert, tensor) devices.

- `data`: replicas of everything, each with requests and a cache of its own.
- `expert`: each device holds E/expert of a layer's experts, whole.
- `tensor`: each expert's width F is cut as well.
- Attention heads, dense parts, embedding and output head are cut over (expert, tensor) together:
  while experts are computed apart, nothing of the rest is computed twice. A family that norms its
  whole query projection keeps its attention whole on every device instead.

The sharded step scans over layers. Layers that differ in shape or window cannot share a scanned
body, so weights and caches are stacked by a layer's place in the repeating pattern of layers:
`stack_params` says how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eldr_jax.config import ModelConfig, block_shapes

AXES = ("data", "expert", "tensor")
MODEL_AXES = ("expert", "tensor")
"""Axes over which one replica is cut."""


class ShardingError(ValueError):
    """A mesh that a model cannot be cut over; names the value and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Devices along each axis.

    Attributes:
      data: replicas.
      expert: devices that share the experts.
      tensor: devices that share each expert's width.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ShardingError: an axis without a device.
        """
        for name in AXES:
            if getattr(self, name) < 1:
                raise ShardingError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.data * self.expert * self.tensor

    @property
    def num_shards(self) -> int:
        """Devices of one replica."""
        return self.expert * self.tensor

    def check(self, config: ModelConfig) -> None:
        """Refuses a model that cannot be cut this way.

        Raises:
          ShardingError: names the axis, the size and the rule.
        """
        for axis, size, what in (
            ("expert", config.num_experts, "num_experts"),
            ("tensor", config.moe_intermediate_size, "moe_intermediate_size"),
        ):
            if size % getattr(self, axis):
                raise ShardingError(f"{axis}={getattr(self, axis)} must divide {what}={size}")
        shards, heads = self.num_shards, attention_shards(config, self)
        for count, size, what in (
            (shards, config.vocab_size, "vocab_size"),
            (shards, config.block.dense_intermediate_size, "dense_intermediate_size"),
            (heads, config.num_heads, "num_heads"),
        ):
            if size % count:
                raise ShardingError(f"expert*tensor={count} must divide {what}={size}")
        for layer in range(pattern_length(config)):
            held = config.layer_attention(layer).num_kv_heads
            if held % heads and heads % held:
                raise ShardingError(
                    f"expert*tensor={heads} must divide num_kv_heads={held} or be a multiple of it"
                )


def plan_for(config: ModelConfig, num_devices: int) -> MeshPlan:
    """All devices along `expert` as far as it goes, the rest along `tensor`.

    Raises:
      ShardingError: the model cannot be cut over that many devices.
    """
    expert = next(n for n in range(num_devices, 0, -1) if _fits(config, n, num_devices))
    plan = MeshPlan(expert=expert, tensor=num_devices // expert)
    plan.check(config)
    return plan


def _fits(config: ModelConfig, expert: int, num_devices: int) -> bool:
    return num_devices % expert == 0 and config.num_experts % expert == 0


def make_mesh(plan: MeshPlan, devices: Sequence[Any]) -> Mesh:
    """The mesh of a plan.

    Args:
      plan: devices along each axis.
      devices: `jax.Device`s, as many as the plan has.

    Raises:
      ShardingError: another number of devices.
    """
    if len(devices) != plan.num_devices:
        raise ShardingError(
            f"data*expert*tensor={plan.num_devices} must be the number of devices, {len(devices)}"
        )
    shape = (plan.data, plan.expert, plan.tensor)
    return jax.make_mesh(shape, AXES, devices=devices, axis_types=(AxisType.Auto,) * 3)


def pattern_length(config: ModelConfig) -> int:
    """Layers of the shortest pattern that repeats: 1, or the interval of full attention."""
    kinds = [config.layer_attention(layer) for layer in range(config.num_layers)]
    return next(
        length
        for length in range(1, config.num_layers + 1)
        if config.num_layers % length == 0
        and all(kind == kinds[layer % length] for layer, kind in enumerate(kinds))
    )


def attention_shards(config: ModelConfig, plan: MeshPlan) -> int:
    """Devices that share a layer's heads: one replica's, or 1 where attention stays whole."""
    return 1 if config.attention.query_key_norm == "projection" else plan.num_shards


def held_kv_heads(config: ModelConfig, layer: int, plan: MeshPlan) -> int:
    """Key/value heads in all of a replica's caches: where there are fewer than devices, copies."""
    return max(config.layer_attention(layer).num_kv_heads, attention_shards(config, plan))


_HEADS_LAST = ("wq", "wk", "wv", "bq", "bk", "bv", "sinks")
_KV_NAMES = ("wk", "wv", "bk", "bv")
_BLOCK_SPECS: Mapping[str, P] = MappingProxyType(
    {
        "w_gate": P(None, "expert", None, "tensor"),
        "w_up": P(None, "expert", None, "tensor"),
        "w_down": P(None, "expert", "tensor", None),
        "b_gate": P(None, "expert", "tensor"),
        "b_up": P(None, "expert", "tensor"),
        "b_down": P(None, "expert", None),
        "dense_gate": P(None, None, MODEL_AXES),
        "dense_up": P(None, None, MODEL_AXES),
        "dense_down": P(None, MODEL_AXES, None),
    }
)


def param_specs(config: ModelConfig, plan: MeshPlan) -> dict[str, Any]:
    """Specs of the tree of `stack_params`; what is not named lies on every device."""

    def block_spec(name: str, shape: tuple[int, ...]) -> P:
        if attention_shards(config, plan) > 1 and name in _HEADS_LAST:
            return P(*(None,) * len(shape), MODEL_AXES)
        if attention_shards(config, plan) > 1 and name == "wo":
            return P(None, MODEL_AXES, None)
        return _BLOCK_SPECS.get(name, P())

    specs: dict[str, Any] = {
        "embed": P(MODEL_AXES, None),
        "final_norm": P(),
        "layers": tuple(
            {name: block_spec(name, shape) for name, shape in block_shapes(config, layer).items()}
            for layer in range(pattern_length(config))
        ),
    }
    if not config.tie_word_embeddings:
        specs["lm_head"] = P(None, MODEL_AXES)
    return specs


def cache_spec(config: ModelConfig, plan: MeshPlan) -> P:
    """Spec of keys and of values, [layers, data*NB, B, Hkv, Dh]."""
    heads = MODEL_AXES if attention_shards(config, plan) > 1 else None
    return P(None, "data", None, heads, None)


def stack_params(config: ModelConfig, params: Mapping[str, Any], plan: MeshPlan) -> dict[str, Any]:
    """Stacks a plain weight tree for the scanned step.

    Args:
      config: geometry.
      params: tree of `eldr_jax.model.params_of`.
      plan: the mesh; decides how often key/value heads are held.

    Returns:
      The tree with "layers" as one entry for each layer of the repeating pattern, which holds
      that place's weights of all repetitions, [L/pattern, ...]. Biases that every device adds to
      a sum over devices are divided by their number.
    """
    length = pattern_length(config)

    def stacked(first: int, name: str) -> jax.Array:
        layers = params["layers"][first::length]
        array = jnp.stack([jnp.asarray(layer[name]) for layer in layers])
        attention = config.layer_attention(first)
        copies = held_kv_heads(config, first, plan) // attention.num_kv_heads
        if name in _KV_NAMES and copies > 1:
            heads = array.reshape(*array.shape[:-1], attention.num_kv_heads, attention.head_dim)
            array = jnp.repeat(heads, copies, axis=-2).reshape(*array.shape[:-1], -1)
        if name == "bo":
            array = array / attention_shards(config, plan)
        if name == "b_down":
            array = array / plan.tensor
        return array

    places = tuple(
        {name: stacked(first, name) for name in block_shapes(config, first)}
        for first in range(length)
    )
    return {**params, "layers": places}


def stacked_shapes(config: ModelConfig, plan: MeshPlan, mesh: Mesh, dtype: Any) -> dict[str, Any]:
    """Shapes and shardings of `stack_params`' tree, without weights.

    Args:
      config: geometry.
      plan: the mesh's plan.
      mesh: the mesh.
      dtype: of every weight.

    Returns:
      Tree of `jax.ShapeDtypeStruct`.
    """
    length = pattern_length(config)
    vocab_shape = (config.vocab_size, config.hidden_size)

    def shape_of(first: int, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name in _KV_NAMES:
            head_dim = config.layer_attention(first).head_dim
            shape = (*shape[:-1], held_kv_heads(config, first, plan) * head_dim)
        return (config.num_layers // length, *shape)

    shapes: dict[str, Any] = {
        "embed": vocab_shape,
        "final_norm": (config.hidden_size,),
        "layers": tuple(
            {
                name: shape_of(first, name, shape)
                for name, shape in block_shapes(config, first).items()
            }
            for first in range(length)
        ),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = vocab_shape[::-1]

    def struct(spec: P, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_format(spec, len(shape), mesh))

    return jax.tree.map(struct, param_specs(config, plan), shapes, is_leaf=_is_spec)


def placed(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts arrays onto a mesh, in the layout that `stacked_shapes` compiles for."""
    return jax.tree.map(
        lambda spec, array: jax.device_put(array, _format(spec, array.ndim, mesh)),
        specs,
        tree,
        is_leaf=_is_spec,
    )


def _format(spec: P, num_dims: int, mesh: Mesh) -> Any:
    """Where an array lies, and for stacks of experts that they lie row by row.

    A TPU by itself turns matrices whose width is no multiple of 128, and turns them back, all
    of them, at every step.
    """
    sharding = NamedSharding(mesh, spec)
    if num_dims < 4:
        return sharding
    return Format(Layout(major_to_minor=tuple(range(num_dims))), sharding)


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)
