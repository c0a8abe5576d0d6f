"""KV-aware routing: what the cached prefix saves against the work that waits. A baseline.

The rule of the KV-aware routers there are (Mooncake's Conductor: least estimated TTFT;
Dynamo: prefill blocks not cached plus active decode blocks), said in seconds so that no
weights have to be guessed: every feasible worker is scored, the least predicted delay of THIS
request wins. What the others lose and what anything costs is not looked at; `expert_cost`
does that.

    prefill   queued tokens + own uncached tokens (padded to buckets), at the measured speed
    decode    transfer of the KV not there yet + E[len] * t(S + r), by the mean experts

Load is in the score, so affinity is bounded: a hot prefix moves on once its worker's queue
costs more than the prefix saves.
"""

from __future__ import annotations

import numpy as np

from serving.core.placement import PlacementContext, Ranking
from serving.core.worker import Phase
from serving.policies.picking import rank_by


class KvAware:
    """Least predicted delay over all feasible workers.

    Attributes:
        prefix_weight: share of a cached prefix that counts as saved, in [0, 1]; below 1 for
            an index that is known to promise too much, 0 is load alone.
    """

    name = "kv_aware"

    def __init__(self, *, prefix_weight: float = 1.0) -> None:
        if not 0.0 <= prefix_weight <= 1.0:
            raise ValueError(f"{prefix_weight=} must be in [0, 1]")
        self.prefix_weight = prefix_weight

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """See `serving.core.placement.Policy`."""
        # The last token is always computed, however much is cached.
        most = context.request.num_prompt_tokens - 1
        saved = np.minimum(context.cached_tokens * self.prefix_weight, most)
        delay = _prefill if context.phase is Phase.PREFILL else _decode
        unit = "token_slowness" if context.costs is None else "s"
        return rank_by(delay(context, saved), context, rng, unit=unit)


def _prefill(context: PlacementContext, saved: np.ndarray) -> np.ndarray:
    """Seconds until the first token, float64 [W]; tokens times slowness without costs."""
    view, costs = context.view, context.costs
    own = context.request.num_prompt_tokens - saved.astype(np.int64)
    if costs is None:
        return (view.queued_prefill_tokens + own) * view.speed_factor
    padded, chunks = costs.padded(own)
    seconds = (view.queued_prefill_tokens + padded) * costs.prefill_token_s
    return (seconds + chunks * costs.prefill_chunk_s) * view.speed_factor


def _decode(context: PlacementContext, saved: np.ndarray) -> np.ndarray:
    """Seconds until the last token, float64 [W]; KV tokens times slowness without costs."""
    view, costs, request = context.view, context.costs, context.request
    if costs is None:
        return (view.kv_tokens + request.num_prompt_tokens - saved) * view.speed_factor
    num = view.num_inflight + 1.0
    own_tokens = request.num_prompt_tokens + request.length.mean_tokens / 2.0
    step_s = costs.step_base_s + costs.request_s * num
    step_s += costs.expert_s * costs.total_experts * (1.0 - costs.miss**num)
    step_s += costs.attention_s * (view.kv_tokens + own_tokens)
    missing = 1.0 - saved / request.num_prompt_tokens
    delay_s = request.length.mean_tokens * step_s * view.speed_factor
    return context.transfer_s * missing + delay_s
