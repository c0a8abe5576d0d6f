"""From scores to a winner: the one place where ties, NaN and infeasible rows are handled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.core.errors import Rejected, RejectReason
from serving.core.native import Kernel
from serving.core.placement import PlacementContext, Ranking, TermSource


def rank_by(
    score: np.ndarray,
    context: PlacementContext,
    rng: np.random.Generator,
    *,
    unit: str,
    allowed: np.ndarray | None = None,
    fallback: str = "",
    terms: TermSource | None = None,
    term_rows: np.ndarray | None = None,
    excluded: tuple[tuple[str, np.ndarray], ...] = (),
    aside: str = "",
) -> Ranking:
    """Takes the lowest score; equal lowest ones by a draw, and the runner-up likewise.

    Args:
        score: float64 [W], the policy's key, lower is better; +inf sets a row aside.
        context: whose feasible rows count; the score elsewhere is ignored, NaN included.
        rng: the decision's draws.
        unit: of the score.
        allowed: bool [W], the feasible rows that the policy did not set aside; None for all.
        fallback: why a simpler rule decided, "" otherwise.
        terms: what spells the objective behind the score out.
        term_rows: see `Ranking`.
        excluded: see `Ranking`.
        aside: see `Ranking`.

    Raises:
        Rejected: no feasible row is left.
        ValueError: a feasible row's score is NaN.
    """
    key, first, num_first, second, num_second = LOWEST_TWO.run(
        np.ascontiguousarray(score, np.float64), context.feasible if allowed is None else allowed
    )
    if first < 0:
        raise no_feasible(context)
    best = key.item(first)
    if best != best:
        worker = context.view.workers[first].worker_id
        raise ValueError(f"score of {worker!r} is NaN ({unit}): never silently the winner")
    if num_first > 1:
        first = _drawn(key, best, num_first, rng)
        second, num_second = _other(key, best, first), num_first - 1
    if num_second > 1:
        second = _drawn(key, key.item(second), num_second, rng, but=first)
    return Ranking(
        chosen=first,
        runner_up=second,
        score=key,
        unit=unit,
        fallback=fallback,
        terms=terms,
        term_rows=term_rows,
        excluded=excluded,
        aside=aside,
    )


def rank_sample(
    rows: Sequence[int],
    scores: Sequence[float],
    context: PlacementContext,
    rng: np.random.Generator,
    *,
    unit: str,
) -> Ranking:
    """`rank_by` over one or two sampled rows; the other feasible ones are told as not sampled.

    Args:
        rows: feasible, one or two.
        scores: their keys, lower is better.
        context: the choice.
        rng: the decision's draws.
        unit: of the score.

    Raises:
        ValueError: a score is NaN.
    """
    first = 0
    for row, key in zip(rows, scores, strict=True):
        if key != key:
            raise ValueError(
                f"score of {context.view.workers[row].worker_id!r} is NaN ({unit}): never "
                "silently the winner"
            )
    if len(rows) == 2:
        first = int(rng.random() < 0.5) if scores[0] == scores[1] else int(scores[1] < scores[0])
    full = np.empty(len(context.feasible))
    full.fill(np.inf)
    for row, key in zip(rows, scores, strict=True):
        full[row] = key
    return Ranking(
        chosen=rows[first],
        runner_up=rows[1 - first] if len(rows) == 2 else -1,
        score=full,
        unit=unit,
        aside="not_sampled",
    )


def no_feasible(context: PlacementContext) -> Rejected:
    """The error of a choice without candidates."""
    return Rejected(
        RejectReason.NO_CAPACITY,
        f"none of {len(context.view.workers)} {context.phase.value} workers is feasible",
    )


def _drawn(key: np.ndarray, value: float, num: int, rng: np.random.Generator, but: int = -1) -> int:
    """One of `num` rows with this key, without row `but`."""
    rows = [row for row in (key == value).nonzero()[0].tolist() if row != but]
    return rows[int(rng.random() * num)]


def _other(key: np.ndarray, value: float, but: int) -> int:
    """First row with this key, without row `but`."""
    return next(row for row in (key == value).nonzero()[0].tolist() if row != but)


def _lowest_two_numpy(
    score: np.ndarray, allowed: np.ndarray
) -> tuple[np.ndarray, int, int, int, int]:
    """The lowest score and the next.

    Args:
        score: float64 [W].
        allowed: bool [W], the rows that count.

    Returns:
        float64 [W], the score and +inf where it does not count; the first row of the lowest and
        how many share it; the first row of the next lowest and how many share it. Rows are -1
        where every score is +inf; the first NaN is the lowest.
    """
    key = np.where(allowed, score, np.inf)
    first = int(key.argmin()) if len(key) else -1
    best = key[first] if len(key) else np.inf
    if best == np.inf:
        return key, -1, 0, -1, 0
    key[first] = np.inf
    second = int(key.argmin())
    next_best = key[second]
    num_first = 1
    num_second = int(np.count_nonzero(key == next_best))
    if next_best == best:
        num_first += num_second
    elif next_best == np.inf:
        second, num_second = -1, 0
    key[first] = best
    return key, first, num_first, second, num_second


def _lowest_two_loop(score, allowed):
    """`_lowest_two_numpy` in one pass."""
    key = np.empty(score.shape[0])
    first = second = -1
    num_first = num_second = 0
    best = next_best = np.inf
    for row in range(score.shape[0]):
        value = score[row] if allowed[row] else np.inf
        key[row] = value
        if best != best or value == np.inf:
            continue
        if value < best or value != value:
            second, num_second, next_best = first, num_first, best
            first, num_first, best = row, 1, value
        elif value == best:
            num_first += 1
            if num_first == 2:
                second, num_second, next_best = row, 0, value
            num_second += 1
        elif value < next_best:
            second, num_second, next_best = row, 1, value
        elif value == next_best:
            num_second += 1
    return key, first, num_first, second, num_second


LOWEST_TWO = Kernel(
    _lowest_two_numpy, _lowest_two_loop, "Tuple((f8[::1],i8,i8,i8,i8))(f8[::1],b1[::1])"
)
