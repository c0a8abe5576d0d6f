"""Attention, each piece once: rotary angles, projections, grouped-query attention.

Pure functions over arrays, without batch or cache policy; what a family does differently comes in
`AttentionOptions` and, resolved for one layer, `LayerAttention`. Shapes use H query heads, Hkv
key/value heads, Dh head width, D hidden; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from eldr_jax.architecture import AttentionOptions, LayerAttention, Yarn
from eldr_jax.layers import rms_norm


def rope_angles(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    *,
    rotary_fraction: float = 1.0,
    yarn: Yarn | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles (arXiv 2104.09864).

    Args:
      positions: [...] int32, place of each token in its sequence, from 0.
      head_dim: Dh, even.
      theta: base of the frequencies.
      rotary_fraction: share of the Dh/2 pairs that turn, the fastest; the others get angle 0.
      yarn: stretches the frequencies and scales cosine and sine.

    Returns:
      cos and sin, each [..., Dh/2] float32.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = theta**-exponent
    if rotary_fraction < 1.0:
        num_turning = int(rotary_fraction * head_dim // 2)
        frequencies = jnp.where(jnp.arange(head_dim // 2) < num_turning, frequencies, 0.0)
    if yarn is None:
        angles = positions.astype(jnp.float32)[..., None] * frequencies
        return jnp.cos(angles), jnp.sin(angles)
    angles = positions.astype(jnp.float32)[..., None] * yarn_frequencies(head_dim, theta, yarn)
    factor = yarn.attention_factor
    if factor is None:
        factor = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1.0 else 1.0
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def yarn_frequencies(head_dim: int, theta: float, yarn: Yarn) -> np.ndarray:
    """Stretched frequencies (arXiv 2309.00071, section 3.2).

    A pair that turns more than `beta_fast` times over the trained context keeps its frequency, one
    that turns less than `beta_slow` times has it divided by `factor`, with a ramp between.

    Returns:
      [Dh/2] float32.
    """

    def pair_with_turns(turns: float) -> float:
        wavelengths = yarn.trained_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = pair_with_turns(yarn.beta_fast), pair_with_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = np.arange(head_dim // 2)
    # A ramp of no width would divide by zero.
    ramp = np.clip((pairs - low) / (high - low or 0.001), 0.0, 1.0)
    frequencies = theta ** (-2.0 * pairs / head_dim)
    return (frequencies * (1.0 - ramp + ramp / yarn.factor)).astype(np.float32)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each head by its token's angles, pairing dimension i with i + Dh/2.

    This is the half-rotation layout of the Hugging Face checkpoints, not the interleaved one of
    the paper: the two differ by a fixed permutation of the projection's columns.

    Args:
      x: [..., heads, Dh].
      cos: [..., Dh/2] float32.
      sin: [..., Dh/2] float32.

    Returns:
      [..., heads, Dh] in the type of `x`.
    """
    cos = cos[..., None, :].astype(x.dtype)
    sin = sin[..., None, :].astype(x.dtype)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def project_qkv(
    x: jax.Array,
    layer: Mapping[str, jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    *,
    attention: LayerAttention,
    options: AttentionOptions,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of tokens, normed and rotated.

    Args:
      x: [..., D], already normed.
      layer: weights as in `eldr_jax.config.block_shapes`.
      cos: [..., Dh/2] float32.
      sin: [..., Dh/2] float32.
      attention: the layer's geometry.
      options: what the family does.
      eps: of the norms.

    Returns:
      q [..., H, Dh], k [..., Hkv, Dh], v [..., Hkv, Dh].
    """

    def project(name: str) -> jax.Array:
        y = x @ layer[f"w{name}"]
        return y + layer[f"b{name}"] if options.bias else y

    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(*x.shape[:-1], -1, attention.head_dim)

    q, k = project("q"), project("k")
    v = k if attention.values_from_keys else project("v")
    if options.query_key_norm == "projection":
        q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
    if options.clip is not None:
        q, k, v = (jnp.clip(y, -options.clip, options.clip) for y in (q, k, v))
    q, k, v = heads(q), heads(k), heads(v)
    if options.query_key_norm == "head":
        q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
    if options.value_norm:
        v = rms_norm(v, None, eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention: each key/value head serves H/Hkv neighbouring query heads.

    Args:
      q: [B, Q, H, Dh].
      k: [B, S, Hkv, Dh].
      v: [B, S, Hkv, Dh].
      mask: bool, broadcastable to [B, Q, S]; True where the query may look. A query that may
        look nowhere gets the mean of the values (without sinks), never NaN.
      scale: factor of the scores; None for Dh**-0.5.
      sinks: [H] float32, one more logit per head that brings no value (arXiv 2309.17453).

    Returns:
      [B, Q, H*Dh] in the type of `q`; scores and softmax are float32.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    factor = head_dim**-0.5 if scale is None else scale
    # The queries of a group are rows of one matrix product, and the division by the softmax's sum
    # follows the product with the values: a third of the time on a CPU, the same arithmetic.
    rows = q.reshape(batch, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    scores = jnp.matmul(rows * factor, keys, preferred_element_type=jnp.float32)
    allowed = jnp.broadcast_to(mask, (batch, num_queries, num_keys))
    allowed = jnp.tile(allowed, (1, group, 1))[:, None]
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    if sinks is not None:
        sunk = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), num_queries, 1)
        sunk = sunk[None, :, :, None]
        top = jax.lax.stop_gradient(jnp.maximum(top, sunk))
    weights = jnp.exp(scores - top)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        mass = mass + jnp.exp(sunk - top)
    mixed = jnp.matmul(weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
    mixed = (mixed / mass).astype(q.dtype)
    mixed = mixed.reshape(batch, num_kv_heads, group, num_queries, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads * head_dim)
