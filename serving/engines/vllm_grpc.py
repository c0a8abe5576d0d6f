"""Drives any server of `vllm.grpc.engine.VllmEngine`: an embedded worker or `vllm serve --grpc`.

What real servers do and this adapter therefore minds (NETWORK.md):
- `completion_tokens` counts a chunk, not the answer so far, and the closing message of a
  stream repeats only the last tokens: tokens are counted from the chunks.
- KV parameters used twice answer with wrong tokens: they leave here once per hand-over, and
  a second use is left to the caller only where the engine enforces a lease.
- A worker that hangs does not break the connection: each answer has its own time limit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from serving.core.clock import Clock
from serving.core.errors import DeadlineExceeded, WorkerLost
from serving.core.worker import WorkerInfo
from serving.engines.base import EngineCall, EngineUnhealthy, KvHandover, PrefillResult
from serving.engines.grpc_errors import engine_error
from serving.fleet.fleet import LoadReport
from serving.proto import embedded_pb2, embedded_pb2_grpc

T = TypeVar("T")

SIGNATURE_KEY = "eldr_sig"
# "abort" comes only when the router asked for it, and then nobody listens any more.
_BROKEN_FINISH = ("abort", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimeouts:
    """How long an engine may be silent before it counts as lost, in seconds.

    Attributes:
        control_s: health, load, abort, release.
        first_token_s: from the call to its first answer (queue and prefill lie in it).
        stall_s: between two answers of one stream.
    """

    control_s: float = 2.0
    first_token_s: float = 120.0
    stall_s: float = 30.0


class VllmGrpcEngine:
    """`Engine` over one gRPC channel; construct it inside the running event loop."""

    def __init__(
        self,
        worker: WorkerInfo,
        *,
        clock: Clock,
        timeouts: EngineTimeouts,
        max_message_bytes: int = 64 << 20,
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._timeouts = timeouts
        self._channel = grpc.aio.insecure_channel(
            worker.address,
            options=(
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_receive_message_length", max_message_bytes),
                # A restarted worker is found again within seconds, not minutes.
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 2000),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.use_local_subchannel_pool", 1),
            ),
        )
        self._engine = pb_grpc.VllmEngineStub(self._channel)
        self._kv = embedded_pb2_grpc.KvStub(self._channel)

    @property
    def worker(self) -> WorkerInfo:
        """The worker behind the engine."""
        return self._worker

    async def prefill(self, call: EngineCall) -> PrefillResult:
        """See `Engine.prefill`."""
        request = self._message(call, {"do_remote_decode": True, "do_remote_prefill": False})
        request.sampling_params.max_tokens = 1
        request.sampling_params.min_tokens = 0
        tokens: list[int] = []
        complete: pb.GenerateComplete | None = None
        async for answer in self._stream(request, call):
            if answer.HasField("chunk"):
                tokens.extend(answer.chunk.token_ids)
            elif answer.HasField("complete"):
                complete = answer.complete
        if complete is None:
            raise WorkerLost(self._worker.worker_id, "the prefill ended without a result")
        params = self._hand_over_params(complete)
        signature = params.pop(SIGNATURE_KEY, None)
        handover = None
        if params:
            handover = KvHandover(
                engine_request_id=call.engine_request_id,
                worker_id=self._worker.worker_id,
                params=params,
                created_at_s=self._clock.monotonic_s(),
            )
        return PrefillResult(
            complete=complete,
            token_ids=tuple(tokens or complete.output_ids),
            handover=handover,
            signature=signature,
        )

    async def generate(
        self, call: EngineCall, handover: KvHandover | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """See `Engine.generate`."""
        params: dict[str, Any] | None = None
        if handover is not None:
            params = {"do_remote_prefill": True, "do_remote_decode": False, **handover.params}
        answers = self._stream(self._message(call, params), call)
        try:
            async for answer in answers:
                yield answer
        finally:
            await answers.aclose()

    async def abort(self, engine_request_id: str) -> None:
        """See `Engine.abort`."""
        await self._control(
            self._engine.Abort(
                pb.AbortRequest(request_ids=[engine_request_id]), timeout=self._timeouts.control_s
            )
        )

    async def release(self, handover: KvHandover) -> None:
        """See `Engine.release`; connectors without a lease let unpulled KV expire themselves."""
        if not handover.lease:
            return
        await self._control(
            self._kv.Release(
                embedded_pb2.ReleaseRequest(
                    remote_request_id=str(handover.params.get("remote_request_id", "")),
                    lease=handover.lease,
                ),
                timeout=self._timeouts.control_s,
            )
        )

    async def load(self) -> LoadReport:
        """See `Engine.load`."""
        limit_s = self._timeouts.control_s
        health, loads = await asyncio.gather(
            self._control(self._engine.HealthCheck(pb.HealthCheckRequest(), timeout=limit_s)),
            self._control(self._engine.GetLoads(pb.GetLoadsRequest(), timeout=limit_s)),
        )
        if not health.healthy:
            raise EngineUnhealthy(self._worker.worker_id, f"unhealthy: {health.message}")
        return self._report(loads)

    async def kv_tokens(self) -> int:
        """KV capacity in tokens as GetLoads tells it, 0 when it does not.

        Raises:
            WorkerLost: the engine did not answer.
        """
        call = self._engine.GetLoads(pb.GetLoadsRequest(), timeout=self._timeouts.control_s)
        return sum(load.max_total_num_tokens for load in (await self._control(call)).loads)

    async def model_info(self) -> pb.GetModelInfoResponse:
        """See `Engine.model_info`."""
        return await self._control(
            self._engine.GetModelInfo(pb.GetModelInfoRequest(), timeout=self._timeouts.control_s)
        )

    async def server_info(self) -> pb.GetServerInfoResponse:
        """See `Engine.server_info`."""
        return await self._control(
            self._engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=self._timeouts.control_s)
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._channel.close()

    def _message(self, call: EngineCall, kv_params: dict[str, Any] | None) -> pb.GenerateRequest:
        """The client's message with everything the router decides written over it."""
        request = pb.GenerateRequest()
        request.CopyFrom(call.template)
        request.request_id = call.engine_request_id
        text = call.template.tokenized.original_text or call.template.text
        request.tokenized.original_text = text
        del request.tokenized.input_ids[:]
        request.tokenized.input_ids.extend(call.token_ids.tolist())
        request.stream = True
        request.sampling_params.max_tokens = call.max_tokens
        request.sampling_params.min_tokens = call.min_tokens
        if kv_params is not None:
            request.kv_transfer_params_json = msgspec.json.encode(kv_params).decode()
        return request

    async def _stream(
        self, request: pb.GenerateRequest, call: EngineCall
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Every answer of one Generate call; ends only after the closing message."""
        worker_id = self._worker.worker_id
        remaining_s = call.deadline_s - self._clock.monotonic_s()
        if remaining_s <= 0:
            raise DeadlineExceeded()
        stream = self._engine.Generate(
            request,
            timeout=None if math.isinf(remaining_s) else remaining_s,
            metadata=call.forwarded or None,
        )
        limit_s, completed = self._timeouts.first_token_s, False
        try:
            while True:
                answer = await call.switch.wait(stream.read(), limit_s)
                if not isinstance(answer, pb.GenerateResponse):  # end of the stream
                    call.trailers.update(_eldr_trailers(await stream.trailing_metadata()))
                    break
                if answer.HasField("complete"):
                    completed = True
                    if answer.complete.finish_reason in _BROKEN_FINISH:
                        reason = answer.complete.finish_reason
                        raise WorkerLost(worker_id, f"the engine ended with {reason!r}")
                yield answer
                limit_s = self._timeouts.stall_s
            if not completed:
                raise WorkerLost(worker_id, "the stream ended without a closing message")
        except TimeoutError:
            raise WorkerLost(worker_id, f"no answer for {limit_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            passed = self._clock.monotonic_s() >= call.deadline_s
            raise engine_error(error, worker_id, deadline_passed=passed) from error
        finally:
            stream.cancel()

    async def _control(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            detail = f"{error.code().name}: {error.details()}"
            raise WorkerLost(self._worker.worker_id, detail) from error

    def _report(self, answer: pb.GetLoadsResponse) -> LoadReport:
        """Load over the worker's data-parallel ranks."""
        loads, capabilities = answer.loads, self._worker.capabilities
        total = sum(load.max_total_num_tokens for load in loads)
        if total:
            used_tokens = sum(load.num_used_tokens for load in loads)
            used_blocks = math.ceil(used_tokens / capabilities.block_size_tokens)
        else:  # an engine that reports only the share
            usage = sum(load.token_usage for load in loads) / max(1, len(loads))
            used_blocks = math.ceil(usage * capabilities.num_kv_blocks)
        return LoadReport(
            num_running=sum(load.num_running_reqs for load in loads),
            num_waiting=sum(load.num_waiting_reqs for load in loads),
            kv_blocks_used=max(0, used_blocks),
        )

    def _hand_over_params(self, complete: pb.GenerateComplete) -> dict[str, Any]:
        if not complete.kv_transfer_params_json:
            return {}
        try:
            return msgspec.json.decode(complete.kv_transfer_params_json, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise WorkerLost(
                self._worker.worker_id, f"kv_transfer_params_json is no JSON object: {error}"
            ) from error


def _eldr_trailers(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {
        key: value
        for key, value in metadata or ()
        if key.startswith("eldr-") and isinstance(value, str)
    }
