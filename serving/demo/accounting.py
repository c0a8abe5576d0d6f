"""From the workers' own steps to what each request saw, and what each policy cost.

Every time here is on a worker's BUSY clock: the sum of that worker's measured step durations.
The demo's workers take turns on the same cores, so a wall clock would charge a request for
steps of workers it never touched. So:

- TPOT of a request: the busy clock of its decode worker from the end of the step that made its
  first token there to the end of the step that made its last, over the tokens between.
- TTFT: the busy clock of its prefill worker from the request's arrival there to the end of the
  step that finished its prompt: queueing behind other prompts included, the hand-over not.
  Workers say both in the trailing metadata of each answer.
- distinct experts: of each decode step, the mean over layers of the experts its real tokens
  touched, WEIGHTED BY TOKENS: mean over decode tokens of the distinct experts of the step that
  made them. An unweighted mean over steps falls by mere imbalance (many steps of one token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step of one worker.

    Attributes:
        worker_id: who ran it.
        kind: "prefill" or "decode".
        duration_s: measured seconds.
        num_tokens: real tokens.
        distinct_experts: mean over layers.
        request_ids: who was in it.
    """

    worker_id: str
    kind: str
    duration_s: float
    num_tokens: int
    distinct_experts: float
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """What one request saw.

    Attributes:
        request_id: whose.
        step_experts: of each decode step that made one of its tokens, the distinct experts.
        step_batches: of the same steps, the tokens.
        ttft_s, tpot_s: see the module's text; NaN where too few tokens were made.
    """

    request_id: str
    step_experts: tuple[float, ...]
    step_batches: tuple[int, ...]
    ttft_s: float
    tpot_s: float

    @property
    def num_decode_tokens(self) -> int:
        """Tokens made by decode steps."""
        return len(self.step_experts)


def request_costs(
    steps: Sequence[Step], times: Mapping[str, tuple[float, float]]
) -> dict[str, RequestCost]:
    """Joins steps by request.

    Args:
        steps: of all workers.
        times: request id -> (TTFT, TPOT) in seconds.

    Returns:
        One cost for each request of `times` that took part in a decode step.
    """
    decode: dict[str, list[Step]] = {}
    for step in steps:
        if step.kind == "decode":
            for request_id in step.request_ids:
                decode.setdefault(request_id, []).append(step)
    costs = {}
    for request_id, (ttft_s, tpot_s) in times.items():
        mine = decode.get(request_id)
        if not mine:
            continue
        costs[request_id] = RequestCost(
            request_id=request_id,
            step_experts=tuple(step.distinct_experts for step in mine),
            step_batches=tuple(step.num_tokens for step in mine),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )
    return costs


def summarise(
    costs: Sequence[RequestCost], steps: Sequence[Step], *, num_requests: int, num_failed: int
) -> dict[str, float]:
    """The figures of one policy over all its rounds (keys of the demo's summary file)."""
    decode = [step for step in steps if step.kind == "decode"]
    durations_ms = np.array([step.duration_s for step in decode]) * 1e3
    tpot_ms = np.array([cost.tpot_s for cost in costs]) * 1e3
    ttft_ms = np.array([cost.ttft_s for cost in costs]) * 1e3
    return {
        "distinct_experts_per_step": float(np.mean([n for c in costs for n in c.step_experts])),
        "mean_batch_per_worker": float(np.mean([n for c in costs for n in c.step_batches])),
        "mean_batch_per_step": float(np.mean([step.num_tokens for step in decode])),
        "step_ms_p50": float(np.median(durations_ms)),
        "step_ms_mean_by_token": float(
            np.average(durations_ms, weights=[step.num_tokens for step in decode])
        ),
        "tpot_ms_p50": float(np.nanpercentile(tpot_ms, 50)),
        "tpot_ms_p99": float(np.nanpercentile(tpot_ms, 99)),
        "ttft_ms_p50": float(np.nanpercentile(ttft_ms, 50)),
        "ttft_ms_p99": float(np.nanpercentile(ttft_ms, 99)),
        "num_requests": num_requests,
        "num_failed": num_failed,
    }
