"""Random: every feasible worker is equally likely. A baseline of ELDR (FACTS section 1)."""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.picking import rank_by


class RandomChoice:
    """Uniform choice; the score is the draw itself."""

    name = "random"

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        return rank_by(rng.random(len(context.feasible)), context, rng, unit="draw")
