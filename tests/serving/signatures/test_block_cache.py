from __future__ import annotations

import numpy as np
import pytest

from serving.core.block_hash import BlockHasher
from serving.core.signature import Signature, SignatureSource
from serving.signatures.block_cache import BlockSignatureCache
from serving.signatures.model import SignatureModel

B, NUM_EXPERTS, TOP_K = 4, 6, 2
MODEL = SignatureModel(
    version="sig-test",
    mask_version="mask-test",
    layers=np.array([1, 0], np.int32),
    num_layers=2,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    idf=np.ones((2, NUM_EXPERTS), np.float32),
)
HASHER = BlockHasher(B)


def rows_of(token_ids: np.ndarray) -> np.ndarray:
    """Counts per block when token t goes to experts t % 6 and (t + 1) % 6 everywhere."""
    num_blocks = -(-len(token_ids) // B)
    rows = np.zeros((num_blocks, 2, NUM_EXPERTS), np.uint32)
    for position, token in enumerate(token_ids.tolist()):
        for expert in (token % NUM_EXPERTS, (token + 1) % NUM_EXPERTS):
            rows[position // B, :, expert] += 1
    return rows


def live(token_ids: np.ndarray) -> Signature:
    return MODEL.signature(
        rows_of(token_ids).sum(axis=0), len(token_ids), source=SignatureSource.LIVE
    )


def new_cache(max_bytes: int = 1 << 16) -> BlockSignatureCache:
    return BlockSignatureCache(MODEL, block_size_tokens=B, max_bytes=max_bytes)


def test_all_blocks_cached_is_exact():
    tokens = np.arange(12)
    cache = new_cache()
    cache.put_blocks(HASHER.hashes(tokens), rows_of(tokens))
    got = cache.lookup(HASHER.hashes(tokens), 12)
    assert got is not None
    assert np.array_equal(got.counts, live(tokens).counts)
    assert np.array_equal(got.vector, live(tokens).vector)
    assert (got.confidence, got.num_tokens) == (1.0, 12)
    assert got.source is SignatureSource.CACHED_BLOCKS


def test_a_prefix_counts_only_its_own_tokens_and_says_how_much_that_is():
    tokens = np.arange(40)
    cache = new_cache()
    cache.put_blocks(HASHER.hashes(tokens[:12]), rows_of(tokens[:12]))
    got = cache.lookup(HASHER.hashes(tokens), 40)
    assert got is not None
    assert np.array_equal(got.counts, live(tokens[:12]).counts)
    assert got.confidence == pytest.approx(12 / 40)


def test_the_same_block_behind_another_prefix_is_not_a_hit():
    cache = new_cache()
    cache.put_blocks(HASHER.hashes(np.arange(12)), rows_of(np.arange(12)))
    other = np.concatenate([np.full(4, 77), np.arange(4, 12)])
    assert cache.lookup(HASHER.hashes(other), 12) is None


def test_the_next_turn_finds_the_last_turns_signature():
    first, second = np.arange(10), np.arange(21)
    cache = new_cache()
    cache.put_prompt(HASHER.hashes(first), live(first))
    got = cache.lookup(HASHER.hashes(second), 21)
    assert got is not None
    assert np.array_equal(got.counts, live(first).counts)
    assert got.num_tokens == 10
    # The tail behind the last full block is not vouched for by any hash.
    assert got.confidence == pytest.approx(8 / 21)


def test_whichever_reaches_further_answers():
    tokens = np.arange(16)
    cache = new_cache()
    hashes = HASHER.hashes(tokens)
    cache.put_blocks(hashes[:2], rows_of(tokens)[:2])
    cache.put_prompt(hashes[:1], live(tokens[:5]))
    short = cache.lookup(hashes, 16)
    assert short is not None
    assert short.num_tokens == 8
    cache.put_prompt(hashes[:3], live(tokens[:12]))
    far = cache.lookup(hashes, 16)
    assert far is not None
    assert far.num_tokens == 12


def test_only_exact_counts_are_remembered():
    tokens = np.arange(8)
    guess = MODEL.signature(
        rows_of(tokens).sum(axis=0), 8, source=SignatureSource.TOKEN_TABLE, confidence=0.5
    )
    cache = new_cache()
    cache.put_prompt(HASHER.hashes(tokens), guess)
    cache.put_prompt(HASHER.hashes(tokens[:3]), live(tokens[:3]))
    assert len(cache) == 0


def test_memory_is_bounded_and_the_least_recently_used_leaves():
    cache = new_cache(max_bytes=2 * 3 * 12 * 1 + 300)
    num_bytes = cache.num_bytes
    keep = np.arange(100, 104)
    cache.put_blocks(HASHER.hashes(keep), rows_of(keep))
    for start in range(0, 4000, 4):
        tokens = np.arange(start, start + 4)
        cache.put_blocks(HASHER.hashes(tokens), rows_of(tokens))
        cache.put_prompt(HASHER.hashes(tokens), live(tokens))
        assert cache.lookup(HASHER.hashes(keep), 4) is not None
    assert cache.num_bytes == num_bytes <= 400
    assert len(cache) * 12 <= 400
    assert cache.lookup(HASHER.hashes(np.arange(4)), 4) is None


def test_counts_that_cannot_be_are_refused():
    cache = new_cache()
    hashes = HASHER.hashes(np.arange(8))
    with pytest.raises(ValueError, match="must sum to 8"):
        cache.put_blocks(hashes, rows_of(np.arange(8)) * 2)
    with pytest.raises(ValueError, match="rows have shape"):
        cache.put_blocks(hashes, rows_of(np.arange(4)))
    with pytest.raises(ValueError, match="max_bytes"):
        new_cache(max_bytes=10)
