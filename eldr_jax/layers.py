"""The arithmetic of a decoder block, each piece once.

Pure functions over arrays, without batch or cache policy: the whole-sequence forward pass
(`eldr_jax.model`) and the paged serving step (`eldr_jax.paged`) both call these, so the two can
only differ in how they find keys and experts. Shapes use T tokens, D hidden, H query heads,
Hkv key/value heads, Dh head width, E experts, K experts per token, F expert width; `...` is any
leading shape.

Architecture: Qwen3 (arXiv 2505.09388), section 2: RMSNorm before each half, per-head RMSNorm on
queries and keys, grouped-query attention, RoPE, SwiGLU experts without a shared one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467).

    Args:
      x: [..., D], any float type; the statistics are float32.
      weight: [D] scale.
      eps: added to the mean square.

    Returns:
      [..., D] in the type of `x`.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles (arXiv 2104.09864).

    Args:
      positions: [...] int32, place of each token in its sequence, from 0.
      head_dim: Dh, even.
      theta: base of the frequencies.

    Returns:
      cos and sin, each [..., Dh/2] float32.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None] * (theta**-exponent)
    return jnp.cos(angles), jnp.sin(angles)


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
    layer: dict[str, jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    *,
    head_dim: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of tokens, normed per head and rotated.

    Args:
      x: [..., D], already normed.
      layer: weights with `wq` [D, H*Dh], `wk` and `wv` [D, Hkv*Dh], `q_norm` and `k_norm` [Dh].
      cos: [..., Dh/2] float32.
      sin: [..., Dh/2] float32.
      head_dim: Dh.
      eps: of the norms.

    Returns:
      q [..., H, Dh], k [..., Hkv, Dh], v [..., Hkv, Dh].
    """
    q = (x @ layer["wq"]).reshape(*x.shape[:-1], -1, head_dim)
    k = (x @ layer["wk"]).reshape(*x.shape[:-1], -1, head_dim)
    v = (x @ layer["wv"]).reshape(*x.shape[:-1], -1, head_dim)
    q = apply_rope(rms_norm(q, layer["q_norm"], eps), cos, sin)
    k = apply_rope(rms_norm(k, layer["k_norm"], eps), cos, sin)
    return q, k, v


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention: each key/value head serves H/Hkv neighbouring query heads.

    Args:
      q: [B, Q, H, Dh].
      k: [B, S, Hkv, Dh].
      v: [B, S, Hkv, Dh].
      mask: bool, broadcastable to [B, Q, S]; True where the query may look. A query that may
        look nowhere gets the mean of the values, never NaN.

    Returns:
      [B, Q, H*Dh] in the type of `q`; scores and softmax are float32.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    # The queries of a group are rows of one matrix product, and the division by the softmax's sum
    # follows the product with the values: a third of the time on a CPU, the same arithmetic.
    rows = q.reshape(batch, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    scores = jnp.matmul(rows * head_dim**-0.5, keys, preferred_element_type=jnp.float32)
    allowed = jnp.broadcast_to(mask, (batch, num_queries, num_keys))
    allowed = jnp.tile(allowed, (1, group, 1))[:, None]
    scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    mixed = jnp.matmul(weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
    mixed = (mixed / jnp.sum(weights, axis=-1, keepdims=True)).astype(q.dtype)
    mixed = mixed.reshape(batch, num_kv_heads, group, num_queries, head_dim)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads * head_dim)


def route(logits: jax.Array, k: int, norm_topk_prob: bool) -> tuple[jax.Array, jax.Array]:
    """The gate: softmax over all experts, then the exact K largest.

    Args:
      logits: [T, E], any float type; computed in float32.
      k: experts per token, K.
      norm_topk_prob: whether the K weights are divided by their sum.

    Returns:
      weights [T, K] float32 in falling order, ids [T, K] int32; of equal probabilities the
      lower expert id comes first.
    """
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(probs, k)
    if norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids.astype(jnp.int32)


def swiglu(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """One expert, or a stack of experts each on its own rows (arXiv 2002.05202).

    Args:
      x: [..., T, D].
      w_gate: [..., D, F].
      w_up: [..., D, F].
      w_down: [..., F, D].

    Returns:
      [..., T, D].
    """
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down
