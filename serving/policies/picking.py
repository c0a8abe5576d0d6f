"""From scores to a winner: the one place where ties, NaN and infeasible rows are handled."""

from __future__ import annotations

import numpy as np

from serving.core.errors import Rejected, RejectReason
from serving.core.placement import PlacementContext, Ranking, TermMatrix


def rank_by(
    score: np.ndarray,
    context: PlacementContext,
    rng: np.random.Generator,
    *,
    unit: str,
    fallback: str = "",
    terms: TermMatrix | None = None,
    excluded: tuple[tuple[str, np.ndarray], ...] = (),
) -> Ranking:
    """Takes the lowest score; equal lowest ones by a draw, and the runner-up likewise.

    Args:
        score: float64 [W], the policy's key, lower is better; +inf sets a row aside.
        context: whose feasible rows count; the score elsewhere is ignored, NaN included.
        rng: the decision's draws.
        unit: of the score.
        fallback: why a simpler rule decided, "" otherwise.
        terms: the objective behind the score.
        excluded: reason -> bool [W], feasible rows the policy set aside.

    Raises:
        Rejected: no feasible row is left.
        ValueError: a feasible row's score is NaN.
    """
    key = np.where(context.feasible, score, np.inf)
    best = key.min(initial=np.inf)
    if best != best:
        row = int(np.isnan(key).argmax())
        worker = context.view.workers[row].worker_id
        raise ValueError(f"score of {worker!r} is NaN ({unit}): never silently the winner")
    if best == np.inf:
        raise no_feasible(context)
    chosen = _draw(key, best, rng)
    own, key[chosen] = key[chosen], np.inf
    second = key.min()
    runner_up = -1 if second == np.inf else _draw(key, second, rng)
    key[chosen] = own
    return Ranking(
        chosen=chosen,
        runner_up=runner_up,
        score=key,
        unit=unit,
        fallback=fallback,
        terms=terms,
        excluded=excluded,
    )


def no_feasible(context: PlacementContext) -> Rejected:
    """The error of a choice without candidates."""
    return Rejected(
        RejectReason.NO_CAPACITY,
        f"none of {len(context.view.workers)} {context.phase.value} workers is feasible",
    )


def _draw(key: np.ndarray, value: float, rng: np.random.Generator) -> int:
    ties = (key == value).nonzero()[0]
    if len(ties) == 1:
        return int(ties[0])
    return int(ties[int(rng.random() * len(ties))])
