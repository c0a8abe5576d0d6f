"""Losses against plain formulas; a tiny run learns, stops and goes on to the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from eldr_jax.checkpoint import load_model_dir, save_model_dir
from eldr_jax.config import ConfigError, ModelConfig
from eldr_jax.dispatch import DENSE
from eldr_jax.model import model_of
from eldr_jax.training.data import Document
from eldr_jax.training.loop import (
    Schedule,
    TrainState,
    TrainStep,
    batch_schedule,
    initial_state,
    make_step,
    train,
)
from eldr_jax.training.objective import (
    StepMetrics,
    balance_loss,
    centre_gate,
    domain_information,
    expert_frequency,
    mean_token_loss,
    objective,
)
from eldr_jax.training.recipe import Recipe, load_recipe

REPO = Path(__file__).parents[2]
CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    tie_word_embeddings=True,
)
RECIPE = Recipe(
    schema_version=1,
    model="unused",
    num_steps=12,
    batch_sequences=4,
    sequence_tokens=16,
    peak_learning_rate=1e-2,
    final_learning_rate=1e-3,
    warmup_steps=2,
    balance_coefficient=0.1,
    z_coefficient=1e-4,
    information_coefficient=0.1,
    information_target=0.5,
    information_domains=("even",),
    domain_decay=0.9,
    frequency_decay=0.7,
    gate_input_decay=0.5,
    checkpoint_steps=100,
    log_steps=3,
)


def _batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Counting sequences, upwards by one or by three: two domains that can be learnt."""
    rng = np.random.default_rng(step)
    domains = rng.integers(0, 2, 4).astype(np.int32)
    starts = rng.integers(0, 32, (4, 1))
    tokens = (starts + np.arange(17)[None, :] * np.where(domains, 3, 1)[:, None]) % 32
    return tokens.astype(np.int32), domains


SCHEDULE = Schedule(domains=["even", "odd"], batch_at=_batch)


def test_mean_token_loss_and_its_gradient_are_optax_s() -> None:
    rng = np.random.default_rng(0)
    # One chunk that is not a multiple of the chunk size, and two whole chunks.
    for num_tokens in (30, 512):
        head = rng.normal(size=(20, 8)).astype(np.float32)
        hidden = rng.normal(size=(num_tokens, 8)).astype(np.float32)
        targets = jnp.asarray(rng.integers(0, 20, num_tokens))

        def plain(head: jax.Array, hidden: jax.Array, targets: jax.Array = targets) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, targets)
            return 3.0 * jnp.mean(losses)

        def ours(head: jax.Array, hidden: jax.Array, targets: jax.Array = targets) -> jax.Array:
            return 3.0 * mean_token_loss(head, hidden, targets)

        expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(head, hidden)
        got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(head, hidden)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, expected)


def test_balance_loss_is_one_when_even_and_e_when_all_go_to_one() -> None:
    even = jnp.full((3, 4), 0.25)
    assert float(balance_loss(even, even[0])) == pytest.approx(1.0)
    one = jnp.eye(4)[:1]
    assert float(balance_loss(one, one[0])) == pytest.approx(4.0)
    # No gradient through the frequency: it counts, it does not steer.
    grads = jax.grad(balance_loss, argnums=(0, 1))(even, one[0])
    assert float(jnp.abs(grads[1]).max()) == 0.0
    assert float(jnp.abs(grads[0]).max()) > 0.0


def test_domain_information_is_mutual_information() -> None:
    # Two domains, each with half of the experts to itself: exactly ln 2, up to the floor.
    used = jnp.array([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    mixture = used.mean(axis=0)
    both = jnp.array([True, True])
    got = float(domain_information(used, used, mixture, both))
    assert got == pytest.approx(np.log(0.525 / 0.275), rel=1e-5)
    assert float(domain_information(used, mixture[None].repeat(2, 0), mixture, both)) == 0.0
    swapped = used[::-1]
    assert float(domain_information(used, swapped, mixture, both)) < 0.0
    assert float(domain_information(used, used, mixture, jnp.array([False, False]))) == 0.0


def test_expert_frequency_counts_each_sequence() -> None:
    ids = jnp.array([[0, 1, 1, 1], [2, 2, 3, 0]])
    np.testing.assert_allclose(expert_frequency(ids, 4), [[0.25, 0.75, 0, 0], [0.25, 0, 0.5, 0.25]])


def test_centring_takes_the_mean_token_out_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    gate, mean = rng.normal(size=(8, 4)), rng.normal(size=8)
    other = rng.normal(size=8)
    other -= mean * (other @ mean) / (mean @ mean)
    arrays = (jnp.asarray(gate, jnp.float32), jnp.asarray(mean, jnp.float32))
    centred = np.asarray(centre_gate(*arrays), np.float64)
    np.testing.assert_allclose(mean @ centred, 0.0, atol=1e-5)
    np.testing.assert_allclose(other @ centred, other @ gate, atol=1e-5)
    np.testing.assert_allclose(centre_gate(arrays[0], jnp.zeros(8)), gate, atol=1e-6)


def test_loss_is_the_sum_of_its_parts(draw_params: Callable[..., dict[str, Any]]) -> None:
    model = model_of(CONFIG, draw_params(CONFIG))
    tokens, domains = _batch(0)
    even = jnp.full((1, 4), 0.25)
    kinds = jnp.array([[[0.7, 0.1, 0.1, 0.1]], [[0.1, 0.1, 0.1, 0.7]]])[domains]

    @jax.jit
    def run(
        balance: float, z: float, information: float, target: float
    ) -> tuple[jax.Array, StepMetrics]:
        return objective(
            model,
            jnp.asarray(tokens),
            even,
            kinds,
            jnp.ones(4, bool),
            dispatch=DENSE,
            balance_coefficient=balance,
            z_coefficient=z,
            information_coefficient=information,
            information_target=target,
            frequency_decay=0.5,
        )

    plain, metrics = run(0.0, 0.0, 0.0, 1.0)
    assert plain == pytest.approx(float(metrics.cross_entropy))
    assert run(2.0, 0.0, 0.0, 1.0)[0] - plain == pytest.approx(
        2 * float(metrics.balance_loss), rel=1e-4
    )
    assert run(0.0, 2.0, 0.0, 1.0)[0] - plain == pytest.approx(2 * float(metrics.z_loss), rel=1e-4)
    information = float(metrics.information)
    assert plain - run(0.0, 0.0, 2.0, 9.0)[0] == pytest.approx(2 * information, abs=1e-4)
    # Beyond its target a layer's information counts no further.
    assert plain - run(0.0, 0.0, 2.0, -5.0)[0] == pytest.approx(-10.0, abs=1e-4)
    np.testing.assert_allclose(metrics.frequency.sum(axis=-1), 1.0, rtol=1e-5)


@pytest.fixture(scope="module")
def step_fn() -> TrainStep:
    return make_step(CONFIG, RECIPE, SCHEDULE.domains)


def _train(
    step_fn: TrainStep, run_dir: Path, stop_after: int | None = None
) -> tuple[TrainState, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    state = train(
        CONFIG,
        RECIPE,
        SCHEDULE,
        step_fn,
        run_dir=run_dir,
        cpu_clock=lambda: 1.0,
        report=records.append,
        stop_after=stop_after,
    )
    return state, records


def test_a_run_learns_and_a_stopped_one_goes_on_to_the_same_weights(
    tmp_path: Path, step_fn: TrainStep
) -> None:
    whole, records = _train(step_fn, tmp_path / "whole")
    assert [record["step"] for record in records] == [3, 6, 9, 12]
    assert records[-1]["cross_entropy"] < records[0]["cross_entropy"] - 0.3
    lines = (tmp_path / "whole/log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records

    _train(step_fn, tmp_path / "parts", stop_after=7)
    resumed, later = _train(step_fn, tmp_path / "parts")
    assert [record["step"] for record in later] == [9, 12]
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)
    jax.tree.map(np.testing.assert_array_equal, resumed.optimiser, whole.optimiser)

    again, nothing = _train(step_fn, tmp_path / "whole")
    assert nothing == []
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)

    save_model_dir(tmp_path / "model", CONFIG, whole.params)
    _, loaded = load_model_dir(tmp_path / "model")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), loaded, whole.params)


def test_a_step_moves_only_the_domains_it_saw(step_fn: TrainStep) -> None:
    tokens, _ = _batch(0)
    state = initial_state(CONFIG, RECIPE, 2)
    before = np.asarray(state.domain_frequency)
    state, _ = step_fn(state, jnp.asarray(tokens), jnp.ones(4, jnp.int32))
    after = np.asarray(state.domain_frequency)
    np.testing.assert_array_equal(after[0], before[0])
    assert not np.array_equal(after[1], before[1])
    np.testing.assert_allclose(after.sum(axis=-1), 1.0, rtol=1e-5)


def test_the_last_steps_use_fewer_and_longer_sequences() -> None:
    recipe = msgspec.structs.replace(RECIPE, long_steps=3, long_sequence_tokens=32)
    documents = [
        Document(id=f"{domain}/{n}", domain=domain, text="", split="train")
        for domain in ("even", "odd")
        for n in range(4)
    ]
    encoded = [np.arange(100, dtype=np.uint16) + 100 * n for n in range(8)]
    schedule = batch_schedule(recipe, documents, encoded)
    shapes = [schedule.batch_at(step)[0].shape for step in range(recipe.num_steps)]
    assert shapes == [(4, 17)] * 9 + [(2, 33)] * 3
    assert schedule.domains == ["even", "odd"]
    again = batch_schedule(recipe, documents, encoded).batch_at(10)
    for got, expected in zip(schedule.batch_at(10), again, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_an_unknown_domain_is_named() -> None:
    recipe = msgspec.structs.replace(RECIPE, information_domains=("evne",))
    with pytest.raises(ConfigError, match=r"information_domains=\['evne'\].*even, odd"):
        make_step(CONFIG, recipe, SCHEDULE.domains)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("schema_version", 3, "must be 1"),
        ("num_steps", 0, "at least 1"),
        ("warmup_steps", 12, r"\[0, num_steps=12\)"),
        ("final_learning_rate", 1.0, "peak_learning_rate"),
        ("balance_coefficient", -1.0, "negative"),
        ("beta2", 1.0, r"\[0, 1\)"),
        ("capacity_factor", 0.0, "positive"),
        ("task_share", 1.0, "between 0 and 1"),
        ("long_steps", 13, "num_steps=12"),
        ("long_steps", 3, "long_sequence_tokens=0 must divide"),
    ],
)
def test_broken_recipe_names_the_field_and_the_rule(field: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        msgspec.structs.replace(RECIPE, **{field: value})


def test_committed_recipe_reads_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = REPO / "configs/artefacts/reference_model/recipe.yaml"
    assert (REPO / load_recipe(path).model).is_file()
    broken = tmp_path / "recipe.yaml"
    broken.write_text(path.read_text() + "learning_rate: 1.0\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml.*learning_rate"):
        load_recipe(broken)
