"""What training minimises: cross-entropy plus two router losses.

The load-balancing loss is the global-batch form of Qiu et al., "Demons in the Detail"
(arXiv 2501.11873): expert frequencies come from many sequences of all domains, not from one
sequence, so a domain may keep to its experts as long as the mixture uses all of them. Their paper
keeps a buffer of frequencies over micro-batches; here it is a running mean over steps. The
z-loss is that of ST-MoE (arXiv 2202.08906, equation 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from eldr_jax.dispatch import Dispatch
from eldr_jax.model import MoeTransformer, RouterTrace

# Tokens whose scores over the vocabulary exist at once: keeps them in cache, not in memory.
_LOSS_CHUNK_TOKENS = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Figures of one training step.

    Attributes:
      cross_entropy: nats per token, scalar float32.
      balance_loss: mean over layers, 1 is perfect balance, scalar float32.
      z_loss: mean over layers, scalar float32.
      frequency: [L, E] float32, share of the step's choices that each expert got.
      dropped_share: share of choices that found no room, scalar float32.
      gate_input: [L, D] float32, mean over the step's tokens of what each gate read.
    """

    cross_entropy: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array
    frequency: jax.Array
    dropped_share: jax.Array
    gate_input: jax.Array


def token_losses(model: MoeTransformer, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy of each token, for evaluation.

    Args:
      model: for its output head.
      hidden: [N, D].
      targets: [N] int32.

    Returns:
      [N] float32, nats.
    """
    return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)


@jax.custom_vjp
def mean_token_loss(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy, for training.

    Scores over the vocabulary exist for `_LOSS_CHUNK_TOKENS` tokens at a time and are used for
    loss and gradients in one go: neither kept nor computed twice.

    Args:
      head: [V, D].
      hidden: [N, D]; N is a multiple of the chunk, or one chunk is all of it.
      targets: [N] int32.

    Returns:
      Scalar float32, nats.
    """
    return _mean_token_loss_fwd(head, hidden, targets)[0]


def _mean_token_loss_fwd(
    head: jax.Array, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    num_tokens, width = hidden.shape
    chunk = num_tokens if num_tokens % _LOSS_CHUNK_TOKENS else _LOSS_CHUNK_TOKENS
    vocabulary = jnp.arange(head.shape[0])[None, :]

    def add_chunk(
        sums: tuple[jax.Array, jax.Array], rows: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        loss_sum, head_grad = sums
        states, wanted = rows
        scores = states @ head.T
        top = jnp.max(scores, axis=-1, keepdims=True)
        powers = jnp.exp(scores - top)
        total = jnp.sum(powers, axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(scores, wanted[:, None], axis=1)
        losses = jnp.log(total) + top - chosen
        score_grad = powers / (total * num_tokens)
        score_grad -= jnp.where(vocabulary == wanted[:, None], 1.0 / num_tokens, 0.0)
        sums = (loss_sum + jnp.sum(losses), head_grad + score_grad.T @ states)
        return sums, score_grad @ head

    start = (jnp.zeros((), hidden.dtype), jnp.zeros_like(head))
    rows = (hidden.reshape(-1, chunk, width), targets.reshape(-1, chunk))
    (loss_sum, head_grad), hidden_grad = jax.lax.scan(add_chunk, start, rows)
    return loss_sum / num_tokens, (head_grad, hidden_grad.reshape(hidden.shape))


def _mean_token_loss_bwd(
    grads: tuple[jax.Array, jax.Array], scale: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    return grads[0] * scale, grads[1] * scale, None


mean_token_loss.defvjp(_mean_token_loss_fwd, _mean_token_loss_bwd)


def expert_frequency(ids: jax.Array, num_experts: int) -> jax.Array:
    """Share of choices per expert: [T, K] int32 ids to [E] float32 that sums to one."""
    hits = jax.nn.one_hot(ids.reshape(-1), num_experts, dtype=jnp.float32)
    return jnp.mean(hits, axis=0)


def balance_loss(trace: RouterTrace, frequency: jax.Array) -> jax.Array:
    """E * sum_e f_e * P_e, P the mean gate probability of the step.

    Args:
      trace: one layer's decisions.
      frequency: [E] float32, f over as wide a batch as is known; gets no gradient.

    Returns:
      Scalar float32.
    """
    probs = jnp.mean(jax.nn.softmax(trace.logits, axis=-1), axis=0)
    return probs.shape[0] * jnp.sum(jax.lax.stop_gradient(frequency) * probs)


def router_z_loss(trace: RouterTrace) -> jax.Array:
    """Mean squared log-sum-exp of one layer's gate activations, scalar float32."""
    return jnp.mean(jax.nn.logsumexp(trace.logits, axis=-1) ** 2)


def objective(
    model: MoeTransformer,
    sequences: jax.Array,
    running_frequency: jax.Array,
    *,
    dispatch: Dispatch,
    balance_coefficient: float,
    z_coefficient: float,
    frequency_decay: float,
) -> tuple[jax.Array, StepMetrics]:
    """The training loss of one step.

    Args:
      model: the model.
      sequences: [B, T + 1] int32.
      running_frequency: [L, E] float32, running mean over earlier steps.
      dispatch: path to the experts.
      balance_coefficient: weight of the mean balance loss.
      z_coefficient: weight of the mean z-loss.
      frequency_decay: weight of the running mean against this step's frequency.

    Returns:
      The scalar loss and its parts.
    """
    inputs, targets = sequences[:, :-1], sequences[:, 1:].reshape(-1)
    forward = model(inputs, dispatch)
    hidden = forward.hidden.reshape(targets.shape[0], -1)
    cross_entropy = mean_token_loss(model.head(), hidden, targets)
    num_experts = model.config.num_experts
    frequency = jnp.stack([expert_frequency(t.ids, num_experts) for t in forward.routers])
    wide = frequency_decay * running_frequency + (1.0 - frequency_decay) * frequency
    pairs = list(zip(forward.routers, wide, strict=True))
    balance = jnp.mean(jnp.stack([balance_loss(trace, row) for trace, row in pairs]))
    z_loss = jnp.mean(jnp.stack([router_z_loss(trace) for trace in forward.routers]))
    num_choices = targets.shape[0] * model.config.num_experts_per_tok * len(forward.routers)
    dropped = jnp.sum(jnp.stack([trace.dropped for trace in forward.routers]))
    metrics = StepMetrics(
        cross_entropy=cross_entropy,
        balance_loss=balance,
        z_loss=z_loss,
        frequency=frequency,
        dropped_share=dropped / num_choices,
        gate_input=jnp.stack([trace.mean_input for trace in forward.routers]),
    )
    return cross_entropy + balance_coefficient * balance + z_coefficient * z_loss, metrics


def centre_gate(gate: jax.Array, mean_input: jax.Array) -> jax.Array:
    """Takes out of a gate what it says about the mean token.

    What all tokens have in common cannot tell them apart, yet early in training it grows faster
    than anything else and sends every token to the same few experts, faster than a balance loss
    pulls back. Projecting each expert's vector onto the complement of the mean input keeps the
    gate a plain linear map, so the checkpoint's format is untouched.

    Args:
      gate: [D, E] weights.
      mean_input: [D] running mean of the gate's input.

    Returns:
      [D, E] with `mean_input @ gate` zero.
    """
    direction = mean_input / jnp.maximum(jnp.linalg.norm(mean_input), 1e-12)
    return gate - direction[:, None] * (direction @ gate)[None, :]
