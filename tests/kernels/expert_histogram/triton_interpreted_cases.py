"""Runs the Triton kernel in Triton's interpreter against NumPy; prints the number of cases.

A program of its own because TRITON_INTERPRET must be set before triton is imported.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import numpy as np
import torch

from kernels.expert_histogram import reference, triton_kernel
from kernels.expert_histogram.arg_specs import HistogramSpec, default_out_dtype

TORCH_DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "int32": torch.int32}


def drawn_case(rng):
    """A small ragged packed step with holes, padding and ids out of range."""
    num_experts = int(rng.choice([1, 2, 5, 32, 60, 64, 128, 160]))
    top_k = int(rng.integers(1, min(10, num_experts) + 1))
    block_size = int(rng.choice([16, 32, 64, 128, 256]))
    num_tokens = int(rng.integers(1, 90))
    num_layers = int(rng.integers(1, 3))
    blocks, row = [], 0
    while len(blocks) < num_tokens and rng.random() < 0.9:
        length = int(rng.choice([1, 2, int(rng.integers(1, 70))]))
        within = (int(rng.integers(0, block_size)) + np.arange(length)) // block_size
        blocks += list(row + within - within[0])
        row = blocks[-1] + 1
    block_of_token = np.full(num_tokens, -1, np.int32)
    kept = np.asarray(blocks[:num_tokens], np.int32)
    block_of_token[: len(kept)] = kept
    block_of_token[rng.random(num_tokens) < 0.05] = -1
    scores = rng.random((num_layers, num_experts, num_tokens))
    ids = np.argsort(scores, axis=1)[:, :top_k].astype(np.int32)
    odd = rng.random(ids.shape) < 0.03
    ids[odd] = rng.choice([-1, -7, num_experts, 2**30], size=int(odd.sum()))
    # One row less than there are, at times: what lies outside must be left out.
    num_blocks = max(1, row - int(rng.random() < 0.2))
    spec = HistogramSpec(
        num_layers=num_layers,
        top_k=top_k,
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        num_experts=num_experts,
        block_size=block_size,
        out_dtype=str(rng.choice([default_out_dtype(block_size).name, "int32"])),
    )
    return ids, block_of_token, spec


def row_ranges(block_of_token, num_blocks):
    """First token of each row and one past its last, by search; JAX would compile each shape."""
    tokens = [np.flatnonzero(block_of_token == row) for row in range(num_blocks)]
    first = [found[0] if found.size else 0 for found in tokens]
    end = [found[-1] + 1 if found.size else 0 for found in tokens]
    return np.asarray(first, np.int32), np.asarray(end, np.int32)


def counted(ids, block_of_token, spec):
    """Counts by the interpreted kernel."""
    first, end = row_ranges(block_of_token, spec.num_blocks)
    out = torch.full(spec.out_shape, 77, dtype=TORCH_DTYPES[spec.out_dtype])
    triton_kernel.count_row[(spec.num_blocks, spec.num_layers)](
        torch.from_numpy(ids),
        torch.from_numpy(block_of_token),
        torch.from_numpy(first),
        torch.from_numpy(end),
        out,
        num_layers=spec.num_layers,
        top_k=spec.top_k,
        num_tokens=spec.num_tokens,
        num_experts=spec.num_experts,
        **triton_kernel.tile_sizes(
            top_k=spec.top_k,
            num_experts=spec.num_experts,
            block_size=spec.block_size,
            num_tokens=spec.num_tokens,
        ),
    )
    return out.numpy()


def main():
    num_cases = int(sys.argv[1])
    rng = np.random.default_rng(20)
    for case in range(num_cases):
        ids, block_of_token, spec = drawn_case(rng)
        want = reference.expert_histogram(ids, block_of_token, spec)
        np.testing.assert_array_equal(
            counted(ids, block_of_token, spec), want, err_msg=f"{case=} {spec=}"
        )
    sys.stdout.write(f"{num_cases}\n")


if __name__ == "__main__":
    main()
