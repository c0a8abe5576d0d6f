"""Decode step time of the reference model against distinct experts, tokens held fixed.

A batch of n rows runs the same number of tokens whoever its rows are; how many DISTINCT experts
it touches is varied by letting rows repeat: d different sequences, each several times (every copy
with KV blocks of its own). So the slope is what one more distinct expert per layer costs, with
tokens, attention and everything else equal. All steps are run again and again in turns and each
keeps its fastest time: a burst of other work on the machine then spoils a pass, not a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eldr_jax.paged import KvPool
from eldr_jax.runner import Chunk, PagedRunner
from serving.core.clock import Clock

PASSES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Least squares of step time over distinct experts at one batch size.

    Attributes:
        batch: rows of every step.
        num_steps: points of the fit; each the fastest of `PASSES` runs of the same step.
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
        num_steps: different steps to measure.
        rng: draws who shares a step.
        clock: measures.
        progress: called with (done, total).

    Raises:
        ValueError: too few prompts or blocks.
    """
    if len(prompts) < batch:
        raise ValueError(f"{len(prompts)} prompts must be at least {batch=}")
    length = min(len(prompt) for prompt in prompts)
    per_row = -(-length // runner.block_size)
    if num_steps * batch * per_row > runner.num_blocks:
        raise ValueError(
            f"{num_steps=} of {batch=} rows need {num_steps * batch * per_row} blocks, "
            f"the runner has {runner.num_blocks}"
        )
    pool = runner.new_pool()
    steps = []
    for number in range(num_steps):
        distinct = 1 + number % batch
        chosen = rng.choice(len(prompts), distinct, replace=False)
        rows = [prompts[chosen[row % distinct]][:length] for row in range(batch)]
        pool, chunks = _prefilled(runner, pool, rows, first_block=number * batch * per_row)
        steps.append(chunks)
    points = np.full((num_steps, 2), np.inf)
    for number in range(PASSES):
        for index, chunks in enumerate(steps):
            began_s = clock.monotonic_s()
            pool, result = runner.step(pool, chunks)
            elapsed_ms = (clock.monotonic_s() - began_s) * 1e3
            points[index] = result.distinct_experts, min(points[index, 1], elapsed_ms)
        progress(number + 1, PASSES)
    experts, milliseconds = points.T
    slope_ms, intercept_ms = np.polyfit(experts, milliseconds, 1)
    correlation = np.corrcoef(experts, milliseconds)[0, 1]
    return DecodeFit(
        batch=batch,
        num_steps=num_steps,
        experts_min=float(experts.min()),
        experts_max=float(experts.max()),
        slope_ms=float(slope_ms),
        intercept_ms=float(intercept_ms),
        r2=float(correlation**2),
    )


def _prefilled(
    runner: PagedRunner, pool: KvPool, rows: Sequence[np.ndarray], *, first_block: int
) -> tuple[KvPool, list[Chunk]]:
    """Fills each row's blocks up to its last token; returns the step that decodes that token."""
    per_row = -(-len(rows[0]) // runner.block_size)
    chunks = []
    for index, prompt in enumerate(rows):
        first = first_block + index * per_row
        blocks = np.arange(first, first + per_row, dtype=np.int32)
        pool, _ = runner.step(pool, [Chunk(token_ids=prompt[:-1], start=0, block_ids=blocks)])
        chunks.append(Chunk(token_ids=prompt[-1:], start=len(prompt) - 1, block_ids=blocks))
    return pool, chunks
