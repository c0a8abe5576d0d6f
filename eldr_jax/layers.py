"""The arithmetic of a decoder block outside attention, each piece once.

Pure functions over arrays, without batch or cache policy: the whole-sequence forward pass
(`eldr_jax.model`) and the paged serving step (`eldr_jax.paged`) both call these and
`eldr_jax.attention`, so the two can only differ in how they find keys and experts. What a family
does differently comes in the option records of `eldr_jax.architecture`. Shapes use T tokens,
D hidden, E experts, K experts per token, F expert width; `...` is any leading shape.

The defaults are Qwen3's (arXiv 2505.09388), section 2: RMSNorm before each half, per-head RMSNorm
on queries and keys, grouped-query attention, RoPE, SwiGLU experts without a shared one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from eldr_jax.architecture import ExpertOptions
from eldr_jax.config import ModelConfig

EXPERT_LEAVES = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
_SILU = ExpertOptions()

Total = Callable[[jax.Array], jax.Array]
"""Sums the partial results [..., D] of devices that share a matrix."""


def _whole(partial: jax.Array) -> jax.Array:
    """The `Total` of a device that holds everything."""
    return partial


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis (arXiv 1910.07467).

    Args:
      x: [..., D], any float type; the statistics are float32.
      weight: [D] scale, or None for none.
      eps: added to the mean square.

    Returns:
      [..., D] in the type of `x`.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = (wide * scale).astype(x.dtype)
    return normed if weight is None else normed * weight.astype(x.dtype)


def embed(tokens: jax.Array, embedding: jax.Array, config: ModelConfig) -> jax.Array:
    """Rows of the embedding, [..., D]; `tokens` is [...] int32 within the vocabulary."""
    x = embedding[tokens]
    return x * config.hidden_size**0.5 if config.scale_embeddings else x


def add_attention(
    x: jax.Array,
    mixed: jax.Array,
    layer: Mapping[str, jax.Array],
    config: ModelConfig,
    total: Total = _whole,
) -> jax.Array:
    """Projects what the heads mixed and adds it to the stream.

    Args:
      x: [..., D] residual stream before the block.
      mixed: [..., H*Dh].
      layer: weights as in `eldr_jax.config.block_shapes`.
      config: geometry.
      total: sums over devices that hold some of the heads each.

    Returns:
      [..., D].
    """
    y = mixed @ layer["wo"]
    if config.attention.bias:
        y = y + layer["bo"]
    y = total(y)
    if config.block.post_norms:
        y = rms_norm(y, layer["attn_post_norm"], config.rms_norm_eps)
    return x + y


def add_experts(
    x: jax.Array,
    out: jax.Array,
    layer: Mapping[str, jax.Array],
    config: ModelConfig,
    total: Total = _whole,
) -> jax.Array:
    """Adds the experts' sum to the stream, with the dense MLP where the block has one.

    Args:
      x: [..., D] residual stream after the attention half.
      out: [..., D] weighted sum of each token's experts.
      layer: weights as in `eldr_jax.config.block_shapes`.
      config: geometry.
      total: sums over devices that hold some of the dense MLP's width each; `out` is whole.

    Returns:
      [..., D] the block's output.
    """
    eps = config.rms_norm_eps
    if config.block.dense_intermediate_size:
        dense = {f"w_{name}": layer[f"dense_{name}"] for name in ("gate", "up", "down")}
        beside = total(expert_mlp(rms_norm(x, layer["dense_norm"], eps), dense, config.expert))
        beside = rms_norm(beside, layer["dense_post_norm"], eps)
        out = beside + rms_norm(out, layer["expert_post_norm"], eps)
    if config.block.post_norms:
        out = rms_norm(out, layer["mlp_post_norm"], eps)
    x = x + out
    return x * layer["output_scale"] if config.block.output_scale else x


def gate_logits(
    x: jax.Array, normed: jax.Array, layer: Mapping[str, jax.Array], config: ModelConfig
) -> jax.Array:
    """What the gate thinks of each expert.

    Args:
      x: [..., D] residual stream after the attention half.
      normed: [..., D], what the experts read.
      layer: weights as in `eldr_jax.config.block_shapes`.
      config: geometry.

    Returns:
      [..., E] in the type of `x`.
    """
    if config.gate.own_norm:
        normed = rms_norm(x, None, config.rms_norm_eps)
        normed = normed * layer["gate_scale"] * config.hidden_size**-0.5
    logits = normed @ layer["gate"]
    return logits + layer["gate_bias"] if config.gate.bias else logits


def choose_experts(
    logits: jax.Array, layer: Mapping[str, jax.Array], config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Weights [T, K] float32 and ids [T, K] int32 of each token's experts; see `route`."""
    k, softmax = config.num_experts_per_tok, config.gate.softmax
    weights, ids = route(logits, k, config.norm_topk_prob, softmax)
    if config.gate.own_norm:
        weights = weights * layer["expert_scale"].astype(jnp.float32)[ids]
    return weights, ids


def route(
    logits: jax.Array, k: int, norm_topk_prob: bool, softmax: Literal["all", "chosen"] = "all"
) -> tuple[jax.Array, jax.Array]:
    """The gate: the exact K largest, with their weights.

    Args:
      logits: [T, E], any float type; computed in float32.
      k: experts per token, K.
      norm_topk_prob: whether the K weights are divided by their sum (`all` only).
      softmax: over `all` experts, the K largest probabilities; or over the K `chosen` logits.

    Returns:
      weights [T, K] float32 in falling order, ids [T, K] int32; of equal probabilities (or logits)
      the lower expert id comes first.
    """
    scores = logits.astype(jnp.float32)
    if softmax == "all":
        scores = jax.nn.softmax(scores, axis=-1)
    weights, ids = jax.lax.top_k(scores, k)
    if softmax == "chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    elif norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids.astype(jnp.int32)


def expert_leaves(layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The experts' stacked weights of a block: `w_gate`, `w_up`, `w_down` and their biases."""
    return {name: layer[name] for name in EXPERT_LEAVES if name in layer}


def expert_mlp(
    x: jax.Array, weights: Mapping[str, jax.Array], options: ExpertOptions = _SILU
) -> jax.Array:
    """One expert, or a stack of experts each on its own rows.

    Args:
      x: [..., T, D].
      weights: `w_gate` and `w_up` [..., D, F], `w_down` [..., F, D]; with `options.bias` also
        `b_gate` and `b_up` [..., F], `b_down` [..., D].
      options: activation and biases.

    Returns:
      [..., T, D].
    """
    gate, up = x @ weights["w_gate"], x @ weights["w_up"]
    if options.bias:
        gate, up = gate + weights["b_gate"][..., None, :], up + weights["b_up"][..., None, :]
    out = gated(gate, up, options) @ weights["w_down"]
    return out + weights["b_down"][..., None, :] if options.bias else out


def gated(gate: jax.Array, up: jax.Array, options: ExpertOptions = _SILU) -> jax.Array:
    """Gated linear unit (arXiv 2002.05202): activation of `gate` times `up`, entry by entry."""
    if options.activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    if options.activation == "clamped_silu":
        gate = jnp.minimum(gate, options.limit)
        up = jnp.clip(up, -options.limit, options.limit)
        return gate * jax.nn.sigmoid(options.alpha * gate) * (up + 1.0)
    return jax.nn.silu(gate) * up


def soften_logits(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """Keeps logits within +-`logit_softcap` where the model has one; any shape."""
    cap = config.logit_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
