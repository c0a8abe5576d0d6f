"""The composition root: a config becomes a running router server.

    async with App(config) as app:
        print(app.address)
        await app.until_failure()

`start` builds everything in dependency order and `stop` takes it down in reverse. An embedded
fleet lives in the same process and the same event loop. The reference model is imported only
when a config asks for one: a router of remote engines never loads jax.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_reflection.v1alpha import reflection

from serving import assembly, native_kernels
from serving.config import ServerConfig, check
from serving.core.clock import Clock, SystemClock
from serving.core.errors import ArtefactError, ConfigError, Rejected, RejectReason
from serving.core.placed import PlacementObserver
from serving.core.router import Router
from serving.core.worker import Phase, WorkerInfo
from serving.decision_log import FileDecisionLog
from serving.engines.base import Engine
from serving.engines.poller import TelemetryPoller
from serving.engines.pulled import Pulled
from serving.engines.relay import Relay, RelayConfig
from serving.engines.signature_reader import SignatureReader
from serving.fleet.fleet import Fleet
from serving.policies.online_regions import OnlineRegions
from serving.policies.registry import make_policy
from serving.rpc import health, router_service, vllm_front
from serving.rpc.binding import bind
from serving.rpc.gate import DrainGate
from serving.rpc.health import HealthDoor
from serving.rpc.router_service import RouterService
from serving.rpc.tokenize import TextTokenizer, load_tokenizer
from serving.rpc.vllm_front import VllmFront
from serving.signatures.artefact import SignatureArtefact, load_artefact
from serving.signatures.regions import FittedRegions
from serving.upkeep import Upkeep

if TYPE_CHECKING:
    from eldr_jax.runner import PagedRunner
    from serving.engines.embedded_fleet import EmbeddedFleet

_log = logging.getLogger(__name__)
_ABORT_GRACE_S = 2.0
_ONLINE_REGIONS = ("eldr_online",)
_CHARS_PER_TOKEN = 32

Progress = Callable[[str, int, int], None]


class App:
    """A router server; use it as an async context manager or call `start` and `stop`.

    Attributes (after `start`):
        address: "host:port" it listens on.
        fleet, router, relay: the decision and the dispatch.
        embedded: workers of this process, or None.
    """

    address: str
    fleet: Fleet
    router: Router
    relay: Relay

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
        progress: Progress = lambda what, done, total: None,
        runner: PagedRunner | None = None,
    ) -> None:
        """Checks the config; nothing is opened or started yet.

        Args:
            config: see serving/config.py.
            clock: time source; the system's by default.
            progress: told (what, done, total) during `start`, possibly from another thread.
            runner: a compiled model for the embedded fleet, when several servers of one
                process share it; None loads the config's.

        Raises:
            ConfigError: a rule between fields is broken, or a policy is unknown.
        """
        check(config)
        self.config = config
        self.embedded: EmbeddedFleet | None = None
        self._clock = clock if clock is not None else SystemClock()
        self._progress = progress
        self._runner = runner
        self._gate = DrainGate()
        self._engines: dict[str, Engine] = {}
        self._log: FileDecisionLog | None = None
        self._tokenizer: TextTokenizer | None = None
        self._artefact: SignatureArtefact | None = None
        self._regions: FittedRegions | None = None
        self._online: OnlineRegions | None = None
        self._upkeep: Upkeep
        self._kernels: threading.Thread | None = None
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] | None = None
        make_policy(config.router.prefill_policy, **config.router.prefill_options)
        make_policy(config.router.decode_policy, **config.router.decode_options)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    # Life.

    async def start(self) -> None:
        """Starts everything; on failure what was started is stopped again.

        Raises:
            ConfigError: names the field, its value and the rule.
            ArtefactError: a model, tokenizer or learned artefact cannot be used.
        """
        self._failure = asyncio.get_running_loop().create_future()
        try:
            await self._start()
        except BaseException:
            await self.stop(0.0)
            raise

    async def drain(self, grace_s: float) -> bool:
        """Refuses new work and lets what runs end.

        Args:
            grace_s: how long; what still runs then ends with a retryable error.

        Returns:
            Whether everything ended by itself.
        """
        self._gate.close()
        if self._server is None:
            return True
        await self._health.show(draining=True, usable=False)
        if await self._gate.idle(grace_s):
            return True
        cut = self.relay.abort_all(
            Rejected(RejectReason.DRAINING, f"still running {grace_s:g} s after shutdown began")
        )
        _log.warning("%d requests were cut off after %g s", cut, grace_s)
        await self._gate.idle(_ABORT_GRACE_S)
        return False

    async def stop(self, grace_s: float | None = None) -> None:
        """Drains and stops; again is harmless.

        Args:
            grace_s: for the drain; None takes the config's.
        """
        await self.drain(self.config.server.drain_grace_s if grace_s is None else grace_s)
        if self._server is not None:
            await self._server.stop(_ABORT_GRACE_S)
            self._server = None
            await self.relay.settle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()
        if self.embedded is not None:
            await self.embedded.stop(0.0)
            self.embedded = None
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._tokenizer is not None:
            self._tokenizer.close()
            self._tokenizer = None

    async def warmed_up(self) -> None:
        """Waits until decisions run as they will from then on: compiling takes a core."""
        if self._kernels is not None:
            await asyncio.to_thread(self._kernels.join)

    async def until_failure(self) -> None:
        """Waits until a background task dies, which it never should.

        Raises:
            Exception: what the task died of.
        """
        assert self._failure is not None
        await asyncio.shield(self._failure)

    # What operators change live.

    def set_policy(self, phase: Phase, name: str, **options: object) -> None:
        """The rule for the next decisions of a phase.

        Raises:
            ConfigError: unknown policy or option.
        """
        self.router.set_policy(phase, make_policy(name, **options))
        if phase is Phase.DECODE:
            self._use_regions(name)

    def summary(self) -> list[str]:
        """What was started, a line each."""
        lines = [f"listening on {self.address}"]
        for info in self.fleet.workers:
            lines.append(
                f"worker {info.worker_id} {info.role.value} at {info.address} "
                f"({info.hardware}, {info.capabilities.num_kv_blocks} KV blocks)"
            )
        version = "none" if self._artefact is None else self._artefact.version
        regions = "none" if self._regions is None else self._regions.version
        lines.append(f"signature artefact {version}, regions {regions}")
        for phase in Phase:
            lines.append(f"{phase.value} policy {self.router.policy(phase).name}")
        lines.append(f"decisions to {self.config.log.decisions or 'memory only'}")
        return lines

    # Inside.

    async def _start(self) -> None:
        config, clock = self.config, self._clock
        assembly.cost_book(config)  # what is wrong with it is told before anything starts
        self._upkeep = upkeep = Upkeep(config)
        self._check_address()
        if config.log.decisions:
            self._log = FileDecisionLog(Path(config.log.decisions))
        await self._load_artefacts()
        infos = [*await self._start_embedded(), *await assembly.discover(config, clock)]
        self._check_unique(infos)
        costs = assembly.cost_book(config, upkeep.surface, infos)
        self.fleet = assembly.fleet_of(config, self._artefact)
        for info in infos:
            self.fleet.add(info, clock.monotonic_s())
            self._engines[info.worker_id] = assembly.engine_for(config, info, clock)
        self._fleet_changed()
        await self._fit_regions(infos)
        self.router = assembly.build_router(
            config,
            self.fleet,
            costs=costs,
            clock=clock,
            sink=self._log,
            artefact=self._artefact,
            regions=self._regions,
            prefix_index=upkeep.prefix_index,
            links=upkeep.links(clock.monotonic_s()),
            observers=self._observers(),
        )
        self._upkeep.push_table(self.router, self.fleet, clock.monotonic_s())
        self._use_regions(config.router.decode_policy)
        facts = await assembly.model_facts(config, self._engines.values(), infos, clock)
        await self._open_doors(facts)
        if config.router.compiled:
            self._kernels = native_kernels.load_in_background()

    def _check_address(self) -> None:
        """Tells of an address in use before anything is compiled; gRPC binds it at the end."""
        section = self.config.server
        family = socket.AF_INET6 if ":" in section.host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((section.host, section.port))
        except OSError as error:
            where = f"{section.host}:{section.port}"
            raise ConfigError("server.port", where, f"cannot be bound: {error.strerror}") from error

    async def _load_artefacts(self) -> None:
        config = self.config
        if config.artefacts.signature:
            path = config.input_path(config.artefacts.signature)
            self._artefact = await asyncio.to_thread(load_artefact, path)
            if self._artefact.manifest.evidence != "counts":
                raise ArtefactError(path, "must be fitted from counts: workers send nothing else")

    async def _start_embedded(self) -> list[WorkerInfo]:
        section = self.config.embedded
        if section is None:
            return []
        from serving.engines.embedded_fleet import EmbeddedFleet, load_runner

        model_dir = self.config.input_path(section.model_dir)
        runner = self._runner
        if runner is None:
            runner = await asyncio.to_thread(load_runner, section, model_dir)
        self.embedded = EmbeddedFleet(
            section,
            runner=runner,
            model_name=self.config.model.name,
            model_dir=str(model_dir),
            hash_seed=self.config.router.hash_seed,
            signature_model=None if self._artefact is None else self._artefact.model,
            clock=self._clock,
        )
        await self.embedded.start(lambda done, total: self._progress("compiling", done, total))
        return self.embedded.infos()

    async def _fit_regions(self, infos: list[WorkerInfo]) -> None:
        if self._artefact is None or not self.config.artefacts.regions:
            return
        decoders = [info.worker_id for info in infos if info.role.serves(Phase.DECODE)]
        self._regions = await asyncio.to_thread(self._artefact.regions_for, decoders)
        self._online = OnlineRegions(self._regions)
        assembly.bind_regions(self.fleet, self._regions)

    async def _open_doors(self, facts: vllm_front.ServerFacts) -> None:
        config, clock, server_section = self.config, self._clock, self.config.server
        limits = assembly.door_limits(config, facts.model, self.fleet.workers)
        tokenizer_path = config.model.tokenizer
        if tokenizer_path:
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer,
                config.input_path(tokenizer_path),
                max_prompt_chars=_CHARS_PER_TOKEN * limits.max_context_tokens,
            )
        poller = TelemetryPoller(
            fleet=self.fleet,
            engines=self._engines.values(),
            clock=clock,
            interval_s=config.telemetry.poll_interval_s,
            lost_after=config.telemetry.lost_after,
            jitter=random.Random(config.router.seed),
            on_change=self._fleet_changed,
        )
        self.relay = Relay(
            router=self.router,
            engines=self._engines,
            clock=clock,
            config=RelayConfig(
                max_losses=config.router.max_losses,
                decode_wait_s=config.router.decode_wait_s,
                kv_lease_s=config.router.kv_lease_s,
                eos_token_ids=frozenset(facts.model.eos_token_ids),
            ),
            signatures=SignatureReader(self._artefact),
            on_loss=poller.suspect,
            on_pulled=self._pulled,
        )
        self._routes = RouterService(
            router=self.router,
            relay=self.relay,
            gate=self._gate,
            limits=limits,
            clock=clock,
        )
        front = VllmFront(
            relay=self.relay,
            router=self.router,
            gate=self._gate,
            limits=limits,
            facts=facts,
            clock=clock,
            tokenizer=self._tokenizer,
            is_routed=self._routes.holds,
        )
        self._health = HealthDoor()
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # a port in use is an error, not half the traffic
                ("grpc.max_receive_message_length", server_section.max_message_bytes),
                ("grpc.max_send_message_length", server_section.max_message_bytes),
            ),
            maximum_concurrent_rpcs=server_section.max_concurrent_calls,
        )
        names = [
            bind(server, vllm_front.SERVICE, front),
            bind(server, router_service.SERVICE, self._routes),
            bind(server, health.SERVICE, self._health),
        ]
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        where = f"{server_section.host}:{server_section.port}"
        try:
            port = server.add_insecure_port(where)
        except RuntimeError as error:
            raise ConfigError("server.port", where, f"cannot be bound: {error}") from error
        self.address = f"{server_section.host}:{port}"
        await asyncio.gather(*(poller.poll_once(worker_id) for worker_id in self._engines))
        await server.start()
        self._server = server
        self._supervise(poller.run(), "telemetry")
        self._supervise(self._sweep(), "sweep")

    async def _sweep(self) -> None:
        """Leases, health and regions, once a beat."""
        while True:
            now_s = self._clock.monotonic_s()
            self.relay.keep_alive(now_s)
            self._routes.expire(now_s)
            usable = all(self.router.view(phase).accepts.any() for phase in Phase)
            await self._health.show(draining=self._gate.draining, usable=usable)
            self._upkeep.sweep(self.router, self.fleet, now_s)
            await self._refit(now_s)
            await asyncio.sleep(self.config.router.sweep_every_s)

    async def _refit(self, now_s: float) -> None:
        """Moves the online regions, while the rule in force follows them."""
        online = self._online
        if online is None or self.router.policy(Phase.DECODE).name not in _ONLINE_REGIONS:
            return
        job = online.due(now_s)
        if job is not None:
            centroids = await asyncio.to_thread(job.run)
            regions = online.adopt(job, centroids)
            if self.router.policy(Phase.DECODE).name in _ONLINE_REGIONS:
                self.router.set_regions(regions)

    def _observers(self) -> tuple[PlacementObserver, ...]:
        online = () if self._online is None else (self._online,)
        return (*online, *self._upkeep.observers())

    def _pulled(self, source_id: str, target_id: str, pulled: Pulled) -> None:
        source, target = self.fleet.find(source_id), self.fleet.find(target_id)
        if source is not None and target is not None:
            self._upkeep.pulled(source, target, pulled, self._clock.monotonic_s())

    def _fleet_changed(self) -> None:
        """Workers joined, restarted, changed state or left."""
        self._upkeep.fleet_changed(self.fleet)

    def _use_regions(self, policy: str) -> None:
        """Online rules see the regions that follow the traffic, the others the fitted ones."""
        online = self._online if policy in _ONLINE_REGIONS else None
        self.router.set_regions(self._regions if online is None else online.regions)

    def _check_unique(self, infos: list[WorkerInfo]) -> None:
        ids = [info.worker_id for info in infos]
        twice = sorted({worker_id for worker_id in ids if ids.count(worker_id) > 1})
        if twice:
            raise ConfigError("workers", twice, "embedded workers have these ids already")

    def _supervise(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.append(task)

        def ended(task: asyncio.Task[None]) -> None:
            failure = self._failure
            if task.cancelled() or failure is None or failure.done():
                return
            error = task.exception() or RuntimeError(f"background task {name!r} returned")
            _log.critical("background task %r died", name, exc_info=error)
            failure.set_exception(error)

        task.add_done_callback(ended)
