"""The reference model's prefill on the accelerator at hand, with and without the histogram.

Every figure is measured here and now; `device_check_main` is the command.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eldr_jax.config import ModelConfig
from eldr_jax.expert_parallel import sharded_step
from eldr_jax.paged import StepInput
from eldr_jax.sharded_state import cache_shapes
from eldr_jax.sharding import MeshPlan, make_mesh, param_specs, placed, stack_params

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """One bucket.

    Attributes:
      bucket: tokens of the prompt and of the program.
      with_us: median time of a step that counts experts.
      without_us: the same of one that does not.
      same_output: whether tokens and logits are equal bit for bit.
      counts_agree: whether the counts are those of the step's expert ids, by NumPy.
    """

    bucket: int
    with_us: float
    without_us: float
    same_output: bool
    counts_agree: bool


def check_prefill(
    config: ModelConfig, params: dict[str, Any], *, bucket: int, rounds: int, seed: int
) -> PrefillResult:
    """Prefills one prompt of random tokens that fills a bucket.

    Args:
      config: geometry.
      params: tree of `eldr_jax.model.params_of`.
      bucket: tokens.
      rounds: timed steps of each kind, in turns.
      seed: of the tokens.

    Returns:
      Times and agreement.
    """
    plan = MeshPlan()
    mesh = make_mesh(plan, jax.devices()[:1])
    weights = placed(stack_params(config, params, plan), param_specs(config, plan), mesh)
    num_blocks = -(-bucket // _BLOCK_SIZE)
    shapes = cache_shapes(
        config, plan, mesh, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=jnp.float32
    )
    position = np.arange(bucket, dtype=np.int32)
    step = StepInput(
        token_ids=np.random.default_rng(seed).integers(0, config.vocab_size, bucket, np.int32),
        positions=position,
        sequences=np.zeros(bucket, np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=np.asarray([bucket - 1], np.int32),
        count_rows=position // _BLOCK_SIZE,
    )
    step = jax.device_put(step)
    counting, plain, debugging = (
        sharded_step(config, plan, mesh, "prefill", count_experts=counts, debug=debug)
        for counts, debug in ((True, False), (False, False), (True, True))
    )
    caches = {
        kind: jax.tree.map(
            lambda s: jax.device_put(jnp.zeros(s.shape, s.dtype), s.sharding), shapes
        )
        for kind in ("with", "without")
    }
    outputs: dict[str, Any] = {}
    times_s: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds + 1):
        for kind, program in (("with", counting), ("without", plain)):
            start_s = time.perf_counter()
            caches[kind], outputs[kind] = program(weights, caches[kind], step)
            jax.block_until_ready(outputs[kind])
            times_s[kind].append(time.perf_counter() - start_s)
    _, debugged = debugging(weights, caches["with"], step)
    equal = [
        np.array_equal(getattr(outputs["with"], name), getattr(outputs["without"], name))
        for name in ("next_tokens", "logits")
    ]
    # The first round compiles.
    with_s, without_s = (statistics.median(times_s[kind][1:]) for kind in ("with", "without"))
    return PrefillResult(
        bucket=bucket,
        with_us=with_s * 1e6,
        without_us=without_s * 1e6,
        same_output=all(equal),
        counts_agree=bool(
            np.array_equal(
                np.asarray(outputs["with"].counts)[:num_blocks],
                _counted(np.asarray(debugged.expert_ids), num_blocks, config.num_experts),
            )
        ),
    )


def _counted(ids: np.ndarray, num_blocks: int, num_experts: int) -> np.ndarray:
    """[num_blocks, L, E] tokens of each block per expert, from [L, K, T]."""
    num_layers, _, num_tokens = ids.shape
    counts = np.zeros((num_blocks, num_layers, num_experts), np.int64)
    block = np.arange(num_tokens) // _BLOCK_SIZE
    for layer in range(num_layers):
        for rank_ids in ids[layer]:
            np.add.at(counts, (block, layer, rank_ids), 1)
    return counts
