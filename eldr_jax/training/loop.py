"""The training loop: state, one jitted step, and a run that can be stopped and taken up again."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eldr_jax.checkpoint import restore_training_state, save_training_state
from eldr_jax.config import ModelConfig
from eldr_jax.dispatch import Dispatch
from eldr_jax.model import Params, init_params, model_of
from eldr_jax.training.data import Document, PackedStreams
from eldr_jax.training.objective import StepMetrics, centre_gate, objective
from eldr_jax.training.recipe import Recipe


class TrainState(NamedTuple):
    """What a step reads and writes.

    Attributes:
      params: weights as in `eldr_jax.model.params_of`.
      optimiser: optax state.
      frequency: [L, E] float32, running share of choices per expert.
      gate_input: [L, D] float32, running mean of what each gate reads.
      cpu_s: CPU seconds spent up to the last saved state, scalar float32.
    """

    params: Params
    optimiser: Any
    frequency: jax.Array
    gate_input: jax.Array
    cpu_s: jax.Array


def batch_schedule(
    recipe: Recipe, documents: Sequence[Document], encoded: Sequence[np.ndarray]
) -> Callable[[int], np.ndarray]:
    """The sequences of every step: short ones first, longer ones in the last `long_steps`.

    Args:
      recipe: settings.
      documents: training texts.
      encoded: their token ids.

    Returns:
      Function of a step to [B, T + 1] int32.
    """

    def packed(sequence_tokens: int, seed: int) -> PackedStreams:
        return PackedStreams(
            documents,
            encoded,
            sequence_tokens=sequence_tokens,
            task_share=recipe.task_share,
            seed=seed,
        )

    short = packed(recipe.sequence_tokens, recipe.seed)
    if not recipe.long_steps:
        return lambda step: short.batch(step, recipe.batch_sequences)
    long = packed(recipe.long_sequence_tokens, recipe.seed + 1)
    long_first = recipe.num_steps - recipe.long_steps
    step_tokens = recipe.batch_sequences * recipe.sequence_tokens
    num_long = step_tokens // recipe.long_sequence_tokens
    return lambda step: (
        short.batch(step, recipe.batch_sequences)
        if step < long_first
        else long.batch(step - long_first, num_long)
    )


def build_optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW behind a global clip, with linear warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=recipe.peak_learning_rate,
        warmup_steps=recipe.warmup_steps,
        decay_steps=recipe.num_steps,
        end_value=recipe.final_learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(recipe.max_grad_norm),
        optax.adamw(
            schedule,
            b1=recipe.beta1,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            mask=lambda params: jax.tree.map(lambda weight: weight.ndim > 1, params),
        ),
    )


def initial_state(config: ModelConfig, recipe: Recipe) -> TrainState:
    """State before the first step."""
    params = init_params(config, jax.random.key(recipe.seed))
    even = jnp.full((config.num_layers, config.num_experts), 1.0 / config.num_experts)
    return TrainState(
        params=params,
        optimiser=build_optimiser(recipe).init(params),
        frequency=even,
        gate_input=jnp.zeros((config.num_layers, config.hidden_size)),
        cpu_s=jnp.float32(0.0),
    )


def make_step(
    config: ModelConfig, recipe: Recipe
) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    """Compiles one optimiser step.

    Args:
      config: geometry.
      recipe: settings.

    Returns:
      Function of the state (given up by the caller) and sequences [B, T + 1] int32 to the next
      state and the step's figures.
    """
    optimiser = build_optimiser(recipe)
    dispatch = Dispatch(kind="capacity", capacity_factor=recipe.capacity_factor)

    def loss(params: Params, sequences: jax.Array, frequency: jax.Array):
        return objective(
            model_of(config, params),
            sequences,
            frequency,
            dispatch=dispatch,
            balance_coefficient=recipe.balance_coefficient,
            z_coefficient=recipe.z_coefficient,
            frequency_decay=recipe.frequency_decay,
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, sequences: jax.Array) -> tuple[TrainState, StepMetrics]:
        grads, metrics = jax.grad(loss, has_aux=True)(state.params, sequences, state.frequency)
        updates, optimiser_state = optimiser.update(grads, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        gate_input = _running(state.gate_input, metrics.gate_input, recipe.gate_input_decay)
        for block, mean_input in zip(params["layers"], gate_input, strict=True):
            block["gate"] = centre_gate(block["gate"], mean_input)
        return (
            TrainState(
                params=params,
                optimiser=optimiser_state,
                frequency=_running(state.frequency, metrics.frequency, recipe.frequency_decay),
                gate_input=gate_input,
                cpu_s=state.cpu_s,
            ),
            metrics,
        )

    return step


def _running(mean: jax.Array, value: jax.Array, decay: float) -> jax.Array:
    return decay * mean + (1.0 - decay) * value


def train(
    config: ModelConfig,
    recipe: Recipe,
    batch_at: Callable[[int], np.ndarray],
    *,
    run_dir: Path,
    cpu_clock: Callable[[], float],
    report: Callable[[dict[str, Any]], None],
    on_checkpoint: Callable[[int, Params], None] = lambda step, params: None,
    stop_after: int | None = None,
) -> TrainState:
    """Runs, or takes up again, a training run.

    Args:
      config: geometry.
      recipe: settings.
      batch_at: sequences [B, T + 1] int32 of a step, the same whenever asked.
      run_dir: folder for saved states and `log.jsonl`.
      cpu_clock: CPU seconds of this process so far; summed over resumed parts.
      report: called with each log record.
      on_checkpoint: called with step and weights after each saved state.
      stop_after: step at which to save and return, the recipe's last where None.

    Returns:
      The state after the last step.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    state_dir = run_dir / "state"
    last = min(recipe.num_steps, stop_after or recipe.num_steps)
    state, first = initial_state(config, recipe), 0
    if (saved := restore_training_state(state_dir, state)) is not None:
        first, state = saved
    cpu_before_s = float(state.cpu_s) - cpu_clock()
    step_fn = make_step(config, recipe)
    window: list[StepMetrics] = []
    with (run_dir / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(first, last):
            batch = jnp.asarray(batch_at(step))
            state, metrics = step_fn(state, batch)
            window.append(jax.block_until_ready(metrics))
            done = step + 1
            if done % recipe.log_steps == 0 or done == last:
                record = _record(done, window, state, cpu_before_s + cpu_clock())
                window = []
                log.write(json.dumps(record) + "\n")
                log.flush()
                report(record)
            if done % recipe.checkpoint_steps == 0 or done == last:
                cpu_s = jnp.float32(cpu_before_s + cpu_clock())
                state = state._replace(cpu_s=cpu_s)
                save_training_state(state_dir, done, state)
                on_checkpoint(done, state.params)
    return state


def _record(
    step: int, window: list[StepMetrics], state: TrainState, cpu_s: float
) -> dict[str, Any]:
    """One log line: means over the window, expert load from the running frequency."""

    def mean(name: str) -> float:
        return round(float(np.mean([getattr(metrics, name) for metrics in window])), 5)

    load = np.asarray(state.frequency) * state.frequency.shape[1]
    return {
        "step": step,
        "cpu_s": round(cpu_s, 1),
        "cross_entropy": mean("cross_entropy"),
        "balance_loss": mean("balance_loss"),
        "z_loss": mean("z_loss"),
        "dropped_share": mean("dropped_share"),
        "max_load": round(float(load.max()), 3),
        "min_load": round(float(load.min()), 3),
    }
