"""Builds the token table: where each vocabulary token's routings went in calibration."""

from __future__ import annotations

import numpy as np

from serving.signatures.model import SignatureModel
from serving.signatures.token_table import TokenTable

PRIOR_CHOICES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def build_token_table(
    token_ids: np.ndarray,
    experts: np.ndarray,
    model: SignatureModel,
    *,
    prior_tokens: float,
    confidence: float,
) -> TokenTable:
    """Counts (token, masked layer, expert).

    Args:
        token_ids: int32 [T], prompt tokens of all prompts, T >= 1.
        experts: unsigned [T, L, K], their experts.
        model: gives mask and geometry.
        prior_tokens: weight of the mean of all tokens.
        confidence: carried by predictions.
    """
    seen, rows, num_seen = np.unique(token_ids, return_inverse=True, return_counts=True)
    offsets = (np.arange(model.num_masked_layers) * model.num_experts)[:, None]
    entries = experts[:, model.layers].astype(np.int64) + offsets
    keys = rows[:, None, None].astype(np.int64) * model.size + entries
    pairs, counts = np.unique(keys, return_counts=True)
    starts = np.searchsorted(pairs, np.arange(len(seen) + 1, dtype=np.int64) * model.size)
    mean = np.bincount(entries.ravel(), minlength=model.size) / len(token_ids)
    return TokenTable(
        token_ids=seen.astype(np.int32),
        num_seen=num_seen.astype(np.int32),
        starts=starts.astype(np.int64),
        entries=(pairs % model.size).astype(np.uint32),
        counts=counts.astype(np.uint32),
        mean=mean.astype(np.float32),
        prior_tokens=prior_tokens,
        confidence=confidence,
    )


def mean_cosine(
    table: TokenTable, prompts: list[np.ndarray], vectors: np.ndarray, model: SignatureModel
) -> float:
    """Mean cosine of predicted and true signatures.

    Args:
        table: the predictor.
        prompts: token ids of each prompt.
        vectors: float32 [N, M], their true signatures.
        model: the signature model.
    """
    predicted = np.stack([table.predict(ids, model).vector for ids in prompts])
    return float((predicted * vectors).sum(axis=1).mean())


def fit_token_table(
    token_ids: np.ndarray,
    num_prompt_tokens: np.ndarray,
    experts: np.ndarray,
    vectors: np.ndarray,
    model: SignatureModel,
) -> tuple[TokenTable, float]:
    """Chooses the prior on half of the prompts, then builds the table from all of them.

    Args:
        token_ids: int32 [T], prompts laid end to end.
        num_prompt_tokens: int [N].
        experts: unsigned [T, L, K].
        vectors: float32 [N, M] true signatures.
        model: the signature model.

    Returns:
        The table, whose confidence is the mean cosine on the half it had not seen when that
        was measured, and that cosine.
    """
    num_prompts = len(num_prompt_tokens)
    owner = np.repeat(np.arange(num_prompts), num_prompt_tokens)
    seen = owner % 2 == 0
    starts = np.concatenate([[0], np.cumsum(num_prompt_tokens)])
    unseen = range(1, num_prompts, 2)
    prompts = [token_ids[starts[i] : starts[i + 1]] for i in unseen]
    cosines = {}
    for prior in PRIOR_CHOICES:
        half = build_token_table(
            token_ids[seen], experts[seen], model, prior_tokens=prior, confidence=1.0
        )
        cosines[prior] = mean_cosine(half, prompts, vectors[1::2], model)
    best = max(cosines, key=lambda prior: cosines[prior])
    confidence = min(1.0, max(cosines[best], 1e-3))
    table = build_token_table(token_ids, experts, model, prior_tokens=best, confidence=confidence)
    return table, cosines[best]
