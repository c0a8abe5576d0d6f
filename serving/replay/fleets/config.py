"""A fleet replay's YAML: pools of catalogue hardware, traffic, loads, policies, seeds.

    schema_version: 1
    name: mixed
    pools: [{name: ironwood, hardware: tpu7x, variant: qwen3_30b_a3b, topology: 2x2x1, ...}]
    traffic: {...}
    loads: [0.3, 0.6, 0.9]          # shares of what the fleet can sustain
    policies: [{label: ours, prefill: cost_p2c, decode: expert_cost}, ...]

Paths start at the file's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from serving.core.errors import ConfigError
from serving.core.request import SloClass

SCHEMA_VERSION = 1

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
Part = Literal["padding", "transfer", "prefix", "packing", "experts", "parking"]
"""What a policy may have switched off: terms of its decision, or parking altogether."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: strict and frozen."""


class PoolSection(_Section, frozen=True, kw_only=True):
    """A pool: equal workers of one variant on one hardware, in slices or NVLink domains.

    Attributes:
        name: of the pool.
        hardware, variant: ids of the catalogue.
        worker_chips: chips of one worker.
        topology: shape of a slice ("4x4", "2x2x1"); "" on GPUs.
        num_domains: slices or NVLink domains.
        prefill_per_domain, decode_per_domain: workers of each role in one.
        buckets_tokens: compiled step sizes of prefill workers; () on GPUs.
        chunk_tokens: most tokens of a prefill step.
        block_tokens: tokens of a KV block and page.
        max_num_seqs: requests of a decode step.
        cache_blocks: blocks a prefill worker's prefix cache holds.
    """

    name: Annotated[str, Meta(min_length=1)]
    hardware: str
    variant: str
    worker_chips: Count = 1
    topology: str = ""
    num_domains: Count = 1
    prefill_per_domain: Count = 1
    decode_per_domain: Count = 3
    buckets_tokens: tuple[Count, ...] = ()
    chunk_tokens: Count = 8192
    block_tokens: Count = 16
    max_num_seqs: Count = 64
    cache_blocks: Count = 4096


class TrafficSection(_Section, frozen=True, kw_only=True):
    """What arrives.

    Attributes:
        seconds: arrivals last that long; warmup_s of it is not counted.
        prompt_tokens, prompt_sigma, max_prompt_tokens: lognormal prompt lengths, their mean.
        output_tokens, output_sigma, max_output_tokens: the same of outputs.
        classes: share per SLO class.
        shared_share: share of interactive (A, B) requests that begin with a shared prefix.
        num_prefixes, prefix_tokens: distinct prefixes (Zipf weights), and their length.
        num_domains: domains with expert profiles of their own.
        specialisation: share of a domain's expert choices that are its own, in [0, 1].
        known_length: what the router is told of outputs: their own length or the mean.
    """

    seconds: Positive = 90.0
    warmup_s: Positive = 15.0
    prompt_tokens: Positive = 2048.0
    prompt_sigma: Positive = 0.6
    max_prompt_tokens: Count = 16384
    output_tokens: Positive = 300.0
    output_sigma: Positive = 0.6
    max_output_tokens: Count = 2048
    classes: dict[SloClass, Share] = msgspec.field(
        default_factory=lambda: {SloClass.A: 0.2, SloClass.B: 0.4, SloClass.C: 0.4}
    )
    shared_share: Share = 0.55
    num_prefixes: Count = 24
    prefix_tokens: Count = 1600
    num_domains: Count = 4
    specialisation: Share = 0.6
    known_length: Literal["exact", "mean"] = "mean"


class ParkingSection(_Section, frozen=True, kw_only=True):
    """The parking rule, the same for all policies; see `ParkingLimits`.

    Attributes:
        wake_s: from the decision to wake until the worker takes work; it is paid for.
        check_every_s: between two decisions.
    """

    idle_after_s: Positive = 10.0
    min_awake: Count = 1
    wake_above: Share = 0.85
    wake_tokens: Positive = 16384.0
    prefill_use_above: Share = 0.7
    wake_s: Positive = 3.0
    check_every_s: Positive = 0.5


class PolicySection(_Section, frozen=True, kw_only=True):
    """Rules under a label.

    Attributes:
        label: unique name in the report.
        prefill, decode: registry names.
        prefill_options, decode_options: their options.
        table: whether pools are ordered by quotes; False is the static fallback.
        without: what is switched off.
        num_seeds: it runs on the first so many seeds only; 0 runs on all.
    """

    label: str
    prefill: str
    decode: str
    prefill_options: dict[str, object] = {}
    decode_options: dict[str, object] = {}
    table: bool = False
    without: tuple[Part, ...] = ()
    num_seeds: Annotated[int, Meta(ge=0)] = 0

    def seeds(self, of: tuple[int, ...]) -> tuple[int, ...]:
        """Its seeds of all."""
        return of[: self.num_seeds] if self.num_seeds else of


class FleetReplayConfig(_Section, frozen=True, kw_only=True):
    """The file; see the module.

    Attributes:
        capacity_tpot_s: TPOT at which the fleet's capacity, the unit of `loads`, is taken.
        reference: label that the others are compared with.
        quick: keys replaced under --quick.
        folder: where paths start; set by `load_fleet_replay`.
    """

    schema_version: int
    name: str
    variants: str
    hardware_dir: str
    pools: Annotated[tuple[PoolSection, ...], Meta(min_length=1)]
    policies: Annotated[tuple[PolicySection, ...], Meta(min_length=1)]
    reference: str
    traffic: TrafficSection = TrafficSection()
    parking: ParkingSection = ParkingSection()
    loads: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (0.3, 0.6, 0.9)
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (0, 1, 2, 3, 4)
    capacity_tpot_s: Positive = 0.08
    quick: dict[str, object] = {}
    folder: str = "."

    def path(self, name: str) -> Path:
        """A path of the file."""
        return Path(self.folder, name)


def load_fleet_replay(path: str | Path, *, quick: bool = False) -> FleetReplayConfig:
    """Reads and checks a fleet replay.

    Raises:
        ConfigError: names file, field, value and rule.
    """
    try:
        config = load_yaml(path, FleetReplayConfig)
        if quick and config.quick:
            plain = msgspec.to_builtins(config)
            config = msgspec.convert({**plain, **config.quick, "quick": {}}, FleetReplayConfig)
    except PlannerConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: quick", config.quick, str(error)) from error
    config = msgspec.structs.replace(config, folder=str(Path(path).parent))
    try:
        _check(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    return config


def _check(config: FleetReplayConfig) -> None:
    if config.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", config.schema_version, f"must be {SCHEMA_VERSION}")
    labels = [policy.label for policy in config.policies]
    for field, names in (
        ("policies.label", labels),
        ("pools.name", [p.name for p in config.pools]),
    ):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(field, twice[0], "must be unique")
    if config.reference not in labels:
        raise ConfigError("reference", config.reference, f"must be one of {labels}")
    total = sum(config.traffic.classes.values())
    if abs(total - 1.0) > 1e-6:
        raise ConfigError("traffic.classes", dict(config.traffic.classes), "shares must sum to 1")
    if config.traffic.warmup_s >= config.traffic.seconds:
        raise ConfigError("traffic.warmup_s", config.traffic.warmup_s, "must be < traffic.seconds")
    traffic = config.traffic
    if (
        traffic.num_prefixes * traffic.prefix_tokens > 1 << 21
        or traffic.max_prompt_tokens > 1 << 20
    ):
        raise ConfigError(
            "traffic.num_prefixes", traffic.num_prefixes, "times prefix_tokens must be <= 2097152"
        )
    if len({pool.variant for pool in config.pools}) > 1:
        raise ConfigError(
            "pools.variant", [p.variant for p in config.pools], "must be one variant for all pools"
        )
