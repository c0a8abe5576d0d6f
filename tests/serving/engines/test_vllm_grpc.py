"""The adapter against servers that behave as real ones were seen to, or worse."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from serving.core.clock import SystemClock
from serving.core.errors import (
    DeadlineExceeded,
    EldrError,
    InvalidRequest,
    KvLost,
    Rejected,
    WorkerLost,
)
from serving.core.worker import Capabilities, Role, WorkerInfo
from serving.engines.base import CallStopped, EngineCall, EngineUnhealthy, KvHandover, StopSwitch
from serving.engines.grpc_errors import StillEnding
from serving.engines.vllm_grpc import EngineTimeouts, VllmGrpcEngine
from serving.rpc import status

Script = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]


class Server(pb_grpc.VllmEngineServicer):
    """Plays a script and keeps what it was sent."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = asyncio.Event()
        self.healthy = True
        self.loads: list[pb.SchedulerLoad] = []
        self.stop: Callable[[], Awaitable[None]] | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Any):
        self.requests.append(request)
        try:
            async for answer in self.script(request, context):
                yield answer
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def HealthCheck(self, request: Any, context: Any) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=self.healthy, message="told so")

    async def GetLoads(self, request: Any, context: Any) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(loads=self.loads)


def _chunk(ids: Sequence[int]) -> pb.GenerateResponse:
    # As vLLM does it: completion_tokens counts the chunk.
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, completion_tokens=1))


def _complete(ids: Sequence[int], **fields: Any) -> pb.GenerateResponse:
    fields.setdefault("finish_reason", "length")
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, **fields))


def _call(template: pb.GenerateRequest | None = None, **fields: Any) -> EngineCall:
    fields.setdefault("deadline_s", math.inf)
    return EngineCall(
        engine_request_id="r1~2",
        token_ids=np.array([4, 5, 6], np.int32),
        max_tokens=7,
        template=template or pb.GenerateRequest(request_id="r1"),
        **fields,
    )


def _run(
    script: Script,
    body: Callable[[VllmGrpcEngine, Server], Awaitable[None]],
    *,
    first_token_s: float = 20.0,
    stall_s: float = 20.0,
) -> Server:
    async def main() -> Server:
        servicer = Server(script)
        server = grpc.aio.server()
        pb_grpc.add_VllmEngineServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servicer.stop = lambda: server.stop(None)
        engine = VllmGrpcEngine(
            WorkerInfo(
                worker_id="w0",
                address=f"127.0.0.1:{port}",
                role=Role.BOTH,
                pool="p",
                model="m",
                hardware="h",
                capabilities=Capabilities(
                    block_size_tokens=16,
                    page_size_tokens=16,
                    max_num_seqs=4,
                    max_context_tokens=64,
                    num_kv_blocks=100,
                ),
            ),
            clock=SystemClock(),
            timeouts=EngineTimeouts(control_s=20.0, first_token_s=first_token_s, stall_s=stall_s),
        )
        try:
            await body(engine, servicer)
        finally:
            await engine.close()
            await server.stop(None)
        return servicer

    return asyncio.run(main())


def test_prefill_asks_for_one_token_and_splits_what_comes_back() -> None:
    params = {"remote_host": "h", "remote_port": 7, "lease": "l-1", "eldr_sig": {"version": 1}}

    async def script(request: pb.GenerateRequest, context: Any):
        yield _chunk([9])
        # As vLLM does it: the closing message of a stream repeats the last tokens only.
        yield _complete([9], kv_transfer_params_json=json.dumps(params))

    async def body(engine: VllmGrpcEngine, _: Server) -> None:
        template = pb.GenerateRequest(request_id="r1", text="some text")
        template.sampling_params.min_tokens = 5
        # Field 100, varint 1: a field this version does not know.
        template.MergeFromString(b"\xa0\x06\x01")
        result = await engine.prefill(_call(template, min_tokens=5))
        assert result.token_ids == (9,)
        assert result.signature == {"version": 1}
        assert result.handover is not None
        assert dict(result.handover.params) == {
            "remote_host": "h",
            "remote_port": 7,
            "lease": "l-1",
        }
        assert result.handover.lease == "l-1"

    sent = _run(script, body).requests[0]
    assert sent.request_id == "r1~2"
    assert list(sent.tokenized.input_ids) == [4, 5, 6]
    assert sent.tokenized.original_text == "some text"
    assert (sent.sampling_params.max_tokens, sent.sampling_params.min_tokens) == (1, 0)
    assert sent.stream
    assert json.loads(sent.kv_transfer_params_json)["do_remote_decode"] is True
    assert b"\xa0\x06\x01" in sent.SerializeToString()


def test_decode_sends_the_parameters_of_its_prefill() -> None:
    async def script(request: pb.GenerateRequest, context: Any):
        yield _chunk([1, 2])
        yield _complete([2])

    async def body(engine: VllmGrpcEngine, _: Server) -> None:
        handover = KvHandover(
            engine_request_id="r1", worker_id="p0", params={"lease": "l"}, created_at_s=0.0
        )
        answers = [answer async for answer in engine.generate(_call(min_tokens=2), handover)]
        assert [a.WhichOneof("response") for a in answers] == ["chunk", "complete"]

    sent = _run(script, body).requests[0]
    assert json.loads(sent.kv_transfer_params_json) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "lease": "l",
    }
    assert (sent.sampling_params.max_tokens, sent.sampling_params.min_tokens) == (7, 2)


async def _nothing(request: pb.GenerateRequest, context: Any):
    return
    yield


async def _no_end(request: pb.GenerateRequest, context: Any):
    yield _chunk([1])


async def _broken(request: pb.GenerateRequest, context: Any):
    yield _complete([], finish_reason="error")


async def _aborted(request: pb.GenerateRequest, context: Any):
    yield _complete([], finish_reason="abort")


async def _hangs(request: pb.GenerateRequest, context: Any):
    await asyncio.sleep(60)
    yield _chunk([1])


async def _stalls(request: pb.GenerateRequest, context: Any):
    yield _chunk([1])
    await asyncio.sleep(60)


async def _bad_json(request: pb.GenerateRequest, context: Any):
    yield _complete([1], kv_transfer_params_json="[1]")


def _status(code: grpc.StatusCode) -> Script:
    async def script(request: pb.GenerateRequest, context: Any):
        await context.abort(code, "says the engine")
        yield

    return script


def _rich(error: EldrError) -> Script:
    async def script(request: pb.GenerateRequest, context: Any):
        await status.abort(context, error)
        yield

    return script


class _Duplicate(InvalidRequest):
    reason = "DUPLICATE_REQUEST"


Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("script", "error", "fact"),
    [
        (_nothing, WorkerLost, "without"),
        (_no_end, WorkerLost, "without a closing message"),
        (_broken, WorkerLost, "'error'"),
        (_aborted, WorkerLost, "'abort'"),
        (_bad_json, WorkerLost, "no JSON object"),
        (_status(Code.UNAVAILABLE), WorkerLost, "UNAVAILABLE: says the engine"),
        (_status(Code.INTERNAL), WorkerLost, "INTERNAL"),
        (_status(Code.DEADLINE_EXCEEDED), WorkerLost, "DEADLINE_EXCEEDED"),
        (_status(Code.INVALID_ARGUMENT), InvalidRequest, "says the engine"),
        (_status(Code.RESOURCE_EXHAUSTED), Rejected, "NO_CAPACITY"),
        (_rich(KvLost("d0", "gone")), KvLost, "gone"),
        (_rich(InvalidRequest("top_p", 7, "must be <= 1")), InvalidRequest, "top_p='7'"),
        (_rich(_Duplicate("request_id", "r1", "runs")), StillEnding, "still ends"),
    ],
)
def test_what_goes_wrong_is_told_apart(script: Script, error: type[EldrError], fact: str) -> None:
    async def body(engine: VllmGrpcEngine, _: Server) -> None:
        with pytest.raises(error) as caught:
            await engine.prefill(_call())
        assert type(caught.value) is error
        assert fact in str(caught.value)

    _run(script, body)


def test_silence_counts_as_lost() -> None:
    async def first(engine: VllmGrpcEngine, _: Server) -> None:
        with pytest.raises(WorkerLost, match=r"no answer for 0\.05 s"):
            await engine.prefill(_call())

    _run(_hangs, first, first_token_s=0.05)

    async def later(engine: VllmGrpcEngine, server: Server) -> None:
        answers = engine.generate(_call())
        assert list((await anext(answers)).chunk.token_ids) == [1]
        with pytest.raises(WorkerLost, match=r"no answer for 0\.05 s"):
            await anext(answers)
        await asyncio.wait_for(server.cancelled.wait(), 20)

    _run(_stalls, later, stall_s=0.05)


def test_closing_the_stream_cancels_the_engine() -> None:
    async def body(engine: VllmGrpcEngine, server: Server) -> None:
        answers = engine.generate(_call())
        await anext(answers)
        await answers.aclose()
        await asyncio.wait_for(server.cancelled.wait(), 20)

    _run(_stalls, body)


def test_a_call_can_be_stopped_from_outside() -> None:
    async def body(engine: VllmGrpcEngine, server: Server) -> None:
        switch = StopSwitch()
        prefill = asyncio.ensure_future(engine.prefill(_call(switch=switch)))
        while not server.requests:
            await asyncio.sleep(0.01)
        switch.throw()
        with pytest.raises(CallStopped):
            await prefill
        await asyncio.wait_for(server.cancelled.wait(), 20)
        with pytest.raises(CallStopped):
            await engine.prefill(_call(switch=switch))

    _run(_hangs, body)


def test_a_deadline_is_the_requests_own() -> None:
    async def body(engine: VllmGrpcEngine, server: Server) -> None:
        now_s = SystemClock().monotonic_s()
        with pytest.raises(DeadlineExceeded):
            await engine.prefill(_call(deadline_s=now_s + 0.1))
        num_sent = len(server.requests)
        with pytest.raises(DeadlineExceeded):
            await engine.prefill(_call(deadline_s=now_s - 1))
        assert len(server.requests) == num_sent

    _run(_hangs, body)


def test_load_sums_the_ranks() -> None:
    async def body(engine: VllmGrpcEngine, server: Server) -> None:
        server.loads = [
            pb.SchedulerLoad(
                num_running_reqs=2,
                num_waiting_reqs=1,
                num_used_tokens=33,
                max_total_num_tokens=800,
            )
            for _ in range(2)
        ]
        report = await engine.load()
        assert (report.num_running, report.num_waiting, report.kv_blocks_used) == (4, 2, 5)
        # An engine that tells only the share in use.
        server.loads = [pb.SchedulerLoad(token_usage=0.25)]
        assert (await engine.load()).kv_blocks_used == 25
        server.healthy = False
        with pytest.raises(EngineUnhealthy, match="told so"):
            await engine.load()

    _run(_nothing, body)


def test_a_server_that_went_away_is_lost() -> None:
    async def body(engine: VllmGrpcEngine, server: Server) -> None:
        await engine.load()
        assert server.stop is not None
        await server.stop()
        for call in (engine.load(), engine.prefill(_call()), engine.abort("r1")):
            with pytest.raises(WorkerLost, match="UNAVAILABLE"):
                await call

    _run(_nothing, body)
