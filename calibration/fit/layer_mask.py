"""Which layers a signature keeps: forward greedy on Spearman (FACTS section 1, "Layer mask").

The target is how far apart two prompts decode: cosine distance of their decode counts over ALL
layers. Layers are added one by one, each time the one that brings the cosine distance of
cumulative signatures closest to it in rank, over random prompt pairs, through all layers; the
mask is cut where the correlation is highest, at the first such place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.fit.rank_correlation import correlation_with, ranks, standardised


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMask:
    """Result of the search.

    Attributes:
        layers: int32 [Lm]; the layers kept, ascending.
        order: int32 [L]; all layers as they were added.
        spearman: float64 [L]; correlation after each of them.
    """

    layers: np.ndarray
    order: np.ndarray
    spearman: np.ndarray


def random_pairs(num_prompts: int, num_pairs: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [num_pairs, 2]; two different prompts each, pairs drawn with replacement."""
    if num_prompts < 2:
        raise ValueError(f"{num_prompts=} must be >= 2 to draw pairs")
    first = rng.integers(num_prompts, size=num_pairs)
    second = rng.integers(num_prompts - 1, size=num_pairs)
    second += second >= first
    return np.stack([first, second], axis=1)


def cosine_distances(rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """1 - cosine of row pairs.

    Args:
        rows: float [N, M].
        pairs: int64 [P, 2].

    Returns:
        float32 [P]; 1 where either row is all zero.
    """
    dots, squares = _products(np.ascontiguousarray(rows, np.float32), pairs)
    return _distances(dots, squares, pairs)


def select_layers(weighted: np.ndarray, decode: np.ndarray, pairs: np.ndarray) -> LayerMask:
    """Runs the greedy search.

    Args:
        weighted: float32 [N, L, E]; IDF-weighted prefill counts.
        decode: unsigned [N, L, E]; decode counts.
        pairs: int64 [P, 2] from `random_pairs`.
    """
    num_prompts, num_layers, _ = weighted.shape
    target = cosine_distances(decode.reshape(num_prompts, -1), pairs)
    target_ranks = standardised(ranks(target))
    layer_dots = np.empty((num_layers, len(pairs)), np.float32)
    layer_squares = np.empty((num_layers, num_prompts), np.float32)
    for layer in range(num_layers):
        rows = np.ascontiguousarray(weighted[:, layer], np.float32)
        layer_dots[layer], layer_squares[layer] = _products(rows, pairs)

    dots = np.zeros(len(pairs), np.float32)
    squares = np.zeros(num_prompts, np.float32)
    order: list[int] = []
    curve: list[float] = []
    remaining = list(range(num_layers))
    while remaining:
        best, best_rho = remaining[0], -np.inf
        for layer in remaining:
            distance = _distances(dots + layer_dots[layer], squares + layer_squares[layer], pairs)
            rho = correlation_with(target_ranks, distance)
            if rho > best_rho:  # strictly: the first layer wins a tie
                best, best_rho = layer, rho
        dots += layer_dots[best]
        squares += layer_squares[best]
        order.append(best)
        curve.append(best_rho)
        remaining.remove(best)
    peak = int(np.argmax(curve))
    return LayerMask(
        layers=np.array(sorted(order[: peak + 1]), np.int32),
        order=np.array(order, np.int32),
        spearman=np.array(curve),
    )


def _products(rows: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Dot products of pairs [P] and squared norms [N]."""
    if len(rows) ** 2 <= 64 * len(pairs):
        # The whole Gram matrix costs less than gathering two rows for every pair.
        gram = rows @ rows.T
        return gram[pairs[:, 0], pairs[:, 1]], np.diagonal(gram).copy()
    dots = np.einsum("pm,pm->p", rows[pairs[:, 0]], rows[pairs[:, 1]])
    return dots, np.einsum("nm,nm->n", rows, rows)


def _distances(dots: np.ndarray, squares: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    norms = np.sqrt(squares)
    scale = norms[pairs[:, 0]] * norms[pairs[:, 1]]
    return 1.0 - np.divide(dots, scale, out=np.zeros_like(dots), where=scale > 0)
