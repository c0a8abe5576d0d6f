"""The objective itself: the worker of the lowest J, with the experts it will touch priced in.

DESIGN "Placement": J in dollars, term by term (serving/core/objective.py), plus what joins it
in the score only (region prior, even steps, tail weighting). Workers that would break the class's
targets are set aside unless all would. In a large cell only a sample is priced: the workers whose
regions are nearest to the request's calibration cluster, and the least loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from serving.core import objective
from serving.core.placement import PlacementContext, Ranking, Regions
from serving.core.worker import Phase, WorkerInfo
from serving.policies.picking import no_feasible, rank_by


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCostOptions:
    """What an operator may choose.

    Attributes:
        score: region prior, even steps and tail weighting.
        max_spread: decode only; sets aside workers holding more than 1.25 times the mean
            number of requests plus 2. For interactive cells; packing cells leave it off.
        sample_above: price a sample when more rows than this are feasible.
        num_near: rows of a sample taken for their region, <= sample_above.
        num_light: rows of a sample taken for their load, <= sample_above.
        sample_small: price a random part of a cell that is not sampled otherwise, which spreads
            the choices of several routers with the same stale view.
        small_share: that part. Fewer rows herd less and choose worse. None follows what nobody
            has told this router yet: with u placements of other routers per worker that it
            cannot see, it prices 1 / (1 + 1.6 sqrt(u)) of the cell, and all of it alone. The other
            routers are taken to have placed as many as this one since the last reports, this
            request among them.
    """

    score: objective.ScoreOptions = field(default_factory=objective.ScoreOptions)
    max_spread: bool = False
    sample_above: int = 128
    num_near: int = 32
    num_light: int = 32
    sample_small: bool = False
    small_share: float | None = None

    def __post_init__(self) -> None:
        if self.small_share is not None and not 0.0 < self.small_share <= 1.0:
            raise ValueError(f"small_share={self.small_share!r} must lie in (0, 1]")
        for name in ("sample_above", "num_near", "num_light"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 2")
        for name in ("num_near", "num_light"):
            if getattr(self, name) > self.sample_above:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be <= sample_above={self.sample_above}"
                )


class ExpertCost:
    """Lowest J; see the module."""

    name = "expert_cost"

    def __init__(self, options: ExpertCostOptions | None = None) -> None:
        self.options = options or ExpertCostOptions()
        self._nearest = _RegionOrder()

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        rows = self._sample(context, rng)
        prices = objective.price(context, self.options.score, rows)
        allowed, excluded = context.feasible, []
        if rows is not None:
            allowed = np.zeros(len(allowed), bool)
            allowed[rows] = True
        if self.options.max_spread and context.phase is Phase.DECODE:
            num = context.view.num_inflight
            crowded = allowed & (num > 1.25 * num[allowed].mean() + 2.0)
            excluded.append(("max_spread", crowded))
            allowed = allowed & ~crowded
        fallback = ""
        if not prices.keeps_target():
            breaks = allowed & prices.breaks_target()
            num_breaking = np.count_nonzero(breaks)
            if num_breaking and num_breaking == np.count_nonzero(allowed):
                fallback = "every_worker_breaks_target"
            elif num_breaking:
                excluded.append(("breaks_target", breaks))
                allowed = allowed & ~breaks
        return rank_by(
            prices.score_usd,
            context,
            rng,
            unit="usd",
            allowed=allowed,
            fallback=fallback,
            terms=prices,
            term_rows=rows,
            excluded=tuple(excluded),
            aside="" if rows is None else "not_sampled",
        )

    def _sample(self, context: PlacementContext, rng: np.random.Generator) -> np.ndarray | None:
        """Rows to price, int64 [R] ascending; None prices all."""
        options = self.options
        num = np.count_nonzero(context.feasible)
        if num == 0:
            raise no_feasible(context)
        if num <= options.sample_above and not (options.sample_small and num >= 4):
            return None
        rows = context.feasible.nonzero()[0]
        if num <= options.sample_above:
            share = options.small_share
            if share is None:
                share = 1.0 / (1.0 + 1.6 * math.sqrt(_num_unseen(context) / num))
            if share >= 1.0:
                return None
            return np.sort(rng.permutation(rows)[: math.ceil(share * num)])
        load = _load(context)[rows]
        light = rows[np.argpartition(load, options.num_light)[: options.num_light]]
        near = self._nearest.first(context, options.num_near)
        if near is None:
            # Nothing to be near to: the least loaded and as many at random.
            near = rng.choice(rows, options.num_near, replace=False)
        sampled = np.zeros(len(context.feasible), bool)
        sampled[light] = True
        sampled[near] = True
        return sampled.nonzero()[0]


class _RegionOrder:
    """Workers by similarity of their region to each calibration cluster, worked out once.

    A memo of a pure function: (regions, workers, cluster) -> rows, most similar first.
    """

    def __init__(self) -> None:
        self._of: tuple[Regions, tuple[WorkerInfo, ...]] | None = None
        self._orders: dict[int, np.ndarray] = {}

    def first(self, context: PlacementContext, num: int) -> np.ndarray | None:
        """The `num` feasible rows nearest to the request; None without regions or clusters."""
        regions, experts, cluster = context.regions, context.experts, context.cluster
        if regions is None or experts is None or experts.centroids is None or cluster < 0:
            return None
        workers = context.view.workers
        if self._of is None or self._of[0] is not regions or self._of[1] is not workers:
            self._of, self._orders = (regions, workers), {}
        order = self._orders.get(cluster)
        if order is None:
            cosine = regions.similarity(experts.centroids[cluster], context.worker_ids())
            order = self._orders[cluster] = (-cosine).argsort(kind="stable")
        return order[context.feasible[order]][:num]


def _num_unseen(context: PlacementContext) -> float:
    """Other routers' placements on feasible workers that no report has told of, in expectation."""
    view = context.view
    if view.num_unreported is None:
        return 0.0
    return (view.num_replicas - 1) * (float(view.num_unreported @ context.feasible) + 1.0)


def _load(context: PlacementContext) -> np.ndarray:
    """What a row is sampled by, float64 [W]: outstanding work times measured slowness."""
    view = context.view
    if context.phase is Phase.PREFILL:
        own = context.request.num_prompt_tokens - context.cached_tokens
        return (view.queued_prefill_tokens + own) * view.speed_factor
    return view.num_inflight * view.speed_factor
