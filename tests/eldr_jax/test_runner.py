"""The runner's packing, its refusals and the block hand-over."""

import jax
import numpy as np
import pytest

from eldr_jax.config import ModelConfig
from eldr_jax.model import init_params
from eldr_jax.runner import Chunk, PagedRunner

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def runner():
    return PagedRunner(
        CONFIG,
        init_params(CONFIG, jax.random.key(0)),
        num_blocks=12,
        block_size=4,
        token_buckets=(16, 32),
        max_blocks_per_seq=8,
    )


def _chunk(length, start=0, blocks=(0, 1, 2, 3, 4, 5, 6, 7)):
    tokens = np.arange(length, dtype=np.int32) % CONFIG.vocab_size
    return Chunk(token_ids=tokens, start=start, block_ids=np.asarray(blocks, np.int32))


def test_takes_the_smallest_bucket(runner):
    pool, result = runner.step(runner.new_pool(), [_chunk(16)])
    assert (result.bucket, result.num_tokens) == (16, 16)
    _, result = runner.step(pool, [_chunk(17)])
    assert (result.bucket, result.num_tokens) == (32, 17)


def test_block_hand_over_continues_identically(runner):
    """Keys and values read from one pool and written to other blocks of another go on alike."""
    source, first = runner.step(runner.new_pool(), [_chunk(10)])
    keys, values = runner.read_blocks(source, np.array([0, 1, 2]))
    target = runner.write_blocks(runner.new_pool(), np.array([7, 3, 9]), keys, values)
    token = first.next_tokens[:1]
    _, here = runner.step(source, [Chunk(token_ids=token, start=10, block_ids=np.arange(8))])
    moved = np.array([7, 3, 9], np.int32)
    _, there = runner.step(target, [Chunk(token_ids=token, start=10, block_ids=moved)])
    np.testing.assert_array_equal(here.logits().view(np.int32), there.logits().view(np.int32))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "num_chunks"),
        ([_chunk(1)] * 17, "num_chunks"),
        ([_chunk(33, blocks=range(9))], "blocks needed"),
        ([_chunk(20), _chunk(20)], "largest bucket"),
        ([_chunk(0)], "at least one token"),
        ([_chunk(1, start=-1)], "position 0"),
        ([_chunk(5, blocks=(1,))], "blocks needed"),
        ([_chunk(5, blocks=(1, 12))], "must lie in"),
        ([_chunk(5, blocks=(-1, 2))], "must lie in"),
    ],
)
def test_refuses(runner, chunks, message):
    with pytest.raises(ValueError, match=message):
        runner.step(runner.new_pool(), chunks)


@pytest.mark.parametrize("buckets", [(), (32, 16), (16, 16), (8,), (0,)])
def test_refuses_buckets(buckets):
    with pytest.raises(ValueError, match="token_buckets"):
        PagedRunner(CONFIG, {}, num_blocks=1, token_buckets=buckets)


def test_refuses_blocks_of_another_shape(runner):
    keys, values = runner.read_blocks(runner.new_pool(), np.arange(2))
    with pytest.raises(ValueError, match="must be"):
        runner.write_blocks(runner.new_pool(), np.arange(3), keys, values)


def test_context_limit(runner):
    assert runner.max_context_tokens == 32
