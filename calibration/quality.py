"""How much a capture's experts can tell: the figures behind fits and held-out reports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibration.captures import Capture
from calibration.fit.layer_mask import cosine_distances, random_pairs
from calibration.fit.rank_correlation import spearman
from serving.signatures.model import SignatureModel

LANGUAGE_PREFIX = "lang/"


def signature_spearman(
    model: SignatureModel,
    prefill: np.ndarray,
    decode: np.ndarray,
    *,
    num_pairs: int,
    rng: np.random.Generator,
) -> float:
    """Rank correlation of signature distance and decode distance over random pairs.

    Args:
        model: IDF and mask.
        prefill: unsigned [N, L, E].
        decode: unsigned [N, L, E].
        num_pairs: pairs drawn.
        rng: draws them.
    """
    pairs = random_pairs(len(prefill), num_pairs, rng)
    signatures = model.vectors(model.mask(prefill))
    return spearman(
        cosine_distances(signatures, pairs),
        cosine_distances(decode.reshape(len(decode), -1), pairs),
    )


def prefill_decode_correlation(prefill: np.ndarray, decode: np.ndarray) -> tuple[float, float]:
    """Pearson correlation of a request's prefill and decode counts over all (layer, expert).

    Args:
        prefill: unsigned [N, L, E].
        decode: unsigned [N, L, E].

    Returns:
        Mean over requests; and the same for the sums over all requests. Requests that never
        decoded are left out.
    """
    first = prefill.reshape(len(prefill), -1).astype(np.float64)
    second = decode.reshape(len(decode), -1).astype(np.float64)
    values = [
        np.corrcoef(a, b)[0, 1] for a, b in zip(first, second, strict=True) if a.std() and b.std()
    ]
    if not values:
        return 0.0, 0.0
    return float(np.mean(values)), float(np.corrcoef(first.sum(axis=0), second.sum(axis=0))[0, 1])


def distinct_experts(
    capture: Capture,
    groups: Sequence[np.ndarray],
    *,
    batch_size: int,
    num_draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Mean distinct experts per layer in decode batches drawn from each group.

    Every member of a batch is another prompt, at a random one of its decode tokens.

    Args:
        capture: gives each prompt's decode tokens.
        groups: prompt rows of each group, at least batch_size, all of which have decoded.
        batch_size: requests per batch.
        num_draws: batches per group.
        rng: draws them.

    Returns:
        float64 [num_groups].
    """
    geometry = capture.geometry
    starts = capture.decode_starts()
    layer_offset = (np.arange(geometry.num_layers) * geometry.num_experts)[:, None]
    means = []
    for rows in groups:
        total = 0
        for _ in range(num_draws):
            members = rng.choice(rows, size=batch_size, replace=False)
            at = starts[members] + rng.integers(capture.num_decode_tokens[members])
            touched = np.zeros(geometry.num_layers * geometry.num_experts, bool)
            touched[capture.decode_experts[at].astype(np.int64) + layer_offset] = True
            total += int(touched.sum())
        means.append(total / (num_draws * geometry.num_layers))
    return np.array(means)


def union_reduction(
    capture: Capture,
    labels: np.ndarray,
    *,
    batch_size: int,
    num_draws: int,
    rng: np.random.Generator,
) -> float | None:
    """Share of distinct experts saved when a decode batch holds one label only.

    Mixed batches draw every label equally, as the one-label batches are averaged equally.
    Labels with fewer prompts than a batch are left out: a prompt beside itself proves nothing.

    Args:
        capture: the decode tokens.
        labels: [N]; rows labelled "" are left out.
        batch_size: requests per batch.
        num_draws: batches per label, and mixed ones in all labels' number.
        rng: draws them.

    Returns:
        1 - same / mixed; None with fewer than two labels.
    """
    decoded = capture.num_decode_tokens > 0
    names = [name for name in np.unique(labels[decoded]).tolist() if name != ""]
    groups = [np.flatnonzero(decoded & (labels == name)) for name in names]
    groups = [rows for rows in groups if len(rows) >= batch_size]
    if len(groups) < 2:
        return None
    same = distinct_experts(
        capture, groups, batch_size=batch_size, num_draws=num_draws, rng=rng
    ).mean()
    mixed = np.mean(
        [
            distinct_experts(
                capture, [_even_mix(groups, rng)], batch_size=batch_size, num_draws=1, rng=rng
            )[0]
            for _ in range(num_draws * len(groups))
        ]
    )
    return float(1.0 - same / mixed)


def domain_groups(domains: Sequence[str]) -> dict[str, np.ndarray]:
    """Labels of the task group and of the language group, [N] each, "" outside the group."""
    names = np.array(domains)
    language = np.char.startswith(names, LANGUAGE_PREFIX)
    return {"task": np.where(language, "", names), "language": np.where(language, names, "")}


def _even_mix(groups: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Prompts drawn from all groups, equally many from each."""
    least = min(len(rows) for rows in groups)
    return np.concatenate([rng.choice(rows, size=least, replace=False) for rows in groups])
