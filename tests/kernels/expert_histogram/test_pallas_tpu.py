"""What the contract's small shapes do not reach in the TPU kernel: its configurations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.expert_histogram import HistogramArgumentError, pallas_tpu, reference
from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.pallas_tpu_layout import layout_of
from kernels.expert_histogram.tuned import INTERPRET_CONFIG, TPU_CONFIGS, TpuConfig

SPEC = HistogramSpec(
    num_layers=9,
    top_k=2,
    num_tokens=300,
    num_blocks=22,
    num_experts=64,
    block_size=16,
    out_dtype="uint8",
)
PIPELINED = replace(INTERPRET_CONFIG, pipelined=True, dot_columns=2, rows_per_loop=4)
FLOAT8 = replace(INTERPRET_CONFIG, operand_dtype="float8_e4m3fn")


def inputs(spec):
    rng = np.random.default_rng(7)
    scores = rng.random((spec.num_layers, spec.num_experts, spec.num_tokens))
    ids = np.argsort(scores, axis=1)[:, : spec.top_k].astype(np.int32)
    blocks = (5 + np.arange(spec.num_tokens)) // spec.block_size
    blocks[100:] += 1  # a second request, whose first block stays short
    blocks[-9:] = -1
    return ids, blocks.astype(np.int32)


def assert_agrees(spec, config):
    ids, blocks = inputs(spec)

    def histogram(ids, blocks):
        return pallas_tpu.call_kernel(ids, blocks, spec, config, interpret=True)

    lowered = jax.jit(histogram).lower(jnp.asarray(ids), jnp.asarray(blocks))
    run = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    got = np.asarray(run(jnp.asarray(ids), jnp.asarray(blocks)))
    np.testing.assert_array_equal(got, reference.expert_histogram(ids, blocks, spec))


@pytest.mark.parametrize(
    "config",
    [PIPELINED, FLOAT8, replace(PIPELINED, operand_dtype="float8_e4m3fn", dots_per_step=2)],
    ids=["pipelined", "float8", "pipelined float8, two products a step"],
)
def test_configurations_agree(config):
    assert_agrees(SPEC, config)


@pytest.mark.parametrize("num_experts", [20, 128])
def test_float8_holds_every_bit_of_a_word(num_experts):
    assert_agrees(replace(SPEC, num_layers=2, num_experts=num_experts, top_k=3), FLOAT8)


def test_an_output_larger_than_the_memory_is_made_in_tiles():
    config = replace(INTERPRET_CONFIG, vmem_bytes=900 * 2**10)
    layout = layout_of(SPEC, config)
    assert layout.num_tiles > 1
    assert layout.tile_rows * layout.num_tiles >= SPEC.num_blocks
    assert_agrees(SPEC, config)


def test_too_little_memory_is_refused():
    with pytest.raises(HistogramArgumentError, match="rows of the output"):
        layout_of(SPEC, replace(INTERPRET_CONFIG, vmem_bytes=2**18))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("operand_dtype", "bfloat16", "must be int8 or"), ("dot_columns", 0, "dot_columns=0")],
)
def test_wrong_configurations_are_refused(field, value, text):
    with pytest.raises(HistogramArgumentError, match=text):
        replace(INTERPRET_CONFIG, **{field: value})


@pytest.mark.parametrize("config", TPU_CONFIGS.values(), ids=TPU_CONFIGS.keys())
@pytest.mark.parametrize("num_experts", [64, 128, 512])
@pytest.mark.parametrize("block_size", [16, 1024])
def test_large_calls_fit_every_chip(config: TpuConfig, num_experts, block_size):
    spec = replace(
        SPEC,
        num_layers=94,
        top_k=8,
        num_tokens=8192,
        num_blocks=8192 // block_size + 64,
        num_experts=num_experts,
        block_size=block_size,
        out_dtype="uint16",
    )
    layout = layout_of(spec, config)
    accumulator_bytes = layout.accumulator_rows * 128 * 4
    out_bytes = layout.tile_rows * 96 * max(128, num_experts) * 2
    assert accumulator_bytes + 2 * out_bytes < config.vmem_bytes
    assert layout.tile_rows * (layout.num_tiles - 1) < spec.num_blocks
