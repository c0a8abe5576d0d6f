"""Summed gate probabilities of a prompt: what a signature may weigh instead of counts (FACTS 1).

A gate gives every expert a probability at every token; a count keeps only who was among the top k.
The sums come from the whole-sequence model, whose forward pass exposes its gates, and stand beside
the counts of the serving step in a capture.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from calibration.capture_checks import GATE_UNITS
from eldr_jax.config import ModelConfig
from eldr_jax.model import Params, model_of

_LENGTH_STEP_TOKENS = 64


class GateSums:
    """Sums of one model; compiled once per padded length.

    Args:
        config: the model's.
        params: its weights.
    """

    def __init__(self, config: ModelConfig, params: Params) -> None:
        def summed(weights: Params, tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
            forward = model_of(config, weights)(tokens[None])
            logits = jnp.stack([trace.logits for trace in forward.routers])
            real = jnp.arange(tokens.shape[0]) < num_tokens
            return jnp.einsum("lte,t->le", jax.nn.softmax(logits, axis=-1), real)

        self._params = params
        self._summed = jax.jit(summed)
        self._scale = GATE_UNITS * config.num_experts_per_tok

    def of(self, token_ids: np.ndarray) -> np.ndarray:
        """The sums over a prompt.

        Args:
            token_ids: int32 [P], P >= 1.

        Returns:
            uint32 [L, E], in 1 / (k * `GATE_UNITS`) of a probability.
        """
        num = len(token_ids)
        if num < 1:
            raise ValueError("token_ids must hold at least one token")
        # Attention is causal, so what stands behind the prompt changes nothing before it.
        padded = np.zeros(-(-num // _LENGTH_STEP_TOKENS) * _LENGTH_STEP_TOKENS, np.int32)
        padded[:num] = token_ids
        sums = np.asarray(self._summed(self._params, padded, np.int32(num)), np.float64)
        return np.rint(self._scale * sums).astype(np.uint32)
