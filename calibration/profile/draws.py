"""Draws a token's experts without replacement: the inner loop of the profile generator.

Successive draws, each with probability proportional to the weights that are left (the
Plackett-Luce law). Weights are summed in blocks, so that a draw walks a few sums and not all
experts. numba compiles it (extra `replay`); without it the interpreter runs the same lines with
the same results, which suits small cases only.
"""

from __future__ import annotations

import numpy as np

from serving.replay.compiled import jit

_BLOCK = 8


@jit
def draw_experts(table, rows, bias, uniforms, floor, out):
    """Experts of each token in one layer.

    Args:
        table: float32 [R, E], weights per row, >= 0.
        rows: integer [T], each token's row.
        bias: float32 [E] > 0, factors on the weights.
        uniforms: float64 [T, K] in [0, 1).
        floor: added to every weight before the factor, > 0.
        out: integer [T, K], takes distinct ids; K <= E.
    """
    num_tokens, num_drawn = uniforms.shape
    num_experts = len(bias)
    num_blocks = (num_experts + _BLOCK - 1) // _BLOCK
    weights = np.zeros(num_blocks * _BLOCK)
    sums = np.zeros(num_blocks)
    for token in range(num_tokens):
        row = rows[token]
        for expert in range(num_experts):
            weights[expert] = (table[row, expert] + floor) * bias[expert]
        for block in range(num_blocks):
            left = 0.0
            for expert in range(block * _BLOCK, (block + 1) * _BLOCK):
                left += weights[expert]
            sums[block] = left
        for drawn in range(num_drawn):
            total = 0.0
            for block in range(num_blocks):
                total += sums[block]
            target = uniforms[token, drawn] * total
            # Rounding may carry the target past the end: the last one with weight takes it.
            chosen_block = -1
            for block in range(num_blocks):
                if sums[block] > 0.0:
                    chosen_block = block
                    if target < sums[block]:
                        break
                    target -= sums[block]
            chosen = -1
            for expert in range(chosen_block * _BLOCK, (chosen_block + 1) * _BLOCK):
                if weights[expert] > 0.0:
                    chosen = expert
                    if target < weights[expert]:
                        break
                    target -= weights[expert]
            out[token, drawn] = chosen
            weights[chosen] = 0.0
            left = 0.0
            for expert in range(chosen_block * _BLOCK, (chosen_block + 1) * _BLOCK):
                left += weights[expert]
            sums[chosen_block] = left
