"""What training minimises: cross-entropy plus three router losses.

The load-balancing loss is the global-batch form of Qiu et al., "Demons in the Detail"
(arXiv 2501.11873): expert frequencies come from many sequences of all domains, not from one
sequence, so a domain may keep to its experts as long as the mixture uses all of them. Their paper
keeps a buffer of frequencies over micro-batches; here it is a running mean over steps. The
z-loss is that of ST-MoE (arXiv 2202.08906, equation 5).

The specialisation loss raises the mutual information between a sequence's domain and its experts,
the aim of Mod-Squad (arXiv 2212.08066, section 3.2) for tasks. Models of billions of weights
specialise by domain on trillions of tokens without it; a small model on few tokens does so by
language, whose tokens differ, but barely by the subject of English prose.
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
      information: mean over layers, nats, scalar float32; what the specialisation loss raises.
      frequency: [L, B, E] float32, share of each sequence's choices that each expert got.
      dropped_share: share of choices that found no room, scalar float32.
      gate_input: [L, D] float32, mean over the step's tokens of what each gate read.
    """

    cross_entropy: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array
    information: jax.Array
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
    """Share of choices per expert: [B, N] int32 ids to [B, E] float32, rows that sum to one."""
    return jnp.mean(jax.nn.one_hot(ids, num_experts, dtype=jnp.float32), axis=1)


def balance_loss(probs: jax.Array, frequency: jax.Array) -> jax.Array:
    """E * sum_e f_e * P_e, P the mean gate probability of the step.

    Args:
      probs: [B, E] float32, mean gate probability of each sequence.
      frequency: [E] float32, f over as wide a batch as is known; gets no gradient.

    Returns:
      Scalar float32, 1 where either is even.
    """
    mean_probs = jnp.mean(probs, axis=0)
    return probs.shape[1] * jnp.sum(jax.lax.stop_gradient(frequency) * mean_probs)


def domain_information(
    probs: jax.Array, domain_frequency: jax.Array, frequency: jax.Array, counted: jax.Array
) -> jax.Array:
    """Mean over the counted sequences of sum_e P_e * log(f_{d,e} / f_e).

    With P the frequencies of the sequence's domain d this is the mutual information between
    domain and expert; with the gate's probabilities it has a gradient.

    Args:
      probs: [B, E] float32, mean gate probability of each sequence.
      domain_frequency: [B, E] float32, f_d of each sequence's domain; gets no gradient.
      frequency: [E] float32, f; gets no gradient.
      counted: [B] bool.

    Returns:
      Scalar float32, nats; 0 where no sequence counts.
    """
    # A tenth of the even share on both sides bounds the logarithm for unused experts.
    floor = 0.1 / probs.shape[1]
    ratio = jnp.log((domain_frequency + floor) / (frequency + floor))
    each = jnp.sum(probs * jax.lax.stop_gradient(ratio), axis=1)
    return jnp.sum(each * counted) / jnp.maximum(jnp.sum(counted), 1)


def router_z_loss(trace: RouterTrace) -> jax.Array:
    """Mean squared log-sum-exp of one layer's gate activations, scalar float32."""
    return jnp.mean(jax.nn.logsumexp(trace.logits, axis=-1) ** 2)


def objective(
    model: MoeTransformer,
    sequences: jax.Array,
    frequency: jax.Array,
    domain_frequency: jax.Array,
    counted: jax.Array,
    *,
    dispatch: Dispatch,
    balance_coefficient: float,
    z_coefficient: float,
    information_coefficient: float,
    information_target: float,
    frequency_decay: float,
) -> tuple[jax.Array, StepMetrics]:
    """The training loss of one step.

    Args:
      model: the model.
      sequences: [B, T + 1] int32.
      frequency: [L, E] float32, running mean over earlier steps.
      domain_frequency: [B, L, E] float32, the same for each sequence's domain.
      counted: [B] bool, sequences that the domain information counts.
      dispatch: path to the experts.
      balance_coefficient: weight of the mean balance loss.
      z_coefficient: weight of the mean z-loss.
      information_coefficient: weight of the mean domain information, which is subtracted.
      information_target: nats beyond which a layer's information counts no further.
      frequency_decay: weight of the running mean against this step's frequency.

    Returns:
      The scalar loss and its parts.
    """
    num_sequences, num_experts = sequences.shape[0], model.config.num_experts
    inputs, targets = sequences[:, :-1], sequences[:, 1:].reshape(-1)
    forward = model(inputs, dispatch)
    hidden = forward.hidden.reshape(targets.shape[0], -1)
    cross_entropy = mean_token_loss(model.head(), hidden, targets)
    frequencies, balances, z_losses, informations = [], [], [], []
    for layer, trace in enumerate(forward.routers):
        used = expert_frequency(trace.ids.reshape(num_sequences, -1), num_experts)
        probs = jax.nn.softmax(trace.logits, axis=-1)
        probs = jnp.mean(probs.reshape(num_sequences, -1, num_experts), axis=1)
        wide = frequency_decay * frequency[layer] + (1.0 - frequency_decay) * used.mean(axis=0)
        frequencies.append(used)
        balances.append(balance_loss(probs, wide))
        z_losses.append(router_z_loss(trace))
        informations.append(domain_information(probs, domain_frequency[:, layer], wide, counted))
    balance, z_loss, information = (
        jnp.mean(jnp.stack(terms)) for terms in (balances, z_losses, informations)
    )
    num_choices = targets.shape[0] * model.config.num_experts_per_tok * len(forward.routers)
    dropped = jnp.sum(jnp.stack([trace.dropped for trace in forward.routers]))
    metrics = StepMetrics(
        cross_entropy=cross_entropy,
        balance_loss=balance,
        z_loss=z_loss,
        information=information,
        frequency=jnp.stack(frequencies),
        dropped_share=dropped / num_choices,
        gate_input=jnp.stack([trace.mean_input for trace in forward.routers]),
    )
    loss = cross_entropy + balance_coefficient * balance + z_coefficient * z_loss
    useful = jnp.mean(jnp.minimum(jnp.stack(informations), information_target))
    return loss - information_coefficient * useful, metrics


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
