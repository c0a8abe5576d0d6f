"""MXFP4 against the standard's own definition of an E2M1 float, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_jax.mxfp4 import dequantise


def _e2m1(nibble: int) -> float:
    """Sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(1,), (2, 3), (2, 1, 4), (0, 2)]))
def test_every_value_is_the_nibble_times_its_groups_power_of_two(
    seed: int, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(seed)
    # The largest magnitude is 6, so a scale of 2^125 still fits a float32.
    scales = rng.integers(0, 253, shape).astype(np.uint8)
    blocks = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
    got = dequantise(blocks, scales)
    assert got.dtype == np.float32
    assert got.shape == (*shape[:-1], shape[-1] * 32)
    grouped = got.reshape(*shape, 32)
    for place in np.ndindex(*shape):
        for byte, pair in zip(blocks[place], grouped[place].reshape(16, 2), strict=True):
            scale = np.float64(2.0) ** (int(scales[place]) - 127)
            assert pair[0] == np.float32(_e2m1(byte & 15) * scale)
            assert pair[1] == np.float32(_e2m1(byte >> 4) * scale)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((2, 16), np.int8), np.zeros(2, np.uint8), "must be uint8"),
        (np.zeros((2, 16), np.uint8), np.zeros(2, np.float32), "must be uint8"),
        (np.zeros((2, 8), np.uint8), np.zeros(2, np.uint8), r"must be \(2, 16\)"),
        (np.zeros((3, 16), np.uint8), np.zeros(2, np.uint8), r"must be \(2, 16\)"),
        (np.zeros((1, 16), np.uint8), np.full(1, 255, np.uint8), "not a number"),
        (np.full((1, 16), 0x77, np.uint8), np.full(1, 254, np.uint8), "scale of 254 makes values"),
    ],
)
def test_what_is_no_mxfp4_is_refused(blocks: np.ndarray, scales: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dequantise(blocks, scales)
