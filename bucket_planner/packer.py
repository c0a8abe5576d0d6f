"""Chunked-prefill step packer: which step sizes a trace makes an engine run.

Engines that pad STEPS schedule, in each step, one token for every decoding request and fill the
rest of `max_num_batched_tokens` with prompt chunks, first come first served. Replaying a trace
through that rule gives the distribution of tokens per step that step buckets are planned for.
"""

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bucket_planner.buckets import BucketSet
from bucket_planner.cost_curve import CostCurve
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import LengthHistogram, Trace

Role = Literal["mixed", "prefill"]
_TARGET_UTILIZATION = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PackerConfig:
    """How steps are packed.

    Attributes:
      max_num_batched_tokens: tokens one step may schedule.
      max_num_seqs: requests that may be in prefill or decode at once.
      role: `mixed` decodes what it prefilled; `prefill` hands over after the last prompt chunk.
      num_workers: workers the trace is dealt to in turn; 0 = enough for about half load.
    """

    max_num_batched_tokens: int
    max_num_seqs: int = 256
    role: Role = "mixed"
    num_workers: int = 0

    def __post_init__(self) -> None:
        for name, low in (("max_num_batched_tokens", 1), ("max_num_seqs", 1), ("num_workers", 0)):
            value = getattr(self, name)
            if value < low:
                raise PlannerConfigError(name, value, f"must be >= {low}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise PlannerConfigError(
                "max_num_seqs",
                self.max_num_seqs,
                f"must be <= max_num_batched_tokens, {self.max_num_batched_tokens}",
            )


def pack_trace(
    trace: Trace, config: PackerConfig, *, buckets: BucketSet, curve: CostCurve
) -> LengthHistogram:
    """Tokens scheduled per step over a whole trace.

    Args:
      trace: requests with arrivals (and, for a mixed worker, output lengths).
      config: the packing rule.
      buckets: what a step is padded to while replaying; sets how long it runs.
      curve: milliseconds of a bucket.

    Returns:
      Histogram of tokens per step, steps of all workers together.

    Raises:
      PlannerConfigError: the trace lacks arrivals or outputs, or the curve has no time.
    """
    if trace.arrival_s is None:
        raise PlannerConfigError("trace", trace.name, "step semantics need arrival times")
    if config.role == "mixed" and trace.output_tokens is None:
        raise PlannerConfigError("trace", trace.name, "a mixed worker needs output lengths")
    if curve.unit != "ms":
        raise PlannerConfigError("cost", curve.unit, "step semantics need a cost in ms")
    if buckets.limit_tokens < config.max_num_batched_tokens:
        raise PlannerConfigError(
            "buckets", buckets.limit_tokens, f"must reach {config.max_num_batched_tokens}"
        )
    step_s = _step_seconds(config.max_num_batched_tokens, buckets, curve)
    num_workers = workers_for(trace, config, buckets=buckets, curve=curve)
    order = np.argsort(trace.arrival_s, kind="stable")
    arrivals = trace.arrival_s[order].tolist()
    prompts = trace.prompt_tokens[order].tolist()
    outputs = (
        [1] * len(trace) if trace.output_tokens is None else trace.output_tokens[order].tolist()
    )
    steps: Counter[int] = Counter()
    for worker in range(min(num_workers, len(trace))):
        mine = slice(worker, None, num_workers)
        _pack_worker(arrivals[mine], prompts[mine], outputs[mine], config, step_s, steps)
    tokens = np.array(sorted(steps), np.int64)
    return LengthHistogram(
        tokens=tokens, counts=np.array([steps[int(t)] for t in tokens], np.int64)
    )


def _step_seconds(limit: int, buckets: BucketSet, curve: CostCurve) -> list[float]:
    """Seconds of a step of 0..limit tokens."""
    sizes = np.array(buckets.sizes_tokens, np.int64)
    padded = sizes[np.searchsorted(sizes, np.arange(limit + 1))]
    return (curve.cost(padded) / 1e3).tolist()


def workers_for(trace: Trace, config: PackerConfig, *, buckets: BucketSet, curve: CostCurve) -> int:
    """Workers that keep prefill alone at about half load.

    Steps of an overloaded worker are all full and those of an idle one single requests; neither
    says much about the trace.

    Args, errors: as `pack_trace`.
    """
    if config.num_workers:
        return config.num_workers
    if trace.arrival_s is None:
        raise PlannerConfigError("trace", trace.name, "step semantics need arrival times")
    step_s = _step_seconds(config.max_num_batched_tokens, buckets, curve)
    span_s = float(trace.arrival_s.max() - trace.arrival_s.min())
    busy_s = float(trace.prompt_tokens.sum()) / config.max_num_batched_tokens * step_s[-1]
    return 1 if span_s <= 0 else max(1, math.ceil(busy_s / span_s / _TARGET_UTILIZATION))


def _pack_worker(
    arrivals: list[float],
    prompts: list[int],
    outputs: list[int],
    config: PackerConfig,
    step_s: list[float],
    steps: Counter[int],
) -> None:
    """Runs one worker to the end of its requests, adding its steps to `steps`."""
    budget = config.max_num_batched_tokens
    decodes = config.role == "mixed"
    waiting: deque[tuple[int, int]] = deque()  # (prompt tokens left, output tokens)
    finish_steps: list[int] = []  # heap: the step in which each decoding request ends
    now, step, arrived, total = 0.0, 0, 0, len(arrivals)
    while arrived < total or waiting or finish_steps:
        while arrived < total and arrivals[arrived] <= now:
            waiting.append((prompts[arrived], outputs[arrived]))
            arrived += 1
        if not waiting and not finish_steps:
            now = arrivals[arrived]
            continue
        decoding = len(finish_steps)
        if not waiting:  # pure decode: the same step repeats until a request ends or one arrives
            repeat = finish_steps[0] - step
            duration = step_s[decoding]
            if arrived < total:
                repeat = min(repeat, max(1, math.ceil((arrivals[arrived] - now) / duration)))
            steps[decoding] += repeat
        else:
            room, repeat = budget - decoding, 1
            seats = config.max_num_seqs - decoding
            while waiting and room > 0 and seats > 0:
                left, output = waiting.popleft()
                chunk = min(left, room)
                room -= chunk
                seats -= 1
                if chunk < left:
                    waiting.appendleft((left - chunk, output))
                elif decodes and output > 1:  # the prompt's last step yields the first token
                    heapq.heappush(finish_steps, step + output)
            scheduled = budget - room
            steps[scheduled] += 1
            duration = step_s[scheduled]
        step += repeat
        now += repeat * duration
        while finish_steps and finish_steps[0] <= step:
            heapq.heappop(finish_steps)
