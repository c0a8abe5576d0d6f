"""From the packed requests of a step to the output row of each token.

A step packs chunks of several requests behind each other. A request's chunk may
begin in the middle of one of its KV blocks, and no two requests share a block:
each chunk starts a new row of the histogram.

    request 0, 3 tokens before it in its block (block_size 4):  . . . a | b b b b
    request 1, at a block's start:                              c c c c | d
    block_of_token:  [0 1 1 1 1 2 2 2 2 3]
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels.expert_histogram.errors import HistogramArgumentError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """Where the blocks of a step's requests lie in the histogram.

    Attributes:
        block_of_token: [T] int32 output row of each token, -1 for padding.
        first_row: [R] int32 first output row of each request.
        num_rows: [R] int32 rows of each request; row first_row[r] + i belongs to
            the request's KV block start_tokens[r] // block_size + i.
    """

    block_of_token: jax.Array
    first_row: jax.Array
    num_rows: jax.Array


def max_num_blocks(*, num_tokens: int, num_requests: int, block_size: int) -> int:
    """Rows that are enough for any packing of `num_tokens` into `num_requests`.

    A chunk of n >= 1 tokens touches at most 1 + ceil((n - 1) / B) blocks (its first
    token may be a block's last). Over at most R chunks of together T tokens that is at
    most R + floor((T + R * (B - 2)) / B), and never more than T. One request needs
    ceil(T / B) + 1; ceil(T / B) + R is too few as soon as two chunks straddle.

    Args:
        num_tokens: T, capacity of the step in tokens.
        num_requests: R, most requests in a step.
        block_size: B, tokens in a KV block.

    Returns:
        The smallest such number of rows.

    Raises:
        HistogramArgumentError: a size is not positive.
    """
    for name, value in (
        ("num_tokens", num_tokens),
        ("num_requests", num_requests),
        ("block_size", block_size),
    ):
        if value < 1:
            raise HistogramArgumentError(f"{name}={value} must be at least 1")
    chunks = min(num_requests, num_tokens)
    straddling = (num_tokens + chunks * (block_size - 2)) // block_size
    return min(num_tokens, chunks + straddling)


def pack_blocks(
    start_tokens: jax.Array, num_new_tokens: jax.Array, *, num_tokens: int, block_size: int
) -> PackedBlocks:
    """Rows of the requests' chunks, packed in order from token 0 of the step.

    Pure and traceable. Requests without new tokens take no row.

    Args:
        start_tokens: [R] int32, each request's tokens that earlier steps have placed,
            so its chunk begins at offset start_tokens % block_size of a block.
        num_new_tokens: [R] int32, each chunk's tokens; together at most `num_tokens`.
        num_tokens: T, capacity of the step in tokens (static).
        block_size: B, tokens in a KV block (static).

    Returns:
        The rows; tokens beyond the last chunk are padding.
    """
    offset = start_tokens % block_size
    num_rows = jnp.where(num_new_tokens > 0, (offset + num_new_tokens - 1) // block_size + 1, 0)
    last_row = jnp.cumsum(num_rows)
    first_row = last_row - num_rows
    last_token = jnp.cumsum(num_new_tokens)
    first_token = last_token - num_new_tokens
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.searchsorted(last_token, token, side="right").astype(jnp.int32)
    valid = request < start_tokens.shape[0]
    request = jnp.where(valid, request, 0)
    within = (token - first_token[request] + offset[request]) // block_size
    block = jnp.where(valid, first_row[request] + within, -1)
    return PackedBlocks(
        block_of_token=block.astype(jnp.int32),
        first_row=first_row.astype(jnp.int32),
        num_rows=num_rows.astype(jnp.int32),
    )
