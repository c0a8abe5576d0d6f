"""Power of two choices: the less loaded of two distinct samples (FACTS section 1)."""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.picking import no_feasible, rank_by


class PowerOfTwo:
    """Fewest requests in flight among two feasible workers drawn without replacement."""

    name = "p2c"

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        sampled = two_of(context, rng)
        score = np.where(sampled, context.view.num_inflight, np.inf)
        excluded = (("not_sampled", context.feasible & ~sampled),)
        return rank_by(score, context, rng, unit="requests", excluded=excluded)


def two_of(
    context: PlacementContext, rng: np.random.Generator, weights: np.ndarray | None = None
) -> np.ndarray:
    """Two distinct feasible rows (one, when only one is feasible).

    Args:
        context: the choice.
        rng: the decision's draws.
        weights: float64 [W] > 0, odds of a row; None is uniform. Drawn without replacement by
            the smallest of Exp(1) / weight (Efraimidis and Spirakis 2006).

    Returns:
        bool [W].

    Raises:
        Rejected: no row is feasible.
    """
    rows = context.feasible.nonzero()[0]
    num = len(rows)
    if num == 0:
        raise no_feasible(context)
    if num <= 2:
        return context.feasible.copy()
    if weights is None:
        first, second = int(rng.random() * num), int(rng.random() * (num - 1))
        rows = rows[[first, second + (second >= first)]]
    else:
        keys = rng.standard_exponential(num) / weights[rows]
        rows = rows[np.argpartition(keys, 1)[:2]]
    sampled = np.zeros(len(context.feasible), bool)
    sampled[rows] = True
    return sampled
