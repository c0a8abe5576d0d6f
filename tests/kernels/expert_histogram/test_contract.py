"""The contract that every backend keeps: adding a backend is adding a row."""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.expert_histogram import expert_histogram, reference
from kernels.expert_histogram.arg_specs import spec_of_call

BACKENDS_HERE = ("xla", "pallas_tpu_interpret")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Static sizes; few of them, because each is compiled for every backend."""

    num_layers: int
    top_k: int
    num_tokens: int
    num_experts: int
    block_size: int
    num_blocks: int
    out_dtype: str | None = None

    @property
    def sizes(self):
        return {
            "num_blocks": self.num_blocks,
            "num_experts": self.num_experts,
            "block_size": self.block_size,
            "out_dtype": self.out_dtype,
        }


SHAPES = (
    Shape(num_layers=3, top_k=4, num_tokens=96, num_experts=64, block_size=16, num_blocks=40),
    Shape(num_layers=1, top_k=8, num_tokens=300, num_experts=128, block_size=128, num_blocks=24),
    Shape(num_layers=9, top_k=2, num_tokens=200, num_experts=33, block_size=32, num_blocks=60),
    Shape(num_layers=2, top_k=10, num_tokens=150, num_experts=200, block_size=256, num_blocks=12),
    Shape(num_layers=2, top_k=1, num_tokens=64, num_experts=2, block_size=16, num_blocks=64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    shape: Shape
    ids: np.ndarray
    block_of_token: np.ndarray


def make_call(shape, *, chunks, seed=0, holes=0.0):
    """A packed step: `chunks` are (offset in the first block, tokens) of each request."""
    rng = np.random.default_rng(seed)
    block_of_token = np.full(shape.num_tokens, -1, np.int32)
    row = token = 0
    for offset, length in chunks:
        within = (offset + np.arange(length)) // shape.block_size
        block_of_token[token : token + length] = row + within
        token += length
        row += int(within[-1]) + 1
    assert row <= shape.num_blocks
    scores = rng.random((shape.num_layers, shape.num_experts, shape.num_tokens))
    ids = np.argsort(scores, axis=1)[:, : shape.top_k].astype(np.int32)
    ids[:, :, block_of_token < 0] = -1
    ids[rng.random(ids.shape) < holes] = -1
    block_of_token[rng.random(shape.num_tokens) < holes] = -1
    return Call(shape=shape, ids=ids, block_of_token=block_of_token)


@st.composite
def calls(draw, shape):
    """Ragged packed steps: long and one-token chunks, holes, padding behind."""
    chunks = []
    tokens, rows = shape.num_tokens, shape.num_blocks
    while tokens and rows and draw(st.integers(0, 9)):
        offset = draw(st.integers(0, shape.block_size - 1))
        most = min(tokens, rows * shape.block_size - offset)
        length = draw(st.sampled_from((1, 1, 2, most, draw(st.integers(1, most)))))
        length = min(length, most)
        chunks.append((offset, length))
        tokens -= length
        rows -= (offset + length - 1) // shape.block_size + 1
    return make_call(
        shape,
        chunks=chunks,
        seed=draw(st.integers(0, 2**31)),
        holes=draw(st.sampled_from((0.0, 0.1))),
    )


def expected(call):
    spec = spec_of_call(jnp.asarray(call.ids), jnp.asarray(call.block_of_token), **call.shape.sizes)
    return reference.expert_histogram(call.ids, call.block_of_token, spec)


@cache
def compiled(shape, backend):
    """Compiled without optimisation: interpreted kernels run seldom and compile slowly."""
    ids = jax.ShapeDtypeStruct((shape.num_layers, shape.top_k, shape.num_tokens), jnp.int32)
    blocks = jax.ShapeDtypeStruct((shape.num_tokens,), jnp.int32)
    histogram = jax.jit(partial(expert_histogram, **shape.sizes, backend=backend))
    return histogram.lower(ids, blocks).compile(
        compiler_options={
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        }
    )


def counted(call, backend):
    run = compiled(call.shape, backend)
    return np.asarray(run(jnp.asarray(call.ids), jnp.asarray(call.block_of_token)))


def assert_agrees(call, backend):
    got, want = counted(call, backend), expected(call)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_agrees_with_the_reference(backend, data):
    assert_agrees(data.draw(calls(data.draw(st.sampled_from(SHAPES)))), backend)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize("offset", [0, 1, 15])
def test_one_request_that_begins_inside_a_block(backend, offset):
    assert_agrees(make_call(SHAPES[0], chunks=[(offset, 96)]), backend)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_a_decode_step_gives_each_token_its_own_row(backend):
    assert_agrees(make_call(SHAPES[4], chunks=[(5, 1)] * 64), backend)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_more_rows_than_one_window_holds(backend):
    assert_agrees(make_call(SHAPES[0], chunks=[(5, 1)] * 40), backend)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize("out_dtype", ["uint16", "int32"])
def test_wider_counts_than_needed(backend, out_dtype):
    shape = replace(SHAPES[0], out_dtype=out_dtype)
    assert_agrees(make_call(shape, chunks=[(3, 60), (0, 20)]), backend)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize(("block_size", "out_dtype"), [(255, "uint8"), (256, "uint16")])
def test_a_full_block_of_one_expert_reaches_the_largest_count(backend, block_size, out_dtype):
    shape = Shape(
        num_layers=1,
        top_k=1,
        num_tokens=block_size,
        num_experts=4,
        block_size=block_size,
        num_blocks=1,
    )
    call = Call(
        shape=shape,
        ids=np.full((1, 1, block_size), 2, np.int32),
        block_of_token=np.zeros(block_size, np.int32),
    )
    counts = counted(call, backend)
    assert counts.dtype == out_dtype
    assert counts.tolist() == [[[0, 0, block_size, 0]]]


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_padding_counts_nothing(backend, shape):
    assert not counted(make_call(shape, chunks=[]), backend).any()


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize("num_experts", [5, 100])
def test_fast_mode_ignores_what_is_out_of_range(backend, num_experts):
    outside = [-(2**31), -1000, -512, -2, -1, num_experts, num_experts + 1, 512, 640, 1000, 2**30]
    outside += [2**31 - 1, *range(num_experts, num_experts + 96), *(-x for x in range(3, 600, 31))]
    ids = np.asarray([*range(num_experts), *outside], np.int32)[None, None, :]
    shape = Shape(
        num_layers=1,
        top_k=1,
        num_tokens=ids.shape[2],
        num_experts=num_experts,
        block_size=1024,
        num_blocks=1,
    )
    call = Call(shape=shape, ids=ids, block_of_token=np.zeros(ids.shape[2], np.int32))
    assert counted(call, backend).tolist() == [[[1] * num_experts]]


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_fast_mode_ignores_rows_that_do_not_exist(backend):
    shape = Shape(num_layers=1, top_k=1, num_tokens=6, num_experts=4, block_size=16, num_blocks=2)
    call = Call(
        shape=shape,
        ids=np.zeros((1, 1, 6), np.int32),
        block_of_token=np.asarray([-5, 0, 1, 2, 3, 2**31 - 1], np.int32),
    )
    assert counted(call, backend)[:, 0, 0].tolist() == [1, 1]


def test_inside_a_callers_jit():
    call = make_call(SHAPES[0], chunks=[(7, 50)])

    @jax.jit
    def caller(ids, block_of_token):
        counts = expert_histogram(ids + 1, block_of_token, **call.shape.sizes)
        return counts.astype(jnp.int32).sum(axis=2)

    ids = jnp.asarray(call.ids)
    got = caller(jnp.where(ids < 0, -2, ids - 1), jnp.asarray(call.block_of_token))
    np.testing.assert_array_equal(got, expected(call).astype(np.int32).sum(axis=2))


def test_nothing_leaves_the_device():
    call = make_call(SHAPES[0], chunks=[(7, 50)])
    text = compiled(call.shape, "xla").as_text()
    assert not any(word in text for word in ("callback", "outfeed", "infeed", "send("))
