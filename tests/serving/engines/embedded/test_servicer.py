"""The other methods of the service, and bytes that are no messages."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.worker import Role


async def refused(call, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return caught.value.details() or ""


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (Role.BOTH, "kv_both")],
)
def test_a_worker_says_what_it_is(scenario, role, kv_role):
    async def body(rig):
        worker = await rig.start(role, max_num_seqs=3)
        info = await worker.engine.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.kv_connector, info.kv_role) == ("eldr_embedded", kv_role)
        assert (info.block_size, info.max_num_seqs) == (4, 3)
        assert info.uptime_seconds > 0
        model = await worker.engine.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.vocab_size, model.max_context_length) == (96, 96)
        assert list(model.eos_token_ids) == [0]
        assert model.is_generation

    scenario(body)


def test_loads_count_blocks_requests_and_uncached_tokens(scenario):
    async def body(rig):
        worker = await rig.start(Role.PREFILL)

        async def load():
            answer = await worker.engine.GetLoads(pb.GetLoadsRequest())
            (one,) = answer.loads
            return one

        idle = await load()
        assert (idle.num_used_tokens, idle.max_total_num_tokens) == (0, 192)
        assert (idle.num_running_reqs, idle.num_waiting_reqs) == (0, 0)
        request = rig.prefill_of(rig.generate("a", rig.prompt_of(1, 10)))
        first = await worker.complete(request)
        held = await load()
        assert held.num_used_tokens == 12
        assert held.token_usage == pytest.approx(12 / 192)
        assert held.gen_throughput > 0
        assert held.cache_hit_rate == 0.0
        request.request_id = "b"
        again = await worker.complete(request)
        assert (await load()).cache_hit_rate == pytest.approx(8 / 20)
        for complete in (first, again):
            params = json.loads(complete.kv_transfer_params_json)
            from serving.proto import embedded_pb2

            await worker.kv.Release(
                embedded_pb2.ReleaseRequest(
                    remote_request_id=params["remote_request_id"], lease=params["lease"]
                )
            )
        assert (await load()).num_used_tokens == 0

    scenario(body)


def test_flush_waits_for_requests_or_says_no(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        await worker.complete(rig.generate("a", rig.prompt_of(1, 16)))
        assert worker.worker.accounting().blocks_cached > 0
        running = asyncio.ensure_future(worker.complete(rig.generate("b", [1, 2, 3], 60)))
        while not worker.worker.accounting().num_running:
            await asyncio.sleep(0.005)
        answer = await worker.engine.FlushCache(common_pb2.FlushCacheRequest())
        assert not answer.success
        assert "in flight" in answer.message
        answer = await worker.engine.FlushCache(common_pb2.FlushCacheRequest(timeout_s=200.0))
        assert answer.success
        assert worker.worker.accounting().blocks_cached == 0
        await running

    scenario(body)


def test_the_tokenizer_travels_as_a_zip(scenario, tmp_path):
    content = json.dumps({"pad": "x" * 3000})
    (tmp_path / "tokenizer.json").write_text(content)

    async def body(rig):
        worker = await rig.start(Role.BOTH, model_dir=str(tmp_path))
        chunks = [c async for c in worker.engine.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.read("tokenizer.json").decode() == content

    scenario(body)


def test_what_is_not_here_is_unimplemented(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        await refused(worker.engine.Embed(pb.EmbedRequest()), grpc.StatusCode.UNIMPLEMENTED)
        events = worker.engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await refused(events.read(), grpc.StatusCode.UNIMPLEMENTED)

    scenario(body)


def test_garbage_is_an_invalid_argument_on_every_method(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        for method in ("Generate", "GetTokenizer"):
            call = worker.channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{method}")
            detail = await refused(call(b"\xff\xff\xff").read(), grpc.StatusCode.INVALID_ARGUMENT)
            assert "must be a serialized" in detail
        for name in (
            "vllm.grpc.engine.VllmEngine/Abort",
            "eldr.embedded.v1.Kv/Release",
            "eldr.embedded.v1.Worker/GetSteps",
        ):
            call = worker.channel.unary_unary(f"/{name}")
            await refused(call(b"\xff\xff\xff"), grpc.StatusCode.INVALID_ARGUMENT)

    scenario(body)


def test_refusals_reach_the_client_with_field_value_and_rule(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        request = rig.generate("a", [1, 96])
        detail = await refused(worker.complete(request), grpc.StatusCode.INVALID_ARGUMENT)
        assert detail == "tokenized.input_ids[1]=96: must be < vocab_size=96"
        call = worker.complete(rig.generate("a", [1]), metadata=(("x-eldr-cache-salt", "s" * 200),))
        await refused(call, grpc.StatusCode.INVALID_ARGUMENT)

    scenario(body)


def test_busy_times_come_as_trailing_metadata(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        call = worker.engine.Generate(rig.generate("a", [1, 2, 3], 4))
        async for _ in call:
            pass
        times = {key: float(value) for key, value in await call.trailing_metadata()}
        assert times["eldr-busy-arrived-s"] == 0.0
        assert 0 < times["eldr-busy-first-token-s"] < times["eldr-busy-last-token-s"]
        assert times["eldr-busy-last-token-s"] == pytest.approx(worker.worker.busy_s)

    scenario(body)
