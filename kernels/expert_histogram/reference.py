"""The histogram in plain NumPy loops: slow, obvious, the judge of every backend."""

import numpy as np

from kernels.expert_histogram.arg_specs import HistogramSpec


def expert_histogram(
    ids: np.ndarray, block_of_token: np.ndarray, spec: HistogramSpec
) -> np.ndarray:
    """Counts, for each block and layer, the tokens whose ids name each expert.

    Args:
        ids: [L, K, T] int32, -1 (or anything outside [0, E)) counts nothing.
        block_of_token: [T] int32, a value outside [0, num_blocks) counts nothing.
        spec: the call's sizes.

    Returns:
        [num_blocks, L, E] of `spec.dtype`.
    """
    counts = np.zeros(spec.out_shape, np.int64)
    for token, block in enumerate(block_of_token):
        if not 0 <= block < spec.num_blocks:
            continue
        for layer in range(spec.num_layers):
            for expert in ids[layer, :, token]:
                if 0 <= expert < spec.num_experts:
                    counts[block, layer, expert] += 1
    return counts.astype(spec.dtype)
