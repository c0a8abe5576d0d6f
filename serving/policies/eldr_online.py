"""ELDR with regions that follow the traffic (FACTS section 1, "online").

The band rule with "min2", over regions that `OnlineRegions` (policies/online_regions.py)
refits every second and hands to the router; the rule itself stays a pure function.
"""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.eldr_static import TAU, band_rule


class EldrOnline:
    """The band rule with min2 over the regions in force.

    Attributes:
        tau: width of the band, in cosine.
    """

    name = "eldr_online"

    def __init__(self, *, tau: float = TAU) -> None:
        if not 0.0 <= tau <= 2.0:
            raise ValueError(f"{tau=} must lie in [0, 2]")
        self.tau = tau

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        return band_rule(context, rng, context.regions, tau=self.tau, min_two=True)
