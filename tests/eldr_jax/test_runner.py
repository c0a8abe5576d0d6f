"""The runner's packing, its refusals and the block hand-over."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eldr_jax import runner as runner_module
from eldr_jax.config import ModelConfig
from eldr_jax.paged import paged_step
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
def runner(draw_params):
    return PagedRunner(
        CONFIG,
        draw_params(CONFIG),
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


def test_a_step_leaves_no_ids_and_waits_for_no_host(runner, monkeypatch):
    """Of what the gate chose only the blocks' counts leave the program that serves."""
    seen = []

    def watched(*args, **static):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        seen.append((shapes, functools.partial(paged_step, **static)))
        return paged_step(*args, **static)

    monkeypatch.setattr(runner_module, "paged_step", watched)
    runner.step(runner.new_pool(), [_chunk(16)])
    (shapes, program), *_ = seen
    _, output = jax.eval_shape(program, *shapes)
    assert output.expert_ids is None
    assert output.hidden is None
    one_a_choice = CONFIG.num_layers * CONFIG.num_experts_per_tok * 16
    whole = [x for x in jax.tree.leaves(output) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert {x.size for x in whole}.isdisjoint({one_a_choice, one_a_choice // CONFIG.num_layers})
    assert "callback" not in str(jax.make_jaxpr(program)(*shapes))


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


@pytest.mark.parametrize("name", ["token_buckets", "request_buckets"])
@pytest.mark.parametrize("buckets", [(), (32, 16), (16, 16), (8,), (0,)])
def test_refuses_buckets(name, buckets):
    with pytest.raises(ValueError, match=name):
        PagedRunner(CONFIG, {}, num_blocks=1, **{name: buckets})


def test_refuses_more_requests_than_tokens():
    with pytest.raises(ValueError, match="every request has a token"):
        PagedRunner(CONFIG, {}, num_blocks=1, token_buckets=(16,), request_buckets=(16, 32))


def test_decode_of_many_requests_takes_the_smallest_request_bucket_and_never_recompiles(
    draw_params,
):
    few = PagedRunner(
        CONFIG,
        draw_params(CONFIG),
        num_blocks=40,
        block_size=4,
        token_buckets=(16, 48),
        request_buckets=(16, 48),
        max_blocks_per_seq=2,
    )
    # Seventeen requests need more than sixteen rows: (16, 48) cannot occur.
    assert few.step_sizes() == [(16, 16), (48, 16), (48, 48)]
    progress = []
    pool = few.warm_up(few.new_pool(), lambda done, total: progress.append((done, total)))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    compiled = paged_step._cache_size(), runner_module._write_blocks._cache_size()

    def row(sequence, token, start):
        return Chunk(token_ids=np.array([token]), start=start, block_ids=np.array([sequence]))

    results = {}
    for num_requests in (1, 16, 17, 40):
        pool = few.new_pool()
        made = []
        for start in range(2):
            chunks = [row(i, (7 * i + start) % 64, start) for i in range(num_requests)]
            pool, step = few.step(pool, chunks)
            made.append(step.logits())
            assert step.logits().shape == (num_requests, CONFIG.vocab_size)
            assert step.bucket == (16 if num_requests <= 16 else 48)
            assert all(counts.sum() == 2 * CONFIG.num_layers for counts in step.counts)
        results[num_requests] = np.stack(made)
    # A request's logits are the same bits in every company and bucket.
    for num_requests, made in results.items():
        shared = results[40][:, :num_requests]
        np.testing.assert_array_equal(made.view(np.int32), shared.view(np.int32))
    for num_blocks in (1, 2):
        blocks = np.arange(num_blocks)
        pool = few.write_blocks(pool, blocks, *few.read_blocks(pool, blocks))
    assert (paged_step._cache_size(), runner_module._write_blocks._cache_size()) == compiled


def test_the_old_pool_is_given_away(runner):
    """Donated: a step needs no second cache, and using the old one is an error."""
    old = runner.new_pool()
    new, _ = runner.step(old, [_chunk(3)])
    assert all(cache.is_deleted() for cache in (*old.keys, *old.values))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.keys[0])
    written = runner.write_blocks(new, np.arange(1), *runner.read_blocks(new, np.arange(1)))
    assert all(cache.is_deleted() for cache in (*new.keys, *new.values))
    assert not any(cache.is_deleted() for cache in (*written.keys, *written.values))


def test_refuses_blocks_of_another_shape(runner):
    keys, values = runner.read_blocks(runner.new_pool(), np.arange(2))
    with pytest.raises(ValueError, match="must be"):
        runner.write_blocks(runner.new_pool(), np.arange(3), keys, values)


def test_context_limit(runner):
    assert runner.max_context_tokens == 32
