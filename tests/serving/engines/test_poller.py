"""Telemetry: reports into the fleet, failures into LOST, a restart into a new epoch."""

from __future__ import annotations

import asyncio
import random

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.clock import ManualClock
from serving.core.errors import WorkerLost
from serving.core.worker import Capabilities, Phase, Role, WorkerInfo, WorkerState
from serving.engines.base import EngineUnhealthy
from serving.engines.poller import TelemetryPoller
from serving.fleet.fleet import Fleet
from serving.fleet.registry import LoadReport


class Worker:
    """The two calls a poll makes; `problem` is raised instead of a report."""

    def __init__(self, clock: ManualClock) -> None:
        self.worker = WorkerInfo(
            worker_id="w0",
            address="nowhere:1",
            role=Role.DECODE,
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
        )
        self.problem: WorkerLost | None = None
        self.started_at_s = 0.0
        self.answer_delay_s = 0.0
        self._clock = clock

    async def load(self) -> LoadReport:
        if self.problem is not None:
            raise self.problem
        return LoadReport(num_running=3, num_waiting=1, kv_blocks_used=40)

    async def server_info(self) -> pb.GetServerInfoResponse:
        uptime_s = self._clock.monotonic_s() - self.started_at_s
        self._clock.advance(self.answer_delay_s)
        return pb.GetServerInfoResponse(uptime_seconds=uptime_s)


class Watched:
    """A worker, its fleet and its poller on a manual clock."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.fleet = Fleet(stale_after_s=10.0)
        self.worker = Worker(self.clock)
        self.fleet.add(self.worker.worker, 100.0)
        self.num_changes = 0
        self.poller = TelemetryPoller(
            fleet=self.fleet,
            engines=[self.worker],  # type: ignore[list-item]
            clock=self.clock,
            interval_s=1.0,
            lost_after=3,
            jitter=random.Random(0),
            on_change=self._changed,
        )

    def _changed(self) -> None:
        self.num_changes += 1

    def poll(self) -> bool:
        self.clock.advance(1.0)
        return asyncio.run(self.poller.poll_once("w0"))

    @property
    def info(self) -> WorkerInfo:
        return self.fleet.registry.get("w0")


def test_reports_reach_the_view() -> None:
    watched = Watched()
    assert watched.poll()
    view = watched.fleet.view(Phase.DECODE, 103.0)
    assert (view.num_running[0], view.num_waiting[0], view.kv_blocks_free[0]) == (3, 1, 60)
    assert view.age_s[0] == pytest.approx(2.0)
    assert view.accepts[0]


def test_failures_age_the_worker_then_lose_it_and_an_answer_brings_it_back() -> None:
    watched = Watched()
    watched.poll()
    watched.worker.problem = WorkerLost("w0", "silent")
    for _ in range(2):
        assert not watched.poll()
        assert watched.info.state is WorkerState.READY
    assert watched.fleet.view(Phase.DECODE, 103.0).age_s[0] == pytest.approx(2.0)
    watched.poll()
    assert watched.info.state is WorkerState.LOST
    watched.worker.problem = None
    assert watched.poll()
    assert (watched.info.state, watched.info.epoch) == (WorkerState.READY, 0)
    assert watched.num_changes == 2


def test_a_restart_is_a_new_epoch() -> None:
    watched = Watched()
    watched.poll()
    watched.worker.problem = WorkerLost("w0", "restarting")
    watched.poll()
    watched.worker.problem = None
    watched.worker.started_at_s = 102.0
    watched.poll()
    assert (watched.info.state, watched.info.epoch) == (WorkerState.READY, 1)
    watched.poll()
    assert watched.info.epoch == 1


def test_a_slow_answer_is_no_restart() -> None:
    watched = Watched()
    watched.poll()
    watched.worker.problem = WorkerLost("w0", "slow")
    watched.poll()
    watched.worker.problem = None
    watched.worker.answer_delay_s = 1.9
    watched.poll()
    watched.worker.problem = WorkerLost("w0", "slow")
    watched.poll()
    watched.worker.problem = None
    watched.worker.answer_delay_s = 0.0
    watched.poll()
    assert watched.info.epoch == 0


def test_an_engine_that_says_no_gets_no_new_work_at_once() -> None:
    watched = Watched()
    watched.worker.problem = EngineUnhealthy("w0", "draining")
    for _ in range(5):
        watched.poll()
    assert watched.info.state is WorkerState.DRAINING
    watched.worker.problem = None
    watched.poll()
    assert watched.info.state is WorkerState.READY


def test_a_suspicion_polls_at_once() -> None:
    watched = Watched()

    async def body() -> None:
        polling = asyncio.create_task(watched.poller.run())
        await asyncio.sleep(0)
        watched.worker.problem = WorkerLost("w0", "gone")
        # The next regular poll is most of a second away; three suspicions need none.
        for _ in range(3):
            watched.poller.suspect("w0")
            for _ in range(5):
                await asyncio.sleep(0)
        watched.poller.suspect("unknown")
        assert watched.info.state is WorkerState.LOST
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)

    asyncio.run(body())
