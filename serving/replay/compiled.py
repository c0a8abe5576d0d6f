"""The three pieces of the decode kernel that numba and NumPy say differently.

With numba (extra `replay`) they are compiled together with the loop around them
(replay/decode_kernel.py); without it the same loop runs in the interpreter over NumPy
calls: slow, for small cases, and with the same results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import numba
except ModuleNotFoundError:
    numba = None

HAS_NUMBA = numba is not None
_MASK = (1 << 64) - 1


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function where numba is installed."""
    return numba.njit(cache=True, error_model="numpy")(function) if numba is not None else function


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function into its callers: handing dozens of arrays over outweighs a step."""
    if numba is None:
        return function
    return numba.njit(cache=True, error_model="numpy", inline="always")(function)


def _row_of_python(key: Any, token: int, start: int, num_rows: int) -> int:
    """Row of an output token: the token's own draw from its prompt's rows."""
    value = (int(key) + int(token) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    value ^= value >> 31
    return int(start) + value % int(num_rows)


def _layers_python(
    rows: Any, chosen: Any, num: int, masks: Any, moe_s: Any, words: Any, found: Any
) -> float:
    """Seconds of the MoE layers over the union of some rows.

    Args:
        rows: uint64 [R, L, Wd].
        chosen: int64 [>= num], the rows of the step.
        num: requests in the step.
        masks: uint64 [ranks, Wd]; which experts each expert-parallel rank holds.
        moe_s: float64 [S + 1, E + 1]; a layer's seconds by requests and distinct experts.
        words: uint64 [L, Wd] scratch.
        found: int64 [1], takes the distinct experts summed over layers.
    """
    union = np.bitwise_or.reduce(rows[chosen[:num]], axis=0)
    counts = np.bitwise_count(union[:, None, :] & masks[None]).sum(axis=2, dtype=np.int64)
    found[0] = counts.sum()
    seconds = 0.0
    for worst in counts.max(axis=1).tolist():
        seconds += float(moe_s[num, worst])
    return seconds


if numba is None:
    row_of = _row_of_python
    layers_s = _layers_python
else:

    @jit
    def row_of(key: Any, token: int, start: int, num_rows: int) -> Any:
        """See `_row_of_python`."""
        value = key + np.uint64(token) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
        return start + np.int64(value % np.uint64(num_rows))

    @jit
    def _popcount(value: Any) -> Any:
        # The idiom LLVM turns into one instruction.
        value = value - ((value >> np.uint64(1)) & np.uint64(0x5555555555555555))
        low = value & np.uint64(0x3333333333333333)
        value = low + ((value >> np.uint64(2)) & np.uint64(0x3333333333333333))
        value = (value + (value >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        return np.int64((value * np.uint64(0x0101010101010101)) >> np.uint64(56))

    @jit
    def layers_s(
        rows: Any, chosen: Any, num: int, masks: Any, moe_s: Any, words: Any, found: Any
    ) -> float:
        """See `_layers_python`."""
        num_layers, num_words = words.shape
        num_ranks = masks.shape[0]
        words[:] = np.uint64(0)
        for i in range(num):
            row = rows[chosen[i]]
            for layer in range(num_layers):
                for word in range(num_words):
                    words[layer, word] |= row[layer, word]
        total = 0
        seconds = 0.0
        for layer in range(num_layers):
            worst = 0
            for rank in range(num_ranks):
                held = 0
                for word in range(num_words):
                    held += _popcount(words[layer, word] & masks[rank, word])
                total += held
                if held > worst:
                    worst = held
            seconds += moe_s[num, worst]
        found[0] = total
        return seconds
