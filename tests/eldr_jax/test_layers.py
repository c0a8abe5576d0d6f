"""Layers against formulas written independently in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_jax import attention, layers


def test_rms_norm_matches_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 5, 16)), rng.normal(size=16)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
    got = layers.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-6)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    assert layers.rms_norm(jnp.ones((2, 4), jnp.bfloat16), jnp.ones(4), 1e-6).dtype == jnp.bfloat16


def test_rope_turns_complex_pairs() -> None:
    rng = np.random.default_rng(1)
    head_dim, theta = 8, 100.0
    x = rng.normal(size=(6, 3, head_dim))
    positions = np.array([0, 1, 2, 7, 63, 1000])
    # Dimension i and i + Dh/2 are one complex number, turned by position / theta^(2i/Dh).
    frequencies = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
        1j * positions[:, None, None] * frequencies[None, None, :]
    )
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    cos, sin = attention.rope_angles(jnp.asarray(positions), head_dim, theta)
    got = attention.apply_rope(jnp.asarray(x, jnp.float32), cos, sin)
    np.testing.assert_allclose(got, expected, atol=2e-4)
    np.testing.assert_allclose(got[0], x[0], rtol=1e-6)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 16)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        turned = []
        for x, at in ((q, at_q), (k, at_k)):
            cos, sin = attention.rope_angles(jnp.array([at]), 16, 10_000.0)
            turned.append(attention.apply_rope(x, cos, sin).ravel())
        return float(turned[0] @ turned[1])

    assert score(3, 10) == pytest.approx(score(103, 110), abs=1e-3)
    assert score(3, 10) != pytest.approx(score(3, 11), abs=1e-3)


def test_attend_matches_a_loop_over_heads_and_queries() -> None:
    rng = np.random.default_rng(3)
    num_heads, num_kv_heads, head_dim, num_queries, num_keys = 4, 2, 8, 3, 5
    q = rng.normal(size=(2, num_queries, num_heads, head_dim))
    k, v = rng.normal(size=(2, 2, num_keys, num_kv_heads, head_dim))
    mask = rng.random((2, num_queries, num_keys)) < 0.6
    mask[:, :, 0] = True
    expected = np.zeros_like(q)
    for b, i, h in np.ndindex(2, num_queries, num_heads):
        seen = np.flatnonzero(mask[b, i])
        scores = k[b, seen, h // 2] @ q[b, i, h] / np.sqrt(head_dim)
        weights = np.exp(scores) / np.exp(scores).sum()
        expected[b, i, h] = weights @ v[b, seen, h // 2]
    queries, keys, values = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    got = attention.attend(queries, keys, values, jnp.asarray(mask))
    np.testing.assert_allclose(got, expected.reshape(2, num_queries, -1), atol=2e-6)


def test_attend_without_anything_to_look_at_is_finite() -> None:
    x = jnp.ones((1, 2, 2, 4))
    got = attention.attend(x, x, x, jnp.zeros((2, 2), bool))
    np.testing.assert_allclose(got, 1.0)


def test_route_gives_ties_to_the_lowest_id() -> None:
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    weights, ids = layers.route(logits, 4, True)
    np.testing.assert_array_equal(ids, [[1, 3, 2, 4], [0, 1, 2, 3]])
    np.testing.assert_allclose(weights[1], 0.25, rtol=1e-6)
    assert weights.dtype == jnp.float32
    assert ids.dtype == jnp.int32


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 1, 1), (4, 9, 3), (5, 7, 7)]),
    levels=st.integers(1, 4),
)
def test_route_is_the_exact_sorted_choice(
    seed: int, shape: tuple[int, int, int], levels: int
) -> None:
    num_tokens, num_experts, k = shape
    # Few levels make ties common.
    logits = np.random.default_rng(seed).integers(0, levels, (num_tokens, num_experts))
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected_ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    expected = np.take_along_axis(probs, expected_ids, axis=-1)
    given_logits = jnp.asarray(logits, jnp.float32)
    weights, ids = layers.route(given_logits, k, False)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    normed, same_ids = layers.route(given_logits, k, True)
    np.testing.assert_array_equal(same_ids, ids)
    np.testing.assert_allclose(normed, expected / expected.sum(-1, keepdims=True), rtol=1e-5)


def test_expert_mlp_of_a_stack_is_each_expert_on_its_rows() -> None:
    rng = np.random.default_rng(4)
    x, gate, up = rng.normal(size=(3, 5, 6)), *rng.normal(size=(2, 3, 6, 4))
    down = rng.normal(size=(3, 4, 6))
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, gate, up, down)]
    x32, *matrices = arrays
    got = layers.expert_mlp(x32, dict(zip(("w_gate", "w_up", "w_down"), matrices, strict=True)))
    for e in range(3):
        a = x[e] @ gate[e]
        expected = (a / (1 + np.exp(-a)) * (x[e] @ up[e])) @ down[e]
        np.testing.assert_allclose(got[e], expected, rtol=1e-4, atol=1e-4)
