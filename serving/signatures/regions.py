"""Expert regions: one centroid per decode worker, so that alike requests meet (FACTS section 1).

Balanced spherical k-means: k-means++ start, exact assignment under an equal cap, centroid =
renormalised mean. The cap keeps a popular kind of request from becoming one region that no
single worker could serve; plain spherical k-means is kept as the ablation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linear_sum_assignment

MAX_ITERATIONS = 50


def fit_regions(
    vectors: np.ndarray, num_regions: int, rng: np.random.Generator, *, balanced: bool = True
) -> np.ndarray:
    """Fits centroids.

    More regions than distinct vectors is allowed: the surplus centroids repeat vectors, in
    turn, so every worker has a region.

    Args:
        vectors: float32 [N, M], N >= 1; unit or all-zero rows (a zero row pulls nowhere).
        num_regions: K >= 1.
        rng: draws the start.
        balanced: exact assignment under the cap ceil(N / K); False is plain spherical k-means.

    Returns:
        float32 [K, M], unit rows (zero rows only if every vector is zero).

    Raises:
        ValueError: no vectors, no regions, or a NaN.
    """
    vectors = _checked(vectors, num_regions)
    return _iterate(vectors, _plus_plus(vectors, num_regions, rng), balanced=balanced)


def refit_regions(
    vectors: np.ndarray, previous: np.ndarray, *, balanced: bool = True
) -> np.ndarray:
    """Moves regions to recent traffic without giving any worker a stranger's region.

    Warm start from the previous centroids, then the new ones are matched to the old by the
    assignment of greatest total cosine (FACTS section 1, "online refit").

    Args:
        vectors: float32 [N, M] of the recent window; with N = 0 nothing changes.
        previous: float32 [K, M].
        balanced: as in `fit_regions`.

    Returns:
        float32 [K, M]; row i continues previous row i.
    """
    if len(vectors) == 0:
        return previous.copy()
    vectors = _checked(vectors, len(previous))
    moved = _iterate(vectors, previous.astype(np.float32), balanced=balanced)
    _, matched = linear_sum_assignment(previous @ moved.T, maximize=True)
    return moved[matched]


def assign(vectors: np.ndarray, centroids: np.ndarray, *, balanced: bool = True) -> np.ndarray:
    """Region of each vector.

    Args:
        vectors: float32 [N, M].
        centroids: float32 [K, M].
        balanced: exact minimum of the summed cosine distance with at most ceil(N / K) vectors
            per region; False takes each vector's nearest (the first of equals).

    Returns:
        int64 [N].
    """
    similarity = vectors @ centroids.T
    if not balanced:
        return similarity.argmax(axis=1)
    cap = -(-len(vectors) // len(centroids))
    return _assign_capped(1.0 - similarity, cap)


def _assign_capped(cost: np.ndarray, cap: int) -> np.ndarray:
    """Exact assignment: rows to columns, each column at most `cap` times."""
    _, slots = linear_sum_assignment(np.repeat(cost, cap, axis=1))
    return slots // cap


def _iterate(vectors: np.ndarray, centroids: np.ndarray, *, balanced: bool) -> np.ndarray:
    labels = np.full(len(vectors), -1)
    for _ in range(MAX_ITERATIONS):
        new_labels = assign(vectors, centroids, balanced=balanced)
        if np.array_equal(new_labels, labels):
            break
        labels = new_labels
        centroids = _means(vectors, labels, centroids)
    return centroids


def _means(vectors: np.ndarray, labels: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """Renormalised means; a region without members (or whose members cancel) stays put."""
    sums = np.stack(
        [vectors[labels == region].sum(axis=0, dtype=np.float64) for region in range(len(previous))]
    )
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(norms > 0, sums / np.maximum(norms, 1e-300), previous).astype(np.float32)


def _plus_plus(vectors: np.ndarray, num_regions: int, rng: np.random.Generator) -> np.ndarray:
    """k-means++ seeds: each next one drawn with weight 1 - cosine to the nearest chosen.

    For unit vectors that is half the squared Euclidean distance, k-means++'s own weight.
    """
    chosen = [int(rng.integers(len(vectors)))]
    nearest = vectors @ vectors[chosen[0]]
    while len(chosen) < num_regions:
        weights = np.clip(1.0 - nearest, 0.0, None).astype(np.float64)
        weights[chosen] = 0.0
        # Float error leaves duplicates of a chosen vector with a weight that means nothing.
        weights[weights < 1e-6] = 0.0
        total = weights.sum()
        if total == 0.0:
            distinct = len(chosen)
            chosen += [chosen[i % distinct] for i in range(num_regions - distinct)]
            break
        chosen.append(int(rng.choice(len(vectors), p=weights / total)))
        nearest = np.maximum(nearest, vectors @ vectors[chosen[-1]])
    return vectors[chosen].copy()


def _checked(vectors: np.ndarray, num_regions: int) -> np.ndarray:
    if num_regions < 1:
        raise ValueError(f"{num_regions=} must be >= 1")
    if vectors.ndim != 2 or len(vectors) == 0:
        raise ValueError(f"vectors have shape {vectors.shape}, must be [N >= 1, M]")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors must be finite")
    return np.ascontiguousarray(vectors, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedRegions:
    """Regions bound to workers; implements `serving.core.placement.Regions`.

    Attributes:
        version: version written into every decision record.
        worker_ids: K workers, one per centroid.
        centroids: float32 [K, M], unit rows.
        profiles: float32 [K, M] or None; probability that one decode token of the region's
            members touches each masked (layer, expert) - P_d of DESIGN "Placement".
        layer_scale: float32 [K] or None; distinct experts over all layers per distinct expert
            over the masked ones, by region.
    """

    version: str
    worker_ids: tuple[str, ...]
    centroids: np.ndarray
    profiles: np.ndarray | None = None
    layer_scale: np.ndarray | None = None
    _rows: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if len(self.worker_ids) != len(self.centroids):
            raise ValueError(
                f"{len(self.worker_ids)} workers for {len(self.centroids)} centroids: one each"
            )
        if len(set(self.worker_ids)) != len(self.worker_ids):
            raise ValueError(f"worker_ids={self.worker_ids!r} must be distinct")

    def rows_of(self, worker_ids: tuple[str, ...]) -> np.ndarray:
        """Centroid row of each worker, int64 [W]; -1 for a worker without a region."""
        rows = self._rows.get(worker_ids)
        if rows is None:
            known = {worker: row for row, worker in enumerate(self.worker_ids)}
            rows = np.array([known.get(worker, -1) for worker in worker_ids], np.int64)
            # A fleet asks with few different tuples; the bound only guards against misuse.
            if len(self._rows) >= 64:
                self._rows.clear()
            self._rows[worker_ids] = rows
        return rows

    def similarity(self, vector: np.ndarray, worker_ids: tuple[str, ...]) -> np.ndarray:
        """Cosine of a vector with each worker's centroid.

        Args:
            vector: float32 [M], unit or zero.
            worker_ids: W workers.

        Returns:
            float32 [W]; -1 for a worker without a region, 0 everywhere for a zero vector.
        """
        rows = self.rows_of(worker_ids)
        cosines = (self.centroids @ vector)[rows]
        cosines[rows < 0] = -1.0
        return cosines


def bind(
    centroids: np.ndarray, worker_ids: Sequence[str], *, version: str = "unversioned"
) -> FittedRegions:
    """Gives worker i centroid i.

    Args:
        centroids: float32 [K, M].
        worker_ids: K distinct ids.
        version: written into decision records.
    """
    return FittedRegions(version=version, worker_ids=tuple(worker_ids), centroids=centroids)
