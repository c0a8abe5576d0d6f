"""Attention against formulas written independently in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from eldr_jax import attention
from eldr_jax.architecture import AttentionOptions, LayerAttention, Yarn
from eldr_jax.model import causal_attention

OWN = LayerAttention(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    window=None,
    rope_theta=100.0,
    rotary_fraction=1.0,
    values_from_keys=False,
    scale=8**-0.5,
)


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


def test_a_fraction_of_the_pairs_turns_and_the_rest_stays() -> None:
    x = np.random.default_rng(8).normal(size=(3, 2, 16))
    positions = jnp.array([0, 5, 40])
    whole = attention.rope_angles(positions, 16, 50.0)
    part = attention.rope_angles(positions, 16, 50.0, rotary_fraction=0.25)
    got = attention.apply_rope(jnp.asarray(x, jnp.float32), *part)
    turned = attention.apply_rope(jnp.asarray(x, jnp.float32), *whole)
    moving = [0, 1, 8, 9]
    np.testing.assert_array_equal(got[..., moving], turned[..., moving])
    resting = [pair for pair in range(16) if pair not in moving]
    np.testing.assert_allclose(got[..., resting], x[..., resting], rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_ramps_between(truncate: bool) -> None:
    yarn = Yarn(
        factor=8.0, trained_context_tokens=512, beta_fast=16.0, beta_slow=1.0, truncate=truncate
    )
    head_dim, theta = 64, 1000.0
    plain = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    got = attention.yarn_frequencies(head_dim, theta, yarn)
    turns = plain * 512 / (2 * np.pi)
    ratio = got / plain
    # A whole dimension either way where the ramp is cut to whole dimensions.
    slack = theta ** (2 / head_dim) if truncate else 1.0
    np.testing.assert_allclose(ratio[turns > 16.0 * slack], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1.0 / slack], 1 / 8, rtol=1e-6)
    between = ratio[(turns < 16.0 / slack) & (turns > slack)]
    assert len(between) > 3
    assert (np.diff(between) < 0).all()
    cos, sin = attention.rope_angles(jnp.array([3]), head_dim, theta, yarn=yarn)
    factor = 0.1 * np.log(8.0) + 1.0
    np.testing.assert_allclose(cos[0], factor * np.cos(3 * got), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-5)


def test_sinks_take_mass_and_give_no_value() -> None:
    rng = np.random.default_rng(9)
    q = rng.normal(size=(1, 3, 4, 8))
    k, v = rng.normal(size=(2, 1, 5, 2, 8))
    sinks = np.array([-2.0, 0.0, 1.0, 4.0])
    mask = np.tril(np.ones((3, 5), bool), 2)
    expected = np.zeros_like(q)
    for i, h in np.ndindex(3, 4):
        seen = np.flatnonzero(mask[i])
        weights = np.exp(k[0, seen, h // 2] @ q[0, i, h] * 0.5)
        expected[0, i, h] = weights @ v[0, seen, h // 2] / (weights.sum() + np.exp(sinks[h]))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    got = attention.attend(
        *arrays, jnp.asarray(mask), scale=0.5, sinks=jnp.asarray(sinks, jnp.float32)
    )
    np.testing.assert_allclose(got, expected.reshape(1, 3, -1), atol=2e-6)


@pytest.mark.parametrize("window", [1, 5, 64, 200])
def test_causal_attention_in_a_window_is_attention_under_a_band(window: int) -> None:
    rng = np.random.default_rng(10)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 150, h, 8)), jnp.float32) for h in (4, 2, 2))
    back = np.arange(150)[:, None] - np.arange(150)[None, :]
    expected = attention.attend(q, k, v, jnp.asarray((back >= 0) & (back < window)))
    np.testing.assert_allclose(causal_attention(q, k, v, window=window), expected, atol=2e-6)


@pytest.mark.parametrize("norm", ["head", "projection", "none"])
@pytest.mark.parametrize("values_from_keys", [True, False])
def test_projections_with_every_option_match_the_formula(norm: str, values_from_keys: bool) -> None:
    options = AttentionOptions(
        bias=True,
        query_key_norm=norm,  # pyright: ignore[reportArgumentType]
        value_norm=True,
        clip=0.9,
    )
    own = LayerAttention(
        **{field: getattr(OWN, field) for field in OWN.__dataclass_fields__}
        | {"values_from_keys": values_from_keys}
    )
    rng = np.random.default_rng(11)
    widths = {"q": 32, "k": 16, "v": 16}
    layer = {f"w{n}": rng.normal(size=(6, width)) for n, width in widths.items()}
    layer |= {f"b{n}": rng.normal(size=width) for n, width in widths.items()}
    for n in ("q", "k"):
        layer[f"{n}_norm"] = rng.normal(size=8 if norm == "head" else widths[n])
    x = rng.normal(size=(5, 6))
    positions = np.arange(5)
    cos, sin = attention.rope_angles(jnp.asarray(positions), 8, 100.0)
    given = {name: jnp.asarray(array, jnp.float32) for name, array in layer.items()}
    got = attention.project_qkv(
        jnp.asarray(x, jnp.float32), given, cos, sin, attention=own, options=options, eps=1e-6
    )

    def normed(y: np.ndarray, weight: np.ndarray | float) -> np.ndarray:
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weight

    for name, result in zip("qkv", got, strict=True):
        source = "k" if name == "v" and values_from_keys else name
        y = x @ layer[f"w{source}"] + layer[f"b{source}"]
        if norm == "projection" and name != "v":
            y = normed(y, layer[f"{name}_norm"])
        y = np.clip(y, -0.9, 0.9).reshape(5, -1, 8)
        if norm == "head" and name != "v":
            y = normed(y, layer[f"{name}_norm"])
        if name == "v":
            y = normed(y, 1.0)
        else:
            angles = positions[:, None, None] * 100.0 ** (-2.0 * np.arange(4) / 8)
            pair = (y[..., :4] + 1j * y[..., 4:]) * np.exp(1j * angles)
            y = np.concatenate([pair.real, pair.imag], axis=-1)
        np.testing.assert_allclose(result, y, atol=2e-5)
