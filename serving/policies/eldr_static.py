"""ELDR's band rule over fitted regions (arXiv 2607.00466; FACTS section 1).

s(d)  cosine of the request's signature with worker d's region centroid
band  feasible workers with s(d) >= max s - tau
pick  fewest requests in flight in the band, ties at random
"""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking, Regions
from serving.policies.jsq import shortest_queue
from serving.policies.picking import rank_by

TAU = 0.1


class EldrStatic:
    """The band rule; falls back to jsq when there is nothing to compare, and says so.

    Attributes:
        tau: width of the band, in cosine.
        min_two: a band of one takes in the second best, so that the most similar worker is
            never the only choice ("min2", camera-ready version of the paper).
    """

    name = "eldr_static"

    def __init__(self, *, tau: float = TAU, min_two: bool = False) -> None:
        if not 0.0 <= tau <= 2.0:
            raise ValueError(f"{tau=} must lie in [0, 2]")
        self.tau = tau
        self.min_two = min_two

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        return band_rule(context, rng, context.regions, tau=self.tau, min_two=self.min_two)


def band_rule(
    context: PlacementContext,
    rng: np.random.Generator,
    regions: Regions | None,
    *,
    tau: float,
    min_two: bool,
) -> Ranking:
    """Requests in flight inside the band; outside it, behind everybody, by similarity."""
    if context.signature is None:
        return shortest_queue(context, rng, fallback="no_signature")
    if regions is None:
        return shortest_queue(context, rng, fallback="no_regions")
    if not context.signature.vector.any():
        # Only experts that every prompt hits: the cosine with anything is 0.
        return shortest_queue(context, rng, fallback="zero_signature")
    ids = context.worker_ids()
    cosine = regions.similarity(context.signature.vector, ids).astype(np.float64)
    near = np.where(context.feasible, cosine, -np.inf)
    best = near.max(initial=-np.inf)
    if best == -1.0:
        return shortest_queue(context, rng, fallback="no_region_of_a_candidate")
    in_band = near >= best - tau
    if min_two and in_band.sum() == 1:
        others = np.where(in_band, -np.inf, near)
        second = others.max()
        if second > -1.0:
            in_band |= others == second
    load = context.view.num_inflight
    behind = load[in_band].max(initial=0.0) + 1.0 + (best - cosine)
    return rank_by(np.where(in_band, load, behind), context, rng, unit="requests")
