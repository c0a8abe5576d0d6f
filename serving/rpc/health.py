"""grpc.health.v1 for probes and load balancers.

""          NOT_SERVING from the start of a drain
readiness   also NOT_SERVING while a phase has no worker that takes work
liveness    SERVING as long as the process answers
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health_pb2 as pb

OVERALL, LIVENESS, READINESS = "", "liveness", "readiness"
SERVICE = pb.DESCRIPTOR.services_by_name["Health"]
_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class HealthDoor:
    """Servicer of `grpc.health.v1.Health` (bind it with `binding.bind`)."""

    def __init__(self) -> None:
        self._status = {OVERALL: _NOT_SERVING, LIVENESS: _SERVING, READINESS: _NOT_SERVING}
        self._changed = asyncio.Condition()

    async def show(self, *, draining: bool, usable: bool) -> None:
        """Publishes the server's state.

        Args:
            draining: no new work is taken.
            usable: every phase has a worker that takes work.
        """
        wanted = {
            OVERALL: _NOT_SERVING if draining else _SERVING,
            LIVENESS: _SERVING,
            READINESS: _SERVING if usable and not draining else _NOT_SERVING,
        }
        if wanted != self._status:
            async with self._changed:
                self._status = wanted
                self._changed.notify_all()

    async def Check(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """The status of one name; NOT_FOUND for others, as the health protocol says."""
        status = self._status.get(message.service)
        if status is None:
            known = ", ".join(repr(name) for name in self._status)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service={message.service!r}: must be one of {known}"
            )
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, message: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """The status now and after each change, until the client leaves."""
        shown = None
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda last=shown: self._status.get(message.service, _UNKNOWN) != last
                )
                shown = self._status.get(message.service, _UNKNOWN)
            yield pb.HealthCheckResponse(status=shown)
