# Triton is installed on GPU hosts only.
# pyright: reportMissingImports=false
"""The Triton kernel of the histogram; importing this module needs triton.

One program counts one output row (KV block) and layer: it walks over the row's tokens
in tiles, adds each tile's histogram in registers and stores the row once, in the output
dtype. Since a row belongs to one program, ragged and packed requests need neither
atomics nor a cleared output.
"""

import triton
import triton.language as tl

MAX_TILE_IDS = 2048
"""Ids that a program holds at a time; more only spill."""


@triton.jit
def count_row(
    ids_ptr,  # [L, K, T] int32
    block_of_token_ptr,  # [T] int32
    first_token_ptr,  # [num_blocks] int32
    end_token_ptr,  # [num_blocks] int32
    out_ptr,  # [num_blocks, L, E]
    num_layers: tl.constexpr,
    top_k: tl.constexpr,
    num_tokens: tl.constexpr,
    num_experts: tl.constexpr,
    num_bins: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_ids: tl.constexpr,
):
    """Counts the experts of one row and layer.

    Grid: (num_blocks, num_layers). `num_bins` is the power of two from `num_experts` on,
    `tile_ids` the one from `top_k * tile_tokens` on. The row's tokens lie in
    [first_token, end_token); other rows' or padding tokens between them are skipped.
    """
    row = tl.program_id(0)
    layer = tl.program_id(1)
    first = tl.load(first_token_ptr + row)
    end = tl.load(end_token_ptr + row)
    index = tl.arange(0, tile_ids)
    rank = index // tile_tokens
    within = index % tile_tokens
    counts = tl.zeros([num_bins], tl.int32)
    for start in range(first, end, tile_tokens):
        token = start + within
        inside = (token < end) & (rank < top_k)
        block = tl.load(block_of_token_ptr + token, mask=inside, other=-1)
        inside = inside & (block == row)
        at = (layer * top_k + rank) * num_tokens + token
        expert = tl.load(ids_ptr + at, mask=inside, other=-1)
        countable = (expert >= 0) & (expert < num_experts)
        counts += tl.histogram(expert, num_bins, mask=countable)
    bins = tl.arange(0, num_bins)
    out = out_ptr + (row * num_layers + layer) * num_experts + bins
    tl.store(out, counts.to(out_ptr.dtype.element_ty), mask=bins < num_experts)


def tile_sizes(*, top_k: int, num_experts: int, block_size: int, num_tokens: int) -> dict[str, int]:
    """Compile-time sizes of `count_row`.

    Args:
        top_k: K.
        num_experts: E.
        block_size: tokens in a KV block, the most that a row holds.
        num_tokens: T.

    Returns:
        num_bins, tile_tokens and tile_ids.
    """
    most = triton.next_power_of_2(min(block_size, num_tokens))
    fitting = MAX_TILE_IDS // triton.next_power_of_2(top_k)
    tile_tokens = max(1, min(most, fitting))
    return {
        "num_bins": max(2, triton.next_power_of_2(num_experts)),
        "tile_tokens": tile_tokens,
        "tile_ids": triton.next_power_of_2(top_k) * tile_tokens,
    }
