"""Runs the sharded step on eight virtual devices against one device; prints a line per case.

A program of its own because the number of devices is fixed when JAX starts. Each line is JSON:
{"family", "mesh", "phase", "ids_equal", "counts_equal", "next_equal", "logit_error"}.
"""

import json
import os
import sys

# Compiling takes most of the time, not running.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from eldr_jax.architecture import (
    AttentionOptions,
    BlockOptions,
    ExpertOptions,
    FullAttention,
    GateOptions,
    Yarn,
)
from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.expert_parallel import sharded_step
from eldr_jax.paged import StepInput
from eldr_jax.runner import Chunk, PagedRunner
from eldr_jax.sharded_state import cache_shapes
from eldr_jax.sharding import MeshPlan, make_mesh, param_specs, placed, stack_params

BLOCK_SIZE = 8
NUM_BLOCKS = 32
BLOCKS_PER_SEQUENCE = 8
BUCKET = 64
PROMPT_LENGTHS = (37, 5, 16)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "qwen3_moe": ModelConfig(**SIZES, tie_word_embeddings=True),
    "olmoe": ModelConfig(
        **SIZES,
        family="olmoe",
        norm_topk_prob=False,
        attention=AttentionOptions(query_key_norm="projection", clip=4.0),
    ),
    "gpt_oss": ModelConfig(
        **SIZES,
        family="gpt_oss",
        attention=AttentionOptions(
            bias=True,
            sinks=True,
            query_key_norm="none",
            sliding_window=12,
            full_interval=2,
            yarn=Yarn(factor=4.0, trained_context_tokens=64),
        ),
        gate=GateOptions(bias=True, softmax="chosen"),
        expert=ExpertOptions(activation="clamped_silu", bias=True),
    ),
    "gemma4": ModelConfig(
        **SIZES,
        family="gemma4",
        tie_word_embeddings=True,
        scale_embeddings=True,
        logit_softcap=30.0,
        attention=AttentionOptions(
            value_norm=True,
            scale=1.0,
            sliding_window=12,
            full_interval=2,
            full=FullAttention(
                num_kv_heads=2,
                head_dim=24,
                rope_theta=1e6,
                rotary_fraction=0.25,
                values_from_keys=True,
            ),
        ),
        gate=GateOptions(own_norm=True),
        expert=ExpertOptions(activation="gelu_tanh"),
        block=BlockOptions(post_norms=True, dense_intermediate_size=64, output_scale=True),
    ),
}
MESHES = {
    "qwen3_moe": ((1, 8, 1), (2, 2, 2)),
    "olmoe": ((1, 4, 2),),
    "gpt_oss": ((1, 4, 2),),
    "gemma4": ((1, 4, 2),),
}


def drawn_params(config, rng):
    """Weights of every kind that differ from zero and one, so that a forgotten one shows."""

    def weight(name, shape):
        scale = shape[-2] ** -0.5 if len(shape) > 1 and not name.startswith("b_") else 0.2
        draw = rng.normal(size=shape) * scale
        if name.endswith(("_norm", "_scale")):
            draw += 1.0
        return (draw * (4.0 if name == "gate" else 1.0)).astype(np.float32)

    vocab = (config.vocab_size, config.hidden_size)
    params = {
        "embed": weight("embed", vocab),
        "final_norm": weight("final_norm", (config.hidden_size,)),
        "layers": [
            {name: weight(name, shape) for name, shape in block_shapes(config, layer).items()}
            for layer in range(config.num_layers)
        ],
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = weight("lm_head", vocab[::-1])
    return params


def packed(chunks, num_rows, num_sequences):
    """A step's input for one replica, as `PagedRunner` packs it."""
    step = StepInput(
        token_ids=np.full(num_rows, -1, np.int32),
        positions=np.zeros(num_rows, np.int32),
        sequences=np.zeros(num_rows, np.int32),
        block_tables=np.zeros((num_sequences, BLOCKS_PER_SEQUENCE), np.int32),
        logit_rows=np.zeros(num_sequences, np.int32),
        count_rows=np.full(num_rows, -1, np.int32),
    )
    begin = first_count = 0
    for index, chunk in enumerate(chunks):
        rows = slice(begin, begin + len(chunk.token_ids))
        positions = chunk.start + np.arange(len(chunk.token_ids))
        step.token_ids[rows] = chunk.token_ids
        step.positions[rows] = positions
        step.sequences[rows] = index
        step.block_tables[index] = chunk.block_ids
        step.logit_rows[index] = rows.stop - 1
        touched = first_count + positions // BLOCK_SIZE - chunk.start // BLOCK_SIZE
        step.count_rows[rows] = touched
        begin, first_count = rows.stop, touched[-1] + 1
    return step


def replicated(step, data):
    """The same rows for every replica."""
    return StepInput(*(np.concatenate([array] * data) for array in step))


def report(family, shape, phase, output, want, data):
    """Compares every replica with the single device."""
    num_chunks, num_tokens = len(want.next_tokens), want.num_tokens
    counts_wanted = np.concatenate(want.counts)
    num_layers = counts_wanted.shape[1]

    def replicas(array, axis=0):
        return np.split(np.asarray(array), data, axis=axis)

    logits = [part[:num_chunks] for part in replicas(output.logits)]
    line = {
        "family": family,
        "mesh": shape,
        "phase": phase,
        "ids_equal": all(
            np.array_equal(part[..., :num_tokens], want.expert_ids)
            for part in replicas(output.expert_ids, axis=-1)
        ),
        "counts_equal": all(
            np.array_equal(part[: len(counts_wanted), :num_layers], counts_wanted)
            and not part[len(counts_wanted) :].any()
            and not part[:, num_layers:].any()
            for part in replicas(output.counts)
        ),
        "next_equal": all(
            np.array_equal(part[:num_chunks], want.next_tokens)
            for part in replicas(output.next_tokens)
        ),
        "logit_error": max(float(np.abs(part - want.logits()).max()) for part in logits),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def run_family(family, config):
    """Two prefill chunks and a decode step on one device, then the same on every mesh."""
    rng = np.random.default_rng(5)
    params = drawn_params(config, rng)
    tables = [np.arange(i * 8, i * 8 + 8, dtype=np.int32) for i in range(len(PROMPT_LENGTHS))]
    prompts = [
        rng.integers(0, config.vocab_size, length).astype(np.int32) for length in PROMPT_LENGTHS
    ]
    runner = PagedRunner(
        config,
        params,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        token_buckets=(BUCKET,),
        max_blocks_per_seq=BLOCKS_PER_SEQUENCE,
        debug=True,
    )
    # The longest prompt comes in two chunks, the second of which begins inside a block.
    first = [Chunk(token_ids=prompts[0][:21], start=0, block_ids=tables[0])]
    second = [
        Chunk(token_ids=prompts[0][21:], start=21, block_ids=tables[0]),
        *(
            Chunk(token_ids=prompt, start=0, block_ids=table)
            for prompt, table in zip(prompts[1:], tables[1:], strict=True)
        ),
    ]
    pool, one = runner.step(runner.new_pool(), first)
    pool, two = runner.step(pool, second)
    decode = [
        Chunk(token_ids=two.next_tokens[i : i + 1], start=length, block_ids=tables[i])
        for i, length in enumerate(PROMPT_LENGTHS)
    ]
    _, three = runner.step(pool, decode)
    steps = (
        ("prefill", packed(first, BUCKET, 4), one),
        ("prefill", packed(second, BUCKET, 4), two),
        ("decode", packed(decode, 4, 4), three),
    )
    for shape in MESHES[family]:
        data, expert, tensor = shape
        plan = MeshPlan(data=data, expert=expert, tensor=tensor)
        mesh = make_mesh(plan, jax.devices()[: plan.num_devices])
        weights = placed(stack_params(config, params, plan), param_specs(config, plan), mesh)
        shapes = cache_shapes(
            config, plan, mesh, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=jnp.float32
        )
        cache = jax.tree.map(
            lambda s: jax.device_put(jnp.zeros(s.shape, s.dtype), s.sharding), shapes
        )
        programs = {
            phase: sharded_step(config, plan, mesh, phase, debug=True)
            for phase in ("prefill", "decode")
        }
        for phase, step, want in steps:
            cache, output = programs[phase](weights, cache, replicated(step, data))
            report(family, shape, phase, output, want, data)


def main():
    for family in sys.argv[1:] or FAMILIES:
        run_family(family, FAMILIES[family])


if __name__ == "__main__":
    main()
