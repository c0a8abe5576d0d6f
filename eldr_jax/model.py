"""The reference model as Flax nnx modules: whole sequences in, logits and router decisions out.

For training, evaluation and as the standard that the paged serving step is compared with. The
weights have one shape everywhere: `params_of` gives them as a plain tree (documented there),
`model_of` puts such a tree into modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from eldr_jax import attention, layers
from eldr_jax.architecture import LayerAttention
from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.dispatch import DENSE, Dispatch, run_experts

Params = dict[str, Any]

_ATTENTION_BLOCK_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTrace:
    """What one layer's gate did.

    Attributes:
      logits: [T, E] float32 gate activations.
      weights: [T, K] float32.
      ids: [T, K] int32.
      dropped: scalar int32, (token, expert) pairs that found no room.
      mean_input: [D] float32, mean over the tokens of what the gate read.
    """

    mean_input: jax.Array
    logits: jax.Array
    weights: jax.Array
    ids: jax.Array
    dropped: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Result of a whole-sequence pass over [B, T] tokens.

    Attributes:
      hidden: [B, T, D] after the final norm.
      routers: one trace per layer, over the B*T tokens in row order.
    """

    hidden: jax.Array
    routers: tuple[RouterTrace, ...]


def param_shapes(config: ModelConfig) -> Params:
    """The weight tree of `params_of` with a shape in each leaf's place."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    shapes: Params = {
        "embed": vocab_shape,
        "final_norm": (config.hidden_size,),
        "layers": [block_shapes(config, layer) for layer in range(config.num_layers)],
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = vocab_shape[::-1]
    return shapes


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh weights.

    Matrices, embedding and head have variance 1/fan_in, norms and scales are one, biases and sinks
    zero. What writes to the residual
    stream starts at `initializer_range` over sqrt(2L) (GPT-2's rule): at first a token's own
    embedding leads the stream. Where the mean over its context led instead, all tokens of a
    sequence would look alike to the gate and pick the same experts.

    Args:
      config: geometry.
      key: random key.

    Returns:
      float32 tree as in `params_of`.
    """

    def normal(index: int, shape: tuple[int, ...], deviation: float) -> jax.Array:
        return deviation * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)

    vocab_shape = (config.vocab_size, config.hidden_size)
    params: Params = {
        "embed": normal(0, vocab_shape, config.hidden_size**-0.5),
        "final_norm": jnp.ones(config.hidden_size, jnp.float32),
        "layers": [],
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = normal(1, vocab_shape[::-1], config.hidden_size**-0.5)
    index = 1
    for layer in range(config.num_layers):
        block: dict[str, jax.Array] = {}
        for name, shape in block_shapes(config, layer).items():
            index += 1
            if name.endswith(("_norm", "_scale")):
                block[name] = jnp.ones(shape, jnp.float32)
                continue
            if name.endswith(("_bias", "sinks")) or name.startswith("b"):
                block[name] = jnp.zeros(shape, jnp.float32)
                continue
            if name in ("wo", "w_down"):
                deviation = config.initializer_range * (2 * config.num_layers) ** -0.5
            else:
                deviation = shape[-2] ** -0.5
            block[name] = normal(index, shape, deviation)
        params["layers"].append(block)
    return params


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention in which a token looks at itself and at what stands before it.

    Blocks of queries see only the keys from their window's start up to their own end: nearly half
    the scores are masked anyway.

    Args:
      q: [B, T, H, Dh].
      k: [B, T, Hkv, Dh].
      v: [B, T, Hkv, Dh].
      window: tokens a token looks back, itself included; None for all.
      scale: factor of the scores; None for Dh**-0.5.
      sinks: [H], see `attention.attend`.

    Returns:
      [B, T, H*Dh].
    """
    length = q.shape[1]
    mixed = []
    for start in range(0, length, _ATTENTION_BLOCK_TOKENS):
        end = min(start + _ATTENTION_BLOCK_TOKENS, length)
        first = 0 if window is None else max(0, start - window + 1)
        back = jnp.arange(start, end)[:, None] - jnp.arange(first, end)[None, :]
        mask = back >= 0 if window is None else (back >= 0) & (back < window)
        keys, values = k[:, first:end], v[:, first:end]
        mixed.append(
            attention.attend(q[:, start:end], keys, values, mask, scale=scale, sinks=sinks)
        )
    return jnp.concatenate(mixed, axis=1)


class Block(nnx.Module):
    """Attention and MoE halves of one layer, each behind its norm and added to the stream."""

    def __init__(self, config: ModelConfig, weights: dict[str, jax.Array], layer: int = 0) -> None:
        """Holds one layer's weights.

        Args:
          config: geometry.
          weights: arrays keyed as `block_shapes` of that layer.
          layer: which layer it is, from 0.
        """
        self.config = config
        self.attention = config.layer_attention(layer)
        self.names = tuple(block_shapes(config, layer))
        for name in self.names:
            setattr(self, name, nnx.Param(weights[name]))

    def weights(self) -> dict[str, jax.Array]:
        """The layer's arrays, keyed as `block_shapes`."""
        return {name: getattr(self, name)[...] for name in self.names}

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, dispatch: Dispatch
    ) -> tuple[jax.Array, RouterTrace]:
        """One layer over whole sequences.

        Args:
          x: [B, T, D] residual stream.
          cos: [T, Dh/2] float32.
          sin: [T, Dh/2] float32.
          dispatch: path to the experts.

        Returns:
          The new stream [B, T, D] and the gate's decisions over B*T tokens.
        """
        config, weights = self.config, self.weights()
        eps, options = config.rms_norm_eps, config.attention
        normed = layers.rms_norm(x, weights["attn_norm"], eps)
        q, k, v = attention.project_qkv(
            normed, weights, cos, sin, attention=self.attention, options=options, eps=eps
        )
        mixed = causal_attention(
            q,
            k,
            v,
            window=self.attention.window,
            scale=self.attention.scale,
            sinks=weights["sinks"] if options.sinks else None,
        )
        x = layers.add_attention(x, mixed, weights, config)

        stream = x.reshape(-1, config.hidden_size)
        tokens = layers.rms_norm(x, weights["mlp_norm"], eps).reshape(-1, config.hidden_size)
        logits = layers.gate_logits(stream, tokens, weights, config).astype(jnp.float32)
        gates, ids = layers.choose_experts(logits, weights, config)
        experts = layers.expert_leaves(weights)
        out, dropped = run_experts(tokens, gates, ids, experts, dispatch, config.expert)
        trace = RouterTrace(
            mean_input=jnp.mean(tokens.astype(jnp.float32), axis=0),
            logits=logits,
            weights=gates,
            ids=ids,
            dropped=dropped,
        )
        return layers.add_experts(x, out.reshape(x.shape), weights, config), trace


class MoeTransformer(nnx.Module):
    """Decoder-only Mixture-of-Experts language model."""

    def __init__(self, config: ModelConfig, params: Params) -> None:
        """Holds a model's weights.

        Args:
          config: geometry.
          params: tree as in `params_of`.
        """
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.blocks = nnx.List(
            [Block(config, weights, layer) for layer, weights in enumerate(params["layers"])]
        )
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(params["lm_head"])

    def __call__(self, tokens: jax.Array, dispatch: Dispatch = DENSE) -> Forward:
        """Runs whole sequences under a causal mask.

        Args:
          tokens: [B, T] int32.
          dispatch: path to the experts; the default is exact.

        Returns:
          Hidden states and router decisions; `logits` turns the first into scores.
        """
        config = self.config
        length = tokens.shape[1]
        positions = jnp.arange(length, dtype=jnp.int32)
        angles: dict[LayerAttention, tuple[jax.Array, jax.Array]] = {}
        x = layers.embed(tokens, self.embed[...], config)
        routers = []
        for block in self.blocks:
            own = block.attention
            if own not in angles:
                angles[own] = attention.rope_angles(
                    positions,
                    own.head_dim,
                    own.rope_theta,
                    rotary_fraction=own.rotary_fraction,
                    yarn=config.attention.yarn,
                )
            x, trace = block(x, *angles[own], dispatch)
            routers.append(trace)
        hidden = layers.rms_norm(x, self.final_norm[...], config.rms_norm_eps)
        return Forward(hidden=hidden, routers=tuple(routers))

    def head(self) -> jax.Array:
        """The output head, [V, D]: the embedding where the two are tied."""
        return self.embed[...] if self.config.tie_word_embeddings else self.lm_head[...].T

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores over the vocabulary.

        Args:
          hidden: [..., D] from `Forward`.

        Returns:
          [..., V] float32.
        """
        logits = jnp.matmul(hidden, self.head().T, preferred_element_type=jnp.float32)
        return layers.soften_logits(logits, self.config)


def model_of(config: ModelConfig, params: Params) -> MoeTransformer:
    """Puts a plain weight tree (NumPy or JAX) into modules; the inverse of `params_of`."""
    return MoeTransformer(config, jax.tree.map(jnp.asarray, params))


def params_of(model: MoeTransformer) -> Params:
    """A model's weights as a plain tree, the form the serving step and checkpoints use.

    Args:
      model: the modules.

    Returns:
      {"embed": [V, D], "final_norm": [D], "layers": [one dictionary a block, with the names and
      shapes of `eldr_jax.config.block_shapes`]}, and "lm_head": [D, V] where the head is not tied.
    """
    params: Params = {
        "embed": model.embed[...],
        "final_norm": model.final_norm[...],
        "layers": [block.weights() for block in model.blocks],
    }
    if not model.config.tie_word_embeddings:
        params["lm_head"] = model.lm_head[...]
    return params
