"""One embedded worker: a reference model behind `VllmEngine` on a port of this machine.

    worker = EmbeddedWorker(EmbeddedWorkerConfig(worker_id="d0", role=Role.DECODE), runner)
    port = await worker.start()
    ...
    await worker.stop(grace_s=10.0)

Workers of one process may share a runner (one compiled model) and must then share a `StepTurn`,
so that their steps do not disturb each other's measurement; each has its own KV pool, step thread
and busy clock (`busy_s`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from eldr_jax.paged import KvPool
from eldr_jax.runner import PagedRunner
from serving.core.clock import Clock, SystemClock
from serving.core.errors import ConfigError
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.engines.embedded.engine import Engine
from serving.engines.embedded.generate_request import Limits
from serving.engines.embedded.kv_transfer import CHANNEL_OPTIONS, KvPuller, KvServicer
from serving.engines.embedded.sequence import Event, Sink
from serving.engines.embedded.servicer import VllmServicer
from serving.engines.embedded.step_log import StepRecord
from serving.engines.embedded.step_loop import StepLoop
from serving.engines.embedded.turn import StepTurn
from serving.engines.embedded.work import Accounting, Geometry
from serving.engines.embedded.worker_service import WorkerServicer
from serving.proto import embedded_pb2
from serving.rpc.binding import bind
from serving.signatures.model import SignatureModel

_SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),
    # On a starved machine gRPC would cancel calls that this process was too slow to accept for
    # 30 s; a call's own deadline says how long it may wait.
    ("grpc.server_max_unrequested_time_in_server", 600),
)
_DRAIN_POLL_S = 0.02
_CLOSE_GRACE_S = 1.0


class _GivenUpError(Exception):
    """Nobody waits for the compilation any more."""


class EmbeddedWorker:
    """A worker's life; use it on one event loop.

    Attributes:
        config: its settings.
        port: the port it listens on; 0 before `start`.
    """

    def __init__(
        self,
        config: EmbeddedWorkerConfig,
        runner: PagedRunner,
        *,
        turn: AbstractContextManager[None] | None = None,
        signature_model: SignatureModel | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Checks that settings, model and signature model fit; nothing runs before `start`.

        Args:
            config: settings.
            runner: the compiled model; may be shared by workers of the process.
            turn: held during every step; share one among the workers of the process.
            signature_model: says which layers `eldr_sig` carries; None sends none.
            clock: time source.

        Raises:
            ConfigError: names the field, its value and the rule.
        """
        model = runner.config
        if signature_model is not None:
            mine = (model.num_layers, model.num_experts, model.num_experts_per_tok)
            its = (signature_model.num_layers, signature_model.num_experts, signature_model.top_k)
            if its != mine:
                rule = f"must be the model's {mine} (layers, experts, top-k)"
                raise ConfigError("signature_model", its, rule)
        self.config = config
        self.port = 0
        self._runner = runner
        self._turn = turn if turn is not None else StepTurn()
        self._signature_model = signature_model
        self._clock = clock if clock is not None else SystemClock()
        self._geometry = Geometry(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            num_layers=model.num_layers,
            num_experts=model.num_experts,
            max_step_tokens=config.step_tokens(runner),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = Engine(config, self._geometry, clock=self._clock, emit=self._emit)
        self._steps = StepLoop(self._engine, runner, turn=self._turn, name=config.worker_id)
        self._server: grpc.aio.Server | None = None
        self._puller: KvPuller | None = None

    @property
    def address(self) -> str:
        """Where others reach it, "host:port"; after `start`."""
        return f"{self.config.advertise_host or self.config.host}:{self.port}"

    @property
    def busy_s(self) -> float:
        """Its busy clock: seconds spent in its own steps."""
        return self._engine.busy.now_s()

    def accounting(self) -> Accounting:
        """Blocks, leases and requests of the moment."""
        return self._engine.accounting()

    def steps_since(self, sequence: int, limit: int) -> tuple[list[StepRecord], int]:
        """Measured steps from that number on, and the number of the step to come."""
        return self._engine.steps_since(sequence, limit)

    async def start(
        self, *, warm_up: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Takes its pool and starts to serve.

        Args:
            warm_up: compile every bucket first; needed once per runner.
            progress: called with (done, total) buckets, from another thread.

        Returns:
            The port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        given_up = threading.Event()
        try:
            pool = await asyncio.to_thread(self._new_pool, warm_up, progress, given_up)
        except asyncio.CancelledError:
            given_up.set()  # a thread cannot be cancelled: it ends after the bucket it compiles
            raise
        server, servicer = self._build_server()
        try:
            self.port = server.add_insecure_port(f"{self.config.host}:{self.config.port}")
        except RuntimeError as error:
            where = f"{self.config.host}:{self.config.port}"
            raise ConfigError("port", where, f"cannot be bound: {error}") from error
        servicer.port = self.port
        self._steps.start(pool)
        await server.start()
        self._server = server
        return self.port

    async def stop(self, grace_s: float = 0.0) -> None:
        """Drains and stops.

        Args:
            grace_s: seconds for running requests and unpulled hand-overs; new requests are
                refused at once, what is left afterwards is broken off with a clear status.
        """
        self._engine.draining = True
        deadline_s = self._clock.monotonic_s() + grace_s
        while self._clock.monotonic_s() < deadline_s and not self._engine.accounting().idle:
            await asyncio.sleep(_DRAIN_POLL_S)
        await self._shut_down(_CLOSE_GRACE_S)

    async def kill(self) -> None:
        """Vanishes as if the process had died: connections break, nobody is told anything."""
        if self._server is not None:
            await self._server.stop(None)
        await self._shut_down(None)

    async def _shut_down(self, grace_s: float | None) -> None:
        # Breaking the requests first lets their streams end with a status within the grace.
        self._engine.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._puller is not None:
            await self._puller.close()
        await asyncio.to_thread(self._steps.join)

    def _new_pool(
        self,
        warm_up: bool,
        progress: Callable[[int, int], None] | None,
        given_up: threading.Event,
    ) -> KvPool:
        def after_each(done: int, total: int) -> None:
            if given_up.is_set():
                raise _GivenUpError
            if progress is not None:
                progress(done, total)

        pool = self._runner.new_pool()
        if warm_up:
            with self._turn:
                pool = self._runner.warm_up(pool, after_each)
        return pool

    def _build_server(self) -> tuple[grpc.aio.Server, VllmServicer]:
        model, runner = self._runner.config, self._runner
        self._puller = KvPuller(
            block_size=runner.block_size,
            block_shape=(model.num_layers, runner.block_size, *model.max_kv_shape),
            counts_shape=(model.num_layers, model.num_experts),
            timeout_s=self.config.pull_timeout_s,
        )
        end = model.eos_token_id
        servicer = VllmServicer(
            self.config,
            model,
            self._engine,
            self._puller,
            limits=Limits(
                role=self.config.role,
                vocab_size=model.vocab_size,
                max_context_tokens=runner.max_context_tokens,
                pool_tokens=runner.num_blocks * runner.block_size,
                eos_token_ids=frozenset() if end is None else frozenset({end}),
            ),
            block_size=runner.block_size,
            signature_model=self._signature_model,
            clock=self._clock,
        )
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        bind(server, vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"], servicer)
        services = embedded_pb2.DESCRIPTOR.services_by_name
        bind(server, services["Kv"], KvServicer(self._engine, runner.block_size))
        bind(server, services["Worker"], WorkerServicer(self._engine))
        return server, servicer

    def _emit(self, events: list[tuple[Sink, Event]]) -> None:
        """Hands events to the event loop, in order; called from either side."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_hand_out, events)


def _hand_out(events: list[tuple[Sink, Event]]) -> None:
    for sink, event in events:
        sink(event)
