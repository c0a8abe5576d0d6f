"""Workloads of the paper-sized captures: YAML in, checked settings out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from calibration.capture_checks import Geometry
from serving.core.errors import ConfigError

SCHEMA_VERSION = 1


class Bias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the published tables lack: preferences beyond the single token.

    A table knows a token's experts, not that a whole request leans to some of them. Each part
    is a normal draw per (layer, expert), in units of log probability.

    Attributes:
        domain: strength shared by all requests of a domain.
        topic: strength shared by a topic, one of `num_topics` inside a domain.
        request: strength of a request's own, in prefill and decode alike.
        style: strength of the answer's style, one of `num_styles` whatever the domain; in decode
            only, since answers are not prompts.
    """

    domain: float = 0.0
    topic: float = 0.0
    num_topics: int = 1
    request: float = 0.0
    style: float = 0.0
    num_styles: int = 1

    def __post_init__(self) -> None:
        for name in ("domain", "topic", "request", "style"):
            if not 0 <= getattr(self, name) < 10:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie in [0, 10)")
        for name in ("num_topics", "num_styles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One workload.

    Attributes:
        name: unique.
        group: corpora: `task` (files task_*) or `language` (files language_*).
        substrate: `olmoe` or `mixtral` tables, or `none`: OLMoE's popularity without structure.
        geometry: of the model imitated; its experts a multiple of the substrate's.
        mix: share of each domain (`code`, `lang/de`, ...).
        tables: table domain of each text domain; "" is the one for all others.
        bias: see `Bias`.
        min_prompt_tokens, max_prompt_tokens: range of prompt lengths drawn.
        decode_tokens: decode tokens per prompt.
        seed: of every draw.
        measured: figures of the generated captures, for readers; nothing depends on them.
    """

    name: str
    group: Literal["task", "language"]
    substrate: Literal["olmoe", "mixtral", "none"]
    geometry: Geometry
    mix: dict[str, float]
    tables: dict[str, str]
    bias: Bias = Bias()
    min_prompt_tokens: int
    max_prompt_tokens: int
    decode_tokens: int
    seed: int = 0
    measured: dict[str, float] = {}

    def __post_init__(self) -> None:
        if not self.mix or min(self.mix.values()) <= 0:
            raise ValueError(f"mix={self.mix!r} must hold shares > 0")
        if "" not in self.tables:
            raise ValueError("tables must hold '', the table of all other domains")
        if not 1 <= self.min_prompt_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"min_prompt_tokens={self.min_prompt_tokens} must lie in [1, max_prompt_tokens]"
            )
        if self.decode_tokens < 1 or self.seed < 0:
            raise ValueError("decode_tokens must be >= 1 and seed >= 0")


class _WorkloadsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int
    workloads: tuple[Workload, ...]


def load_workloads(path: str | Path) -> dict[str, Workload]:
    """Reads a workloads file.

    Returns:
        Name -> workload.

    Raises:
        ConfigError: unreadable, unknown key, wrong value or a name twice; names the field.
    """
    try:
        file = load_yaml(path, _WorkloadsFile)
    except PlannerConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    if file.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", file.schema_version, f"must be {SCHEMA_VERSION}")
    names = [workload.name for workload in file.workloads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("workloads.name", twice[0], "must be unique")
    return dict(zip(names, file.workloads, strict=True))


def choose(workloads: dict[str, Workload], name: str) -> Workload:
    """The workload of a name.

    Raises:
        ConfigError: unknown; lists the known ones.
    """
    if name not in workloads:
        raise ConfigError("workload", name, f"must be one of {', '.join(sorted(workloads))}")
    return workloads[name]
