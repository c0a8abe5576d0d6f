"""One worker over real gRPC: answers, batching, endings, failures."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
from scipy.special import log_softmax

from eldr_jax.runner import Chunk
from serving.core.errors import ConfigError
from serving.core.worker import Role
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.engines.embedded.worker import EmbeddedWorker
from serving.proto import embedded_pb2


class Faulty:
    """A runner whose next steps raise; everything else is the real one's."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.num_failures = 0
        self.before_donation = True

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def step(self, pool, chunks):
        if self.num_failures:
            self.num_failures -= 1
            if not self.before_donation:
                self._runner.step(pool, chunks)
            raise FloatingPointError("the device is on fire")
        return self._runner.step(pool, chunks)


async def refused(call, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return caught.value.details() or ""


@pytest.mark.parametrize("stream", [True, False])
def test_one_worker_answers_as_the_model_alone(scenario, alone, stream):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        prompts = [rig.prompt_of(i, n) for i, n in enumerate((1, 3, 4, 5, 17, 40, 64))]
        answers = await asyncio.gather(
            *(
                worker.complete(rig.generate(f"r{i}", p, 8, stream=stream))
                for i, p in enumerate(prompts)
            )
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.output_ids) == alone(prompt, 8).tokens
            assert answer.finish_reason == "length"
            assert answer.prompt_tokens == len(prompt)
            assert answer.completion_tokens == 8

    scenario(body)


def test_more_requests_than_places_share_steps_and_all_end(scenario, alone):
    async def body(rig):
        worker = await rig.start(Role.BOTH, max_num_seqs=4)
        prompts = [rig.prompt_of(50 + i % 5, 6) for i in range(14)]
        answers = await asyncio.gather(
            *(worker.complete(rig.generate(f"r{i}", p, 5)) for i, p in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.output_ids) == alone(prompt, 5).tokens
        response = await worker.steps.GetSteps(embedded_pb2.GetStepsRequest())
        assert max(len(step.request_ids) for step in response.steps) == 4
        assert sum(step.duration_s for step in response.steps) == pytest.approx(response.busy_s)
        assert all(step.distinct_experts >= 2 for step in response.steps)
        assert response.next == response.steps[-1].sequence + 1
        later = await worker.steps.GetSteps(embedded_pb2.GetStepsRequest(since=response.next))
        assert not later.steps
        assert later.next == response.next

    scenario(body)


def test_workers_of_one_process_do_not_disturb_each_other(scenario, alone):
    async def body(rig):
        workers = [await rig.start(Role.BOTH) for _ in range(3)]
        prompt = rig.prompt_of(9, 12)
        answers = await asyncio.gather(
            *(w.complete(rig.generate(f"r{i}", prompt, 10)) for i, w in enumerate(workers))
        )
        assert {tuple(a.output_ids) for a in answers} == {tuple(alone(prompt, 10).tokens)}
        assert all(w.worker.busy_s > 0 for w in workers)

    scenario(body)


def test_stop_tokens_eos_and_min_tokens(scenario, alone, model_config):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        prompt = rig.prompt_of(4, 11)
        tokens = alone(prompt, 8).tokens
        stop = tokens[3]
        first = tokens.index(stop)
        answer = await worker.complete(rig.generate("a", prompt, 8, stop_token_ids=[stop]))
        assert list(answer.output_ids) == tokens[: first + 1]
        assert (answer.finish_reason, answer.matched_token_id) == ("stop", stop)
        # The stop token may not come before min_tokens: the model's second choice does.
        answer = await worker.complete(
            rig.generate("b", prompt, 8, stop_token_ids=[stop], min_tokens=first + 1)
        )
        assert list(answer.output_ids)[:first] == tokens[:first]
        assert len(answer.output_ids) > first
        assert stop not in list(answer.output_ids)[: first + 1][:-1]
        end = model_config.eos_token_id
        answer = await worker.complete(
            rig.generate("c", prompt, 60, temperature=5.0, seed=1, ignore_eos=False)
        )
        whole = await worker.complete(rig.generate("d", prompt, 60, temperature=5.0, seed=1))
        assert end in whole.output_ids, "seed 1 is meant to draw the end token"
        cut = list(whole.output_ids).index(end) + 1
        assert list(answer.output_ids) == list(whole.output_ids)[:cut]
        assert answer.finish_reason == "stop"
        assert answer.WhichOneof("matched_stop") is None

    scenario(body)


def test_logprobs_are_those_of_the_model(scenario, runner):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        prompt = rig.prompt_of(6, 10)
        answer = await worker.complete(rig.generate("a", prompt, 1, logprobs=3))
        blocks = np.arange(runner.max_blocks_per_seq, dtype=np.int32)
        chunk = Chunk(token_ids=np.array(prompt, np.int32), start=0, block_ids=blocks)
        _, result = runner.step(runner.new_pool(), [chunk])
        wanted = log_softmax(result.logits()[0].astype(np.float64))
        (chosen,) = answer.output_logprobs.token_logprobs
        assert chosen == pytest.approx(wanted[answer.output_ids[0]], rel=1e-5)
        (top,) = answer.output_logprobs.top_logprobs
        assert list(top.token_ids) == np.argsort(-wanted, kind="stable")[:3].tolist()
        assert list(answer.output_logprobs.token_ids) == list(answer.output_ids)

    scenario(body)


def test_abort_closes_the_stream_with_its_tokens_so_far(scenario, alone):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        prompt = rig.prompt_of(2, 5)
        stream = worker.engine.Generate(rig.generate("a", prompt, 80))
        tokens = []
        async for answer in stream:
            if answer.HasField("complete"):
                break
            tokens.extend(answer.chunk.token_ids)
            if len(tokens) == 3:
                request = worker.engine.Abort
                await request(_abort("a", "unknown"))
        assert answer.complete.finish_reason == "abort"
        assert list(answer.complete.output_ids) == tokens
        assert tokens == alone(prompt, 80).tokens[: len(tokens)]
        assert len(tokens) < 80

    scenario(body)


def _abort(*request_ids: str):
    from smg_grpc_proto.generated import vllm_engine_pb2

    return vllm_engine_pb2.AbortRequest(request_ids=request_ids)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
def test_clients_that_hang_up_at_any_moment_leave_nothing(scenario, role, alone):
    async def body(rig):
        worker = await rig.start(role, max_num_seqs=2)
        rng = np.random.default_rng(0)

        async def hang_up(index: int) -> None:
            request = rig.generate(f"r{index}", rig.prompt_of(index, 40), 20)
            if role is Role.PREFILL:
                request = rig.prefill_of(request)
            call = worker.engine.Generate(request)
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(float(rng.exponential(0.05))):
                    async for answer in call:
                        if answer.HasField("complete"):
                            break
            call.cancel()

        await asyncio.gather(*(hang_up(i) for i in range(16)))
        if role is Role.PREFILL:
            # Answers that did arrive carry leases; like any unclaimed one they are given back.
            await worker.worker.stop()
            return
        prompt = rig.prompt_of(1, 9)
        await worker.idle()
        answer = await worker.complete(rig.generate("z", prompt, 5))
        assert list(answer.output_ids) == alone(prompt, 5).tokens

    scenario(body)


def test_a_failed_step_is_told_and_the_worker_goes_on(scenario, alone, runner):
    async def body(rig):
        faulty = Faulty(runner)
        worker = await rig.start(Role.BOTH, runner=faulty)
        prompt = rig.prompt_of(3, 12)
        for before in (True, False):
            faulty.num_failures, faulty.before_donation = 1, before
            detail = await refused(
                worker.complete(rig.generate("a", prompt)), grpc.StatusCode.INTERNAL
            )
            assert "FloatingPointError: the device is on fire" in detail
            answer = await worker.complete(rig.generate("b", prompt, 5))
            assert list(answer.output_ids) == alone(prompt, 5).tokens

    scenario(body)


def test_failures_in_a_row_make_it_unhealthy_and_it_says_so(scenario, runner):
    async def body(rig):
        from smg_grpc_proto.generated import vllm_engine_pb2 as pb

        faulty = Faulty(runner)
        worker = await rig.start(Role.BOTH, runner=faulty, max_step_failures=2)
        assert (await worker.engine.HealthCheck(pb.HealthCheckRequest())).healthy
        faulty.num_failures = 2
        await refused(worker.complete(rig.generate("a", [1, 2])), grpc.StatusCode.INTERNAL)
        await refused(worker.complete(rig.generate("b", [1, 2])), grpc.StatusCode.INTERNAL)
        health = await worker.engine.HealthCheck(pb.HealthCheckRequest())
        assert not health.healthy
        assert "2 steps failed in a row" in health.message
        detail = await refused(
            worker.complete(rig.generate("c", [1, 2])), grpc.StatusCode.UNAVAILABLE
        )
        assert "2 steps failed in a row" in detail

    scenario(body)


def test_what_does_not_fit_is_refused_by_name_and_what_must_wait_may(scenario, alone):
    async def body(rig):
        worker = await rig.start(Role.BOTH, max_num_seqs=2, max_waiting=2)
        code = grpc.StatusCode.INVALID_ARGUMENT
        detail = await refused(worker.complete(rig.generate("a", [1] * 90, 7)), code)
        assert "sampling_params.max_tokens=7" in detail
        assert "<= 6" in detail
        detail = await refused(worker.complete(rig.generate("a", [1] * 96)), code)
        assert "tokenized.input_ids" in detail
        prompts = [rig.prompt_of(60 + i, 20) for i in range(5)]
        calls = [
            asyncio.ensure_future(worker.complete(rig.generate(f"r{i}", p, 70)))
            for i, p in enumerate(prompts)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert [e.code() for e in errors] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert "2 requests wait already" in (errors[0].details() or "")
        for prompt, result in zip(prompts, results, strict=True):
            if not isinstance(result, grpc.aio.AioRpcError):
                assert list(result.output_ids) == alone(prompt, 70).tokens

    scenario(body)


def test_drain_lets_running_requests_end_and_refuses_new_ones(scenario, alone):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        prompt = rig.prompt_of(5, 8)
        running = asyncio.ensure_future(worker.complete(rig.generate("a", prompt, 40)))
        while not worker.worker.accounting().num_running:
            await asyncio.sleep(0.005)
        stopping = asyncio.ensure_future(worker.worker.stop(grace_s=300.0))
        await asyncio.sleep(0)
        detail = await refused(
            worker.complete(rig.generate("b", prompt)), grpc.StatusCode.UNAVAILABLE
        )
        assert "DRAINING" in detail
        assert list((await running).output_ids) == alone(prompt, 40).tokens
        await stopping

    scenario(body)


def test_a_drain_waits_for_pulls_too(scenario, alone):
    async def body(rig):
        prefill, decode = await rig.start(Role.PREFILL), await rig.start(Role.DECODE)
        request = rig.generate("a", rig.prompt_of(5, 8))
        first = await prefill.complete(rig.prefill_of(request))
        stopping = asyncio.ensure_future(prefill.worker.stop(grace_s=300.0))
        await asyncio.sleep(0.05)
        request.kv_transfer_params_json = first.kv_transfer_params_json
        answer = await decode.complete(request)
        assert list(answer.output_ids) == alone(rig.prompt_of(5, 8), 6).tokens
        await stopping

    scenario(body)


def test_a_stop_without_grace_breaks_requests_with_a_status(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        running = asyncio.ensure_future(worker.complete(rig.generate("a", [1, 2, 3], 90)))
        while not worker.worker.accounting().num_running:
            await asyncio.sleep(0.005)
        await worker.worker.stop()
        detail = await refused(running, grpc.StatusCode.UNAVAILABLE)
        assert "it has stopped" in detail

    scenario(body)


def test_a_killed_worker_breaks_its_clients(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        running = asyncio.ensure_future(worker.complete(rig.generate("a", [1, 2, 3], 90)))
        while not worker.worker.accounting().num_running:
            await asyncio.sleep(0.005)
        await worker.worker.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await running

    scenario(body)


def test_wrong_settings_are_named(runner, signature_model):
    def config(**options):
        return EmbeddedWorkerConfig(worker_id="w", role=Role.BOTH, **options)

    for options, field in (
        ({"max_num_seqs": 17}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"port": -1}, "port"),
        ({"lease_s": 0.0}, "lease_s"),
        ({"pull_timeout_s": float("inf")}, "pull_timeout_s"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_step_failures": 0}, "max_step_failures"),
    ):
        with pytest.raises(ConfigError) as caught:
            config(**options)
        assert caught.value.field == field
    for tokens in (8, 33):
        with pytest.raises(ConfigError, match=f"max_step_tokens={tokens}"):
            EmbeddedWorker(config(max_step_tokens=tokens), runner)


def test_a_taken_port_is_named(scenario):
    async def body(rig):
        worker = await rig.start(Role.BOTH)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{worker.worker.port}"):
            await rig.start(Role.BOTH, port=worker.worker.port)

    scenario(body)
