"""Packing: a worker is filled to its classes' allowances before another one is touched.

Inside an allowance (a share of the class's TTFT and TPOT, of the strictest promise on the worker
and of its slots) delay is what the class was promised anyway, so only compute and the hand-over
are compared: an idle worker pays its whole step, the fullest one the least for one request more,
less still where its experts are loaded already. A pool keeps only as many workers open as its
work fills (in registration order, equal ones too), so that the last ones fall idle and can be
parked. When nobody open is inside, all are asked; when nobody is inside at all, J decides
(`cost_p2c`, `expert_cost`) and the record says so, which wakes a parked worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from serving.core import objective
from serving.core.placement import DecodeAhead, PlacementContext, Ranking
from serving.core.prefill_prices import PrefillPrices
from serving.core.request import SloClass
from serving.core.worker import Phase
from serving.policies.cost_p2c import CostPowerOfTwo, PairTerms
from serving.policies.expert_cost import ExpertCost
from serving.policies.picking import no_feasible

_EQUAL = 1e-3
"""Scores this near to the lowest, relatively, are equal: the first of them is taken."""

_LONGEST_S = 4.0
"""Seconds a prompt of a class without a TTFT bound may wait, times `ttft_share`: those behind it
in the queue have bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingOptions:
    """What an operator may choose.

    Attributes:
        share_a, share_b, share_c: of the class's TPOT, of the strictest promise on a worker and
            of its slots that may be used up.
        ttft_share: of the class's TTFT that queue and prefill may use up.
        fill: how full the open workers of a pool may be (slots or KV, or the allowance for a
            prefill queue) before one more is opened.
    """

    share_a: float = 0.5
    share_b: float = 0.9
    share_c: float = 1.0
    ttft_share: float = 0.25
    fill: float = 0.85

    def __post_init__(self) -> None:
        for name in ("share_a", "share_b", "share_c", "ttft_share", "fill"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie in (0, 1]")

    def share(self, slo: SloClass) -> float:
        """The share of a class."""
        return {SloClass.A: self.share_a, SloClass.B: self.share_b}.get(slo, self.share_c)


class PackedCost:
    """Lowest compute inside the allowances; see the module."""

    name = "packed_cost"
    looks_ahead = True

    def __init__(self, options: PackingOptions | None = None) -> None:
        self.options = options or PackingOptions()
        self._by_cost = {Phase.PREFILL: CostPowerOfTwo(), Phase.DECODE: ExpertCost()}

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        if not np.count_nonzero(context.feasible):
            raise no_feasible(context)
        phase = context.phase
        packed = self._prefill(context) if phase is Phase.PREFILL else self._decode(context)
        if packed is not None:
            return packed
        if context.ahead is not None:
            context.ahead.pack(None)
        spread = self._by_cost[phase].rank(context, rng)
        return spread._replace(fallback=spread.fallback or "over_packing_limit")

    def _decode(self, context: PlacementContext) -> Ranking | None:
        prices = objective.price(context)
        assert isinstance(prices, objective.DecodePrices)
        usd, inside = prices.packed(self.options.share(context.request.slo))
        view, costs = context.view, context.costs
        assert costs is not None
        load = np.maximum(
            view.num_inflight / costs.max_num_seqs,
            1.0 - view.kv_blocks_free / costs.num_kv_blocks,
        )
        allowed = context.feasible & inside
        few = allowed & self._open(context, load)
        return _first_fit(context, usd, few if few.any() else allowed, prices, None)

    def _open(self, context: PlacementContext, load: np.ndarray) -> np.ndarray:
        """The first workers of each pool that its work fills, and one request more, bool [W]."""
        assert context.costs is not None
        opened = np.zeros(len(load), bool)
        for pool in context.costs.pool_rows:
            rows = pool[context.feasible[pool] | (load[pool] > 0)]
            # Workers that take no new work still hold some: it counts, they do not.
            takes = rows[context.feasible[rows]]
            num = math.ceil((float(load[rows].sum()) + 1e-3) / self.options.fill)
            opened[takes[:num]] = True
        return opened

    def _prefill(self, context: PlacementContext) -> Ranking | None:
        prices = objective.price(context)
        assert isinstance(prices, PrefillPrices)
        options = self.options
        bound_s = min(context.target.ttft_p99_s, _LONGEST_S)
        limit_s = options.ttft_share * bound_s
        usd, inside = prices.packed(limit_s)
        allowed = context.feasible & inside
        few = allowed & self._open(context, prices.queue_s / limit_s)
        if few.any():
            allowed = few
        rows, ahead = allowed.nonzero()[0], context.ahead
        if not len(rows):
            return None
        if ahead is None:
            return _first_fit(context, usd, allowed, prices, None)
        ahead.pack(options.share(context.request.slo))
        decode_usd = ahead.usd(rows)
        keeps = np.isfinite(decode_usd) & ~ahead.breaks_target(rows)
        rows, decode_usd = rows[keeps], decode_usd[keeps]
        usd = usd.copy()
        usd[rows] += decode_usd
        allowed = np.zeros(len(usd), bool)
        allowed[rows] = True
        return _first_fit(context, usd, allowed, prices, ahead)


def _first_fit(
    context: PlacementContext,
    usd: np.ndarray,
    allowed: np.ndarray,
    prices: objective.Prices,
    ahead: DecodeAhead | None,
) -> Ranking | None:
    """The first of the cheapest rows; None when no row is allowed."""
    rows = allowed.nonzero()[0]
    if not len(rows):
        return None
    score = np.where(allowed, usd, np.inf)
    if np.isnan(usd[rows]).any():
        worker = context.view.workers[int(rows[np.isnan(usd[rows]).argmax()])].worker_id
        raise ValueError(f"score of {worker!r} is NaN (usd): never silently the winner")
    chosen = _first(score)
    rest = score.copy()
    rest[chosen] = np.inf
    runner_up = _first(rest) if len(rows) > 1 else -1
    return Ranking(
        chosen=chosen,
        runner_up=runner_up,
        score=score,
        unit="usd",
        terms=prices if ahead is None else PairTerms(prices, ahead, rows),
        term_rows=None if ahead is None else rows,
        excluded=(("over_packing_limit", context.feasible & ~allowed),),
    )


def _first(score: np.ndarray) -> int:
    """First row within `_EQUAL` of the lowest."""
    lowest = float(score.min())
    return int((score <= lowest + _EQUAL * abs(lowest)).argmax())
