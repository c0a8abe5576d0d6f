"""Whole-sequence forward pass: paths to the experts, causality, an independent reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_jax import attention, layers
from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.dispatch import Dispatch, run_experts
from eldr_jax.model import (
    causal_attention,
    init_params,
    model_of,
    params_of,
)

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    tie_word_embeddings=True,
)


DrawParams = Callable[..., dict[str, Any]]


def _numpy_logits(config: ModelConfig, params: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """One sequence, token by token, in float64 and with loops for everything."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    dh, half, group = config.head_dim, config.head_dim // 2, config.num_heads // config.num_kv_heads

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + config.rms_norm_eps) * weight

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        angle = position * config.rope_theta ** (-np.arange(half) * 2 / dh)
        pair = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
        return np.concatenate([pair.real, pair.imag])

    stream = [params["embed"][token] for token in tokens]
    for block in params["layers"]:
        keys, values, mixed = [], [], []
        for position, x in enumerate(stream):
            h = norm(x, block["attn_norm"])
            k = (h @ block["wk"]).reshape(config.num_kv_heads, dh)
            keys.append([turn(norm(head, block["k_norm"]), position) for head in k])
            values.append((h @ block["wv"]).reshape(config.num_kv_heads, dh))
            heads = []
            for index, head in enumerate((h @ block["wq"]).reshape(config.num_heads, dh)):
                q = turn(norm(head, block["q_norm"]), position)
                scores = np.array([q @ key[index // group] for key in keys]) / np.sqrt(dh)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                heads.append(
                    sum(w * v[index // group] for w, v in zip(weights, values, strict=True))
                )
            mixed.append(np.concatenate(heads) @ block["wo"])
        stream = [x + m for x, m in zip(stream, mixed, strict=True)]
        added = []
        for x in stream:
            h = norm(x, block["mlp_norm"])
            logits = h @ block["gate"]
            probs = np.exp(logits - logits.max())
            chosen = np.argsort(-logits)[: config.num_experts_per_tok]
            total = probs[chosen].sum() if config.norm_topk_prob else probs.sum()
            out = np.zeros_like(h)
            for e in chosen:
                a = h @ block["w_gate"][e]
                out += (
                    probs[e]
                    / total
                    * ((a / (1 + np.exp(-a)) * (h @ block["w_up"][e])) @ block["w_down"][e])
                )
            added.append(out)
        stream = [x + a for x, a in zip(stream, added, strict=True)]
    head = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    return np.stack([norm(x, params["final_norm"]) @ head for x in stream])


@pytest.mark.parametrize(
    "change", [{}, {"tie_word_embeddings": False, "norm_topk_prob": False, "num_kv_heads": 4}]
)
def test_logits_match_an_independent_reference(
    change: dict[str, Any], draw_params: DrawParams
) -> None:
    config = msgspec.structs.replace(CONFIG, **change)
    params = draw_params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 9))
    model = model_of(config, params)
    logits = jax.jit(lambda tokens: model.logits(model(tokens).hidden))(tokens)
    for row in range(2):
        np.testing.assert_allclose(
            logits[row], _numpy_logits(config, params, tokens[row]), atol=2e-4, rtol=1e-4
        )


def test_a_token_sees_only_what_stands_before_it(draw_params: DrawParams) -> None:
    model = model_of(CONFIG, draw_params(CONFIG))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (1, 12)))
    changed = tokens.at[0, 7].set((tokens[0, 7] + 1) % 61)
    read = jax.jit(lambda tokens: model(tokens).hidden)
    before, after = read(tokens), read(changed)
    np.testing.assert_allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not np.allclose(before[:, 7:], after[:, 7:], atol=1e-4)


def test_causal_attention_in_blocks_is_attention_under_a_triangle() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 150, h, 8)), jnp.float32) for h in (4, 2, 2))
    whole = jax.jit(attention.attend)(q, k, v, np.tril(np.ones((150, 150), bool)))
    np.testing.assert_allclose(jax.jit(causal_attention)(q, k, v), whole, atol=2e-6)


def test_router_traces_are_the_gate_on_its_input(draw_params: DrawParams) -> None:
    model = model_of(CONFIG, draw_params(CONFIG))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 61, (2, 5)))
    forward = jax.jit(lambda tokens: model(tokens))(tokens)
    assert len(forward.routers) == CONFIG.num_layers
    for block, trace in zip(model.blocks, forward.routers, strict=True):
        weights, ids = layers.route(trace.logits, 3, True)
        np.testing.assert_array_equal(trace.ids, ids)
        np.testing.assert_allclose(trace.weights, weights)
        expected = trace.mean_input @ block.weights()["gate"]
        np.testing.assert_allclose(trace.logits.mean(axis=0), expected, atol=1e-5)
        assert int(trace.dropped) == 0


def test_params_and_modules_are_two_views_of_one_thing(draw_params: DrawParams) -> None:
    for tied in (True, False):
        config = msgspec.structs.replace(CONFIG, tie_word_embeddings=tied)
        params = draw_params(config)
        model = model_of(config, params)
        back = params_of(model)
        assert jax.tree.structure(back) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, back, params)
        num_weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert num_weights == config.num_params


def test_fresh_weights_have_the_documented_spread() -> None:
    config = msgspec.structs.replace(
        CONFIG, num_layers=1, vocab_size=400, moe_intermediate_size=48, tie_word_embeddings=False
    )
    params = init_params(config, jax.random.key(3))
    block = params["layers"][0]
    residual = config.initializer_range * 2**-0.5
    for weight, expected in (
        (params["embed"], 24**-0.5),
        (params["lm_head"], 24**-0.5),
        (block["wq"], 24**-0.5),
        (block["w_up"], 24**-0.5),
        (block["wo"], residual),
        (block["w_down"], residual),
    ):
        assert float(jnp.std(weight)) == pytest.approx(expected, rel=0.1)
    np.testing.assert_array_equal(block["q_norm"], 1.0)
    assert {name: weight.shape for name, weight in block.items()} == block_shapes(config)


def _moe_case(
    seed: int, num_tokens: int, num_experts: int, k: int, skew: float
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    x, gate, up = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((num_tokens, 6), (num_experts, 6, 4), (num_experts, 6, 4))
    )
    down = jnp.asarray(rng.normal(size=(num_experts, 4, 6)), jnp.float32)
    logits = rng.normal(size=(num_tokens, num_experts)) - skew * np.arange(num_experts)
    ids = np.argsort(-logits, axis=-1)[:, :k].astype(np.int32)
    weights = rng.random((num_tokens, k)).astype(np.float32)
    experts = {"w_gate": gate, "w_up": up, "w_down": down}
    return x, jnp.asarray(weights), jnp.asarray(ids), experts


_run_experts = jax.jit(run_experts, static_argnames="dispatch")


# Shapes are few, because each compiles anew; what varies is who goes where.
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from([(1, 1, 1), (1, 5, 2), (11, 6, 6), (12, 4, 1)]),
    skew=st.sampled_from([0.0, 3.0]),
)
def test_every_path_gives_the_same_sum(seed: int, shape: tuple[int, int, int], skew: float) -> None:
    case = _moe_case(seed, *shape, skew)
    exact, none = _run_experts(*case, dispatch=Dispatch(kind="dense"))
    # Room for every token at every expert: nothing can drop.
    roomy = Dispatch(kind="capacity", capacity_factor=float(shape[1]))
    for dispatch in (roomy, Dispatch(kind="ragged")):
        got, dropped = _run_experts(*case, dispatch=dispatch)
        np.testing.assert_allclose(got, exact, atol=1e-4)
        assert int(dropped) == int(none) == 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), factor=st.sampled_from([0.5, 1.0, 1.3]))
def test_what_finds_no_room_is_dropped_and_counted(seed: int, factor: float) -> None:
    num_tokens, num_experts, k = 16, 4, 2
    x, weights, ids, experts = _moe_case(seed, num_tokens, num_experts, k, skew=1.0)
    capacity = int(np.ceil(factor * num_tokens * k / num_experts))
    used = np.zeros(num_experts, int)
    kept = np.zeros((num_tokens, k), bool)
    # Tokens come first come first served, in order.
    for token, choice in np.ndindex(num_tokens, k):
        expert = int(ids[token, choice])
        kept[token, choice] = used[expert] < capacity
        used[expert] += 1
    capacity_path = Dispatch(kind="capacity", capacity_factor=factor)
    got, dropped = _run_experts(x, weights, ids, experts, dispatch=capacity_path)
    assert int(dropped) == int((~kept).sum())
    exact, _ = _run_experts(x, weights * kept, ids, experts, dispatch=Dispatch(kind="dense"))
    np.testing.assert_allclose(got, exact, atol=1e-4)


@pytest.mark.parametrize("factor", [0.6, 4.0])
def test_gradients_through_capacity_are_those_of_the_kept_choices(factor: float) -> None:
    x, weights, ids, experts = _moe_case(5, 16, 4, 2, skew=1.0)
    capacity = Dispatch(kind="capacity", capacity_factor=factor)
    order = np.zeros(4, int)
    kept = np.zeros((16, 2), bool)
    for token, choice in np.ndindex(16, 2):
        expert = int(ids[token, choice])
        kept[token, choice] = order[expert] < min(np.ceil(factor * 8), 16)
        order[expert] += 1

    def total(dispatch: Dispatch, mask: np.ndarray):
        def loss(x: jax.Array, weights: jax.Array, experts: dict[str, jax.Array]) -> jax.Array:
            out, _ = run_experts(x, weights * mask, ids, experts, dispatch)
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weights, experts)

    got = total(capacity, np.ones_like(kept))
    expected = total(Dispatch(kind="dense"), kept)
    # A dropped choice has no gradient either way: the mask takes it out of the exact sum.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, expected)


def test_dispatch_names_the_broken_rule() -> None:
    with pytest.raises(ValueError, match="kind='sparse' must be one of"):
        Dispatch(kind="sparse")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"capacity_factor=0\.0 must be positive"):
        Dispatch(kind="capacity", capacity_factor=0.0)
