"""Held-out texts through the model: what each token cost and where it went.

Exact: every token reaches its experts, nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from eldr_jax.config import ModelConfig
from eldr_jax.model import MoeTransformer, Params, model_of
from eldr_jax.training.data import Document, encode_documents
from eldr_jax.training.objective import token_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedText:
    """One text as the model read it.

    Attributes:
      num_bytes: UTF-8 bytes of the tokens that were predicted.
      losses: [N] float32, nats of each predicted token.
      ids: [L, N, K] uint16, experts of each token that was read.
    """

    num_bytes: int
    losses: np.ndarray
    ids: np.ndarray


def read_texts(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    max_tokens: int,
    batch_texts: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RoutedText]:
    """Runs texts through the model, exactly.

    Args:
      config: geometry.
      params: weights.
      tokenizer: the model's.
      documents: texts; only the first `max_tokens` tokens of each are read.
      max_tokens: T.
      batch_texts: texts run at once, sorted by length so that padding stays small.
      progress: called with texts done and their total.

    Returns:
      One record per document, in order.
    """
    encoded = [ids[: max_tokens + 1] for ids in encode_documents(tokenizer, documents)]
    order = np.argsort([len(ids) for ids in encoded], kind="stable")
    read = _compile_reader(model_of(config, params))
    routed: list[RoutedText | None] = [None] * len(encoded)
    for first in range(0, len(order), batch_texts):
        rows = order[first : first + batch_texts]
        longest = max(len(encoded[row]) for row in rows) - 1
        # Lengths in steps of 64 keep the number of compilations small.
        width = min(max_tokens, -(-longest // 64) * 64)
        padded = np.zeros((batch_texts, width + 1), np.int32)
        for place, row in enumerate(rows):
            padded[place, : len(encoded[row])] = encoded[row]
        losses, ids = jax.device_get(read(padded))
        for place, row in enumerate(rows):
            num_tokens = len(encoded[row]) - 1
            text = tokenizer.decode([int(token) for token in encoded[row][1:]])
            routed[row] = RoutedText(
                num_bytes=len(text.encode("utf-8")),
                losses=losses[place, :num_tokens],
                ids=ids[:, place, :num_tokens].astype(np.uint16),
            )
        progress(first + len(rows), len(order))
    return [text for text in routed if text is not None]


def _compile_reader(
    model: MoeTransformer,
) -> Callable[[np.ndarray], tuple[jax.Array, jax.Array]]:
    @jax.jit
    def read(sequences: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        forward = model(inputs)
        hidden = forward.hidden.reshape(targets.size, -1)
        losses = token_losses(model, hidden, targets.reshape(-1)).reshape(targets.shape)
        ids = jnp.stack([trace.ids for trace in forward.routers])
        return losses, ids.reshape(len(forward.routers), *targets.shape, -1)

    return lambda sequences: read(jnp.asarray(sequences))


def loss_by_position(
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    length: int,
    bucket: int,
    max_windows: int,
) -> list[dict[str, float]]:
    """Loss against the place in the context, over texts joined to long sequences.

    Args:
      config: geometry.
      params: weights.
      tokenizer: the model's.
      documents: texts, joined in order.
      length: tokens of a sequence.
      bucket: tokens whose losses are averaged; divides `length`.
      max_windows: sequences read at most.

    Returns:
      Per bucket {`first_token`, `nats_per_token`}.

    Raises:
      ValueError: the texts do not fill one sequence.
    """
    stream = np.concatenate(encode_documents(tokenizer, documents)).astype(np.int32)
    num_windows = min(max_windows, (len(stream) - 1) // length)
    if num_windows < 1:
        raise ValueError(f"{len(stream)} tokens do not fill a sequence of {length=}")
    read = _compile_reader(model_of(config, params))
    starts = range(0, num_windows * length, length)
    losses = [
        jax.device_get(read(stream[None, start : start + length + 1])[0])[0] for start in starts
    ]
    means = np.mean(losses, axis=0).reshape(-1, bucket).mean(axis=1)
    return [
        {"first_token": index * bucket, "nats_per_token": float(mean)}
        for index, mean in enumerate(means)
    ]
