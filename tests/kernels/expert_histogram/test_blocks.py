"""Packed requests become rows; the capacity is enough and not larger than needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.expert_histogram import HistogramArgumentError, max_num_blocks, pack_blocks

jitted_pack_blocks = jax.jit(pack_blocks, static_argnames=("num_tokens", "block_size"))

NUM_TOKENS = 96
NUM_REQUESTS = 6


def packed_by_hand(starts, lengths, num_tokens, block_size):
    """Walks token by token; a new row where the request or its KV block changes."""
    blocks, row, last = [], -1, None
    for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for position in range(start, start + length):
            if (request, position // block_size) != last:
                last = (request, position // block_size)
                row += 1
            blocks.append(row)
    return blocks + [-1] * (num_tokens - len(blocks)), row + 1


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 100), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    lengths=st.lists(st.integers(0, 16), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    block_size=st.sampled_from((2, 16)),
)
def test_rows_follow_the_tokens(starts, lengths, block_size):
    packed = jitted_pack_blocks(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        num_tokens=NUM_TOKENS,
        block_size=block_size,
    )
    blocks, num_rows = packed_by_hand(starts, lengths, NUM_TOKENS, block_size)
    assert packed.block_of_token.tolist() == blocks
    assert int(packed.num_rows.sum()) == num_rows
    assert packed.first_row.tolist() == [
        sum(packed.num_rows.tolist()[:request]) for request in range(NUM_REQUESTS)
    ]
    assert packed.block_of_token.dtype == jnp.int32
    assert num_rows <= max_num_blocks(
        num_tokens=NUM_TOKENS, num_requests=NUM_REQUESTS, block_size=block_size
    )


@pytest.mark.parametrize("block_size", [2, 3, 16])
def test_the_capacity_is_reached_by_some_packing(block_size):
    for num_requests in (1, 2, 5):
        for num_tokens in (1, 2, 5, 9, 32, 33):
            # Each chunk begins at a block's last token; the rest goes where it opens a block.
            chunks = min(num_requests, num_tokens)
            lengths = np.ones(chunks, int)
            spare = num_tokens - chunks
            opened, at = 0, 0
            while spare > 0 and at < chunks:
                lengths[at] += 1
                spare, opened, at = spare - 1, opened + 1, at + 1
            lengths[0] += spare
            extra = (lengths[0] - 2) // block_size if lengths[0] > 1 else 0
            most = chunks + opened + extra
            capacity = max_num_blocks(
                num_tokens=num_tokens, num_requests=num_requests, block_size=block_size
            )
            assert capacity == most


def test_one_request_needs_one_row_more_than_its_aligned_blocks():
    assert max_num_blocks(num_tokens=8192, num_requests=1, block_size=128) == 65


@pytest.mark.parametrize("field", ["num_tokens", "num_requests", "block_size"])
def test_capacity_refuses_nonsense(field):
    sizes = {"num_tokens": 4, "num_requests": 1, "block_size": 16} | {field: 0}
    with pytest.raises(HistogramArgumentError, match=f"{field}=0"):
        max_num_blocks(**sizes)
