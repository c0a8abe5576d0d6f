"""The report's figures on routings whose answer is known, and on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eldr_jax.config import ModelConfig
from eldr_jax.model import model_of
from eldr_jax.training.card import render_card
from eldr_jax.training.data import Document, encode_documents
from eldr_jax.training.reading import RoutedText, loss_by_position, read_texts
from eldr_jax.training.recipe import Recipe
from eldr_jax.training.report import (
    distinct_reduction,
    expert_shares,
    load_table,
    loss_by_domain,
    summarise,
)
from eldr_jax.training.tokenizer import train_tokenizer

NUM_EXPERTS = 8


def _text(expert_of: Callable[[int, int], list[int]], length: int = 20) -> RoutedText:
    """A text of two layers whose token `t` goes to `expert_of(layer, t)`."""
    ids = np.array([[expert_of(layer, t) for t in range(length)] for layer in range(2)], np.uint16)
    return RoutedText(num_bytes=4 * length, losses=np.full(length, 0.5, np.float32), ids=ids)


def _parted() -> dict[str, list[RoutedText]]:
    """Layer 0 sends both domains to experts 0 and 1; layer 1 gives each a pair of its own."""
    return {
        "a": [_text(lambda layer, t: [0, 1]) for _ in range(5)],
        "b": [_text(lambda layer, t: [2 * layer, 2 * layer + 1]) for _ in range(5)],
    }


def _measure(texts: dict[str, list[RoutedText]], batch: int = 4):
    return distinct_reduction(
        texts,
        NUM_EXPERTS,
        batch=batch,
        num_draws=400,
        steps=10,
        rng=np.random.default_rng(0),
    )


def test_reduction_of_domains_that_part_in_one_layer() -> None:
    got = _measure(_parted())
    assert got.same == pytest.approx([2.0, 2.0])
    # Four members of two equally likely domains are all of one with probability 1/8.
    expected = 4 - 2 / 8
    assert got.mixed[0] == pytest.approx(2.0)
    assert got.mixed[1] == pytest.approx(expected, abs=0.15)
    assert got.reduction[0] == pytest.approx(0.0)
    assert got.mean == pytest.approx(1 - 4 / (2 + got.mixed[1]))
    assert got.ci_low < got.mean < got.ci_high
    assert got.by_domain == {"a": pytest.approx(got.mean), "b": pytest.approx(got.mean)}


def test_no_structure_gives_no_reduction() -> None:
    rng = np.random.default_rng(1)

    def anywhere(layer: int, t: int) -> list[int]:
        return rng.choice(NUM_EXPERTS, 2, replace=False).tolist()

    got = _measure({name: [_text(anywhere) for _ in range(8)] for name in "ab"})
    assert got.ci_low - 0.02 < 0.0 < got.ci_high + 0.02
    # Distinct experts of 4 tokens with 2 of 8 each: 8 * (1 - (6/8)^4).
    assert got.mixed == pytest.approx([8 * (1 - 0.75**4)] * 2, abs=0.15)


def test_too_few_long_texts_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"domain 'a' has 5 texts of 10 tokens, needs batch=6"):
        _measure(_parted(), batch=6)


def test_load_weighs_domains_not_tokens() -> None:
    texts = _parted()
    texts["b"] = texts["b"][:1]
    shares = expert_shares(texts, NUM_EXPERTS)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)
    np.testing.assert_allclose(shares[1, :4], 0.25)
    table = load_table(shares)
    assert table[0] == {"max_over_mean": 4.0, "min_over_mean": 0.0, "cv": pytest.approx(3**0.5)}
    assert table[1]["max_over_mean"] == 2.0


def test_losses_are_per_token_and_per_byte() -> None:
    table = loss_by_domain(_parted())
    assert table["a"] == {
        "num_texts": 5,
        "num_tokens": 100,
        "nats_per_token": pytest.approx(0.5),
        "bits_per_byte": pytest.approx(0.5 / np.log(2) / 4),
    }


def test_texts_are_read_as_the_model_reads_them_alone(
    draw_params: Callable[..., dict[str, Any]],
) -> None:
    texts = [f"text {'word ' * n}{n}" for n in (1, 40, 3)]
    tokenizer = train_tokenizer(texts, 264)
    config = ModelConfig(
        vocab_size=264,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        tie_word_embeddings=True,
    )
    params = draw_params(config)
    documents = [Document(id=t, domain="d", text=t, split="heldout") for t in texts]
    seen: list[tuple[int, int]] = []
    read = read_texts(
        config,
        params,
        tokenizer,
        documents,
        max_tokens=32,
        batch_texts=3,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(3, 3)]
    model = model_of(config, params)

    @jax.jit
    def alone(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        forward = model(tokens)
        ids = jnp.stack([trace.ids for trace in forward.routers])
        return jax.nn.log_softmax(model.logits(forward.hidden))[0], ids

    for text, ids in zip(read, encode_documents(tokenizer, documents), strict=True):
        num_tokens = min(len(ids) - 1, 32)
        # Padding behind a text changes nothing before it; equal widths spare a compilation.
        tokens = np.zeros((1, 32), np.int32)
        tokens[0, :num_tokens] = ids[:num_tokens]
        scores, expected_ids = alone(tokens)
        targets = ids[1 : num_tokens + 1].astype(int)
        expected = -np.asarray(scores)[np.arange(num_tokens), targets]
        np.testing.assert_allclose(text.losses, expected, atol=1e-4)
        np.testing.assert_array_equal(text.ids, expected_ids[:, :num_tokens])
        assert text.num_bytes == len(tokenizer.decode(targets.tolist()).encode())

    table = loss_by_position(
        config, params, tokenizer, documents, length=32, bucket=16, max_windows=1
    )
    assert [row["first_token"] for row in table] == [0, 16]
    with pytest.raises(ValueError, match="do not fill a sequence of length=512"):
        loss_by_position(config, params, tokenizer, documents, length=512, bucket=16, max_windows=1)


def test_card_prints_what_was_measured() -> None:
    summary = {
        "schema_version": 1,
        "max_tokens": 20,
        "max_texts": 5,
        "num_draws": 40,
        "seed": 0,
        "mixture_load": load_table(expert_shares(_parted(), NUM_EXPERTS)),
        "loss_by_position": [{"first_token": 0, "nats_per_token": 1.25}],
        "groups": summarise(
            {"task": _parted()},
            NUM_EXPERTS,
            batches=(2, 4),
            num_draws=40,
            steps={"task": 10},
            seed=0,
        ),
    }
    config = ModelConfig(
        vocab_size=270,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    recipe = Recipe(
        schema_version=1,
        model="m",
        num_steps=20,
        batch_sequences=2,
        sequence_tokens=8,
        peak_learning_rate=0.1,
        final_learning_rate=0.01,
        warmup_steps=1,
        balance_coefficient=0.1,
        z_coefficient=0.0,
        information_coefficient=0.2,
        information_target=0.6,
        domain_decay=0.9,
        frequency_decay=0.7,
        gate_input_decay=0.5,
    )
    record = {
        "cross_entropy": 9.9,
        "balance_loss": 1.0,
        "information": 0.1,
        "dropped_share": 0.25,
        "min_load": 0.5,
        "max_load": 1.5,
    }
    # Step 10 was logged twice: the run was stopped and taken up again.
    log = [
        record | {"step": 10, "cpu_s": 60.0},
        record | {"step": 10, "cpu_s": 66.0, "cross_entropy": 7.125},
        record | {"step": 20, "cpu_s": 120.0, "cross_entropy": 3.5},
    ]
    card = render_card(config, recipe, summary, log)
    assert "**2.0 CPU minutes**" in card
    assert "| 10 | 7.125 | 1.000 | 0.100 | 25.0 | 0.50..1.50 | 1.1 |" in card
    assert "9.900" not in card
    largest = summary["groups"]["task"]["reduction"][1]
    assert f"| 4 | **{100 * largest['mean']:.1f}** |" in card
    assert "| 1 | 2.00 | 0.00 | 1.00 |" in card
    assert "| nats/token | 1.250 |" in card
    assert "| a | 5 | 100 | 0.500 |" in card
