"""Join the shortest queue, ties at random. A baseline of ELDR (FACTS section 1)."""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.picking import rank_by


class JoinShortestQueue:
    """Fewest requests in flight."""

    name = "jsq"

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        return shortest_queue(context, rng)


def shortest_queue(
    context: PlacementContext, rng: np.random.Generator, *, fallback: str = ""
) -> Ranking:
    """The rule itself; the other policies fall back to it and say why in `fallback`."""
    score = context.view.num_inflight
    return rank_by(score, context, rng, unit="requests", fallback=fallback)
