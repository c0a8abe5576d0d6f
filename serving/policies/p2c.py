"""Power of two choices: the less loaded of two distinct samples (FACTS section 1)."""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.picking import no_feasible, rank_sample


class PowerOfTwo:
    """Fewest requests in flight among two feasible workers drawn without replacement."""

    name = "p2c"

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        rows = two_of(context, rng)
        load = context.view.num_inflight[rows]
        return rank_sample(rows, load, context, rng, unit="requests")


def two_of(
    context: PlacementContext, rng: np.random.Generator, weights: np.ndarray | None = None
) -> np.ndarray:
    """Two distinct feasible rows (one, when only one is feasible), int64.

    Args:
        context: the choice.
        rng: the decision's draws.
        weights: float64 [W] > 0, odds of a row; None is uniform. Drawn without replacement by
            the smallest of Exp(1) / weight (Efraimidis and Spirakis 2006).

    Raises:
        Rejected: no row is feasible.
    """
    rows = context.feasible.nonzero()[0]
    num = len(rows)
    if num == 0:
        raise no_feasible(context)
    if num <= 2:
        return rows
    if weights is None:
        first, second = int(rng.random() * num), int(rng.random() * (num - 1))
        return rows[[first, second + (second >= first)]]
    keys = rng.standard_exponential(num) / weights[rows]
    return rows[keys.argpartition(1)[:2]]
