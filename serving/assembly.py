"""From a config to the parts of a router; each function builds one of them, none starts any."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import load_hardware_dir
from serving.config import CapabilitiesSection, ServerConfig, WorkerSection
from serving.core.clock import Clock
from serving.core.costs import CellCost, CostBook, CostKey
from serving.core.errors import ConfigError, WorkerLost
from serving.core.experts import ExpertProfiles
from serving.core.placed import Placed, PlacementObserver
from serving.core.ports import DecisionSink
from serving.core.router import Router
from serving.core.router_config import RouterConfig
from serving.core.transfer import LinkSpeeds
from serving.core.worker import Capabilities, Phase, WorkerInfo
from serving.cost.catalogue import load_catalogue
from serving.cost.surface import CostSurface, MeanRequest
from serving.cost.topology import ACCELERATOR_LABEL, slice_of_labels
from serving.engines.base import Engine
from serving.engines.vllm_grpc import EngineTimeouts, VllmGrpcEngine
from serving.fleet.fleet import Fleet
from serving.fleet.parking import ParkingLimits, ParkingRule
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.survival import SurvivalRows
from serving.policies.registry import make_policy
from serving.rpc.convert import DoorLimits
from serving.rpc.vllm_front import ServerFacts
from serving.signatures.artefact import SignatureArtefact
from serving.signatures.regions import FittedRegions

_PROBE_PAUSE_S = 0.5


def cost_surface(config: ServerConfig) -> CostSurface | None:
    """The cost surface, None where the config names no catalogue.

    Raises:
        ConfigError: a file is wrong.
    """
    section = config.costs
    if not section.variants:
        return None
    catalogue = load_catalogue(
        config.input_path(section.variants), config.input_path(section.hardware_dir)
    )
    return CostSurface(
        catalogue,
        mean_request=MeanRequest(
            prompt_tokens=section.mean_prompt_tokens, output_tokens=section.mean_output_tokens
        ),
        num_compared=section.num_compared,
    )


def cost_book(
    config: ServerConfig, surface: CostSurface | None = None, infos: Iterable[WorkerInfo] = ()
) -> CostBook:
    """Coefficients and prices of every cell; calibrated ones first, rooflines for the others.

    Raises:
        ConfigError: a hardware file is wrong, a cell names hardware without one, or a worker's
            cell cannot exist.
    """
    folder = config.input_path(config.costs.hardware_dir)
    try:
        hardware = load_hardware_dir(folder)
    except PlannerConfigError as error:
        raise ConfigError(f"costs.hardware_dir: {error.field}", error.value, str(error)) from error
    cells: dict[CostKey, CellCost] = {}
    if surface is not None:
        known = {(cell.model, cell.hardware) for cell in config.costs.cells}
        bare = [info for info in infos if (info.model, info.hardware) not in known]
        cells.update(surface.coefficients(bare))
        for info in bare:
            key = info.model, info.hardware, info.num_chips
            if key in surface.holes:
                raise ConfigError(f"workers.{info.worker_id}", key, surface.holes[key])
    for row, cell in enumerate(config.costs.cells):
        if cell.hardware not in hardware:
            raise ConfigError(
                f"costs.cells[{row}].hardware",
                cell.hardware,
                f"must be one of the hardware files {sorted(hardware)}",
            )
        price = cell.usd_per_chip_hour
        if price is None:
            price = hardware[cell.hardware].usd_per_chip_hour["amortised"]
        cells[cell.model, cell.hardware] = cell.cost(price)
    return CostBook(cells)


def parking(config: ServerConfig) -> ParkingRule | None:
    """The rule that parks idle decode workers, None where none is to be parked."""
    section = config.costs
    if not section.park_idle_after_s:
        return None
    return ParkingRule(
        ParkingLimits(idle_after_s=section.park_idle_after_s, min_awake=section.min_awake)
    )


def fleet_of(config: ServerConfig, artefact: SignatureArtefact | None) -> Fleet:
    """An empty fleet, with survival rows when there is a signature model."""
    survival = None
    if artefact is not None:
        model = artefact.model
        survival = SurvivalRows(model.size, layer_scale=model.num_layers / model.num_masked_layers)
    return Fleet(
        stale_after_s=config.router.stale_after_s,
        num_replicas=config.router.num_replicas,
        survival=survival,
    )


def expert_profiles(artefact: SignatureArtefact) -> ExpertProfiles:
    """The artefact's decode profiles as the objective takes them."""
    model, fitted = artefact.model, artefact.profiles
    weights = fitted.sizes / fitted.sizes.sum()
    return ExpertProfiles(
        version=artefact.version,
        signature_version=model.version,
        num_layers=model.num_layers,
        num_masked_layers=model.num_masked_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        mean_profile=np.asarray(weights @ fitted.profiles, np.float32),
        shrink_tokens=fitted.shrink_tokens,
        centroids=fitted.centroids,
        profiles=fitted.profiles,
        layer_scale=fitted.layer_scale,
    )


def bind_regions(fleet: Fleet, regions: FittedRegions | None) -> None:
    """Gives the decode workers the profiles of their regions."""
    if regions is None or regions.profiles is None:
        fleet.set_profiles(None)
        return
    scale = regions.layer_scale
    ids = regions.worker_ids
    fleet.set_profiles(
        dict(zip(ids, regions.profiles, strict=True)),
        None if scale is None else dict(zip(ids, scale.tolist(), strict=True)),
    )


class PrefixCredits:
    """Credits a prompt's blocks to the prefill worker it was sent to (a `PlacementObserver`)."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def placed(self, placed: Placed, now_s: float) -> None:
        """Takes one placement."""
        if placed.phase is Phase.PREFILL:
            with contextlib.suppress(KeyError):  # the worker left in the meantime
                self._index.route(placed.worker.worker_id, placed.block_hashes, now_s)


def build_router(
    config: ServerConfig,
    fleet: Fleet,
    *,
    costs: CostBook,
    clock: Clock,
    sink: DecisionSink | None,
    artefact: SignatureArtefact | None,
    regions: FittedRegions | None,
    prefix_index: PrefixIndex | None,
    links: LinkSpeeds,
    observers: tuple[PlacementObserver, ...],
) -> Router:
    """The router over its parts.

    Raises:
        ConfigError: a policy or one of its options is unknown.
    """
    section = config.router
    return Router(
        fleet,
        costs=costs,
        prefill_policy=make_policy(section.prefill_policy, **section.prefill_options),
        decode_policy=make_policy(section.decode_policy, **section.decode_options),
        config=RouterConfig(
            router_id=section.router_id,
            seed=section.seed,
            hash_seed=section.hash_seed,
            lease_s=section.lease_s,
            targets=config.targets(),
            links=links,
            record_everyone=section.record_all_share,
            explain_requests=section.num_explained,
        ),
        clock=clock,
        sink=sink,
        prefix_index=prefix_index,
        experts=None if artefact is None else expert_profiles(artefact),
        regions=regions,
        fallback_policy=make_policy("p2c_work"),
        observers=observers,
        cpu_s=time.thread_time,
    )


def engine_for(config: ServerConfig, worker: WorkerInfo, clock: Clock) -> VllmGrpcEngine:
    """The adapter of one worker; construct it inside the running event loop."""
    telemetry = config.telemetry
    return VllmGrpcEngine(
        worker,
        clock=clock,
        timeouts=EngineTimeouts(
            control_s=telemetry.timeout_s,
            first_token_s=telemetry.first_token_timeout_s,
            stall_s=telemetry.stall_timeout_s,
        ),
        max_message_bytes=config.server.max_message_bytes,
    )


async def discover(config: ServerConfig, clock: Clock) -> list[WorkerInfo]:
    """The static workers, with what the config leaves open asked from the engines.

    Raises:
        ConfigError: an engine does not answer within the first-token timeout, or does not
            tell a size that the config leaves open either.
    """
    found = (
        _discovered(config, f"workers[{row}]", worker, clock)
        for row, worker in enumerate(config.workers)
    )
    return list(await asyncio.gather(*found))


async def model_facts(
    config: ServerConfig, engines: Iterable[Engine], infos: Iterable[WorkerInfo], clock: Clock
) -> ServerFacts:
    """What GetModelInfo and GetServerInfo answer, from the first engine that answers.

    Raises:
        ConfigError: none does.
    """
    told, failure = None, None
    for engine in engines:
        try:
            told = await engine.model_info()
            break
        except WorkerLost as error:
            failure = error
    if told is None:
        raise ConfigError("workers", str(failure), "at least one engine must answer GetModelInfo")
    decoders = [info for info in infos if info.role.serves(Phase.DECODE)]
    limits = [info.capabilities for info in decoders]
    model = pb.GetModelInfoResponse()
    model.CopyFrom(told)
    model.served_model_name = config.model.name
    model.max_context_length = max(limit.max_context_tokens for limit in limits)
    return ServerFacts(
        model=model,
        started_at_s=clock.monotonic_s(),
        block_size_tokens=limits[0].block_size_tokens,
        max_num_seqs=sum(limit.max_num_seqs for limit in limits),
    )


def door_limits(
    config: ServerConfig, model: pb.GetModelInfoResponse, workers: Iterable[WorkerInfo]
) -> DoorLimits:
    """What requests may ask for: no more than the model's context and the largest KV pool."""
    pools = [
        worker.capabilities.num_kv_blocks * worker.capabilities.block_size_tokens
        for worker in workers
        if worker.role.serves(Phase.DECODE)
    ]
    return DoorLimits(
        models=frozenset({config.model.name, *(w.variant for w in config.workers if w.variant)}),
        max_context_tokens=min(model.max_context_length, max(pools)),
        vocab_size=model.vocab_size,
        default_max_tokens=config.router.default_max_tokens,
        default_slo=config.router.default_slo,
        allow_restart=config.router.allow_restart,
    )


async def _discovered(
    config: ServerConfig, field: str, section: WorkerSection, clock: Clock
) -> WorkerInfo:
    given = section.capabilities
    known = _Sizes.given(given)
    if known.missing():
        known = await _ask(config, field, section, known, clock)
    if missing := known.missing():
        name = missing[0]
        raise ConfigError(
            f"{field}.capabilities.{name}", 0, f"engine {section.address} does not tell it: set it"
        )
    return _worker_info(
        config,
        field,
        section,
        Capabilities(
            **dataclasses.asdict(known),
            buckets_tokens=given.buckets_tokens,
            pads=given.pads,
            tensor_parallel=given.tensor_parallel,
            kv_connector=given.kv_connector,
            kv_order=given.kv_order,
            emits_signature=given.emits_signature,
        ),
    )


def _worker_info(
    config: ServerConfig, field: str, section: WorkerSection, capabilities: Capabilities
) -> WorkerInfo:
    slice_id = ""
    if ACCELERATOR_LABEL in section.labels:
        try:
            hardware = load_hardware_dir(config.input_path(config.costs.hardware_dir))
            slice_id = slice_of_labels(section.labels, hardware).slice_id
        except ConfigError as error:
            raise ConfigError(f"{field}.labels.{error.field}", error.value, error.rule) from None
    return WorkerInfo(
        worker_id=section.worker_id,
        address=section.address,
        role=section.role,
        pool=section.pool,
        model=section.variant or config.model.name,
        hardware=section.hardware,
        capabilities=capabilities,
        num_chips=section.num_chips,
        ici_domain=section.ici_domain or slice_id,
        slice_id=slice_id,
        host=section.host,
        labels=tuple(sorted(section.labels.items())),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """The sizes an engine can be asked for; 0 is not known yet."""

    block_size_tokens: int
    page_size_tokens: int
    max_num_seqs: int
    max_context_tokens: int
    num_kv_blocks: int

    @classmethod
    def given(cls, section: CapabilitiesSection) -> _Sizes:
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(section, name) for name in names})

    def missing(self) -> list[str]:
        return [name for name, value in dataclasses.asdict(self).items() if not value]

    def filled(self, told: Mapping[str, int]) -> _Sizes:
        """With what was told in place of what is missing."""
        return dataclasses.replace(self, **{name: told[name] for name in self.missing()})


async def _ask(
    config: ServerConfig, field: str, section: WorkerSection, known: _Sizes, clock: Clock
) -> _Sizes:
    """Asks the engine, waiting for it to come up."""
    probe = Capabilities(
        block_size_tokens=1,
        page_size_tokens=1,
        max_num_seqs=1,
        max_context_tokens=1,
        num_kv_blocks=1,
    )
    engine = engine_for(config, _worker_info(config, field, section, probe), clock)
    give_up_s = clock.monotonic_s() + config.telemetry.first_token_timeout_s
    try:
        while True:
            try:
                server, model = await asyncio.gather(engine.server_info(), engine.model_info())
                num_kv_tokens = await engine.kv_tokens()
                break
            except WorkerLost as error:
                if clock.monotonic_s() >= give_up_s:
                    raise ConfigError(
                        f"{field}.address", section.address, f"no engine answers there: {error}"
                    ) from error
            await asyncio.sleep(_PROBE_PAUSE_S)
    finally:
        await engine.close()
    block = known.block_size_tokens or server.block_size
    return known.filled(
        {
            "block_size_tokens": block,
            "page_size_tokens": block,
            "max_num_seqs": server.max_num_seqs,
            "max_context_tokens": model.max_context_length,
            "num_kv_blocks": num_kv_tokens // block if block else 0,
        }
    )
