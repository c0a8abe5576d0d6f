"""MXFP4 tensors to floats (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1).

Thirty-two 4-bit floats (one sign, two exponent, one mantissa bit) share an 8-bit power of two.
Checkpoints keep the pairs of nibbles as `NAME_blocks` (low nibble first) and the exponents, biased
by 127, as `NAME_scales`.
"""

from __future__ import annotations

import numpy as np

BLOCK_VALUES = 32
BLOCKS_SUFFIX = "_blocks"
SCALES_SUFFIX = "_scales"

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_SCALE_BIAS = 127
_SCALE_NAN = 255


def dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Floats of an MXFP4 tensor, exactly.

    Args:
      blocks: uint8 [..., G, 16], two values a byte.
      scales: uint8 [..., G], exponent of each group of 32.

    Returns:
      float32 [..., G*32].

    Raises:
      ValueError: names the shape or type that does not fit, a scale that means "not a number", or
        that a value is too large for a float32.
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"{blocks.dtype=} and {scales.dtype=} must be uint8")
    if blocks.shape != (*scales.shape, BLOCK_VALUES // 2):
        raise ValueError(f"{blocks.shape=} must be {(*scales.shape, BLOCK_VALUES // 2)}")
    if (scales == _SCALE_NAN).any():
        raise ValueError(f"scales hold {_SCALE_NAN}, which is not a number")
    values = np.empty((*scales.shape, BLOCK_VALUES), np.float32)
    values[..., ::2] = _VALUES[blocks & 0x0F]
    values[..., 1::2] = _VALUES[blocks >> 4]
    exponents = scales.astype(np.int32) - _SCALE_BIAS
    with np.errstate(over="ignore"):
        values = np.ldexp(values, exponents[..., None])
    if not np.isfinite(values).all():
        raise ValueError(f"a scale of {scales.max()} makes values too large for a float32")
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK_VALUES)
