from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.profile.draws import draw_experts


def drawn(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Each token's draws by the kernel, int64 [T, K]."""
    out = np.full(uniforms.shape, -1, np.int64)
    rows = np.zeros(len(uniforms), np.int32)
    ones = np.ones(len(weights), np.float32)
    draw_experts(weights[None].astype(np.float32), rows, ones, uniforms, 1e-9, out)
    return out


def walked(weights: np.ndarray, uniforms: np.ndarray) -> list[int]:
    """One token's draws as the law says them."""
    left = weights.astype(np.float32).astype(np.float64) + 1e-9
    chosen = []
    for uniform in uniforms:
        place = int(np.searchsorted(np.cumsum(left), uniform * left.sum(), side="right"))
        chosen.append(min(place, len(left) - 1))
        left[chosen[-1]] = 0.0
    return chosen


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 21), st.integers(0, 10_000))
def test_every_draw_takes_its_share_of_what_is_left(num_experts, seed):
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(size=num_experts) * 2.0)
    uniforms = rng.random((3, min(num_experts, 6)))
    found = drawn(weights, uniforms)
    for token in range(3):
        assert len(set(found[token].tolist())) == uniforms.shape[1]
        assert found[token].tolist() == walked(weights, uniforms[token])


def test_all_experts_can_be_drawn_and_none_twice():
    weights = np.array([1.0, 0.0, 1e6, 1e-9, 3.0, 0.0, 0.0, 0.0, 2.0])
    uniforms = np.array([[0.0] * 9, [np.nextafter(1.0, 0.0)] * 9])
    for row in drawn(weights, uniforms):
        assert sorted(row.tolist()) == list(range(9))
