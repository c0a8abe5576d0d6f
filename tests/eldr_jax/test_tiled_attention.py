"""Tiled attention against a plain softmax over each row's own keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eldr_jax import tiled_attention
from eldr_jax.tiled_attention import Cache, decode_attention, prefill_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 8, 4
SCALE = 0.4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles that these short sequences cross several times."""
    monkeypatch.setattr(tiled_attention, "QUERY_TILE_ROWS", 8)
    monkeypatch.setattr(tiled_attention, "KEY_TILE_TOKENS", 8)


def drawn(num_sequences, max_blocks, seed):
    rng = np.random.default_rng(seed)
    num_blocks = num_sequences * max_blocks
    keys, values = rng.normal(size=(2, num_blocks, BLOCK, KV_HEADS, HEAD_DIM)).astype(np.float32)
    tables = rng.permutation(num_blocks).reshape(num_sequences, max_blocks).astype(np.int32)
    return rng, Cache(keys=keys, values=values, tables=tables)


def plain(q, cache, position, sequence, window, sinks):
    """One row's attention, in float64."""
    shape = (-1, KV_HEADS, HEAD_DIM)
    keys = np.asarray(cache.keys)[cache.tables[sequence]].reshape(shape)
    values = np.asarray(cache.values)[cache.tables[sequence]].reshape(shape)
    first = 0 if window is None else max(0, position - window + 1)
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = keys[first : position + 1, kv].astype(np.float64) @ q[head] * SCALE
        if sinks is not None:
            scores = np.append(scores, sinks[head])
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        out.append(shares[: position + 1 - first] @ values[first : position + 1, kv])
    return np.concatenate(out)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_of_packed_chunks(window, with_sinks):
    rng, cache = drawn(num_sequences=3, max_blocks=7, seed=1)
    sinks = rng.normal(size=HEADS).astype(np.float32) if with_sinks else None
    # Chunks of 13, 1 and 6 rows from positions 9, 20 and 0, and three rows of padding.
    positions = np.r_[9:22, 20, 0:6, 0, 0, 0].astype(np.int32)
    sequences = np.r_[[0] * 13, 1, [2] * 6, 0, 0, 0].astype(np.int32)
    real = np.arange(len(positions)) < 20
    q = rng.normal(size=(len(positions), HEADS, HEAD_DIM)).astype(np.float32)
    run = jax.jit(lambda *rows: prefill_attention(*rows, scale=SCALE, window=window, sinks=sinks))
    got = run(jnp.asarray(q), cache, positions, sequences, real)
    want = [
        plain(q[row], cache, positions[row], sequences[row], window, sinks) for row in range(20)
    ]
    np.testing.assert_allclose(got[:20], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[20:], np.zeros_like(got[20:]))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_decode_of_one_row_per_sequence(window, with_sinks):
    rng, cache = drawn(num_sequences=4, max_blocks=7, seed=2)
    sinks = rng.normal(size=HEADS).astype(np.float32) if with_sinks else None
    positions = np.asarray([27, 0, 11, 0], np.int32)
    real = np.asarray([True, True, True, False])
    q = rng.normal(size=(4, HEADS, HEAD_DIM)).astype(np.float32)
    run = jax.jit(lambda *rows: decode_attention(*rows, scale=SCALE, window=window, sinks=sinks))
    got = run(jnp.asarray(q), cache, positions, real)
    want = [plain(q[row], cache, positions[row], row, window, sinks) for row in range(3)]
    np.testing.assert_allclose(got[:3], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[3:], np.zeros_like(got[3:]))


def test_padding_alone_gives_zeros():
    _, cache = drawn(num_sequences=2, max_blocks=3, seed=3)
    nothing = np.zeros(5, np.int32)
    q = jnp.ones((5, HEADS, HEAD_DIM))
    run = jax.jit(lambda *rows: prefill_attention(*rows, scale=SCALE))
    got = run(q, cache, nothing, nothing, nothing > 0)
    np.testing.assert_array_equal(got, np.zeros((5, HEADS * HEAD_DIM)))
