"""Round robin: feasible workers in turn. A baseline of ELDR (FACTS section 1)."""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.picking import no_feasible, rank_by


class RoundRobin:
    """The n-th choice of a phase takes the n-th feasible worker, wrapping around.

    The turn is the context's sequence number, so there is no hidden state to lose.
    """

    name = "rr"

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        place = context.feasible.cumsum() - 1
        num_feasible = int(place[-1]) + 1 if len(place) else 0
        if num_feasible == 0:
            raise no_feasible(context)
        turns = (place - context.sequence) % num_feasible
        return rank_by(turns.astype(np.float64), context, rng, unit="turns")
