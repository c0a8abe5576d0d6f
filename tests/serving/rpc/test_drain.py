"""Drain: new work is refused, what runs ends or is cut off clearly, probes see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2

from serving.proto import router_pb2

Scenario = Callable[..., None]
Alone = Callable[[Sequence[int], int], list[int]]
Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _health(rig, name: str) -> int:
    return (await rig.health.Check(health_pb2.HealthCheckRequest(service=name))).status


def test_running_requests_end_and_new_ones_are_refused(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(1, 9)
        started = asyncio.Event()
        running = asyncio.ensure_future(
            rig.generate(rig.message("r1", prompt, 60), on_token=lambda _: started.set())
        )
        await started.wait()
        draining = asyncio.ensure_future(rig.app.drain(60.0))
        await asyncio.sleep(0)
        late = await rig.generate(rig.message("r2", prompt, 8))
        assert (late.failure.code, late.failure.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert late.failure.retry_s == 1.0
        route = router_pb2.RouteRequest(request_id="r3", token_ids=[1], max_tokens=2)
        failure = await rig.failure(rig.router.Route(route))
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert await _health(rig, "") == NOT_SERVING
        assert await _health(rig, "readiness") == NOT_SERVING
        assert await _health(rig, "liveness") == SERVING
        told = await rig.engine.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (told.healthy, told.message) == (False, "draining")
        answer = await running
        assert answer.tokens == alone(prompt, 60)
        assert await draining is True

    scenario(body)


def test_a_drain_waits_for_open_routes(scenario: Scenario) -> None:
    """A client that drives the engines itself must still be able to report."""

    async def body(rig) -> None:
        route = router_pb2.RouteRequest(request_id="r1", token_ids=[1, 2], max_tokens=2)
        placed = await rig.router.Route(route)
        draining = asyncio.ensure_future(rig.app.drain(60.0))
        await asyncio.sleep(0.05)
        assert not draining.done()
        failed = router_pb2.Failed(reason="GAVE_UP")
        await rig.router.Report(
            router_pb2.ReportRequest(
                request_id="r1", lease_id=placed.decode.lease_id, failed=failed
            )
        )
        assert await draining is True

    scenario(body)


def test_what_outlives_the_grace_is_cut_off_clearly(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(2, 9)
        started = asyncio.Event()
        running = asyncio.ensure_future(
            rig.generate(rig.message("r1", prompt, 80), on_token=lambda _: started.set())
        )
        await started.wait()
        assert await rig.app.drain(0.0) is False
        answer = await running
        assert (answer.failure.code, answer.failure.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert answer.failure.retry_s is not None
        assert answer.tokens == alone(prompt, 80)[: len(answer.tokens)]

    scenario(body)


def test_probes(scenario: Scenario) -> None:
    async def body(rig) -> None:
        for name in ("", "liveness", "readiness"):
            for _ in range(500):
                if await _health(rig, name) == SERVING:
                    break
                await asyncio.sleep(0.02)
            assert await _health(rig, name) == SERVING
        failure = await rig.failure(
            rig.health.Check(health_pb2.HealthCheckRequest(service="other"))
        )
        assert failure.code is Code.NOT_FOUND
        watch = rig.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == SERVING
        await rig.app.drain(5.0)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()

    scenario(body)


def test_reflection_names_every_service(scenario: Scenario) -> None:
    async def body(rig) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {row.name for row in (await call.read()).list_services_response.service}
        symbol = "eldr.router.v1.Router"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        described = await call.read()
        await call.done_writing()
        assert names == {
            "vllm.grpc.engine.VllmEngine",
            "eldr.router.v1.Router",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert described.file_descriptor_response.file_descriptor_proto

    scenario(body)
