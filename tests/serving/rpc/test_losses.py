"""Workers die under running requests: full tokens or a retryable error, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest

from serving.core import metadata as keys
from serving.core.errors import KvLost, WorkerLost
from serving.core.worker import WorkerState

Scenario = Callable[..., None]
Alone = Callable[[Sequence[int], int], list[int]]
Code = grpc.StatusCode


async def _when(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


async def _until_decoding(rig, worker_id: str, num: int = 1) -> None:
    """Waits until a worker runs `num` requests of ours and some token was sent."""
    worker = rig.app.embedded.workers[worker_id]
    await _when(lambda: worker.accounting().num_running >= num)


def test_a_decode_worker_dies_and_every_request_gets_its_tokens(
    scenario: Scenario, alone: Alone
) -> None:
    async def body(rig) -> None:
        prompts = {f"r{i}": rig.prompt(30 + i, 8 + 3 * i) for i in range(6)}
        tasks = [
            asyncio.ensure_future(rig.generate(rig.message(name, prompt, 40)))
            for name, prompt in prompts.items()
        ]
        await _until_decoding(rig, "d0")
        await rig.app.embedded.workers["d0"].kill()
        answers = await asyncio.gather(*tasks)
        for prompt, answer in zip(prompts.values(), answers, strict=True):
            assert answer.failure is None, answer.failure
            assert answer.tokens == alone(prompt, 40)
            assert answer.complete.completion_tokens == 40
            assert answer.complete.prompt_tokens == len(prompt)
        assert {answer.trailers["eldr-decode-worker"] for answer in answers} >= {"d1"}
        retries = [rig.app.router.explain(name)[-1].retries for name in prompts]
        assert sum(retries) >= 1
        await _when(lambda: rig.app.fleet.registry.get("d0").state is WorkerState.LOST)

    scenario(body, killed=("d0",), router={"decode_policy": "rr", "stale_after_s": 60.0})


def test_without_restart_the_loss_is_reported_with_its_tokens(
    scenario: Scenario, alone: Alone
) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(40, 9)
        seen: list[int] = []
        task = asyncio.ensure_future(
            rig.generate(rig.message("r1", prompt, 80), ((keys.RESTART, "never"),), seen.append)
        )
        await _when(lambda: len(seen) >= 3)
        winner = rig.app.router.explain("r1")[-1].stage.winner
        await rig.app.embedded.workers[winner].kill()
        answer = await task
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.reason) == (Code.ABORTED, "WORKER_LOST")
        assert int(answer.failure.facts["num_tokens"]) == len(answer.tokens) >= 3
        assert answer.failure.facts["worker_id"] == winner
        assert answer.failure.retry_s is not None
        assert answer.tokens == alone(prompt, 80)[: len(answer.tokens)]
        outcome = rig.app.router.explain("r1")[-1]
        assert (outcome.status.value, outcome.error) == ("failed", "WORKER_LOST")

    scenario(body, killed=("d0", "d1"))


def test_the_last_decode_worker_dies(scenario: Scenario) -> None:
    async def body(rig) -> None:
        seen: list[int] = []
        running = asyncio.ensure_future(
            rig.generate(rig.message("r1", rig.prompt(41, 9), 80), on_token=seen.append)
        )
        await _when(lambda: len(seen) >= 2)
        await rig.app.embedded.workers["d0"].kill()
        answer = await running
        assert (answer.failure.code, answer.failure.reason) == (Code.ABORTED, "WORKER_LOST")
        assert int(answer.failure.facts["num_tokens"]) == len(answer.tokens)
        await _when(lambda: rig.app.fleet.registry.get("d0").state is WorkerState.LOST)
        late = await rig.generate(rig.message("r2", rig.prompt(42, 9), 8))
        assert (late.failure.code, late.failure.reason) == (Code.UNAVAILABLE, "NO_LIVE_WORKER")
        assert late.failure.retry_s == 1.0

    scenario(body, killed=("d0",), embedded={"num_decode": 1})


def test_a_prefill_worker_dies(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        await rig.app.embedded.workers["p0"].kill()
        prompts = {f"r{i}": rig.prompt(50 + i, 20) for i in range(4)}
        answers = await asyncio.gather(
            *(rig.generate(rig.message(name, prompt, 5)) for name, prompt in prompts.items())
        )
        for prompt, answer in zip(prompts.values(), answers, strict=True):
            assert answer.failure is None
            assert answer.tokens == alone(prompt, 5)
            assert answer.trailers["eldr-prefill-worker"] == "p1"

    scenario(body, killed=("p0",), router={"prefill_policy": "rr", "stale_after_s": 60.0})


@pytest.mark.parametrize("error", [KvLost("d0", "gone"), WorkerLost("d0", "gone")])
def test_lost_before_the_first_token(
    scenario: Scenario, alone: Alone, monkeypatch: pytest.MonkeyPatch, error: WorkerLost
) -> None:
    """KV that is gone means another prefill; a worker that is gone only another decode worker."""

    async def body(rig) -> None:
        calls: list[str] = []
        for worker_id, engine in rig.app.relay.engines.items():
            _spy(monkeypatch, engine, worker_id, calls, error)
        prompt = rig.prompt(60, 14)
        answer = await rig.generate(rig.message("r1", prompt, 6))
        assert answer.failure is None
        assert answer.tokens == alone(prompt, 6)
        assert answer.trailers["eldr-losses"] == "1"
        kinds = [call.split()[0] for call in calls]
        if isinstance(error, KvLost):
            assert kinds == ["prefill", "decode", "prefill", "decode"]
        else:
            assert kinds == ["prefill", "decode", "decode"]
            assert calls[1] != calls[2]

    scenario(body)


def _spy(
    monkeypatch: pytest.MonkeyPatch,
    engine: object,
    worker_id: str,
    calls: list[str],
    error: WorkerLost,
) -> None:
    """Notes an engine's calls and loses the first decode before anything reached the worker."""
    real_prefill, real_generate = engine.prefill, engine.generate

    async def prefill(call: object) -> object:
        calls.append(f"prefill {worker_id}")
        return await real_prefill(call)

    async def generate(call: object, handover: object = None):
        calls.append(f"decode {worker_id}")
        if sum(name.startswith("decode") for name in calls) == 1:
            raise error
        async for answer in real_generate(call, handover):
            yield answer

    monkeypatch.setattr(engine, "prefill", prefill)
    monkeypatch.setattr(engine, "generate", generate)


def test_losses_are_bounded(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(rig) -> None:
        async def lost(call: object) -> None:
            raise KvLost("p0", "always")

        for engine in rig.app.relay.engines.values():
            monkeypatch.setattr(engine, "prefill", lost)
        answer = await rig.generate(rig.message("r1", rig.prompt(61, 9), 6))
        assert (answer.failure.code, answer.failure.reason) == (Code.UNAVAILABLE, "KV_LOST")
        assert answer.failure.retry_s is not None

    scenario(body)


def test_a_draining_worker_gets_no_new_work(scenario: Scenario) -> None:
    async def body(rig) -> None:
        stopping = asyncio.ensure_future(rig.app.embedded.workers["d0"].stop(5.0))
        await _when(lambda: rig.app.fleet.registry.get("d0").state is not WorkerState.READY)
        for i in range(3):
            answer = await rig.generate(rig.message(f"r{i}", rig.prompt(70 + i, 9), 4))
            assert answer.failure is None
            assert answer.trailers["eldr-decode-worker"] == "d1"
        await stopping

    scenario(body, killed=("d0",))


def test_a_full_fleet_rejects_with_a_delay(scenario: Scenario) -> None:
    async def body(rig) -> None:
        # One decode worker of one slot, and no patience: the second request finds no room.
        call = rig.engine.Generate(rig.message("r1", rig.prompt(80, 9), 80))
        await call.read()
        answer = await rig.generate(rig.message("r2", rig.prompt(81, 9), 8))
        assert (answer.failure.code, answer.failure.reason) == (
            Code.RESOURCE_EXHAUSTED,
            "NO_CAPACITY",
        )
        assert answer.failure.retry_s == 1.0
        assert "slots" in answer.failure.facts["detail"]
        call.cancel()

    scenario(
        body,
        embedded={"num_decode": 1, "max_num_seqs": 1},
        router={"decode_wait_s": 0.0, "stale_after_s": 60.0},
    )


def test_a_finished_prefill_waits_for_room(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompts = [rig.prompt(82 + i, 9) for i in range(3)]
        answers = await asyncio.gather(
            *(rig.generate(rig.message(f"r{i}", prompt, 20)) for i, prompt in enumerate(prompts))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.failure is None
            assert answer.tokens == alone(prompt, 20)

    scenario(
        body,
        embedded={"num_decode": 1, "max_num_seqs": 1},
        router={"decode_wait_s": 50.0},
    )


def test_kv_of_an_abandoned_prefill_is_freed(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client hangs up while the prefill's answer, and with it a lease, is on its way."""

    async def body(rig) -> None:
        answered, hung_up = asyncio.Event(), asyncio.Event()

        def late(engine: object) -> None:
            real = engine.prefill

            async def prefill(call: object) -> object:
                result = await real(call)
                answered.set()
                await hung_up.wait()
                return result

            monkeypatch.setattr(engine, "prefill", prefill)

        for engine in rig.app.relay.engines.values():
            late(engine)
        call = rig.engine.Generate(rig.message("r1", rig.prompt(90, 14), 6))
        await answered.wait()
        leases = [w.accounting().leases_open for w in rig.app.embedded.workers.values()]
        assert sum(leases) == 1
        call.cancel()
        await _when(lambda: rig.app.relay.num_running == 0)
        hung_up.set()
        await rig.settled()

    scenario(body)


def test_settling_right_after_a_clean_up_ended_returns(scenario: Scenario) -> None:
    """The clean-up is done, but the loop has not yet come round to forget it."""

    async def body(rig) -> None:
        ended = []

        async def clean_up() -> None:
            ended.append(True)

        rig.app.relay.behind(clean_up(), "clean-up")
        await asyncio.sleep(0)
        assert ended
        await rig.app.relay.settle()

    scenario(body)
