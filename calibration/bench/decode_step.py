"""Decode step time of the reference model against distinct experts, tokens held fixed.

A batch of n rows runs the same number of tokens whoever its rows are; how many DISTINCT experts
it touches is varied by letting rows repeat: d different sequences, each several times (every copy
with KV blocks of its own). So the slope is what one more distinct expert per layer costs, with
tokens, attention and everything else equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from eldr_jax.paged import KvPool
from eldr_jax.runner import Chunk, PagedRunner
from serving.core.clock import Clock

REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Least squares of step time over distinct experts at one batch size.

    Attributes:
        batch: rows of every step.
        num_steps: points of the fit; each the fastest of `REPEATS` runs of the same step.
        experts_min, experts_max: range of distinct experts per layer.
        slope_ms: milliseconds per distinct expert per layer (all layers together).
        intercept_ms: step time at no expert.
        r2: coefficient of determination.
    """

    batch: int
    num_steps: int
    experts_min: float
    experts_max: float
    slope_ms: float
    intercept_ms: float
    r2: float


def fit_decode_steps(
    runner: PagedRunner,
    prompts: Sequence[np.ndarray],
    batch: int,
    *,
    num_steps: int,
    rng: np.random.Generator,
    clock: Clock,
    progress: Callable[[int, int], None],
) -> DecodeFit:
    """Measures and fits one batch size.

    Args:
        runner: compiled model with room for `batch` prompts.
        prompts: int32 token ids, at least `batch` different ones.
        batch: rows, 2 to 16.
        num_steps: steps to measure.
        rng: draws who shares a step.
        clock: measures.
        progress: called with (done, total).

    Raises:
        ValueError: too few prompts.
    """
    if len(prompts) < batch:
        raise ValueError(f"{len(prompts)} prompts must be at least {batch=}")
    length = min(len(prompt) for prompt in prompts)
    pool = runner.new_pool()
    points = []
    for number in range(num_steps):
        distinct = 1 + number % batch
        chosen = rng.choice(len(prompts), distinct, replace=False)
        rows = [prompts[chosen[row % distinct]][:length] for row in range(batch)]
        pool, point = _measure(runner, pool, rows, clock)
        points.append(point)
        progress(number + 1, num_steps)
    experts, milliseconds = np.array(points).T
    line = stats.linregress(experts, milliseconds)
    return DecodeFit(
        batch=batch,
        num_steps=num_steps,
        experts_min=float(experts.min()),
        experts_max=float(experts.max()),
        slope_ms=float(line.slope),
        intercept_ms=float(line.intercept),
        r2=float(line.rvalue**2),
    )


def _measure(
    runner: PagedRunner, pool: KvPool, rows: Sequence[np.ndarray], clock: Clock
) -> tuple[KvPool, tuple[float, float]]:
    """(distinct experts, milliseconds) of the step that decodes the last token of each row."""
    per_row = -(-len(rows[0]) // runner.block_size)
    chunks = []
    for index, prompt in enumerate(rows):
        blocks = np.arange(index * per_row, (index + 1) * per_row, dtype=np.int32)
        pool, _ = runner.step(pool, [Chunk(token_ids=prompt[:-1], start=0, block_ids=blocks)])
        chunks.append(Chunk(token_ids=prompt[-1:], start=len(prompt) - 1, block_ids=blocks))
    best_s, experts = np.inf, 0.0
    for _ in range(REPEATS):
        began_s = clock.monotonic_s()
        pool, result = runner.step(pool, chunks)
        best_s = min(best_s, clock.monotonic_s() - began_s)
        experts = result.distinct_experts
    return pool, (experts, best_s * 1e3)
