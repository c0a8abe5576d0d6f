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
        score = np.where(sampled, completion(context), np.inf)
        excluded = (("not_sampled", context.feasible & ~sampled),)
        unit = "token_slowness" if context.costs is None else "s"
        return rank_by(score, context, rng, unit=unit, excluded=excluded)


def completion(context: PlacementContext) -> np.ndarray:
    """Predicted seconds until each worker has done this request's work, float64 [W].

    Without coefficients the same in tokens: outstanding work times measured slowness.
    """
    view, costs = context.view, context.costs
    if context.phase is Phase.PREFILL:
        cached = np.minimum(context.cached_tokens, context.request.num_prompt_tokens - 1)
        own = context.request.num_prompt_tokens - cached.astype(np.int64)
        if costs is None:
            return (view.queued_prefill_tokens + own) * view.speed_factor
        padded, chunks = costs.padded(own)
        seconds = (view.queued_prefill_tokens + padded) * costs.prefill_token_s
        return (seconds + chunks * costs.prefill_chunk_s) * view.speed_factor
    outstanding = view.remaining_decode_tokens + context.request.length.mean_tokens
    if costs is None:
        return outstanding * view.speed_factor
    # All requests of a step advance together: n + 1 tokens every t(S + r) seconds.
    num = view.num_inflight + 1.0
    step_s = costs.expert_s * costs.total_experts * (1.0 - costs.miss**num)
    step_s += costs.step_base_s + costs.request_s * num + costs.attention_s * view.kv_tokens
    return context.transfer_s + outstanding * step_s * view.speed_factor / num
