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
        prefill = context.phase is Phase.PREFILL
        rows = two_of(context, rng, self.prefix_bias if prefill else 0.0)
        unit = "token_slowness" if context.costs is None else "s"
        work_s = _prefill_s if prefill else _decode_s
        return rank_sample(rows, work_s(context, rows), context, rng, unit=unit)


def _prefill_s(context: PlacementContext, rows: list[int]) -> list[float]:
    """Predicted seconds until each row has computed this prompt too.

    Without coefficients the same in tokens: outstanding work times measured slowness.
    """
    view, costs, most = context.view, context.costs, context.request.num_prompt_tokens - 1
    found = []
    for row in rows:
        own = most + 1 - min(context.cached_tokens.item(row), most)
        work = view.queued_prefill_tokens.item(row)
        if costs is None:
            work += own
        else:
            padded, chunks = costs.padded_on(row, own)
            work = (work + padded) * costs.prefill_token_s.item(row)
            work += chunks * costs.prefill_chunk_s.item(row)
        found.append(work * view.speed_factor.item(row))
    return found


def _decode_s(context: PlacementContext, rows: list[int]) -> list[float]:
    """The same of the output: all requests of a step advance together, n + 1 tokens each."""
    view, costs, length = context.view, context.costs, context.request.length.mean_tokens
    outstanding = view.remaining_decode_tokens
    found = []
    for row in rows:
        work, speed = outstanding.item(row) + length, view.speed_factor.item(row)
        if costs is not None:
            num = view.num_inflight.item(row) + 1.0
            experts = costs.total_experts.item(row) * (1.0 - costs.miss.item(row) ** num)
            step_s = costs.step_base_s.item(row) + costs.expert_s.item(row) * experts
            step_s += costs.request_s.item(row) * num
            step_s += costs.attention_s.item(row) * view.kv_tokens.item(row)
            found.append(context.transfer_s.item(row) + work * step_s * speed / num)
        else:
            found.append(work * speed)
    return found
