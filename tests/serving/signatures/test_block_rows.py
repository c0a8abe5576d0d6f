from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.signatures.block_rows import BlockCounts

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 7, 2


def token_experts(num_tokens: int, seed: int) -> np.ndarray:
    """One-hot experts of each token, uint16 [T, L, E]."""
    rng = np.random.default_rng(seed)
    hot = np.zeros((num_tokens, NUM_LAYERS, NUM_EXPERTS), np.uint16)
    order = rng.random(hot.shape).argsort(axis=2)[..., :TOP_K]
    np.put_along_axis(hot, order, 1, axis=2)
    return hot


def chunk_counts(hot: np.ndarray, start: int, block_size: int) -> np.ndarray:
    """What a step reports for tokens hot[start:...]: counts per touched block."""
    blocks = (start + np.arange(len(hot))) // block_size
    first = start // block_size
    counts = np.zeros((blocks[-1] - first + 1, NUM_LAYERS, NUM_EXPERTS), np.uint16)
    np.add.at(counts, blocks - first, hot)
    return counts


def new_rows(block_size: int, num_blocks: int = 64) -> BlockCounts:
    rows = BlockCounts(
        num_blocks=num_blocks,
        block_size_tokens=block_size,
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
    )
    rows.rows[:] = 999  # what an earlier owner of the blocks left behind
    return rows


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_chunking_sums_to_the_same_signature(data):
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    num_tokens = data.draw(st.integers(1, 50))
    hot = token_experts(num_tokens, data.draw(st.integers(0, 1000)))
    block_ids = np.random.default_rng(0).permutation(64)[: -(-num_tokens // block_size)]
    rows = new_rows(block_size)
    start = 0
    while start < num_tokens:
        length = data.draw(st.integers(1, num_tokens - start))
        counts = chunk_counts(hot[start : start + length], start, block_size)
        rows.add_chunk(block_ids, start, counts)
        start += length
    assert np.array_equal(rows.total(block_ids), hot.sum(axis=0))
    layers = np.array([2, 0])
    assert np.array_equal(rows.total(block_ids, layers), hot.sum(axis=0)[layers])


def test_a_cached_prefix_gives_what_a_cold_prompt_gives():
    prompt = token_experts(41, 1)
    cold, warm = new_rows(8), new_rows(8)
    cold.add_chunk(np.arange(6), 0, chunk_counts(prompt, 0, 8))
    # An earlier request left the first 32 tokens in other blocks; only the rest is computed.
    warm.add_chunk([9, 3, 7, 1], 0, chunk_counts(prompt[:32], 0, 8))
    warm.add_chunk([9, 3, 7, 1, 20, 21], 32, chunk_counts(prompt[32:], 32, 8))
    assert np.array_equal(cold.total(np.arange(6)), warm.total([9, 3, 7, 1, 20, 21]))


def test_decode_steps_add_to_the_last_block_and_begin_the_next():
    hot = token_experts(10, 2)
    rows = new_rows(4)
    rows.add_chunk([5, 6], 0, chunk_counts(hot[:6], 0, 4))
    for position in range(6, 10):
        rows.add_chunk([5, 6, 7], position, chunk_counts(hot[position : position + 1], position, 4))
    assert np.array_equal(rows.rows[5], hot[:4].sum(axis=0))
    assert np.array_equal(rows.rows[6], hot[4:8].sum(axis=0))
    assert np.array_equal(rows.rows[7], hot[8:].sum(axis=0))


def test_a_reused_block_forgets_its_earlier_owner():
    rows = new_rows(4)
    first, second = token_experts(4, 3), token_experts(2, 4)
    rows.add_chunk([5], 0, chunk_counts(first, 0, 4))
    rows.add_chunk([5], 0, chunk_counts(second, 0, 4))
    assert np.array_equal(rows.total([5]), second.sum(axis=0))


def test_rows_travel_with_their_blocks():
    here, there = new_rows(4), new_rows(4)
    hot = token_experts(8, 5)
    here.add_chunk([1, 2], 0, chunk_counts(hot, 0, 4))
    sent = here.take([1, 2])
    here.rows[:] = 0
    there.put([30, 4], sent)
    assert np.array_equal(there.total([30, 4]), hot.sum(axis=0))


def test_a_full_block_of_one_expert_fits():
    rows = BlockCounts(num_blocks=1, block_size_tokens=65_535, num_layers=1, num_experts=1)
    rows.add_chunk([0], 0, np.array([[[65_534]]]))
    rows.add_chunk([0], 65_534, np.array([[[1]]]))
    assert rows.total([0]).tolist() == [[65_535]]


def test_impossible_arguments_are_refused():
    with pytest.raises(ValueError, match="uint16"):
        BlockCounts(num_blocks=1, block_size_tokens=65_536, num_layers=1, num_experts=1)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockCounts(num_blocks=0, block_size_tokens=1, num_layers=1, num_experts=1)
    rows = new_rows(4)
    with pytest.raises(ValueError, match="touches 2 blocks"):
        rows.add_chunk([5], 0, np.zeros((2, NUM_LAYERS, NUM_EXPERTS), np.uint16))
    with pytest.raises(ValueError, match="must end in"):
        rows.add_chunk([5], 0, np.zeros((1, NUM_LAYERS, NUM_EXPERTS + 1), np.uint16))
