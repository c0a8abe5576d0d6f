"""What the public function refuses, and how it says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from kernels.expert_histogram import (
    BackendUnavailableError,
    HistogramArgumentError,
    HistogramError,
    default_out_dtype,
    expert_histogram,
)

SIZES = {"num_blocks": 2, "num_experts": 4, "block_size": 16}
IDS = jnp.zeros((1, 1, 3), jnp.int32)
BLOCKS = jnp.zeros(3, jnp.int32)


@pytest.mark.parametrize(
    ("ids", "blocks", "sizes", "text"),
    [
        (IDS[0], BLOCKS, {}, r"ids has shape \(1, 3\)"),
        (IDS.astype(jnp.int16), BLOCKS, {}, "dtype int16; it must be"),
        (IDS, BLOCKS[:2], {}, r"block_of_token has shape \(2,\).*\[T=3\] int32"),
        (IDS, BLOCKS.astype(jnp.uint32), {}, "dtype uint32"),
        (IDS, BLOCKS, {"num_blocks": 0}, "num_blocks=0 must be an integer of at least 1"),
        (IDS, BLOCKS, {"num_experts": -1}, "num_experts=-1 must be an integer of at least 1"),
        (IDS, BLOCKS, {"block_size": 0}, "block_size=0 must be an integer of at least 1"),
        (IDS[:, :, :0], BLOCKS[:0], {}, "num_tokens=0 must be an integer of at least 1"),
        (IDS, BLOCKS, {"num_blocks": 2.0}, r"num_blocks=2\.0 must be an integer"),
        (IDS, BLOCKS, {"num_blocks": True}, "num_blocks=True must be an integer"),
        (IDS, BLOCKS, {"block_size": "16"}, "block_size='16' must be an integer"),
        (IDS, BLOCKS, {"out_dtype": "foo"}, "out_dtype=foo must be one of uint8"),
        (IDS, BLOCKS, {"out_dtype": jnp.int8}, "out_dtype=int8 must be one of uint8"),
        (IDS, BLOCKS, {"out_dtype": jnp.uint8, "block_size": 256}, "use uint16$"),
        (IDS, BLOCKS, {"out_dtype": jnp.uint8, "block_size": 256}, "counts up to 255"),
        (IDS, BLOCKS, {"num_blocks": 2**30}, "must not exceed 2147483647"),
        (IDS, BLOCKS, {"backend": "cuda"}, "backend=cuda must be one of xla, pallas_tpu, "),
        (jnp.zeros((1, 5, 3), jnp.int32), BLOCKS, {}, "top_k=5 must not exceed num_experts=4"),
    ],
)
def test_refused_calls_name_the_argument_and_the_rule(ids, blocks, sizes, text):
    with pytest.raises(HistogramArgumentError, match=text):
        expert_histogram(ids, blocks, **(SIZES | sizes))


def test_errors_are_also_the_builtin_kind():
    assert issubclass(HistogramArgumentError, ValueError)
    assert issubclass(BackendUnavailableError, RuntimeError)
    assert issubclass(HistogramArgumentError, HistogramError)


@pytest.mark.parametrize(
    ("block_size", "dtype"), [(16, "uint8"), (255, "uint8"), (256, "uint16"), (1024, "uint16")]
)
def test_default_out_dtype_is_the_smallest_that_cannot_overflow(block_size, dtype):
    assert default_out_dtype(block_size) == dtype


WRONG_VALUES = (
    ([[[0, 4, 0]]], [0, 0, 0], "must lie in .-1, num_experts="),
    ([[[0, -2, 0]]], [0, 0, 0], "must lie in .-1, num_experts="),
    ([[[0, 1, -1], [2, 1, -1]]], [0, 0, 0], "must be distinct"),
    ([[[0, 1, 0]]], [0, 2, 2], "must lie in .-1, num_blocks="),
    ([[[0, 1, 0]]], [-2, 0, 0], "must lie in .-1, num_blocks="),
    ([[[0, 1, 0]]], [1, -1, 0], "must not decrease"),
    ([[[0] * 17]], [0] * 17, "a block holds block_size="),
)


@pytest.mark.parametrize(("ids", "blocks", "text"), WRONG_VALUES)
def test_checked_mode_refuses_wrong_values(ids, blocks, text):
    ids, blocks = np.asarray(ids, np.int32), np.asarray(blocks, np.int32)
    with pytest.raises(HistogramArgumentError, match=text):
        expert_histogram(jnp.asarray(ids), jnp.asarray(blocks), **SIZES, checked=True)


@pytest.mark.parametrize(("ids", "blocks", "text"), WRONG_VALUES)
def test_checked_mode_inside_jit_goes_through_checkify(ids, blocks, text):
    def caller(ids, blocks):
        return expert_histogram(ids, blocks, **SIZES, checked=True)

    error, _ = jax.jit(checkify.checkify(caller))(
        jnp.asarray(ids, jnp.int32), jnp.asarray(blocks, jnp.int32)
    )
    with pytest.raises(checkify.JaxRuntimeError, match=text):
        error.throw()


def test_checked_mode_inside_jit_passes_good_values():
    def caller(ids, blocks):
        return expert_histogram(ids, blocks, **SIZES, checked=True)

    blocks = jnp.asarray([0, -1, 1], jnp.int32)
    error, counts = jax.jit(checkify.checkify(caller))(IDS, blocks)
    error.throw()
    assert counts[:, 0, 0].tolist() == [1, 1]


def test_checked_mode_names_the_place():
    ids = jnp.asarray([[[0, 9, 0]]], jnp.int32)
    with pytest.raises(HistogramArgumentError, match=r"ids\[0, 0, 1\]=9"):
        expert_histogram(ids, BLOCKS, **SIZES, checked=True)


@pytest.mark.skipif(jax.default_backend() == "tpu", reason="this host has a TPU")
def test_without_a_tpu_the_backend_says_so():
    with pytest.raises(BackendUnavailableError, match=r"needs a TPU, or to compile ahead of time"):
        expert_histogram(IDS, BLOCKS, **SIZES, backend="pallas_tpu")
