"""Watches the workers: load reports into the fleet, silence into age, failures into LOST.

One task per worker, so that a slow one delays nobody else's report. A failed poll changes
nothing at once: the worker's report ages, and a stale worker takes no new work; after
`lost_after` failures in a row it is LOST and what it held is given back; an engine that says
itself that it takes no requests is DRAINING at once. One answered poll brings it back, under a
new epoch when the engine restarted in between.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.core.clock import Clock
from serving.core.errors import WorkerLost
from serving.core.worker import WorkerState
from serving.engines.base import Engine, EngineUnhealthy
from serving.fleet.fleet import Fleet

_log = logging.getLogger(__name__)
_START_SLACK_S = 1.0


class _Started(NamedTuple):
    """When an engine started: its uptime was read somewhere between question and answer."""

    earliest_s: float
    latest_s: float


@dataclass(slots=True, kw_only=True)
class _Watch:
    """What the poller remembers of one worker."""

    engine: Engine
    num_failures: int = 0
    started: _Started | None = None
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


class TelemetryPoller:
    """Polls every engine; `run` until cancelled."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        engines: Iterable[Engine],
        clock: Clock,
        interval_s: float,
        lost_after: int,
        jitter: random.Random,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._interval_s = interval_s
        self._lost_after = lost_after
        self._jitter = jitter
        self._on_change = on_change
        self._watches = {engine.worker.worker_id: _Watch(engine=engine) for engine in engines}

    async def run(self) -> None:
        """Polls all workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker_id in self._watches:
                group.create_task(self._watch(worker_id))

    def suspect(self, worker_id: str) -> None:
        """Somebody lost a request on this worker: poll it now."""
        watch = self._watches.get(worker_id)
        if watch is not None:
            watch.hurry.set()

    async def poll_once(self, worker_id: str) -> bool:
        """One poll of one worker; whether it answered.

        Raises:
            KeyError: no such worker.
        """
        watch = self._watches[worker_id]
        try:
            report = await watch.engine.load()
            started = await self._started(watch)
        except WorkerLost as error:
            self._failed(worker_id, watch, error)
            return False
        self._answered(worker_id, watch, started)
        self._fleet.update(worker_id, report, self._clock.monotonic_s())
        return True

    async def _watch(self, worker_id: str) -> None:
        watch = self._watches[worker_id]
        # Start apart, so that the polls of a large fleet do not come in bursts.
        pause_s = self._jitter.random() * self._interval_s
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await watch.hurry.wait()
            except TimeoutError:
                pass
            watch.hurry.clear()
            await self.poll_once(worker_id)
            pause_s = self._interval_s * (0.9 + 0.2 * self._jitter.random())

    async def _started(self, watch: _Watch) -> _Started | None:
        """When the engine started, asked only at first contact and after failures."""
        if watch.started is not None and not watch.num_failures:
            return watch.started
        asked_s = self._clock.monotonic_s()
        info = await watch.engine.server_info()
        if not info.uptime_seconds:
            return None
        answered_s = self._clock.monotonic_s()
        return _Started(asked_s - info.uptime_seconds, answered_s - info.uptime_seconds)

    def _failed(self, worker_id: str, watch: _Watch, error: WorkerLost) -> None:
        watch.num_failures += 1
        if isinstance(error, EngineUnhealthy):
            if self._fleet.registry.get(worker_id).state is WorkerState.READY:
                self._fleet.set_state(worker_id, WorkerState.DRAINING)
                _log.warning("worker %s takes no new work: %s", worker_id, error)
                self._on_change()
            return
        if watch.num_failures < self._lost_after:
            return
        state = self._fleet.registry.get(worker_id).state
        if state is not WorkerState.LOST:
            released = self._fleet.set_state(worker_id, WorkerState.LOST)
            _log.warning(
                "worker %s is lost (%d reservations given back): %s",
                worker_id,
                len(released),
                error,
            )
            self._on_change()

    def _answered(self, worker_id: str, watch: _Watch, started: _Started | None) -> None:
        known = self._fleet.registry.get(worker_id)
        before, watch.started = watch.started, started
        watch.num_failures = 0
        restarted = (
            before is not None
            and started is not None
            and started.earliest_s > before.latest_s + _START_SLACK_S
        )
        if restarted:
            known = dataclasses.replace(known, epoch=known.epoch + 1)
        # A parked worker answers too; waking it is not the poller's business.
        if restarted or known.state not in (WorkerState.READY, WorkerState.PARKED):
            self._fleet.add(
                dataclasses.replace(known, state=WorkerState.READY), self._clock.monotonic_s()
            )
            _log.warning("worker %s is back%s", worker_id, " after a restart" * restarted)
            self._on_change()
