"""The router server's config: one YAML file, read strictly.

An unknown key is an error that names the nearest known one; every rule names file, dotted
path, value and rule. Paths of what is read are relative to the config file's folder; paths of
what is written are relative to the working directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from serving.core.costs import CellCost, PrefillTimeModel, StepTimeModel
from serving.core.errors import ConfigError
from serving.core.request import SloClass, SloTarget
from serving.core.transfer import LinkSpeeds
from serving.core.worker import KvOrder, Padding, Role

SCHEMA_VERSION = 1

_LARGEST = 1e15  # no setting means anything beyond; infinities and NaN are refused with it
Positive = Annotated[float, Meta(gt=0, le=_LARGEST)]
NonNegative = Annotated[float, Meta(ge=0, le=_LARGEST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
CountOrNone = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, no unknown keys."""


class ServerSection(_Section, frozen=True, kw_only=True):
    """The listening side.

    Attributes:
        host: address to bind; the default is this machine only, since there is no auth.
        port: 0 takes a free one.
        drain_grace_s: how long running requests may go on after SIGTERM.
        max_message_bytes: largest message taken or sent.
        max_concurrent_calls: calls beyond it are refused by gRPC itself.
    """

    host: Name = "127.0.0.1"
    port: Port = 50051
    drain_grace_s: NonNegative = 20.0
    max_message_bytes: Count = 64 << 20
    max_concurrent_calls: Count = 4096


class RouterSection(_Section, frozen=True, kw_only=True):
    """How requests are placed.

    Attributes:
        router_id: this replica's name in the records.
        prefill_policy, decode_policy: names of serving/policies.
        prefill_options, decode_options: the policies' own options.
        seed: of tie-breaks and draws.
        hash_seed: of the router's block hashes, a deployment secret.
        lease_s: a reservation nobody renews or ends is taken back after it.
        stale_after_s: a worker silent for longer takes no new work.
        sweep_every_s: how often leases are checked.
        num_replicas: router replicas that share the fleet.
        record_all_share: share of decisions recorded with every candidate.
        num_explained: recent requests `Explain` can still answer for.
        max_losses: workers one request may lose before its loss is reported.
        decode_wait_s: how long a finished prefill waits for a decode worker with room.
        compiled: whether the decision's hot loops are compiled once the server runs, where numba
            is installed.
        prefix_index: whether prompts are credited on the workers they were sent to before.
        kv_lease_s: how long unpulled KV is trusted on engines that enforce no lease.
        allow_restart: whether requests may be re-run from their tokens so far by default.
        default_max_tokens: output limit of requests that name none.
        default_slo: class of requests that name none.
    """

    router_id: Name = "router-0"
    prefill_policy: Name = "p2c_work"
    decode_policy: Name = "expert_cost"
    prefill_options: dict[str, bool | int | float | str] = {}
    decode_options: dict[str, bool | int | float | str] = {}
    seed: int = 0
    hash_seed: int = 0
    lease_s: Positive = 60.0
    stale_after_s: Positive = 10.0
    sweep_every_s: Positive = 1.0
    num_replicas: Count = 1
    record_all_share: Share = 0.01
    num_explained: Count = 4096
    max_losses: CountOrNone = 3
    decode_wait_s: NonNegative = 10.0
    compiled: bool = True
    prefix_index: bool = False
    kv_lease_s: Positive = 20.0
    allow_restart: bool = True
    default_max_tokens: Count = 256
    default_slo: SloClass = SloClass.B


class SloSection(_Section, frozen=True, kw_only=True):
    """One class; a bound left out does not exist.

    Attributes:
        lambda_usd_per_s: what a second of the class's visible delay is worth.
        ttft_p99_s, tpot_p99_s, deadline_s: see `SloTarget`.
    """

    lambda_usd_per_s: Positive
    ttft_p99_s: Positive = math.inf
    tpot_p99_s: Positive = math.inf
    deadline_s: Positive = math.inf

    def target(self) -> SloTarget:
        """The core's type."""
        return SloTarget(
            ttft_p99_s=self.ttft_p99_s,
            tpot_p99_s=self.tpot_p99_s,
            deadline_s=self.deadline_s,
            lambda_usd_per_s=self.lambda_usd_per_s,
        )


class ModelSection(_Section, frozen=True, kw_only=True):
    """The model served.

    Attributes:
        name: what clients ask for and workers serve.
        tokenizer: `tokenizer.json` or its folder; "" takes token ids only.
    """

    name: Name
    tokenizer: str = ""


class ArtefactsSection(_Section, frozen=True, kw_only=True):
    """Learned parts; an empty path leaves one out.

    Attributes:
        signature: folder of the signature artefact.
        regions: whether its regions enter placement.
    """

    signature: str = ""
    regions: bool = True


class CapabilitiesSection(_Section, frozen=True, kw_only=True):
    """What an engine was configured for; 0 asks the engine at start."""

    block_size_tokens: CountOrNone = 0
    page_size_tokens: CountOrNone = 0
    max_num_seqs: CountOrNone = 0
    max_context_tokens: CountOrNone = 0
    num_kv_blocks: CountOrNone = 0
    buckets_tokens: tuple[Count, ...] = ()
    pads: Padding = Padding.STEP
    tensor_parallel: Count = 1
    kv_connector: str = ""
    kv_order: KvOrder = KvOrder.AFTER_PREFILL
    emits_signature: bool = False


class WorkerSection(_Section, frozen=True, kw_only=True):
    """One engine that runs elsewhere; see `WorkerInfo`.

    Attributes:
        variant: model variant it serves; "" is the model's name.
        ici_domain: "" takes the slice that GKE labels put it in, where there are such.
    """

    worker_id: Name
    address: Annotated[str, Meta(pattern=r"^[^\s]+:[0-9]{1,5}$")]
    role: Role
    hardware: Name
    variant: str = ""
    pool: Name = "default"
    num_chips: Count = 1
    ici_domain: str = ""
    host: str = ""
    labels: dict[str, str] = {}
    capabilities: CapabilitiesSection = CapabilitiesSection()


class EmbeddedSection(_Section, frozen=True, kw_only=True):
    """Reference-model workers inside this process.

    Attributes:
        model_dir: checkpoint folder; its tokenizer serves when `model.tokenizer` is "".
        num_prefill, num_decode, num_both: workers by role.
        num_blocks: KV blocks of each worker.
        block_size_tokens: tokens per block.
        max_blocks_per_seq: longest request, in blocks.
        token_buckets: compiled step sizes.
        max_num_seqs: requests one worker runs at once.
        lease_s: seconds a finished prefill keeps its KV for decode.
        prefix_cache: whether workers find earlier prompts' blocks.
        hardware: id of the hardware file that prices them.
        pool: their pool's name.
        domain_size: workers per simulated fast-link domain; 0 puts all into one.
    """

    model_dir: Name
    num_prefill: CountOrNone = 1
    num_decode: CountOrNone = 2
    num_both: CountOrNone = 0
    num_blocks: Count = 512
    block_size_tokens: Count = 16
    max_blocks_per_seq: Count = 64
    token_buckets: tuple[Count, ...] = (16, 32, 64, 128, 256, 512)
    max_num_seqs: Count = 16
    lease_s: Positive = 30.0
    prefix_cache: bool = True
    hardware: Name = "cpu_embedded"
    pool: Name = "embedded"
    domain_size: CountOrNone = 0


class TelemetrySection(_Section, frozen=True, kw_only=True):
    """How workers are watched.

    Attributes:
        poll_interval_s: between two reports of a worker.
        timeout_s: silence of one control call that counts as a failure.
        lost_after: failures in a row after which a worker is LOST.
        first_token_timeout_s, stall_timeout_s: see `EngineTimeouts`.
    """

    poll_interval_s: Positive = 0.5
    timeout_s: Positive = 2.0
    lost_after: Count = 3
    first_token_timeout_s: Positive = 120.0
    stall_timeout_s: Positive = 30.0


class LogSection(_Section, frozen=True, kw_only=True):
    """Where records go.

    Attributes:
        decisions: JSONL file of decisions and outcomes; "" keeps them in memory only.
    """

    decisions: str = ""


class StepSection(_Section, frozen=True, kw_only=True):
    """Decode step-time coefficients; see `StepTimeModel`."""

    base_s: NonNegative
    c0_s: NonNegative
    c2_s: NonNegative
    c3_s: NonNegative
    attention_s: NonNegative
    num_moe_layers: CountOrNone
    num_experts: Count
    top_k: Count


class PrefillSection(_Section, frozen=True, kw_only=True):
    """Prefill-time coefficients; see `PrefillTimeModel`."""

    chunk_s: NonNegative
    token_s: NonNegative


class CellSection(_Section, frozen=True, kw_only=True):
    """Time and price of one (model, hardware) cell.

    Attributes:
        usd_per_chip_hour: None takes the hardware file's amortised price.
        version: where the coefficients come from.
    """

    model: Name
    hardware: Name
    prefill: PrefillSection
    step: StepSection
    version: Name
    usd_per_chip_hour: NonNegative | None = None
    kv_bytes_per_token: NonNegative = 0.0
    needs_equal_tensor_parallel: bool = False

    def cost(self, usd_per_chip_hour: float) -> CellCost:
        """The core's type, at a price."""
        return CellCost(
            usd_per_chip_hour=usd_per_chip_hour,
            prefill=PrefillTimeModel(**msgspec.structs.asdict(self.prefill)),
            step=StepTimeModel(**msgspec.structs.asdict(self.step)),
            kv_bytes_per_token=self.kv_bytes_per_token,
            needs_equal_tensor_parallel=self.needs_equal_tensor_parallel,
            version=self.version,
        )


class MeasuredLink(_Section, frozen=True, kw_only=True):
    """Measured hand-over bandwidth from one pool's prefill to another's decode workers."""

    prefill_pool: Name
    decode_pool: Name
    bytes_per_s: Positive


class LinksSection(_Section, frozen=True, kw_only=True):
    """Hand-over bandwidths; see `LinkSpeeds`, whose priors stand where a value is left out."""

    latency_s: NonNegative | None = None
    host_bytes_per_s: Positive | None = None
    domain_bytes_per_s: Positive | None = None
    network_bytes_per_s: Positive | None = None
    measured: tuple[MeasuredLink, ...] = ()

    def speeds(self) -> LinkSpeeds:
        """The core's type."""
        given = msgspec.structs.asdict(self)
        measured = {(m.prefill_pool, m.decode_pool): m.bytes_per_s for m in given.pop("measured")}
        priors = {name: value for name, value in given.items() if value is not None}
        return LinkSpeeds(**priors, measured_bytes_per_s=measured)


class CostsSection(_Section, frozen=True, kw_only=True):
    """Time and price.

    Attributes:
        hardware_dir: folder of hardware files.
        cells: calibrated cells by (model, hardware).
        links: how fast KV moves between workers.
        variants: catalogue file; where one is given, cells without calibration take their
            roofline, links their hardware's priors, and pools are ordered by what they cost.
        mean_prompt_tokens, mean_output_tokens: the traffic pools are ordered for.
        num_compared: cheapest pools a request is compared over.
        table_every_s: how often the order is worked out anew.
        park_idle_after_s: idle decode workers are parked after it; 0 never parks.
        min_awake: decode workers of a pool that are never parked.
    """

    hardware_dir: Name
    cells: tuple[CellSection, ...] = ()
    links: LinksSection = LinksSection()
    variants: str = ""
    mean_prompt_tokens: Positive = 2048.0
    mean_output_tokens: Positive = 300.0
    num_compared: Count = 3
    table_every_s: Positive = 10.0
    park_idle_after_s: NonNegative = 0.0
    min_awake: Count = 1


class ServerConfig(_Section, frozen=True, kw_only=True):
    """The whole file.

    Attributes:
        workers: engines that run elsewhere.
        embedded: workers inside this process; either or both.
        folder: where relative input paths start; set by `load_config`.
    """

    schema_version: int
    model: ModelSection
    slo: dict[SloClass, SloSection]
    costs: CostsSection
    server: ServerSection = ServerSection()
    router: RouterSection = RouterSection()
    artefacts: ArtefactsSection = ArtefactsSection()
    workers: tuple[WorkerSection, ...] = ()
    embedded: EmbeddedSection | None = None
    telemetry: TelemetrySection = TelemetrySection()
    log: LogSection = LogSection()
    folder: str = "."

    def input_path(self, path: str) -> Path:
        """A path of something to read, resolved."""
        return Path(self.folder, path)

    def targets(self) -> dict[SloClass, SloTarget]:
        """SLO targets by class."""
        return {slo: section.target() for slo, section in self.slo.items()}


def load_config(path: str | Path) -> ServerConfig:
    """Reads and checks a config file.

    Raises:
        ConfigError: names file, dotted path, value and rule.
    """
    try:
        config = load_yaml(path, ServerConfig)
    except PlannerConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    if config.folder != ".":
        raise ConfigError(f"{path}: folder", config.folder, "is set by the loader, leave it out")
    config = msgspec.structs.replace(config, folder=str(Path(path).parent))
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    return config


def check(config: ServerConfig) -> None:
    """The rules between fields.

    Raises:
        ConfigError: names the dotted path, the value and the rule.
    """
    if config.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", config.schema_version, f"must be {SCHEMA_VERSION}")
    missing = [slo.value for slo in SloClass if slo not in config.slo]
    if missing:
        raise ConfigError("slo", missing, "every class A, B, C needs its section")
    if config.router.decode_wait_s >= config.router.lease_s:
        raise ConfigError(
            "router.decode_wait_s",
            config.router.decode_wait_s,
            f"must be < router.lease_s={config.router.lease_s:g}, or waiting requests expire",
        )
    _check_workers(config)
    _check_cells(config)
    if config.telemetry.poll_interval_s >= config.router.stale_after_s:
        raise ConfigError(
            "telemetry.poll_interval_s",
            config.telemetry.poll_interval_s,
            f"must be < router.stale_after_s={config.router.stale_after_s:g}, "
            "or every worker is always stale",
        )


def _check_workers(config: ServerConfig) -> None:
    roles = [worker.role for worker in config.workers]
    if config.embedded is not None:
        embedded = config.embedded
        roles += [Role.PREFILL] * embedded.num_prefill + [Role.DECODE] * embedded.num_decode
        roles += [Role.BOTH] * embedded.num_both
        buckets = embedded.token_buckets
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ConfigError(
                "embedded.token_buckets", list(buckets), "must be ascending and distinct"
            )
    for wanted in (Role.PREFILL, Role.DECODE):
        if wanted not in roles and Role.BOTH not in roles:
            raise ConfigError(
                "workers",
                [role.value for role in roles],
                f"no worker serves {wanted.value}: list one in workers or embedded",
            )
    _check_distinct("worker_id", (worker.worker_id for worker in config.workers))
    _check_distinct("address", (worker.address for worker in config.workers))


def _check_distinct(name: str, values: Iterable[str]) -> None:
    seen: dict[str, int] = {}
    for row, value in enumerate(values):
        if value in seen:
            raise ConfigError(
                f"workers[{row}].{name}", value, f"must be unique; workers[{seen[value]}] has it"
            )
        seen[value] = row


def _check_cells(config: ServerConfig) -> None:
    known = {(cell.model, cell.hardware) for cell in config.costs.cells}
    if len(known) != len(config.costs.cells):
        raise ConfigError("costs.cells", sorted(known), "each (model, hardware) must be given once")
    name = config.model.name
    used = {
        (worker.variant or name, worker.hardware): f"workers[{i}].hardware"
        for i, worker in enumerate(config.workers)
        if not config.costs.variants
    }
    if config.embedded is not None:
        used[name, config.embedded.hardware] = "embedded.hardware"
    for (model, hardware), field in used.items():
        if (model, hardware) not in known:
            raise ConfigError(field, hardware, f"costs.cells has none for model {model!r} on it")
