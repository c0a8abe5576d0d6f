"""The paged step against the whole-sequence model, and against itself bit for bit."""

import itertools

import jax
import numpy as np
import pytest

from eldr_jax.config import ModelConfig
from eldr_jax.dispatch import DENSE
from eldr_jax.model import init_params, model_of
from eldr_jax.paged import num_count_rows, paged_step
from eldr_jax.runner import Chunk, PagedRunner

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    tie_word_embeddings=True,
    max_position_embeddings=512,
)
BLOCK = 8
LENGTHS = (37, 64, 5, 16, 1)


@pytest.fixture(scope="module")
def params():
    tree = init_params(CONFIG, jax.random.key(1))
    for layer in tree["layers"]:
        layer["gate"] = layer["gate"] * 30  # a decided gate, as a trained one
    return tree


@pytest.fixture(scope="module")
def runner(params):
    return PagedRunner(
        CONFIG,
        params,
        num_blocks=96,
        block_size=BLOCK,
        token_buckets=(16, 64, 128),
        max_blocks_per_seq=16,
        debug=True,
    )


@pytest.fixture(scope="module")
def prompts():
    draw = np.random.default_rng(3)
    return [draw.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in LENGTHS]


def _blocks(index):
    return np.arange(index * 16, index * 16 + 16, dtype=np.int32)


def _bits(array):
    return np.asarray(array).view(np.int32)


def _alone(runner, prompt, index=0):
    chunk = Chunk(token_ids=prompt, start=0, block_ids=_blocks(index))
    return runner.step(runner.new_pool(), [chunk])


def test_agrees_with_the_whole_sequence_model(runner, params, prompts):
    model = model_of(CONFIG, params)
    # One padded batch: what stands behind a prompt's end changes nothing before it.
    longest = max(LENGTHS)
    batch = np.stack([np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts])
    forward = jax.jit(lambda tokens: model(tokens, dispatch=DENSE))(batch)
    logits = np.asarray(jax.jit(model.logits)(forward.hidden))
    ids = np.stack([np.asarray(router.ids) for router in forward.routers])
    ids = ids.reshape(CONFIG.num_layers, len(prompts), longest, -1)
    for row, prompt in enumerate(prompts):
        _, result = _alone(runner, prompt)
        np.testing.assert_allclose(result.logits()[0], logits[row, len(prompt) - 1], atol=2e-5)
        expected = ids[:, row, : len(prompt)].transpose(0, 2, 1)
        np.testing.assert_array_equal(result.expert_ids, expected)


def test_whole_matmuls_agree_with_tiles(params, runner, prompts):
    whole = PagedRunner(
        CONFIG,
        params,
        num_blocks=96,
        block_size=BLOCK,
        token_buckets=(64,),
        max_blocks_per_seq=16,
        row_tile=None,
        debug=True,
    )
    _, tiled = _alone(runner, prompts[0])
    _, result = _alone(whole, prompts[0])
    np.testing.assert_allclose(result.hidden, tiled.hidden, atol=1e-4)
    np.testing.assert_array_equal(result.counts[0], tiled.counts[0])


@pytest.mark.parametrize("bucket", [64, 128])
def test_bucket_changes_no_bit(params, runner, prompts, bucket):
    only = PagedRunner(
        CONFIG,
        params,
        num_blocks=96,
        block_size=BLOCK,
        token_buckets=(bucket,),
        max_blocks_per_seq=16,
        debug=True,
    )
    for prompt in prompts:
        _, expected = _alone(runner, prompt)
        _, result = _alone(only, prompt)
        assert result.bucket == bucket
        np.testing.assert_array_equal(_bits(result.hidden), _bits(expected.hidden))
        np.testing.assert_array_equal(_bits(result.logits()), _bits(expected.logits()))
        np.testing.assert_array_equal(result.counts[0], expected.counts[0])


@pytest.mark.parametrize("cuts", [(1,), (5,), (8,), (16, 17), (3, 20, 36)])
def test_chunking_changes_no_bit(runner, prompts, cuts):
    prompt = prompts[0]
    _, expected = _alone(runner, prompt)
    pool = runner.new_pool()
    hidden, counts = [], np.zeros(expected.counts[0].shape, int)
    edges = (0, *cuts, len(prompt))
    for low, high in itertools.pairwise(edges):
        pool, part = runner.step(
            pool, [Chunk(token_ids=prompt[low:high], start=low, block_ids=_blocks(0))]
        )
        hidden.append(part.hidden)
        first = low // BLOCK
        counts[first : first + len(part.counts[0])] += part.counts[0]
    np.testing.assert_array_equal(_bits(np.concatenate(hidden)), _bits(expected.hidden))
    np.testing.assert_array_equal(counts, expected.counts[0])
    np.testing.assert_array_equal(_bits(part.logits()), _bits(expected.logits()))


def test_company_changes_no_bit(runner, prompts):
    chunks = [Chunk(token_ids=p, start=0, block_ids=_blocks(i)) for i, p in enumerate(prompts)]
    order = [3, 0, 4, 2, 1]
    _, packed = runner.step(runner.new_pool(), [chunks[i] for i in order])
    begin = 0
    for place, index in enumerate(order):
        _, expected = _alone(runner, prompts[index], index)
        end = begin + len(prompts[index])
        np.testing.assert_array_equal(_bits(packed.hidden[begin:end]), _bits(expected.hidden))
        np.testing.assert_array_equal(_bits(packed.logits()[place]), _bits(expected.logits()[0]))
        np.testing.assert_array_equal(packed.counts[place], expected.counts[0])
        begin = end


def test_decode_in_company_equals_prefill(runner, prompts):
    """A token decoded beside others has the bits it has inside its own prefill."""
    expected = [_alone(runner, p, i)[1] for i, p in enumerate(prompts)]
    pool = runner.new_pool()
    for index, prompt in enumerate(prompts):
        if len(prompt) > 1:
            chunk = Chunk(token_ids=prompt[:-1], start=0, block_ids=_blocks(index))
            pool, _ = runner.step(pool, [chunk])
    chunks = [
        Chunk(token_ids=p[-1:], start=len(p) - 1, block_ids=_blocks(i))
        for i, p in enumerate(prompts)
    ]
    _, step = runner.step(pool, chunks)
    assert step.bucket == 16
    for index, whole in enumerate(expected):
        np.testing.assert_array_equal(_bits(step.hidden[index]), _bits(whole.hidden[-1]))
        np.testing.assert_array_equal(_bits(step.logits()[index]), _bits(whole.logits()[0]))


def test_counts_are_the_ids_counted(runner, prompts):
    _, result = _alone(runner, prompts[0])
    counts = np.zeros(result.counts[0].shape, int)
    for layer in range(CONFIG.num_layers):
        for token in range(len(prompts[0])):
            for expert in result.expert_ids[layer, :, token]:
                counts[token // BLOCK, layer, expert] += 1
    np.testing.assert_array_equal(result.counts[0], counts)
    distinct = np.mean([len(np.unique(ids)) for ids in result.expert_ids])
    assert result.distinct_experts == pytest.approx(distinct)


def test_padding_writes_nowhere(runner, prompts):
    pool, _ = _alone(runner, prompts[2])
    touched = -(-len(prompts[2]) // BLOCK)
    for cache in (*pool.keys, *pool.values):
        assert not np.asarray(cache)[touched:].any()
        assert not np.asarray(cache)[0, len(prompts[2]) :].any()


def test_serving_never_recompiles(runner, prompts):
    pool = runner.warm_up(runner.new_pool())
    compiled = paged_step._cache_size()
    for prompt in prompts:
        pool, _ = runner.step(pool, [Chunk(token_ids=prompt, start=0, block_ids=_blocks(1))])
    chunks = [Chunk(token_ids=p[:1], start=0, block_ids=_blocks(i)) for i, p in enumerate(prompts)]
    runner.step(pool, chunks)
    assert paged_step._cache_size() == compiled


def test_count_capacity_holds_the_worst_packing():
    # One token per sequence is the packing with most blocks per token.
    assert num_count_rows(16, 16, 8) >= 16
    assert num_count_rows(17, 1, 8) >= 4
