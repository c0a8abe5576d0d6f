"""Prefill on one worker, decode on another, over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket

import grpc
import numpy as np
import pytest

from serving.core.clock import ManualClock
from serving.core.worker import Role
from serving.proto import embedded_pb2
from serving.signatures.wire import decode_signature


def params_of(complete) -> dict:
    return json.loads(complete.kv_transfer_params_json)


async def refused(call, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return caught.value.details() or ""


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_hand_over_equals_the_model_alone(scenario, alone, prefix_cache):
    async def body(rig):
        prefill = await rig.start(Role.PREFILL, prefix_cache=prefix_cache)
        decode = await rig.start(Role.DECODE, prefix_cache=prefix_cache)
        # Lengths around the block and the step: 1, a block, a block and one, several steps.
        prompts = [rig.prompt_of(i, n) for i, n in enumerate((1, 4, 5, 16, 31, 33, 70))] * 2
        answers = await asyncio.gather(
            *(
                rig.hand_over(prefill, decode, rig.generate(f"r{i}", p, 7))
                for i, p in enumerate(prompts)
            )
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.output_ids) == alone(prompt, 7).tokens
        steps = await decode.steps.GetSteps(embedded_pb2.GetStepsRequest())
        assert {step.kind for step in steps.steps} == {"decode"}

    scenario(body)


def test_the_signature_is_the_prompts_exact_count(scenario, alone, signature_model):
    async def body(rig):
        prefill = await rig.start(Role.PREFILL)
        for request_id, seed in (("cold", 1), ("cached", 1), ("other", 2)):
            prompt = rig.prompt_of(seed, 37)
            complete = await prefill.complete(rig.prefill_of(rig.generate(request_id, prompt)))
            assert (complete.cached_tokens > 0) == (request_id == "cached")
            params = params_of(complete)
            signature = decode_signature(
                params["eldr_sig"], model=signature_model, num_prompt_tokens=37
            )
            assert np.array_equal(signature.counts, alone(prompt, 1).counts)
            await prefill.kv.Release(
                embedded_pb2.ReleaseRequest(
                    remote_request_id=params["remote_request_id"], lease=params["lease"]
                )
            )

    scenario(body)


def test_a_chat_of_three_turns_equals_a_cold_prefill_bit_for_bit(scenario, alone, signature_model):
    """Turns run on one worker with cache: blocks filled by prefill chunks and decode steps."""

    async def body(rig):
        both = await rig.start(Role.BOTH)
        history: list[int] = []
        for turn in range(3):
            history += rig.prompt_of(100 + turn, 9)
            complete = await both.complete(rig.prefill_of(rig.generate(f"s{turn}", history)))
            params = params_of(complete)
            assert (complete.cached_tokens > 0) == (turn > 0)
            signature = decode_signature(params["eldr_sig"], model=signature_model)
            assert np.array_equal(signature.counts, alone(history, 1).counts)
            await both.kv.Release(
                embedded_pb2.ReleaseRequest(
                    remote_request_id=params["remote_request_id"], lease=params["lease"]
                )
            )
            answer = await both.complete(rig.generate(f"t{turn}", history, 8))
            assert answer.cached_tokens >= len(history) - 4
            assert list(answer.output_ids) == alone(history, 8).tokens
            history += answer.output_ids

    scenario(body)


def test_a_decode_worker_pulls_only_what_it_lacks(scenario, alone):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        history = rig.prompt_of(7, 21)
        first = await rig.hand_over(prefill, decode, rig.generate("a", history, 8))
        history = [*history, *first.output_ids, *rig.prompt_of(8, 6)]
        second = await rig.hand_over(prefill, decode, rig.generate("b", history, 8))
        assert second.cached_tokens == 28
        assert list(second.output_ids) == alone(history, 8).tokens

    scenario(body)


def test_seeded_sampling_is_one_stream_across_the_hand_over(scenario):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        both = await rig.start(Role.BOTH)
        prompt = rig.prompt_of(3, 18)
        params = {"temperature": 1.3, "seed": 77, "top_p": 0.95}
        whole = await both.complete(rig.generate("a", prompt, 12, **params))
        split = await rig.hand_over(prefill, decode, rig.generate("b", prompt, 12, **params))
        assert split.output_ids == whole.output_ids
        other = await both.complete(rig.generate("c", prompt, 12, **(params | {"seed": 78})))
        assert other.output_ids != whole.output_ids
        # A request resumed from its tokens so far draws on as if nothing had happened.
        resumed = await both.complete(
            rig.generate("d", [*prompt, *whole.output_ids[:5]], 7, **params)
        )
        assert resumed.output_ids == whole.output_ids[5:]

    scenario(body)


def test_parameters_serve_once(scenario):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        request = rig.generate("a", rig.prompt_of(1, 10))
        first = await prefill.complete(rig.prefill_of(request))
        request.kv_transfer_params_json = first.kv_transfer_params_json
        await decode.complete(request)
        request.request_id = "again"
        detail = await refused(decode.complete(request), grpc.StatusCode.FAILED_PRECONDITION)
        assert "was pulled already" in detail

    scenario(body)


def test_another_requests_parameters_are_refused_before_any_pull(scenario):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        mine = rig.generate("a", rig.prompt_of(1, 10))
        first = await prefill.complete(rig.prefill_of(mine))
        theirs = rig.generate("b", rig.prompt_of(2, 10))
        theirs.kv_transfer_params_json = first.kv_transfer_params_json
        detail = await refused(decode.complete(theirs), grpc.StatusCode.FAILED_PRECONDITION)
        assert "another request's prompt" in detail
        salted = rig.generate("c", rig.prompt_of(1, 10))
        salted.kv_transfer_params_json = first.kv_transfer_params_json
        call = decode.complete(salted, metadata=(("x-eldr-cache-salt", "tenant"),))
        await refused(call, grpc.StatusCode.FAILED_PRECONDITION)
        # The rightful owner still can.
        mine.kv_transfer_params_json = first.kv_transfer_params_json
        assert (await decode.complete(mine)).finish_reason == "length"

    scenario(body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_request_id": "b-1"}, "does not belong to request"),
        ({"remote_block_ids": [0]}, "names 1 blocks"),
        ({"remote_block_ids": [45, 46, 47]}, "does not hold block"),
    ],
)
def test_tampered_parameters_are_refused(scenario, changes, message):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        request = rig.generate("a", rig.prompt_of(1, 10))
        params = params_of(await prefill.complete(rig.prefill_of(request)))
        request.kv_transfer_params_json = json.dumps(params | changes)
        detail = await refused(decode.complete(request), grpc.StatusCode.FAILED_PRECONDITION)
        assert message in detail
        release = embedded_pb2.ReleaseRequest(
            remote_request_id=params["remote_request_id"], lease=params["lease"]
        )
        await prefill.kv.Release(release)
        again = prefill.kv.Release(release)
        detail = await refused(again, grpc.StatusCode.FAILED_PRECONDITION)
        assert "was released" in detail

    scenario(body)


def test_an_expired_lease_is_refused_and_its_blocks_are_back(scenario):
    async def body(rig):
        clock = ManualClock()
        prefill = await rig.start(Role.PREFILL, lease_s=30.0, clock=clock)
        decode = await rig.start(Role.DECODE)
        request = rig.generate("a", rig.prompt_of(1, 10))
        first = await prefill.complete(rig.prefill_of(request))
        assert prefill.worker.accounting().leases_open == 1
        assert prefill.worker.accounting().blocks_in_use == 3
        clock.advance(30.0)
        await prefill.idle()
        request.kv_transfer_params_json = first.kv_transfer_params_json
        detail = await refused(decode.complete(request), grpc.StatusCode.FAILED_PRECONDITION)
        assert "has expired" in detail

    scenario(body)


def test_a_prefill_worker_that_died_before_the_pull(scenario):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        request = rig.generate("a", rig.prompt_of(1, 10))
        first = await prefill.complete(rig.prefill_of(request))
        await prefill.worker.kill()
        request.kv_transfer_params_json = first.kv_transfer_params_json
        detail = await refused(decode.complete(request), grpc.StatusCode.FAILED_PRECONDITION)
        assert "cannot be pulled from 127.0.0.1" in detail
        # The decode worker is well and computes the prompt itself when asked to.
        request.ClearField("kv_transfer_params_json")
        assert (await decode.complete(request)).finish_reason == "length"

    scenario(body)


def test_a_decode_client_that_leaves_during_the_pull(scenario):
    """The pull hangs (a port that answers nothing), the client hangs up."""

    async def body(rig):
        silent = socket.create_server(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        request = rig.generate("a", rig.prompt_of(1, 10))
        params = params_of(await prefill.complete(rig.prefill_of(request)))
        request.kv_transfer_params_json = json.dumps(params | {"remote_port": port})
        call = asyncio.ensure_future(decode.complete(request))
        while not decode.worker.accounting().blocks_in_use:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await decode.idle()
        await prefill.kv.Release(
            embedded_pb2.ReleaseRequest(
                remote_request_id=params["remote_request_id"], lease=params["lease"]
            )
        )
        silent.close()

    scenario(body)


def test_pull_requests_that_make_no_sense(scenario):
    async def body(rig):
        prefill = await rig.start(Role.PREFILL)
        request = rig.generate("a", rig.prompt_of(1, 12))
        params = params_of(await prefill.complete(rig.prefill_of(request)))
        one, two, _ = params["remote_block_ids"]

        async def pull(block_ids):
            message = embedded_pb2.PullRequest(
                remote_request_id=params["remote_request_id"],
                lease=params["lease"],
                block_ids=block_ids,
            )
            return [block async for block in prefill.kv.Pull(message)]

        for bad in ([], [two, one], [one, one]):
            detail = await refused(pull(bad), grpc.StatusCode.INVALID_ARGUMENT)
            assert "block_ids" in detail
        assert [block.index for block in await pull([two])] == [1]

    scenario(body)


def test_the_answer_names_where_the_kv_lies(scenario):
    async def body(rig):
        prefill = await rig.start(Role.PREFILL, lease_s=0.05)
        first = await prefill.complete(rig.prefill_of(rig.generate("a", rig.prompt_of(1, 9))))
        params = params_of(first)
        assert set(params) == {
            "remote_host",
            "remote_port",
            "remote_block_ids",
            "remote_request_id",
            "lease",
            "eldr_sig",
        }
        assert params["remote_port"] == prefill.worker.port
        assert len(params["remote_block_ids"]) == 3

    scenario(body)


def test_a_pool_smaller_than_the_prompts_in_flight_still_serves_all(scenario, alone, runner):
    """Leases pin most of the pool: later prompts wait for pulls instead of failing."""

    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        prompts = [rig.prompt_of(200 + i, 80) for i in range(6)]
        answers = await asyncio.gather(
            *(
                rig.hand_over(prefill, decode, rig.generate(f"r{i}", p, 9))
                for i, p in enumerate(prompts)
            )
        )
        assert len(prompts) * 20 > runner.num_blocks
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.output_ids) == alone(prompt, 9).tokens

    scenario(body)


def test_without_a_signature_model_no_signature_is_claimed(scenario):
    async def body(rig):
        bare = dataclasses.replace(rig, signature_model=None, clients=rig.clients)
        prefill = await bare.start(Role.PREFILL, lease_s=0.05)
        first = await prefill.complete(rig.prefill_of(rig.generate("a", [1, 2, 3])))
        assert "eldr_sig" not in params_of(first)

    scenario(body)
