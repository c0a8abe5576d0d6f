"""Power of two choices over predicted work and measured speed; samples lean to cached prefixes.

Load is seconds of work at the worker's measured speed, never a count: queued plus own
uncached tokens (at the bucket they run in) for prefill; outstanding output tokens over the
worker's decode throughput with this request for decode, by the mean number of experts.
"""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.core.worker import Phase
from serving.policies.p2c import two_of
from serving.policies.picking import rank_sample


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
        if context.phase is Phase.PREFILL and np.count_nonzero(context.cached_tokens):
            share = context.cached_tokens / context.request.num_prompt_tokens
            weights = 1.0 + self.prefix_bias * share
        rows = two_of(context, rng, weights)
        unit = "token_slowness" if context.costs is None else "s"
        return rank_sample(rows, completion(context, rows), context, rng, unit=unit)


def completion(context: PlacementContext, rows: np.ndarray) -> np.ndarray:
    """Predicted seconds until workers have done this request's work.

    Without coefficients the same in tokens: outstanding work times measured slowness.

    Args:
        context: the choice.
        rows: int64 [R], which workers.

    Returns:
        float64 [R].
    """
    view, costs = context.view, context.costs
    speed = view.speed_factor[rows]
    if context.phase is Phase.PREFILL:
        most = context.request.num_prompt_tokens - 1
        own = most + 1 - np.minimum(context.cached_tokens[rows], most)
        queued = view.queued_prefill_tokens[rows]
        if costs is None:
            return (queued + own) * speed
        padded, chunks = costs.padded(own, rows)
        seconds = (queued + padded) * costs.prefill_token_s[rows]
        return (seconds + chunks * costs.prefill_chunk_s[rows]) * speed
    outstanding = view.remaining_decode_tokens[rows] + context.request.length.mean_tokens
    if costs is None:
        return outstanding * speed
    # All requests of a step advance together: n + 1 tokens every t(S + r) seconds.
    num = view.num_inflight[rows] + 1.0
    step_s = costs.expert_s[rows] * costs.total_experts[rows] * (1.0 - costs.miss[rows] ** num)
    step_s += costs.step_base_s[rows] + costs.request_s[rows] * num
    step_s += costs.attention_s[rows] * view.kv_tokens[rows]
    return context.transfer_s[rows] + outstanding * step_s * speed / num
