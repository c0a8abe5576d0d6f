"""Spearman's rank correlation, fast enough to be asked for a thousand times."""

from __future__ import annotations

import numpy as np


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks.

    Args:
        values: float [P], finite.

    Returns:
        float64 [P].
    """
    order, by_order = _ranked(values)
    result = np.empty(len(values))
    result[order] = by_order
    return result


def correlation_with(target: np.ndarray, values: np.ndarray) -> float:
    """Spearman's rho with a target whose ranks are already `standardised`.

    Args:
        target: float64 [P], `standardised(ranks(...))` of the other side.
        values: float [P].
    """
    order, by_order = _ranked(values)
    by_order -= (len(values) + 1) / 2
    length = np.sqrt(dot(by_order, by_order))
    # Gathering the target into the order of the values spares putting the ranks back in place.
    return float(dot(by_order, target[order]) / length) if length > 0 else 0.0


def _ranked(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending order of the values [P], and the rank of each in that order, float64 [P]."""
    order = np.argsort(values)
    ordered = values[order]
    by_order = np.arange(1.0, len(values) + 1)
    is_tie = ordered[1:] == ordered[:-1]
    if is_tie.any():
        edges = np.flatnonzero(np.concatenate([[True], ~is_tie, [True]]))
        starts, sizes = edges[:-1], edges[1:] - edges[:-1]
        tied = sizes > 1  # few, as a rule; the rest keeps its place
        starts, sizes = starts[tied], sizes[tied]
        ramp = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        by_order[np.repeat(starts, sizes) + ramp] = np.repeat(starts + (sizes + 1) / 2, sizes)
    return order, by_order


def standardised(values: np.ndarray) -> np.ndarray:
    """Zero mean and unit length; all zero for constant values."""
    centred = values - values.mean()
    length = np.sqrt(dot(centred, centred))
    return centred / length if length > 0 else centred


def dot(first: np.ndarray, second: np.ndarray) -> float:
    """Inner product on one thread: BLAS wakes all of them for it and waits, a thousand times."""
    return float(np.einsum("i,i->", first, second))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rho of two float [P] arrays; 0.0 when either is constant.

    A constant says nothing about order, so it counts as no correlation rather than as NaN.
    """
    return correlation_with(standardised(ranks(first)), second)
