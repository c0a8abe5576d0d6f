"""Domain oracle: a fixed group of workers per label, least loaded inside (FACTS section 1).

A baseline that is told what no router knows: which domain a prompt comes from.
"""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.policies.jsq import shortest_queue
from serving.policies.picking import rank_by


class Domain:
    """Workers in registration order, cut into one contiguous group per label.

    Attributes:
        labels: the domains, in group order; with more labels than workers, groups share.
    """

    name = "domain"

    def __init__(self, *, labels: tuple[str, ...] = ()) -> None:
        if len(set(labels)) != len(labels):
            raise ValueError(f"labels={labels!r} must be distinct")
        self.labels = labels

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        if context.domain not in self.labels:
            return shortest_queue(context, rng, fallback="no_domain")
        index, num_workers = self.labels.index(context.domain), len(context.feasible)
        num_groups = min(len(self.labels), num_workers)
        group = np.arange(num_workers) * num_groups // num_workers
        inside = group == index % num_groups
        if not (inside & context.feasible).any():
            return shortest_queue(context, rng, fallback="domain_group_full")
        score = np.where(inside, context.view.num_inflight, np.inf)
        excluded = (("other_domain", context.feasible & ~inside),)
        return rank_by(score, context, rng, unit="requests", excluded=excluded)
