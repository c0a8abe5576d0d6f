"""Builds the token table: where each vocabulary token's routings went in calibration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.fit.decode_profiles import fit_profiles
from serving.signatures.model import SignatureModel
from serving.signatures.token_table import TokenTable

PRIOR_CHOICES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
CONFIDENCE_CHOICES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedPrompts:
    """How the table's prompts decoded, to choose what a predicted token is worth.

    Attributes:
        decode: unsigned [N, L, E].
        num_tokens: int [N], decode tokens; prompts without any are left out.
        num_clusters: C of the decode profiles.
        shrink_tokens: k of the decode profiles.
        rng: draws the clusters' start.
    """

    decode: np.ndarray
    num_tokens: np.ndarray
    num_clusters: int
    shrink_tokens: float
    rng: np.random.Generator


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
    decoded: DecodedPrompts,
) -> tuple[TokenTable, float]:
    """Chooses prior and confidence on half of the prompts, then builds the table from all of them.

    Args:
        token_ids: int32 [T], prompts laid end to end.
        num_prompt_tokens: int [N].
        experts: unsigned [T, L, K].
        vectors: float32 [N, M] true signatures.
        model: the signature model.
        decoded: how the same prompts decoded.

    Returns:
        The table, and the mean cosine of its predictions on the half it had not seen when that
        was measured.
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
    half = build_token_table(
        token_ids[seen], experts[seen], model, prior_tokens=best, confidence=1.0
    )
    confidence = choose_confidence(half, prompts, vectors, model, decoded)
    table = build_token_table(token_ids, experts, model, prior_tokens=best, confidence=confidence)
    return table, cosines[best]


def choose_confidence(
    half: TokenTable,
    prompts: list[np.ndarray],
    vectors: np.ndarray,
    model: SignatureModel,
    decoded: DecodedPrompts,
) -> float:
    """What a predicted token is worth beside the cluster's profile, for predicting decode.

    The one of `CONFIDENCE_CHOICES` with the least squared error of q against realised decode
    frequencies on prompts that neither the table nor the clusters have seen, each weighted by
    its decode tokens.

    Args:
        half: table of the even prompts.
        prompts: token ids of the odd ones.
        vectors: float32 [N, M], true signatures of all.
        model: the signature model.
        decoded: how all of them decoded.
    """
    even = np.arange(len(vectors)) % 2 == 0
    profiles = fit_profiles(
        vectors[even],
        decoded.decode[even],
        decoded.num_tokens[even],
        model.layers,
        num_clusters=decoded.num_clusters,
        shrink_tokens=decoded.shrink_tokens,
        rng=decoded.rng,
    )
    errors = dict.fromkeys(CONFIDENCE_CHOICES, 0.0)
    for number, ids in enumerate(prompts):
        prompt = 2 * number + 1
        num_decoded = int(decoded.num_tokens[prompt])
        if num_decoded == 0:
            continue
        predicted = half.predict(ids, model)
        counts = predicted.counts.reshape(-1).astype(np.float32)
        prior = decoded.shrink_tokens * profiles.profile_of(predicted.vector)
        realised = decoded.decode[prompt][model.layers].reshape(-1) / num_decoded
        for worth in CONFIDENCE_CHOICES:
            q = (worth * counts + prior) / (worth * len(ids) + decoded.shrink_tokens)
            errors[worth] += num_decoded * float(((q - realised) ** 2).mean())
    return min(errors, key=lambda worth: errors[worth])
