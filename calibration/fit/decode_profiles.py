"""Shrinkage clusters: how prompts of each kind decode, and how far to trust it (DESIGN)."""

from __future__ import annotations

import numpy as np

from serving.signatures.profiles import DecodeProfiles
from serving.signatures.regions import fit_regions

SHRINK_CHOICES = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
_SCALE_BATCH = 8
_SCALE_DRAWS = 32


def fit_profiles(
    vectors: np.ndarray,
    decode: np.ndarray,
    num_decode_tokens: np.ndarray,
    layers: np.ndarray,
    *,
    num_clusters: int,
    shrink_tokens: float,
    rng: np.random.Generator,
) -> DecodeProfiles:
    """Clusters prompts by signature and takes each cluster's decode profile.

    Args:
        vectors: float32 [N, M] signatures.
        decode: unsigned [N, L, E] decode counts over all layers.
        num_decode_tokens: int [N], at least one of them > 0.
        layers: int32 [Lm] mask.
        num_clusters: C at most; empty clusters are dropped.
        shrink_tokens: weight of the profile in tokens.
        rng: draws the k-means start and the batches behind `layer_scale`.
    """
    decoded = np.flatnonzero(num_decode_tokens > 0)
    if not len(decoded):
        raise ValueError("num_decode_tokens: at least one prompt must have decoded")
    vectors, decode = vectors[decoded], decode[decoded]
    tokens = num_decode_tokens[decoded].astype(np.float64)
    num_clusters = min(num_clusters, len(vectors))
    centroids = fit_regions(vectors, num_clusters, rng, balanced=False)
    labels = (vectors @ centroids.T).argmax(axis=1)
    kept = np.unique(labels)
    masked = decode[:, layers].reshape(len(decode), -1)
    profiles = [masked[labels == c].sum(axis=0) / tokens[labels == c].sum() for c in kept]
    frequency = decode / tokens[:, None, None].astype(np.float32)
    scales = [_layer_scale(frequency[labels == c], layers, rng) for c in kept]
    return DecodeProfiles(
        centroids=centroids[kept],
        profiles=np.asarray(profiles, np.float32),
        sizes=np.bincount(labels)[kept].astype(np.int32),
        layer_scale=np.asarray(scales, np.float32),
        shrink_tokens=shrink_tokens,
    )


def choose_shrinkage(
    vectors: np.ndarray,
    prefill: np.ndarray,
    num_prompt_tokens: np.ndarray,
    decode: np.ndarray,
    num_decode_tokens: np.ndarray,
    layers: np.ndarray,
    *,
    num_clusters: int,
    rng: np.random.Generator,
) -> tuple[float, dict[float, float]]:
    """The shrinkage that predicts decode best on prompts its clusters have not seen.

    Clusters come from every second prompt; the squared error of q against realised decode
    frequencies, weighted by decode tokens, is taken over the others.

    Args:
        vectors: float32 [N, M].
        prefill: unsigned [N, Lm, E], masked.
        num_prompt_tokens: int [N].
        decode: unsigned [N, L, E], all layers.
        num_decode_tokens: int [N].
        layers: int32 [Lm].
        num_clusters: C.
        rng: draws the k-means start.

    Returns:
        The best of `SHRINK_CHOICES`, and the mean squared error of each, per token and expert.
    """
    seen = np.arange(len(vectors)) % 2 == 0
    profiles = fit_profiles(
        vectors[seen],
        decode[seen],
        num_decode_tokens[seen],
        layers,
        num_clusters=num_clusters,
        shrink_tokens=1.0,
        rng=rng,
    )
    unseen = np.flatnonzero(~seen & (num_decode_tokens > 0))
    if not len(unseen):
        raise ValueError("num_decode_tokens: a prompt of each half must have decoded")
    prior = np.stack([profiles.profile_of(vectors[i]) for i in unseen])
    counts = prefill[unseen].reshape(len(unseen), -1).astype(np.float32)
    prompt_tokens = num_prompt_tokens[unseen].astype(np.float32)[:, None]
    weights = num_decode_tokens[unseen].astype(np.float32)
    realised = decode[unseen][:, layers].reshape(len(unseen), -1) / weights[:, None]
    errors = {}
    for choice in SHRINK_CHOICES:
        q = (counts + choice * prior) / (prompt_tokens + choice)
        per_prompt = ((q - realised) ** 2).mean(axis=1)
        errors[choice] = float(per_prompt @ weights / weights.sum())
    return min(errors, key=lambda choice: errors[choice]), errors


def _layer_scale(frequency: np.ndarray, layers: np.ndarray, rng: np.random.Generator) -> float:
    """Expected distinct experts over all layers per masked one, in batches of the members."""
    everywhere = masked = 0.0
    for _ in range(_SCALE_DRAWS):
        batch = frequency[rng.integers(len(frequency), size=_SCALE_BATCH)]
        per_layer = (1.0 - np.prod(1.0 - np.minimum(batch, 1.0), axis=0)).sum(axis=1)
        everywhere += float(per_layer.sum())
        masked += float(per_layer[layers].sum())
    return everywhere / masked
