"""The VllmEngine door over real loopback gRPC with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core import metadata as keys

Scenario = Callable[..., None]
Alone = Callable[[Sequence[int], int], list[int]]
Code = grpc.StatusCode


def test_stream_and_one_piece_agree_with_the_model_alone(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompts = {f"r{i}": rig.prompt(i, 5 + 6 * i) for i in range(5)}
        streamed = await asyncio.gather(
            *(rig.generate(rig.message(name, prompt, 8)) for name, prompt in prompts.items())
        )
        whole = await asyncio.gather(
            *(
                rig.generate(rig.message(f"{name}-whole", prompt, 8, stream=False))
                for name, prompt in prompts.items()
            )
        )
        for prompt, stream, piece in zip(prompts.values(), streamed, whole, strict=True):
            expected = alone(prompt, 8)
            assert stream.tokens == expected
            assert list(stream.complete.output_ids) == expected
            assert piece.tokens == []
            assert list(piece.complete.output_ids) == expected
            for answer in (stream, piece):
                assert answer.complete.prompt_tokens == len(prompt)
                assert answer.complete.completion_tokens == 8
                assert not answer.complete.kv_transfer_params_json

    scenario(body)


def test_text_is_tokenised_at_the_door(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        message = rig.message("r1", [], 4)
        message.text = "w5 w6 w7 w8 w9"
        answer = await rig.generate(message)
        assert answer.tokens == alone([5, 6, 7, 8, 9], 4)
        assert answer.complete.prompt_tokens == 5

    scenario(body)


def test_one_token_ends_with_its_prefill(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(4, 14)
        answer = await rig.generate(rig.message("r1", prompt, 1))
        assert answer.tokens == alone(prompt, 1)
        assert "eldr-decode-worker" not in answer.trailers
        phases = [line.stage.phase for line in rig.app.router.explain("r1")[:-1]]
        assert phases == ["prefill"]

    scenario(body)


def test_a_repeated_prompt_is_cached(scenario: Scenario) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(5, 24)
        first = await rig.generate(rig.message("r1", prompt, 3))
        assert first.complete.cached_tokens == 0
        # Round robin over two prefill workers comes back to the first.
        await rig.generate(rig.message("r2", prompt, 3))
        third = await rig.generate(rig.message("r3", prompt, 3))
        assert third.tokens == first.tokens

    scenario(body, router={"prefill_policy": "rr", "decode_policy": "rr"})


def test_logprobs_and_unknown_fields_pass_through(scenario: Scenario) -> None:
    async def body(rig) -> None:
        message = rig.message("r1", rig.prompt(6, 9), 3, logprobs=2)
        # Field 100, varint 1: a newer client's field that no version here knows.
        raw = message.SerializeToString() + b"\xa0\x06\x01"
        answer = await rig.generate(pb.GenerateRequest.FromString(raw))
        assert answer.failure is None
        whole = await rig.generate(rig.message("r2", rig.prompt(6, 9), 3, stream=False, logprobs=2))
        assert list(whole.complete.output_logprobs.token_ids) == answer.tokens
        assert len(whole.complete.output_logprobs.top_logprobs) == 3

    scenario(body)


def test_the_record_knows_what_the_metadata_said(scenario: Scenario) -> None:
    async def body(rig) -> None:
        given = ((keys.TENANT, "t1"), (keys.SLO_CLASS, "A"), (keys.PRODUCT, "chat"))
        await rig.generate(rig.message("r1", rig.prompt(7, 9), 3), given)
        *decisions, outcome = rig.app.router.explain("r1")
        assert [line.stage.phase for line in decisions] == ["prefill", "decode"]
        assert {(line.tenant, line.slo, line.product) for line in decisions} == {
            ("t1", "A", "chat")
        }
        assert decisions[1].inputs["signature_source"] == "live"
        assert outcome.status.value == "ok"
        assert outcome.num_output_tokens == 3
        assert outcome.ttft_s > 0
        assert outcome.tpot_s > 0

    scenario(body)


def _text(text: str) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: setattr(message, "text", text)


def _ids(ids: list[int]) -> Callable[[pb.GenerateRequest], None]:
    def change(message: pb.GenerateRequest) -> None:
        message.tokenized.SetInParent()
        del message.tokenized.input_ids[:]
        message.tokenized.input_ids.extend(ids)

    return change


def _param(name: str, value: object) -> Callable[[pb.GenerateRequest], None]:
    return lambda message: setattr(message.sampling_params, name, value)


BAD = [
    ("empty prompt", _ids([]), (), Code.INVALID_ARGUMENT, "token_ids", "at least one token"),
    ("empty text", _text(""), (), Code.INVALID_ARGUMENT, "text", "must not be empty"),
    (
        "no prompt",
        lambda m: m.ClearField("tokenized"),
        (),
        Code.INVALID_ARGUMENT,
        "input",
        "one of",
    ),
    ("too long", _ids([1] * 96), (), Code.INVALID_ARGUMENT, "token_ids", "must be < 96 tokens"),
    (
        "too much",
        _param("max_tokens", 90),
        (),
        Code.INVALID_ARGUMENT,
        "max_tokens",
        "must be <= 87",
    ),
    ("zero limit", _param("max_tokens", 0), (), Code.INVALID_ARGUMENT, "max_tokens", ">= 1"),
    ("huge limit", _param("max_tokens", 2**32 - 1), (), Code.INVALID_ARGUMENT, "max_tokens", "87"),
    ("not a word", _ids([1, 96]), (), Code.INVALID_ARGUMENT, "token_ids[1]", "must be < 96"),
    (
        "no id",
        lambda m: m.ClearField("request_id"),
        (),
        Code.INVALID_ARGUMENT,
        "request_id",
        "empty",
    ),
    (
        "two samples",
        _param("n", 2),
        (),
        Code.INVALID_ARGUMENT,
        "sampling_params.n",
        "must be 1 where prefill and decode run on separate workers",
    ),
    (
        "a penalty the engine refuses",
        _param("presence_penalty", 0.5),
        (),
        Code.INVALID_ARGUMENT,
        "sampling_params.presence_penalty",
        "",
    ),
    (
        "kv of one's own",
        lambda m: setattr(m, "kv_transfer_params_json", "{}"),
        (),
        Code.INVALID_ARGUMENT,
        "kv_transfer_params",
        "must be absent",
    ),
    ("model", None, ((keys.MODEL, "gpt"),), Code.NOT_FOUND, "model", "served: tiny"),
    ("class", None, ((keys.SLO_CLASS, "Z"),), Code.INVALID_ARGUMENT, keys.SLO_CLASS, "A, B, C"),
    (
        "deadline",
        None,
        ((keys.DEADLINE_MS, "-1"),),
        Code.INVALID_ARGUMENT,
        keys.DEADLINE_MS,
        "1 to",
    ),
    ("key", None, (("x-eldr-slo", "A"),), Code.INVALID_ARGUMENT, "x-eldr-slo", keys.SLO_CLASS),
]


def test_bad_requests_are_named_exactly(scenario: Scenario) -> None:
    async def body(rig) -> None:
        for name, change, given, code, field, rule in BAD:
            message = rig.message("bad", rig.prompt(8, 9))
            if change is not None:
                change(message)
            failure = (await rig.generate(message, given)).failure
            assert failure is not None, name
            assert (failure.code, failure.facts.get("field")) == (code, field), (name, failure)
            assert rule in failure.facts["rule"], (name, failure)
            assert failure.domain == "eldr.router"
            assert failure.retry_s is None
        answer = await rig.generate(rig.message("good", rig.prompt(8, 9)))
        assert answer.failure is None

    scenario(body)


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0a\x50abc", bytes(range(64))])
def test_garbage_on_the_wire(scenario: Scenario, garbage: bytes) -> None:
    async def body(rig) -> None:
        generate = rig.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        failure = await rig.failure(generate(garbage).read())
        assert failure.code is Code.INVALID_ARGUMENT
        assert failure.facts["field"] == "message"
        assert "vllm.grpc.engine.GenerateRequest" in failure.facts["rule"]
        route = rig.channel.unary_unary("/eldr.router.v1.Router/Route")
        failure = await rig.failure(route(garbage))
        assert failure.code is Code.INVALID_ARGUMENT
        assert "eldr.router.v1.RouteRequest" in failure.facts["rule"]
        missing = rig.channel.unary_unary("/vllm.grpc.engine.VllmEngine/Embed")
        assert (await rig.failure(missing(b""))).code is Code.UNIMPLEMENTED

    scenario(body)


def test_an_unexpected_failure_shows_an_incident_only(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(rig) -> None:
        def broken(request: object, **_: object) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(rig.app.router, "place_prefill", broken)
        failure = (await rig.generate(rig.message("r1", rig.prompt(9, 9)))).failure
        assert failure.code is Code.INTERNAL
        assert "secret" not in failure.message
        assert failure.facts["incident"] in failure.message

    scenario(body)


def test_an_id_runs_once_at_a_time(scenario: Scenario) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(10, 9)
        call = rig.engine.Generate(rig.message("r1", prompt, 80))
        await call.read()
        failure = (await rig.generate(rig.message("r1", prompt, 3))).failure
        assert (failure.code, failure.facts["field"]) == (Code.INVALID_ARGUMENT, "request_id")
        call.cancel()
        await rig.settled()
        # Over and forgotten: the id may be used again.
        assert (await rig.generate(rig.message("r1", prompt, 3))).failure is None

    scenario(body)


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_client_that_hangs_up_leaves_nothing(scenario: Scenario, num_read: int) -> None:
    async def body(rig) -> None:
        calls = []
        for i in range(4):
            call = rig.engine.Generate(rig.message(f"r{i}", rig.prompt(20 + i, 30), 60))
            calls.append(call)
        for call in calls:
            for _ in range(num_read):
                await call.read()
        for call in calls:
            call.cancel()
        await rig.settled()
        for i in range(4):
            lines = rig.app.router.explain(f"r{i}")
            if lines:  # a call cancelled on the client's side may never have arrived
                assert lines[-1].status.value == "cancelled"

    scenario(body)


def test_abort_closes_the_stream_with_its_tokens(scenario: Scenario) -> None:
    async def body(rig) -> None:
        message = rig.message("r1", rig.prompt(11, 9), 80)
        aborting: list[asyncio.Task[object]] = []

        def on_token(count: int) -> None:
            if count == 4:
                request = pb.AbortRequest(request_ids=["r1", "unknown"])
                aborting.append(asyncio.ensure_future(rig.engine.Abort(request)))

        answer = await rig.generate(message, on_token=on_token)
        await asyncio.gather(*aborting)
        assert answer.failure is None
        assert answer.complete.finish_reason == "abort"
        assert 4 <= len(answer.tokens) < 80
        assert list(answer.complete.output_ids) == answer.tokens
        assert rig.app.router.explain("r1")[-1].status.value == "cancelled"

    scenario(body)


def test_a_deadline_ends_the_request_everywhere(scenario: Scenario) -> None:
    async def body(rig) -> None:
        # 80 steps of a worker take longer than that, whatever the machine.
        given = ((keys.DEADLINE_MS, "30"),)
        answer = await rig.generate(rig.message("r1", rig.prompt(12, 12), 80), given)
        assert answer.failure.code is Code.DEADLINE_EXCEEDED
        assert answer.failure.reason == "DEADLINE_EXCEEDED"
        assert int(answer.failure.facts["num_tokens"]) == len(answer.tokens)
        await rig.settled()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.engine.Generate(
                rig.message("r2", rig.prompt(12, 12), 80), timeout=0.03
            ):
                pass
        assert caught.value.code() is Code.DEADLINE_EXCEEDED

    scenario(body)


def test_a_long_answer_keeps_its_leases(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(13, 9)
        answer = await rig.generate(rig.message("r1", prompt, 80))
        assert answer.tokens == alone(prompt, 80)
        assert rig.app.router.explain("r1")[-1].status.value == "ok"

    # Leases far shorter than 80 steps take; the sweep renews them while the request runs.
    scenario(body, router={"lease_s": 0.05, "decode_wait_s": 0.01, "sweep_every_s": 0.01})


def test_a_prompt_is_credited_where_it_went(scenario: Scenario) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(14, 33)
        winners = set()
        for i in range(4):
            await rig.generate(rig.message(f"r{i}", prompt, 2))
            prefill = rig.app.router.explain(f"r{i}")[0]
            winners.add(prefill.stage.winner)
            assert prefill.inputs["cached_tokens"] == (0 if i == 0 else 32)
        assert len(winners) == 1

    scenario(body, router={"prefix_index": True, "prefill_policy": "kv_aware"})


def test_the_door_describes_the_fleet(scenario: Scenario) -> None:
    async def body(rig) -> None:
        model = await rig.engine.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.vocab_size) == ("tiny", 96)
        assert model.max_context_length == 96
        server = await rig.engine.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_type, server.block_size) == ("eldr-router", 4)
        assert server.max_num_seqs == 32
        loads = (await rig.engine.GetLoads(pb.GetLoadsRequest())).loads
        assert len(loads) == 1
        assert loads[0].max_total_num_tokens == 2 * 96 * 4
        assert loads[0].num_running_reqs == 0
        health = await rig.engine.HealthCheck(pb.HealthCheckRequest())
        assert health.healthy

    scenario(body)
