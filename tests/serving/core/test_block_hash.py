"""The chained block hash against a loop in exact integers, and the promises it makes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.block_hash import BlockHasher

_MASK = (1 << 64) - 1
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)


def _mix(value):
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _by_the_definition(tokens, block, seed, salt):
    """H_i of the module's text, with Python integers and no tricks."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    multipliers = [int(m) | 1 for m in draw.integers(0, _MASK, block, np.uint64, True)]
    base = int(draw.integers(0, _MASK, dtype=np.uint64, endpoint=True)) | 1
    offset = int(draw.integers(0, _MASK, dtype=np.uint64, endpoint=True))
    chain = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "big") | 1
    chain = chain if salt else 0
    out = []
    for start in range(0, len(tokens) - block + 1, block):
        terms = zip(tokens[start : start + block], multipliers, strict=True)
        inner = offset + sum(token * m for token, m in terms)
        chain = (chain * base + _mix(inner)) & _MASK
        out.append(_mix(chain))
    return out


@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS, block=st.integers(1, 9), seed=st.integers(0, 2**32), salt=st.text(max_size=3))
def test_equals_its_definition(tokens, block, seed, salt):
    hashes = BlockHasher(block, seed=seed).hashes(np.array(tokens, np.int64), salt=salt)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == _by_the_definition(tokens, block, seed, salt)


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 5), min_size=12, max_size=60), data=st.data())
def test_names_the_prefix_and_nothing_else(tokens, data):
    hasher = BlockHasher(4)
    hashes = hasher.hashes(np.array(tokens, np.int32))
    cut = data.draw(st.integers(0, len(tokens)))
    np.testing.assert_array_equal(
        hasher.hashes(np.array(tokens[:cut], np.int32)), hashes[: cut // 4]
    )
    place = data.draw(st.integers(0, len(hashes) * 4 - 1))
    changed = list(tokens)
    changed[place] += 1
    other = hasher.hashes(np.array(changed, np.int32))
    assert (other[: place // 4] == hashes[: place // 4]).all()
    assert (other[place // 4 :] != hashes[place // 4 :]).all()


def test_order_salt_and_seed_matter():
    tokens = np.arange(64, dtype=np.int32)
    plain = BlockHasher(16).hashes(tokens)
    swapped = np.concatenate([tokens[16:32], tokens[:16], tokens[32:]])
    assert (BlockHasher(16).hashes(swapped) != plain).all()
    assert (BlockHasher(16).hashes(tokens, salt="tenant") != plain).all()
    assert (BlockHasher(16, seed=1).hashes(tokens) != plain).all()


def test_no_collision_among_many_near_equal_blocks():
    """Blocks that differ in one small token are what a weak hash merges first."""
    hasher = BlockHasher(16)
    seen = set()
    for place in range(16):
        for value in range(4000):
            block = np.zeros(16, np.int32)
            block[place] = value
            seen.add(int(hasher.hashes(block)[0]))
    assert len(seen) == 16 * 3999 + 1


def test_partial_blocks_are_not_hashed():
    assert len(BlockHasher(16).hashes(np.arange(15, dtype=np.int32))) == 0
    assert len(BlockHasher(16).hashes(np.arange(33, dtype=np.int32))) == 2


def test_refuses():
    with pytest.raises(ValueError, match="block_size_tokens"):
        BlockHasher(0)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockHasher(1).hashes(np.zeros(70_000, np.int32))
