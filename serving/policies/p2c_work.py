"""Power of two choices over predicted work and measured speed; samples lean to cached prefixes.

Load is seconds of work at the worker's measured speed, never a count: queued plus own
uncached tokens (at the bucket they run in) for prefill; outstanding output tokens over the
worker's decode throughput with this request for decode.
"""

from __future__ import annotations

import numpy as np

from serving.core import objective
from serving.core.placement import PlacementContext, Ranking, TermMatrix
from serving.core.worker import Phase
from serving.policies.p2c import two_of
from serving.policies.picking import rank_by


class PowerOfTwoWork:
    """Least predicted completion of two samples.

    Attributes:
        prefix_bias: how many times likelier a worker is sampled that holds the whole prompt,
            than one that holds nothing, minus one.
    """

    name = "p2c_work"

    def __init__(self, *, prefix_bias: float = 4.0) -> None:
        if not 0.0 <= prefix_bias < np.inf:
            raise ValueError(f"{prefix_bias=} must be finite and >= 0")
        self.prefix_bias = prefix_bias

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        weights = None
        if context.phase is Phase.PREFILL and context.cached_tokens.any():
            share = context.cached_tokens / context.request.num_prompt_tokens
            weights = 1.0 + self.prefix_bias * share
        sampled = two_of(context, rng, weights)
        matrix = None if context.costs is None else objective.terms(context)
        seconds = np.where(sampled, completion_s(context, matrix), np.inf)
        excluded = (("not_sampled", context.feasible & ~sampled),)
        return rank_by(seconds, context, rng, unit="s", terms=matrix, excluded=excluded)


def completion_s(context: PlacementContext, matrix: TermMatrix | None) -> np.ndarray:
    """Predicted seconds until each worker has done this request's work, float64 [W].

    Without coefficients the same in tokens: outstanding work times measured slowness.
    """
    view = context.view
    if context.phase is Phase.PREFILL:
        if matrix is not None:
            return dict(matrix.facts)["ttft_s"]
        own = context.request.num_prompt_tokens - context.cached_tokens
        return (view.queued_prefill_tokens + own) * view.speed_factor
    own = context.request.length.mean_tokens
    outstanding = view.remaining_decode_tokens + own
    if matrix is None:
        return outstanding * view.speed_factor
    # All requests of a step advance together: n + 1 tokens every t(S + r) seconds.
    step_s = dict(matrix.facts)["step_with_s"]
    return context.transfer_s + outstanding * step_s / (view.num_inflight + 1.0)
