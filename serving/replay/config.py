"""A replay's YAML: one base scenario, cells that change parts of it, policies, seeds.

    schema_version: 1
    name: task
    scenario: {...}                       # everything a cell may change
    cells: [{name: batch-32, group: task, change: {load: {mean_batch: 32}}}]
    policies: [{name: jsq}, {name: expert_cost, options: {...}}]
    baselines: [random, rr, jsq, p2c]
    seeds: [0, 1, 2, 3, 4]
    quick: {...}                          # the same keys; replaces them under --quick

Paths start at the file's folder; `{seed}` in the path of a bank or an artefact is the run's seed,
so that every seed may stand on a structural draw of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from bucket_planner.config_file import convert, load_yaml
from bucket_planner.errors import PlannerConfigError
from serving.core.errors import ConfigError

SCHEMA_VERSION = 1


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: strict and frozen."""


class SyntheticBank(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drawn bank, see `bank.synthetic_bank`."""

    num_prompts: int = 200
    num_layers: int = 48
    num_experts: int = 128
    top_k: int = 8
    num_domains: int = 4
    rows_per_prompt: int = 16
    strength: float = 1.0
    seed: int = 0


class FleetSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers and the machine they run on.

    Attributes:
        num_prefill, num_decode: workers at the start.
        num_spare: decode workers that `join` events may start.
        max_num_seqs, kv_blocks, block_tokens, max_context_tokens: of a decode worker.
        chunk_tokens, buckets_tokens, cache_blocks: of a prefill worker.
        num_ranks: expert-parallel ranks of a decode worker.
        realised_experts: False takes the mean number of experts.
        link_bytes_per_s, link_latency_s: between prefill and decode workers.
    """

    num_prefill: int = 8
    num_decode: int = 16
    num_spare: int = 0
    max_num_seqs: int = 256
    kv_blocks: int = 16384
    block_tokens: int = 16
    max_context_tokens: int = 131072
    chunk_tokens: int = 2048
    buckets_tokens: tuple[int, ...] = ()
    cache_blocks: int = 8192
    num_ranks: int = 1
    realised_experts: bool = True
    link_bytes_per_s: float = 12.5e9
    link_latency_s: float = 0.0005

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "max_num_seqs", "kv_blocks", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if self.num_spare < 0 or self.cache_blocks < 0 or self.chunk_tokens < 1:
            raise ValueError("num_spare and cache_blocks must be >= 0, chunk_tokens >= 1")


class LoadSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests arrive.

    Attributes:
        kind: a drawn process, or a published trace.
        mean_batch: drawn processes: the rate that keeps decode batches at this mean, worked out
            from the bank alone and so the same for all policies.
        rate_per_s: drawn processes: the rate itself; 0 takes `mean_batch`.
        path: the trace's file.
        speedup: a trace's time is divided by it.
        peak: busy rate over the mean of `bursty`.
    """

    kind: Literal["poisson", "bursty", "azure", "mooncake"] = "poisson"
    mean_batch: float = 16.0
    rate_per_s: float = 0.0
    path: str = ""
    speedup: float = 1.0
    peak: float = 3.0

    def __post_init__(self) -> None:
        if not (self.mean_batch > 0 and self.speedup > 0 and self.rate_per_s >= 0):
            raise ValueError("mean_batch and speedup must be > 0, rate_per_s >= 0")
        if (self.kind in ("azure", "mooncake")) != bool(self.path):
            raise ValueError(f"path={self.path!r} belongs to the kinds azure and mooncake")


class RequestsSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests are.

    Attributes:
        num_measured: requests the metrics are over; 0 takes a whole trace.
        warmup_batches, cooldown_batches: requests before and after them, in fleets full of
            requests (mean_batch times decode workers); drawn processes only.
        output_tokens: of every request, where the trace does not say.
        lengths: `fixed`, or `trace`: outputs drawn from the trace at `lengths_path` (Azure).
        lengths_path: see above.
        known_length: what the router is told: the request's own output length, the workload's
            mean and p95, or nothing but max_tokens.
        max_tokens: limit the client sets; 0 is the request's own length.
        repeat_prompts: draw prompts with replacement; False walks through the bank in a drawn
            order and repeats only when it is exhausted.
        phase_requests: this many requests in a row come from one domain, domains in drawn turns
            (synchronised cliques: what a rule that expects a steady mix does not expect); 0 mixes.
        slo: service class.
    """

    num_measured: int = 2000
    warmup_batches: float = 1.5
    cooldown_batches: float = 1.0
    output_tokens: int = 512
    lengths: Literal["fixed", "trace"] = "fixed"
    lengths_path: str = ""
    known_length: Literal["exact", "mean", "max_tokens"] = "exact"
    max_tokens: int = 0
    repeat_prompts: bool = False
    phase_requests: int = 0
    slo: Literal["A", "B", "C"] = "B"

    def __post_init__(self) -> None:
        if self.num_measured < 0 or self.output_tokens < 1 or self.max_tokens < 0:
            raise ValueError("num_measured and max_tokens must be >= 0, output_tokens >= 1")
        if self.warmup_batches < 0 or self.cooldown_batches < 0 or self.phase_requests < 0:
            raise ValueError("warmup_batches, cooldown_batches, phase_requests must be >= 0")


class DriftSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A shift of the mix of domains half-way.

    Attributes:
        at_share: share of the requests after which the mix shifts; 1 never.
        before: domains served before it; () is all.
        after: domains served after it; () is all.
        window_requests: a run's TPOT is also kept as a series, one value per this many measured
            requests in a row; 0 keeps none.
    """

    at_share: float = 1.0
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    window_requests: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.at_share <= 1 or self.window_requests < 0:
            raise ValueError("at_share must lie in [0, 1], window_requests be >= 0")


class RoutersSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The routers and what reaches them.

    Attributes:
        num: replicas; requests take turns.
        telemetry_interval_s, telemetry_delay_s, telemetry_loss: of the workers' reports; a
            report arrives late, or with some probability never.
        prefix_index: whether routers credit cached prefixes.
        prefill_policy: places prompts.
        refit_regions: 5 s window, 1 s beat for policies that follow the traffic.
        retry_s: a request that nobody has room for asks again after this.
        give_up_s: and is rejected after this.
        lost_after_s: a crashed worker is noticed after this.
    """

    num: int = 1
    telemetry_interval_s: float = 1.0
    telemetry_delay_s: float = 0.0
    telemetry_loss: float = 0.0
    prefix_index: bool = True
    prefill_policy: str = "p2c_work"
    retry_s: float = 0.05
    give_up_s: float = 60.0
    lost_after_s: float = 0.5

    def __post_init__(self) -> None:
        if self.num < 1 or not self.telemetry_interval_s > 0 or not self.retry_s > 0:
            raise ValueError("num must be >= 1, telemetry_interval_s and retry_s > 0")
        if not 0 <= self.telemetry_loss < 1 or self.telemetry_delay_s < 0:
            raise ValueError("telemetry_loss must lie in [0, 1), telemetry_delay_s be >= 0")


class SignaturesSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where signatures come from.

    Attributes:
        source: exact counts from prefill, the token table's guess, or none.
        wrong_share: share of requests that carry another prompt's signature.
    """

    source: Literal["live", "token_table", "none"] = "live"
    wrong_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.wrong_share <= 1:
            raise ValueError(f"wrong_share={self.wrong_share} must lie in [0, 1]")


class EventSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to a worker.

    Attributes:
        at_s: virtual seconds.
        kind: `slow` changes a decode worker's factor; `crash` kills a worker with what it
            holds; `leave` drains a decode worker; `join` starts a spare one.
        worker: id, d0.. or p0...
        factor: of `slow`.
    """

    at_s: float
    kind: Literal["slow", "crash", "leave", "join"]
    worker: str
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor > 0 or self.at_s < 0:
            raise ValueError("factor must be > 0 and at_s >= 0")


class Scenario(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a cell may change.

    Attributes:
        bank: the bank's file, or a drawn one.
        artefact: folder of a signature artefact; "" without (policies that need one fall back).
        latency: service times.
        fleet, load, requests, routers, signatures, drift, events: see their types.
    """

    bank: str | SyntheticBank
    artefact: str = ""
    latency: str
    fleet: FleetSection = FleetSection()
    load: LoadSection = LoadSection()
    requests: RequestsSection = RequestsSection()
    routers: RoutersSection = RoutersSection()
    signatures: SignaturesSection = SignaturesSection()
    drift: DriftSection = DriftSection()
    events: tuple[EventSection, ...] = ()


class PolicySection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode policy under a label.

    Attributes:
        name: registry name.
        label: unique name in reports; "" is the registry name.
        options: the policy's own.
        regions: regions given to the router: fitted ones (`balanced`), plain k-means
            (`vanilla`), or `none`.
        refit: move the regions with the traffic (5 s window, 1 s beat).
        pseudo_members: m of the region prior.
        drift_rate: share by which a worker's prior moves towards each request placed on it.
        artefact: the router knows this one instead of the scenario's (ablations of the fit);
            `{artefact}` in it is the scenario's own.
        guard: watch signatures and trust them less while they mispredict steps.
    """

    name: str
    label: str = ""
    options: dict[str, object] = {}
    regions: Literal["balanced", "vanilla", "none"] = "balanced"
    refit: bool = False
    pseudo_members: float = 8.0
    drift_rate: float = 0.0
    artefact: str = ""
    guard: bool = False

    @property
    def title(self) -> str:
        """Name in reports."""
        return self.label or self.name


class CellSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell.

    Attributes:
        name: unique.
        group: cells of a group are also reported as their mean; "" for none.
        like: an earlier cell whose change this one's is laid over; "" for none.
        change: parts of the scenario that differ.
        policies: labels to run; () runs all.
        num_seeds: run the first so many of the file's seeds only; 0 runs them all.
    """

    name: str
    group: str = ""
    like: str = ""
    change: dict[str, object] = {}
    policies: tuple[str, ...] = ()
    num_seeds: int = 0

    def __post_init__(self) -> None:
        if self.num_seeds < 0:
            raise ValueError(f"num_seeds={self.num_seeds} must be >= 0")


class ReplayFile(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file; see the module."""

    schema_version: int
    name: str
    scenario: dict[str, object]
    cells: tuple[CellSection, ...]
    policies: tuple[PolicySection, ...]
    baselines: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    quick: dict[str, object] = {}


class Cell(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell with its scenario worked out."""

    name: str
    group: str
    scenario: Scenario
    policies: tuple[PolicySection, ...]
    seeds: tuple[int, ...]


class ReplayConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checked replay.

    Attributes:
        name: of the replay.
        cells, baselines, seeds: what to run and compare with.
        folder: paths start there.
    """

    name: str
    cells: tuple[Cell, ...]
    baselines: tuple[str, ...]
    seeds: tuple[int, ...]
    folder: str

    @property
    def num_runs(self) -> int:
        """Runs of the whole replay."""
        return sum(len(cell.policies) * len(cell.seeds) for cell in self.cells)

    def path(self, name: str) -> Path:
        """A path of the file, from the file's folder."""
        return Path(self.folder) / name


class SuiteFile(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replays that belong together, the most important first.

    Attributes:
        replays: files, from this one's folder.
        quick: the ones run under --quick; () runs none.
    """

    schema_version: int
    replays: tuple[str, ...]
    quick: tuple[str, ...] = ()


def load_suite(path: str | Path, *, quick: bool = False) -> list[ReplayConfig]:
    """Reads a suite and all its replays.

    Raises:
        ConfigError: as `load_replay`.
    """
    try:
        file = load_yaml(path, SuiteFile)
    except PlannerConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.rule} ({path})") from error
    if file.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", file.schema_version, f"must be {SCHEMA_VERSION}")
    names = file.quick if quick else file.replays
    if not names:
        raise ConfigError("quick" if quick else "replays", names, "must name a replay file")
    found = [load_replay(Path(path).parent / name, quick=quick) for name in names]
    _distinct("replays.name", [config.name for config in found])
    return found


def load_replay(path: str | Path, *, quick: bool = False) -> ReplayConfig:
    """Reads and checks a replay file.

    Raises:
        ConfigError: unreadable, unknown key, wrong value; names the field.
    """
    try:
        raw = load_yaml(path, dict)
        file = convert(raw, ReplayFile, file=str(path))
        if quick and file.quick:
            file = convert(_merged(raw, file.quick), ReplayFile, file=str(path))
    except PlannerConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.rule} ({path})") from error
    if file.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", file.schema_version, f"must be {SCHEMA_VERSION}")
    titles = [policy.title for policy in file.policies]
    _distinct("policies.label", titles)
    _distinct("cells.name", [cell.name for cell in file.cells])
    if unknown := sorted(set(file.baselines) - set(titles)):
        raise ConfigError("baselines", unknown[0], f"must be one of {titles}")
    if not file.cells or not file.policies or not file.seeds:
        raise ConfigError("cells", len(file.cells), "cells, policies and seeds must not be empty")
    return ReplayConfig(
        name=file.name,
        cells=tuple(_cell(file, row, str(path)) for row in range(len(file.cells))),
        baselines=file.baselines,
        seeds=file.seeds,
        folder=str(Path(path).parent),
    )


def _cell(file: ReplayFile, row: int, path: str) -> Cell:
    cell = file.cells[row]
    try:
        scenario = convert(_merged(file.scenario, _change(file, row)), Scenario, file=path)
    except PlannerConfigError as error:
        field = f"cells[{row}] {cell.name!r}: {error.field}"
        raise ConfigError(field, error.value, error.rule) from error
    titles = {policy.title: policy for policy in file.policies}
    if unknown := sorted(set(cell.policies) - set(titles)):
        raise ConfigError(f"cells[{row}].policies", unknown[0], f"must be one of {sorted(titles)}")
    chosen = [titles[name] for name in cell.policies] if cell.policies else list(file.policies)
    return Cell(
        name=cell.name,
        group=cell.group,
        scenario=scenario,
        policies=tuple(chosen),
        seeds=file.seeds[: cell.num_seeds or len(file.seeds)],
    )


def _change(file: ReplayFile, row: int) -> object:
    """A cell's change, laid over that of the cell it is like."""
    cell = file.cells[row]
    if not cell.like:
        return cell.change
    earlier = [other.name for other in file.cells[:row]]
    if cell.like not in earlier:
        raise ConfigError(f"cells[{row}].like", cell.like, f"must be one of {earlier}")
    return _merged(_change(file, earlier.index(cell.like)), cell.change)


def _merged(base: object, change: object) -> object:
    """`change` laid over `base`, maps merged key by key."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {
        **base,
        **{key: _merged(base.get(key), value) for key, value in change.items()},
    }


def _distinct(field: str, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(field, twice[0], "must be unique")
