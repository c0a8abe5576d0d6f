"""The `vllm.grpc.engine.VllmEngine` door: a client talks to the fleet as to one engine.

Convert, call the relay, convert. Generate, Abort, HealthCheck, GetModelInfo, GetServerInfo and
GetLoads are served; methods about one engine's inside (profiles, KV events, cache flush) are
UNIMPLEMENTED here.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.clock import Clock
from serving.core.errors import InvalidRequest
from serving.core.router import Router
from serving.core.worker import Phase
from serving.engines.relay import Relay
from serving.rpc import convert, metadata
from serving.rpc.answers import AnswerBook
from serving.rpc.convert import DoorLimits
from serving.rpc.gate import DrainGate
from serving.rpc.tokenize import TextTokenizer

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What GetModelInfo and GetServerInfo answer.

    Attributes:
        model: the engines' own description, with this deployment's name and limits.
        started_at_s: monotonic seconds.
        block_size_tokens: tokens per KV block.
        max_num_seqs: requests the fleet decodes at once.
    """

    model: pb.GetModelInfoResponse
    started_at_s: float
    block_size_tokens: int
    max_num_seqs: int


class VllmFront:
    """Servicer of `vllm.grpc.engine.VllmEngine` (bind it with `binding.bind`)."""

    def __init__(
        self,
        *,
        relay: Relay,
        router: Router,
        gate: DrainGate,
        limits: DoorLimits,
        facts: ServerFacts,
        clock: Clock,
        tokenizer: TextTokenizer | None,
        is_routed: Callable[[str], bool],
    ) -> None:
        """Wires the door.

        Args:
            relay: carries the requests.
            router: asked about the fleet.
            gate: refuses while draining.
            limits: of a request.
            facts: see `ServerFacts`.
            clock: time source.
            tokenizer: None takes token ids only.
            is_routed: whether an id is open through the Router door.
        """
        self._relay = relay
        self._router = router
        self._gate = gate
        self._limits = limits
        self._facts = facts
        self._clock = clock
        self._tokenizer = tokenizer
        self._is_routed = is_routed
        self._last_call_s = 0.0

    async def Generate(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Serves one request through the fleet; see serving/engines/relay.py."""
        with self._gate.enter():
            now_s = self._clock.monotonic_s()
            self._last_call_s = self._clock.wall_s()
            call = metadata.of_call(context, now_s=now_s)
            token_ids = await self._token_ids(message)
            request = convert.generate_request(message, token_ids, call, self._limits, now_s=now_s)
            if self._is_routed(request.request_id):
                raise InvalidRequest("request_id", request.request_id, "is open through Route")
            book = AnswerBook(num_prompt_tokens=len(token_ids), stream=message.stream)
            trailers: dict[str, str] = {}
            answers = self._relay.serve(
                request, message, forwarded=call.forwarded, trailers=trailers
            )
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    shown = book.take(answer)
                    if shown is not None:
                        yield shown
            context.set_trailing_metadata(tuple(trailers.items()))

    async def Abort(
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends running requests; ids that do not run are fine."""
        for request_id in message.request_ids:
            self._relay.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Healthy while not draining and both phases have a worker that takes work."""
        if self._gate.draining:
            return pb.HealthCheckResponse(healthy=False, message="draining")
        for phase in Phase:
            if not self._router.view(phase).accepts.any():
                return pb.HealthCheckResponse(
                    healthy=False, message=f"no {phase.value} worker takes work"
                )
        return pb.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """The model as this deployment serves it."""
        return self._facts.model

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """This router, in an engine's terms."""
        return pb.GetServerInfoResponse(
            active_requests=self._relay.num_running,
            is_paused=self._gate.draining,
            last_receive_timestamp=self._last_call_s,
            uptime_seconds=self._clock.monotonic_s() - self._facts.started_at_s,
            server_type="eldr-router",
            data_parallel_size=1,
            block_size=self._facts.block_size_tokens,
            max_num_seqs=self._facts.max_num_seqs,
        )

    async def GetLoads(
        self, message: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        """The fleet's load as one engine's: decode workers summed."""
        prefill, decode = (self._router.view(phase) for phase in Phase)
        sizes = [
            w.capabilities.num_kv_blocks * w.capabilities.block_size_tokens for w in decode.workers
        ]
        free = (
            np.array([w.capabilities.block_size_tokens for w in decode.workers], np.int64)
            * decode.kv_blocks_free
        )
        total, used = sum(sizes), sum(sizes) - int(free.sum())
        running, waiting = int(decode.num_running.sum()), int(decode.num_waiting.sum())
        now = datetime.datetime.fromtimestamp(self._clock.wall_s(), datetime.UTC)
        return pb.GetLoadsResponse(
            timestamp=now.isoformat(),
            version="eldr-router",
            dp_rank_count=1,
            loads=[
                pb.SchedulerLoad(
                    num_running_reqs=running,
                    num_waiting_reqs=waiting,
                    num_total_reqs=running + waiting,
                    num_used_tokens=used,
                    max_total_num_tokens=total,
                    token_usage=used / total if total else 0.0,
                    max_running_requests=self._facts.max_num_seqs,
                    num_waiting_uncached_tokens=round(float(prefill.queued_prefill_tokens.sum())),
                )
            ],
        )

    async def _token_ids(self, message: pb.GenerateRequest) -> np.ndarray:
        match message.WhichOneof("input"):
            case "tokenized":
                return convert.prompt_array(message.tokenized.input_ids)
            case "text" if self._tokenizer is None:
                raise InvalidRequest(
                    "text", message.text, "this router has no tokenizer: send tokenized.input_ids"
                )
            case "text":
                assert self._tokenizer is not None
                return await self._tokenizer.token_ids(message.text)
        raise InvalidRequest("input", None, "must be one of tokenized, text")
