"""Gate, experts and norms against formulas written independently in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_jax import layers
from eldr_jax.architecture import ExpertOptions, GateOptions
from eldr_jax.config import ModelConfig


def test_rms_norm_matches_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 5, 16)), rng.normal(size=16)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
    got = layers.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-6)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)
    assert layers.rms_norm(jnp.ones((2, 4), jnp.bfloat16), jnp.ones(4), 1e-6).dtype == jnp.bfloat16


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


def test_softmax_over_the_chosen_orders_by_logit_and_sums_to_one() -> None:
    logits = np.random.default_rng(5).normal(size=(7, 9))
    weights, ids = layers.route(jnp.asarray(logits, jnp.float32), 3, False, "chosen")
    expected_ids = np.argsort(-logits, axis=-1)[:, :3]
    chosen = np.exp(np.take_along_axis(logits, expected_ids, axis=-1))
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_expert_with_biases_matches_the_formula(activation: str) -> None:
    options = ExpertOptions(activation=activation, bias=True, alpha=1.3, limit=0.5)  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(6)
    shapes = {"w_gate": (6, 4), "w_up": (6, 4), "w_down": (4, 6)}
    shapes |= {"b_gate": (4,), "b_up": (4,), "b_down": (6,)}
    w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x = rng.normal(size=(5, 6))
    gate, up = x @ w["w_gate"] + w["b_gate"], x @ w["w_up"] + w["b_up"]
    if activation == "silu":
        inner = gate / (1 + np.exp(-gate)) * up
    elif activation == "gelu_tanh":
        cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        inner = 0.5 * gate * (1 + np.tanh(cubic)) * up
    else:
        # Both sides of the clamp are met, or the test would not see it.
        assert (gate > 0.5).any()
        assert (np.abs(up) > 0.5).any()
        gate, up = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
        inner = gate / (1 + np.exp(-1.3 * gate)) * (up + 1)
    got = layers.expert_mlp(
        jnp.asarray(x, jnp.float32),
        {name: jnp.asarray(array, jnp.float32) for name, array in w.items()},
        options,
    )
    np.testing.assert_allclose(got, inner @ w["w_down"] + w["b_down"], atol=1e-5)


def test_gate_with_a_norm_of_its_own_ignores_the_length_of_the_stream() -> None:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=6,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        gate=GateOptions(own_norm=True),
    )
    rng = np.random.default_rng(7)
    x, gate, scale = rng.normal(size=(4, 6)), rng.normal(size=(6, 5)), rng.normal(size=6)
    per_expert = rng.uniform(0.5, 2.0, 5)
    layer = {
        name: jnp.asarray(array, jnp.float32)
        for name, array in (("gate", gate), ("gate_scale", scale), ("expert_scale", per_expert))
    }
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    expected = (normed * scale / np.sqrt(6)) @ gate
    for factor in (1.0, 10.0):
        stream = jnp.asarray(factor * x, jnp.float32)
        # What the experts read must not matter to this gate.
        logits = layers.gate_logits(stream, jnp.full_like(stream, jnp.nan), layer, config)
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    plain, same_ids = layers.route(logits, 2, True)
    weights, ids = layers.choose_experts(logits, layer, config)
    np.testing.assert_array_equal(ids, same_ids)
    np.testing.assert_allclose(weights, plain * per_expert[ids], rtol=1e-6)


def test_soft_cap_is_monotone_and_bounded() -> None:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=6,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
        logit_softcap=3.0,
    )
    logits = jnp.array([-100.0, -1.0, 0.0, 0.01, 2.0, 100.0])
    got = np.asarray(layers.soften_logits(logits, config))
    np.testing.assert_allclose(got, 3.0 * np.tanh(np.asarray(logits) / 3.0), rtol=1e-6)
