"""The model run alone: one request at a time, no router, no worker, no cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from eldr_jax.runner import Chunk, PagedRunner


def generate_alone(
    runner: PagedRunner,
    prompts: Mapping[str, np.ndarray],
    max_tokens: int,
    progress: Callable[[int], None],
) -> dict[str, tuple[int, ...]]:
    """Greedy continuations, each from an empty pool and in a batch of one.

    Args:
        runner: the compiled model.
        prompts: key -> int32 [P].
        max_tokens: tokens to generate.
        progress: called with the number of prompts done.

    Returns:
        Key -> tokens.
    """
    pool = runner.new_pool()
    blocks = np.arange(runner.max_blocks_per_seq, dtype=np.int32)
    outputs = {}
    for number, (key, prompt) in enumerate(prompts.items(), start=1):
        tokens, start = prompt, 0
        made: list[int] = []
        while len(made) < max_tokens:
            # A prompt longer than the largest bucket runs in chunks, as a worker would run it.
            now, tokens = tokens[: runner.token_buckets[-1]], tokens[runner.token_buckets[-1] :]
            pool, result = runner.step(pool, [Chunk(token_ids=now, start=start, block_ids=blocks)])
            start += len(now)
            if not len(tokens):
                tokens = result.next_tokens[:1]
                made.append(int(tokens[0]))
        outputs[key] = tuple(made)
        progress(number)
    return outputs
