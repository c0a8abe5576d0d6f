"""Prefill by J, together with the decode it leads to: greedy on TPU cells, two choices on GPUs.

Step times of compiled (TPU) cells are tight, so the best predicted workers of a pool are compared
greedily; elsewhere two feasible workers of a pool are drawn, those that hold more of the prompt
likelier, which keeps routers with the same stale view apart. What is drawn is compared in
dollars: prefill, the hand-over to the best decode partner, and decode there. So a pool with
cheap prefill and dear decode does not win, nor does a prefill worker far from every good decode
worker. For decode the rule is `expert_cost`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core import objective
from serving.core.decision import TermKind
from serving.core.placement import DecodeAhead, PlacementContext, Ranking, TermMatrix
from serving.core.worker import Phase
from serving.policies.expert_cost import ExpertCost
from serving.policies.picking import no_feasible, rank_by


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPowerOfTwoOptions:
    """What an operator may choose.

    Attributes:
        prefix_bias: how many times likelier a GPU worker is drawn that holds the whole prompt,
            than one that holds nothing, minus one.
        num_greedy: TPU workers of a pool whose pairs are priced.
        num_drawn: GPU workers of a pool that are drawn.
        look_ahead: price decode and the hand-over with the prefill worker.
    """

    prefix_bias: float = 4.0
    num_greedy: int = 8
    num_drawn: int = 2
    look_ahead: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.prefix_bias < np.inf:
            raise ValueError(f"{self.prefix_bias=} must be finite and >= 0")
        for name in ("num_greedy", "num_drawn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")


class CostPowerOfTwo:
    """Lowest J of the pairs that are priced; see the module."""

    name = "cost_p2c"

    @property
    def looks_ahead(self) -> bool:
        """Whether prefill choices want the request's predicted signature."""
        return self.options.look_ahead

    def __init__(self, options: CostPowerOfTwoOptions | None = None) -> None:
        self.options = options or CostPowerOfTwoOptions()
        self._decode = ExpertCost()

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        if context.phase is Phase.DECODE:
            return self._decode.rank(context, rng)
        if not np.count_nonzero(context.feasible):
            raise no_feasible(context)
        prices = objective.price(context)
        breaks = prices.breaks_target()
        excluded: list[tuple[str, np.ndarray]] = []
        fallback = ""
        allowed = context.feasible & ~breaks
        if np.count_nonzero(allowed):
            late = context.feasible & breaks
            if np.count_nonzero(late):
                excluded.append(("breaks_target", late))
        else:
            allowed, fallback = context.feasible, "every_worker_breaks_target"
        rows = self._rows(context, prices.score_usd, allowed, rng)
        total = prices.score_usd.take(rows)
        ahead = context.ahead if self.options.look_ahead else None
        if ahead is not None:
            total = total + ahead.usd(rows)
            slow = ahead.breaks_target(rows)
            keeps = ~slow & np.isfinite(total)
            if np.count_nonzero(slow) and np.count_nonzero(keeps):
                excluded.append(("decode_breaks_target", _mark(rows[~keeps], len(allowed))))
                total = np.where(keeps, total, np.inf)
            elif not np.isfinite(total).any():
                # Nobody decodes now: prefill is chosen by itself and the prompt waits for room.
                total, ahead = prices.score_usd.take(rows), None
                fallback = fallback or "no_decode_worker"
        score = np.full(len(allowed), np.inf)
        score[rows] = total
        return rank_by(
            score,
            context,
            rng,
            unit="usd",
            fallback=fallback,
            terms=prices if ahead is None else PairTerms(prices, ahead, rows),
            term_rows=None if ahead is None else rows,
            excluded=tuple(excluded),
            aside="not_sampled",
        )

    def _rows(
        self,
        context: PlacementContext,
        score: np.ndarray,
        allowed: np.ndarray,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Rows whose pairs are priced, int64 [R] ascending."""
        options, costs = self.options, context.costs
        assert costs is not None
        taken: list[np.ndarray] = []
        for pool in costs.pool_rows:
            rows = pool[allowed[pool]]
            if not len(rows):
                continue
            if costs.compiled[rows[0]]:
                num = options.num_greedy
                if len(rows) > num:
                    rows = rows[score.take(rows).argpartition(num)[:num]]
            elif len(rows) > options.num_drawn:
                weights = np.ones(len(rows))
                cached = context.cached_tokens.take(rows)
                if np.count_nonzero(cached):
                    weights += options.prefix_bias * cached / context.request.num_prompt_tokens
                # Weighted draws without replacement: the largest u^(1/w), Efraimidis-Spirakis.
                keys = np.log(rng.random(len(rows))) / weights
                rows = rows[keys.argpartition(-options.num_drawn)[-options.num_drawn :]]
            taken.append(rows)
        return np.sort(np.concatenate(taken))


class PairTerms:
    """Terms of prefill and of the decode it leads to, spelled out when a record wants them."""

    def __init__(self, prices: objective.Prices, ahead: DecodeAhead, rows: np.ndarray) -> None:
        """Args: prices of all prefill workers; what decode costs; the rows that were priced."""
        self._prices, self._ahead, self._rows = prices, ahead, rows

    def matrix(self) -> TermMatrix:
        """The terms; those of decode hold for the priced rows only."""
        first, rows = self._prices.matrix(), self._rows
        second = self._ahead.matrix(rows)
        num = len(first.seconds)

        def spread(values: np.ndarray) -> np.ndarray:
            out = np.zeros((num, *values.shape[1:]))
            out[rows] = values
            return out

        def words(found: list[str]) -> list[str]:
            out = [""] * num
            for row, word in zip(rows.tolist(), found, strict=True):
                out[row] = word
            return out

        own = first.kinds or (TermKind.COST,) * len(first.names)
        return TermMatrix(
            names=first.names + second.names,
            kinds=own + second.kinds,
            seconds=np.concatenate((first.seconds, spread(second.seconds)), axis=1),
            usd=np.concatenate((first.usd, spread(second.usd)), axis=1),
            facts=first.facts + tuple((name, spread(v)) for name, v in second.facts),
            labels=first.labels + tuple((name, words(list(w))) for name, w in second.labels),
        )


def _mark(rows: np.ndarray, num: int) -> np.ndarray:
    marked = np.zeros(num, bool)
    marked[rows] = True
    return marked
