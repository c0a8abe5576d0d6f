"""The training loop: state, one jitted step, and a run that can be stopped and taken up again."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eldr_jax.checkpoint import restore_training_state, save_training_state
from eldr_jax.config import ConfigError, ModelConfig
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
      domain_frequency: [M, L, E] float32, the same for each of M domains.
      gate_input: [L, D] float32, running mean of what each gate reads.
      cpu_s: CPU seconds spent up to the last saved state, scalar float32.
    """

    params: Params
    optimiser: Any
    frequency: jax.Array
    domain_frequency: jax.Array
    gate_input: jax.Array
    cpu_s: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a run reads.

    Attributes:
      domains: names of the domains.
      batch_at: function of a step to tokens [B, T + 1] int32 and each sequence's place in
        `domains`, [B] int32; the same whenever asked.
    """

    domains: Sequence[str]
    batch_at: Callable[[int], tuple[np.ndarray, np.ndarray]]


TrainStep = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, StepMetrics]]


def batch_schedule(
    recipe: Recipe, documents: Sequence[Document], encoded: Sequence[np.ndarray]
) -> Schedule:
    """The sequences of every step: short ones first, longer ones in the last `long_steps`.

    Args:
      recipe: settings.
      documents: training texts.
      encoded: their token ids.

    Returns:
      The batches and the domains they speak of.
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
        return Schedule(
            domains=short.domains, batch_at=lambda step: short.batch(step, recipe.batch_sequences)
        )
    long = packed(recipe.long_sequence_tokens, recipe.seed + 1)
    long_first = recipe.num_steps - recipe.long_steps
    step_tokens = recipe.batch_sequences * recipe.sequence_tokens
    num_long = step_tokens // recipe.long_sequence_tokens
    return Schedule(
        domains=short.domains,
        batch_at=lambda step: (
            short.batch(step, recipe.batch_sequences)
            if step < long_first
            else long.batch(step - long_first, num_long)
        ),
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


def initial_state(config: ModelConfig, recipe: Recipe, num_domains: int) -> TrainState:
    """State before the first step."""
    params = init_params(config, jax.random.key(recipe.seed))
    even = jnp.full((num_domains, config.num_layers, config.num_experts), 1 / config.num_experts)
    return TrainState(
        params=params,
        optimiser=build_optimiser(recipe).init(params),
        frequency=even[0],
        domain_frequency=even,
        gate_input=jnp.zeros((config.num_layers, config.hidden_size)),
        cpu_s=jnp.float32(0.0),
    )


def make_step(config: ModelConfig, recipe: Recipe, domain_names: Sequence[str]) -> TrainStep:
    """Compiles one optimiser step.

    Args:
      config: geometry.
      recipe: settings.
      domain_names: names of the domains.

    Returns:
      Function of the state (given up by the caller), tokens [B, T + 1] int32 and domains [B]
      int32 to the next state and the step's figures.

    Raises:
      ConfigError: the recipe names a domain that the corpora lack.
    """
    if unknown := sorted(set(recipe.information_domains) - set(domain_names)):
        raise ConfigError(
            f"information_domains={unknown} must be among {', '.join(sorted(domain_names))}"
        )
    counted = jnp.array([name in recipe.information_domains for name in domain_names])
    optimiser = build_optimiser(recipe)
    dispatch = Dispatch(kind="capacity", capacity_factor=recipe.capacity_factor)

    def loss(
        params: Params, tokens: jax.Array, domains: jax.Array, state: TrainState
    ) -> tuple[jax.Array, StepMetrics]:
        return objective(
            model_of(config, params),
            tokens,
            state.frequency,
            state.domain_frequency[domains],
            counted[domains],
            dispatch=dispatch,
            balance_coefficient=recipe.balance_coefficient,
            z_coefficient=recipe.z_coefficient,
            information_coefficient=recipe.information_coefficient,
            information_target=recipe.information_target,
            frequency_decay=recipe.frequency_decay,
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, tokens: jax.Array, domains: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        grads, metrics = jax.grad(loss, has_aux=True)(state.params, tokens, domains, state)
        updates, optimiser_state = optimiser.update(grads, state.optimiser, state.params)
        params: Params = jax.tree.map(jnp.add, state.params, updates)
        gate_input = _running(state.gate_input, metrics.gate_input, recipe.gate_input_decay)
        for block, mean_input in zip(params["layers"], gate_input, strict=True):
            block["gate"] = centre_gate(block["gate"], mean_input)
        used = metrics.frequency.mean(axis=1)
        return (
            TrainState(
                params=params,
                optimiser=optimiser_state,
                frequency=_running(state.frequency, used, recipe.frequency_decay),
                domain_frequency=_running_by_domain(
                    state.domain_frequency, metrics.frequency, domains, recipe.domain_decay
                ),
                gate_input=gate_input,
                cpu_s=state.cpu_s,
            ),
            metrics,
        )

    return step


def _running(mean: jax.Array, value: jax.Array, decay: float) -> jax.Array:
    return decay * mean + (1.0 - decay) * value


def _running_by_domain(
    mean: jax.Array, frequency: jax.Array, domains: jax.Array, decay: float
) -> jax.Array:
    """Moves the running means [M, L, E] of the domains of a step, [L, B, E]; others stay."""
    member = jax.nn.one_hot(domains, mean.shape[0], dtype=frequency.dtype)
    size = jnp.sum(member, axis=0)[:, None, None]
    step_mean = jnp.einsum("bm,lbe->mle", member, frequency) / jnp.maximum(size, 1.0)
    return jnp.where(size > 0, _running(mean, step_mean, decay), mean)


def train(
    config: ModelConfig,
    recipe: Recipe,
    schedule: Schedule,
    step_fn: TrainStep,
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
      schedule: the batches.
      step_fn: from `make_step` with the same settings.
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
    num_domains = len(schedule.domains)
    like = jax.eval_shape(lambda: initial_state(config, recipe, num_domains))
    saved = restore_training_state(state_dir, like)
    first, state = saved or (0, initial_state(config, recipe, num_domains))
    cpu_before_s = float(state.cpu_s) - cpu_clock()
    window: list[StepMetrics] = []
    with (run_dir / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(first, last):
            tokens, domains = schedule.batch_at(step)
            state, metrics = step_fn(state, jnp.asarray(tokens), jnp.asarray(domains))
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
        "information": mean("information"),
        "dropped_share": mean("dropped_share"),
        "max_load": round(float(load.max()), 3),
        "min_load": round(float(load.min()), 3),
    }
