"""grpc.health.v1 for probes and load balancers.

""          NOT_SERVING from the start of a drain
readiness   also NOT_SERVING while a phase has no worker that takes work
liveness    SERVING as long as the process answers
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

OVERALL, LIVENESS, READINESS = "", "liveness", "readiness"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthDoor:
    """Keeps the three names current; watchers learn of each change."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self._shown: dict[str, bool] = {}

    async def show(self, *, draining: bool, usable: bool) -> None:
        """Publishes the server's state.

        Args:
            draining: no new work is taken.
            usable: every phase has a worker that takes work.
        """
        wanted = {LIVENESS: True, OVERALL: not draining, READINESS: usable and not draining}
        for name, serving in wanted.items():
            if self._shown.get(name) is not serving:
                self._shown[name] = serving
                await self._servicer.set(name, _SERVING if serving else _NOT_SERVING)
