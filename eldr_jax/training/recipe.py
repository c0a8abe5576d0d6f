"""Settings of a training run, read strictly from YAML."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from eldr_jax.config import ConfigError

SCHEMA_VERSION = 1


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that, with the corpora, fixes a training run.

    Attributes:
      schema_version: of this record.
      model: path of the model file, relative to the directory of the command.
      seed: of weights, shuffles and order.
      num_steps: optimiser steps.
      batch_sequences: sequences of a step, B.
      sequence_tokens: tokens of a sequence, T.
      long_steps: last steps that use longer sequences, and fewer of them, for the same tokens.
      long_sequence_tokens: tokens of a sequence in those steps.
      task_share: share of sequences from task domains; languages get the rest.
      peak_learning_rate: reached after the warm-up.
      final_learning_rate: reached at the last step, by a cosine.
      warmup_steps: steps of linear rise.
      weight_decay: of matrices; norms are not decayed.
      beta1: AdamW's decay of the mean.
      beta2: AdamW's decay of the square.
      max_grad_norm: global norm to which gradients are clipped.
      capacity_factor: rows per expert over the even share.
      balance_coefficient: weight of the load-balancing loss.
      z_coefficient: weight of the router z-loss.
      information_coefficient: weight of the specialisation loss.
      information_target: nats at which a layer's specialisation loss stops pushing.
      information_domains: domains whose sequences it counts.
      domain_decay: of each domain's running expert frequency, per step that has the domain.
      frequency_decay: of the running expert frequency in the balance loss.
      gate_input_decay: of the running mean out of which the gates are centred.
      checkpoint_steps: steps between saved states.
      log_steps: steps between log lines.
    """

    schema_version: int
    model: str
    seed: int = 0
    num_steps: int
    batch_sequences: int
    sequence_tokens: int
    long_steps: int = 0
    long_sequence_tokens: int = 0
    task_share: float = 0.5
    peak_learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    capacity_factor: float = 1.5
    balance_coefficient: float
    z_coefficient: float
    information_coefficient: float
    information_target: float
    information_domains: tuple[str, ...] = ()
    domain_decay: float
    frequency_decay: float
    gate_input_decay: float
    checkpoint_steps: int = 200
    log_steps: int = 10

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version={self.schema_version} must be {SCHEMA_VERSION}")
        for name in (
            "num_steps",
            "batch_sequences",
            "sequence_tokens",
            "checkpoint_steps",
            "log_steps",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} must lie in [0, num_steps={self.num_steps})"
            )
        if not 0 <= self.long_steps <= self.num_steps:
            raise ConfigError(
                f"long_steps={self.long_steps} must lie in [0, num_steps={self.num_steps}]"
            )
        step_tokens = self.batch_sequences * self.sequence_tokens
        if self.long_steps and (
            self.long_sequence_tokens < 1 or step_tokens % self.long_sequence_tokens
        ):
            raise ConfigError(
                f"long_sequence_tokens={self.long_sequence_tokens} must divide the "
                f"{step_tokens} tokens of a step"
            )
        if not 0 <= self.final_learning_rate <= self.peak_learning_rate:
            raise ConfigError(
                f"final_learning_rate={self.final_learning_rate} must lie in "
                f"[0, peak_learning_rate={self.peak_learning_rate}]"
            )
        for name in (
            "weight_decay",
            "balance_coefficient",
            "z_coefficient",
            "information_coefficient",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("beta1", "beta2", "frequency_decay", "domain_decay", "gate_input_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        for name in ("peak_learning_rate", "max_grad_norm", "capacity_factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be positive")
        if not 0 < self.task_share < 1:
            raise ConfigError(f"task_share={self.task_share} must lie between 0 and 1")


def load_recipe(path: str | Path) -> Recipe:
    """Reads a recipe.

    Args:
      path: YAML file.

    Returns:
      The settings.

    Raises:
      ConfigError: not YAML, an unknown key, or a broken rule; names the field.
      OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return msgspec.convert(yaml.safe_load(text), Recipe)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
