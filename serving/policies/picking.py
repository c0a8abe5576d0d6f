"""From scores to a winner: the one place where ties, NaN and infeasible rows are handled."""

from __future__ import annotations

import numpy as np

from serving.core.errors import Rejected, RejectReason
from serving.core.placement import PlacementContext, Ranking, TermSource


def rank_by(
    score: np.ndarray,
    context: PlacementContext,
    rng: np.random.Generator,
    *,
    unit: str,
    fallback: str = "",
    terms: TermSource | None = None,
    excluded: tuple[tuple[str, np.ndarray], ...] = (),
) -> Ranking:
    """Takes the lowest score; equal lowest ones by a draw, and the runner-up likewise.

    Args:
        score: float64 [W], the policy's key, lower is better; +inf sets a row aside.
        context: whose feasible rows count; the score elsewhere is ignored, NaN included.
        rng: the decision's draws.
        unit: of the score.
        fallback: why a simpler rule decided, "" otherwise.
        terms: what spells the objective behind the score out.
        excluded: reason -> bool [W], feasible rows the policy set aside.

    Raises:
        Rejected: no feasible row is left.
        ValueError: a feasible row's score is NaN.
    """
    feasible = context.feasible
    if np.count_nonzero(feasible) == len(feasible):
        key = np.array(score, np.float64)
    else:
        key = np.where(feasible, score, np.inf)
    if not len(key):
        raise no_feasible(context)
    chosen = _lowest(key, rng)
    best = float(key[chosen])
    if best != best:
        worker = context.view.workers[chosen].worker_id
        raise ValueError(f"score of {worker!r} is NaN ({unit}): never silently the winner")
    if best == np.inf:
        raise no_feasible(context)
    key[chosen] = np.inf
    runner_up = _lowest(key, rng)
    if key[runner_up] == np.inf:
        runner_up = -1
    key[chosen] = best
    return Ranking(
        chosen=chosen,
        runner_up=runner_up,
        score=key,
        unit=unit,
        fallback=fallback,
        terms=terms,
        excluded=excluded,
    )


def rank_sample(
    rows: np.ndarray,
    score: np.ndarray,
    context: PlacementContext,
    rng: np.random.Generator,
    *,
    unit: str,
) -> Ranking:
    """`rank_by` over one or two sampled rows; the other feasible ones are told as not sampled.

    Args:
        rows: int64 [R], feasible, R in {1, 2}.
        score: float64 [R], their keys.
        context: the choice.
        rng: the decision's draws.
        unit: of the score.

    Raises:
        ValueError: a score is NaN.
    """
    first, keys = 0, score.tolist()
    for row, key in zip(rows.tolist(), keys, strict=True):
        if key != key:
            raise ValueError(
                f"score of {context.view.workers[row].worker_id!r} is NaN ({unit}): never "
                "silently the winner"
            )
    if len(keys) == 2:
        first = int(rng.random() < 0.5) if keys[0] == keys[1] else int(keys[1] < keys[0])
    full = np.full(len(context.feasible), np.inf)
    full[rows] = score
    unsampled = context.feasible.copy()
    unsampled[rows] = False
    return Ranking(
        chosen=int(rows[first]),
        runner_up=int(rows[1 - first]) if len(keys) == 2 else -1,
        score=full,
        unit=unit,
        excluded=(("not_sampled", unsampled),),
    )


def no_feasible(context: PlacementContext) -> Rejected:
    """The error of a choice without candidates."""
    return Rejected(
        RejectReason.NO_CAPACITY,
        f"none of {len(context.view.workers)} {context.phase.value} workers is feasible",
    )


def _lowest(key: np.ndarray, rng: np.random.Generator) -> int:
    """Row of the lowest key, ties by a draw; the first NaN's when there is one."""
    row = int(key.argmin())
    ties = key == key[row]
    if np.count_nonzero(ties) <= 1:
        return row
    rows = ties.nonzero()[0]
    return int(rows[int(rng.random() * len(rows))])
