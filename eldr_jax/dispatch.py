"""Three ways to send the tokens of a whole sequence through their experts, one result.

- `dense`: every expert on every token, weighted by zero where it was not chosen. Exact, E/K times
  the arithmetic; for evaluation and as the reference in tests.
- `capacity`: each expert gets C rows, a batch of [E, C, D] matrices; what does not fit is dropped
  and counted (arXiv 2006.16668, section 2). For training on CPUs and GPUs.
- `ragged`: rows sorted by expert and `jax.lax.ragged_dot`. Exact, without padding; it maps to a
  grouped matrix product on TPUs and is slow on CPUs.

The serving step has its own fourth way (only the active experts, `eldr_jax.paged`). All four call
`layers.gated`'s arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from eldr_jax import layers
from eldr_jax.architecture import ExpertOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How tokens reach their experts.

    Attributes:
      kind: the path, see the module's text.
      capacity_factor: for `capacity` only: rows per expert over the even share T*K/E.
    """

    kind: Literal["dense", "capacity", "ragged"] = "dense"
    capacity_factor: float = 1.5

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ValueError: names the field, its value and the rule.
        """
        if self.kind not in ("dense", "capacity", "ragged"):
            raise ValueError(f"kind={self.kind!r} must be one of dense, capacity, ragged")
        if not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPart:
    """Some consecutive experts of a stack, such as one layer's of all layers'.

    A slice of the stack would be copied before it is multiplied; this is not.

    Attributes:
      first: scalar int32, where they begin.
      num_experts: how many they are.
    """

    first: jax.Array
    num_experts: int


DENSE = Dispatch(kind="dense")
_SILU = ExpertOptions()


def run_experts(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    experts: Mapping[str, jax.Array],
    dispatch: Dispatch,
    options: ExpertOptions = _SILU,
    part: StackPart | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of each token's experts.

    Args:
      x: [T, D] normed tokens.
      weights: [T, K] float32 from `layers.choose_experts`.
      ids: [T, K] int32 from `layers.choose_experts`; with `ragged`, a negative id is nobody's
        here and brings nothing: padding, or an expert that another device holds.
      experts: stacked weights from `layers.expert_leaves`.
      dispatch: the path.
      options: activation and biases of an expert.
      part: with `ragged` only: the experts that ids count from, where the stack holds more.

    Returns:
      y [T, D] in the type of `x`, and the number of dropped (token, expert) pairs, int32.
    """
    if dispatch.kind == "dense":
        return _dense(x, weights, ids, experts, options), jnp.int32(0)
    if dispatch.kind == "ragged":
        return _ragged(x, weights, ids, experts, options, part), jnp.int32(0)
    even_share = x.shape[0] * ids.shape[1] / experts["w_gate"].shape[0]
    capacity = min(max(1, math.ceil(dispatch.capacity_factor * even_share)), x.shape[0])
    return _capacity(x, weights, ids, experts, options, capacity=capacity)


def _dense(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    experts: Mapping[str, jax.Array],
    options: ExpertOptions,
) -> jax.Array:
    num_experts = experts["w_gate"].shape[0]
    chosen = jax.nn.one_hot(ids, num_experts, dtype=weights.dtype)
    combine = jnp.einsum("tk,tke->et", weights, chosen).astype(x.dtype)

    def add_expert(
        total: jax.Array, expert: tuple[jax.Array, Mapping[str, jax.Array]]
    ) -> tuple[jax.Array, None]:
        share, stacked = expert
        return total + share[:, None] * layers.expert_mlp(x, stacked, options), None

    total, _ = jax.lax.scan(add_expert, jnp.zeros_like(x), (combine, dict(experts)))
    return total


def _sorted_choices(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choices (numbered t*K + k) in expert order, their experts, and choices per expert."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(jax.nn.one_hot(flat, num_experts, dtype=jnp.int32), axis=0)
    return order, flat[order], sizes


def _ragged(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    experts: Mapping[str, jax.Array],
    options: ExpertOptions,
    part: StackPart | None,
) -> jax.Array:
    k, num_stacked = ids.shape[1], experts["w_gate"].shape[0]
    num_experts = num_stacked if part is None else part.num_experts
    # Choices that are nobody's here sort behind the last group and belong to none.
    mine = ids >= 0
    order, owners, sizes = _sorted_choices(jnp.where(mine, ids, num_experts), num_experts)
    if part is not None:
        nobody = jnp.zeros(num_stacked, sizes.dtype)
        sizes = jax.lax.dynamic_update_slice_in_dim(nobody, sizes, part.first, axis=0)
        owners = owners + part.first
    rows = x[order // k]

    def project(rows: jax.Array, name: str) -> jax.Array:
        y = jax.lax.ragged_dot(rows, experts[f"w_{name}"], sizes)
        return y + experts[f"b_{name}"][owners] if options.bias else y

    inner = layers.gated(project(rows, "gate"), project(rows, "up"), options)
    picked = project(inner, "down")[jnp.argsort(order)].reshape(*ids.shape, -1)
    # Rows outside of every group may hold anything.
    return _combine(jnp.where(mine[..., None], picked, 0), weights, x.dtype)


def _capacity(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    experts: Mapping[str, jax.Array],
    options: ExpertOptions,
    *,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, k = ids.shape
    num_experts = experts["w_gate"].shape[0]
    num_slots = num_experts * capacity
    order, owners, sizes = _sorted_choices(ids, num_experts)
    place = jnp.arange(num_tokens * k) - (jnp.cumsum(sizes) - sizes)[owners]
    fits = place < capacity
    # One slot beyond the last takes whatever is dropped; nothing reads it back.
    slot_sorted = jnp.where(fits, owners * capacity + place, num_slots)
    slot_of_choice = jnp.zeros(num_tokens * k, jnp.int32).at[order].set(slot_sorted)
    choice_of_slot = jnp.full(num_slots + 1, num_tokens * k, jnp.int32).at[slot_sorted].set(order)
    choice_of_slot = choice_of_slot.at[num_slots].set(num_tokens * k)[:num_slots]
    slots = slot_of_choice.reshape(num_tokens, k)
    rows = _gather_rows(x, choice_of_slot // k, slots)
    out = layers.expert_mlp(rows.reshape(num_experts, capacity, -1), experts, options)
    picked = _gather_rows(out.reshape(num_slots, -1), slots.reshape(-1), choice_of_slot[:, None])
    dropped = num_tokens * k - jnp.sum(fits, dtype=jnp.int32)
    return _combine(picked.reshape(num_tokens, k, -1), weights, x.dtype), dropped


def _combine(picked: jax.Array, weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[T, K, D] expert outputs and [T, K] weights to [T, D]."""
    return jnp.einsum("tkd,tk->td", picked, weights.astype(dtype))


@jax.custom_vjp
def _gather_rows(source: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows `source[index]`, zeros where `index` is past the end.

    `inverse` [N, M] names the up to M places at which row n of `source` went (past the end where
    it went nowhere), so the gradient is a gather as well: XLA's scatter-add on a CPU is serial.
    """
    del inverse
    return jnp.take(source, index, axis=0, mode="fill", fill_value=0)


def _gather_rows_fwd(
    source: jax.Array, index: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather_rows(source, index, inverse), (index, inverse)


def _gather_rows_bwd(
    saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    index, inverse = saved
    parts = jnp.take(grad, inverse, axis=0, mode="fill", fill_value=0)
    no_grad = jax.dtypes.float0
    return (
        jnp.sum(parts, axis=1),
        np.zeros(index.shape, no_grad),
        np.zeros(inverse.shape, no_grad),
    )


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)
