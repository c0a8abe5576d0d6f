"""Power of two choices: the less loaded of two distinct samples (FACTS section 1)."""

from __future__ import annotations

import numpy as np

from serving.core.native import Kernel
from serving.core.placement import PlacementContext, Ranking
from serving.policies.picking import no_feasible, rank_sample


class PowerOfTwo:
    """Fewest requests in flight among two feasible workers drawn without replacement."""

    name = "p2c"

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        rows = two_of(context, rng)
        load = context.view.num_inflight
        return rank_sample(rows, [load.item(row) for row in rows], context, rng, unit="requests")


def two_of(
    context: PlacementContext, rng: np.random.Generator, prefix_bias: float = 0.0
) -> list[int]:
    """Two distinct feasible rows (one, when only one is feasible).

    Args:
        context: the choice.
        rng: the decision's draws.
        prefix_bias: a row's odds are 1 plus this times the share of the prompt it holds.

    Raises:
        Rejected: no row is feasible.
    """
    per_token = prefix_bias / context.request.num_prompt_tokens
    first, second = TWO_OF.run(
        context.feasible, context.cached_tokens, per_token, rng.random(), rng.random()
    )
    if first < 0:
        raise no_feasible(context)
    return [first] if second < 0 else [first, second]


def _two_of_numpy(
    feasible: np.ndarray, cached_tokens: np.ndarray, per_token: float, first: float, second: float
) -> tuple[int, int]:
    """Two draws without replacement.

    Args:
        feasible: bool [W].
        cached_tokens: int32 [W]; a row's odds are 1 + per_token * cached.
        per_token: >= 0.
        first: uniform in [0, 1).
        second: the same.

    Returns:
        The rows; -1 where there is none left to draw.
    """
    odds = (1.0 + per_token * cached_tokens) * feasible
    found = []
    for draw in (first, second):
        up_to = odds.cumsum()
        total = up_to[-1] if len(up_to) else 0.0
        if not total > 0.0:
            found.append(-1)
            continue
        row = min(int(up_to.searchsorted(draw * total, "right")), len(odds) - 1)
        while not odds[row] > 0.0:  # rounding at the end
            row -= 1
        odds[row] = 0.0
        found.append(row)
    return found[0], found[1]


def _two_of_loop(feasible, cached_tokens, per_token, first, second):
    """`_two_of_numpy`, one row after another."""
    taken = -1
    for turn in range(2):
        total = 0.0
        for row in range(feasible.shape[0]):
            if feasible[row] and row != taken:
                total += 1.0 + per_token * cached_tokens[row]
        found, up_to = -1, 0.0
        left = (first if turn == 0 else second) * total
        for row in range(feasible.shape[0]):
            if feasible[row] and row != taken:
                up_to += 1.0 + per_token * cached_tokens[row]
                found = row
                if up_to > left:
                    break
        if turn == 0:
            taken = found
    return taken, found if taken >= 0 else -1


TWO_OF = Kernel(_two_of_numpy, _two_of_loop, "UniTuple(i8,2)(b1[::1],i4[::1],f8,f8,f8)")
