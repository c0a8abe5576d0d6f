from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.block_hash import BlockHasher
from serving.engines.embedded.block_pool import BlockPool, NoFreeBlocks
from serving.engines.embedded.prefix_cache import PrefixCache

BLOCK = 4


def pool_of(num_blocks: int, *, cached: bool = True) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache(BlockHasher(BLOCK)) if cached else None)


class Model:
    """What the pool should be: content of each block by name, and holders."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = dict.fromkeys(range(num_blocks), 0)
        self.published: dict[int, int] = {}  # hash -> block

    def check(self, pool: BlockPool) -> None:
        held = {block for block, count in self.holders.items() if count}
        assert pool.num_in_use == len(held)
        assert pool.num_available == len(self.holders) - len(held)
        for block, count in self.holders.items():
            assert pool.references(block) == count
        cached = {block for block in self.published.values() if block not in held}
        assert pool.num_cached == len(cached)
        for block_hash, block in self.published.items():
            assert pool.match([block_hash], 1) == [block]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_a_model(data):
    num_blocks = data.draw(st.integers(1, 12))
    pool, model = pool_of(num_blocks), Model(num_blocks)
    owners: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["reserve", "release", "publish", "flush"]))
        if action == "reserve":
            prefix = data.draw(st.lists(st.integers(0, 8), max_size=4))
            shared = pool.match(prefix, data.draw(st.integers(0, 4)))
            assert shared == [model.published[h] for h in prefix[: len(shared)]]
            num_new = data.draw(st.integers(0, num_blocks))
            room = sum(not n for b, n in model.holders.items() if b not in shared)
            if num_new > room:
                with pytest.raises(NoFreeBlocks):
                    pool.reserve(shared, num_new)
            else:
                blocks = pool.reserve(shared, num_new)
                fresh = blocks[len(shared) :]
                assert len(set(fresh)) == num_new
                assert all(model.holders[b] == 0 for b in fresh), "a held block was taken"
                model.published = {h: b for h, b in model.published.items() if b not in fresh}
                for block in blocks:
                    model.holders[block] += 1
                owners.append(blocks)
        elif action == "release" and owners:
            blocks = owners.pop(data.draw(st.integers(0, len(owners) - 1)))
            pool.release(blocks)
            for block in blocks:
                model.holders[block] -= 1
        elif action == "publish" and owners:
            blocks = data.draw(st.sampled_from(owners))
            if blocks:
                block = data.draw(st.sampled_from(blocks))
                name = data.draw(st.integers(0, 8))
                pool.publish(block, name)
                if name not in model.published and block not in model.published.values():
                    model.published[name] = block
        elif action == "flush":
            pool.flush()
            model.published.clear()
        model.check(pool)
    for blocks in owners:
        pool.release(blocks)
    assert pool.num_in_use == 0
    assert pool.reserve([], num_blocks)


def test_a_double_release_is_refused_and_changes_nothing_more():
    pool = pool_of(2)
    blocks = pool.reserve([], 1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(blocks)
    assert pool.num_available == 2


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head():
    pool = pool_of(4)
    old, young = pool.reserve([], 2), pool.reserve([], 2)
    for name, block in enumerate(old + young):
        pool.publish(block, name)
    pool.release(old)
    pool.release(young)
    assert pool.reserve([], 1) == [old[1]]
    assert pool.match([0, 1], 2) == [old[0]]
    assert pool.match([2, 3], 2) == young
    assert pool.reserve([], 2) == [old[0], young[1]]


def test_a_hit_is_used_last_of_all():
    pool = pool_of(3)
    blocks = pool.reserve([], 3)
    for name, block in enumerate(blocks):
        pool.publish(block, name)
    pool.release(blocks)
    shared = pool.match([0], 1)
    pool.release(pool.reserve(shared, 0))
    assert pool.reserve([], 2) == [blocks[2], blocks[1]]


def test_without_a_cache_nothing_is_kept():
    pool = pool_of(2, cached=False)
    blocks = pool.reserve([], 2)
    pool.publish(blocks[0], 7)
    pool.release(blocks)
    assert pool.num_cached == 0
    assert pool.match([7], 1) == []


def test_salts_do_not_share():
    cache = PrefixCache(BlockHasher(BLOCK))
    tokens = np.arange(8, dtype=np.int32)
    plain, salted = cache.hashes(tokens, ""), cache.hashes(tokens, "tenant")
    cache.insert(0, plain[0])
    assert cache.match(plain, 2) == [0]
    assert cache.match(salted, 2) == []


def test_cached_blocks_that_are_shared_cannot_also_be_taken():
    pool = pool_of(3)
    blocks = pool.reserve([], 2)
    for name, block in enumerate(blocks):
        pool.publish(block, name)
    pool.release(blocks)
    with pytest.raises(NoFreeBlocks, match="2 blocks wanted, 1 available"):
        pool.reserve(pool.match([0, 1], 2), 2)
    assert pool.num_in_use == 0
    assert pool.match([0, 1], 2) == blocks
