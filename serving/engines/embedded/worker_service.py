"""`eldr.embedded.v1.Worker`: a worker's measured steps and its block accounting."""

from __future__ import annotations

import grpc

from serving.engines.embedded.engine import Engine
from serving.proto import embedded_pb2 as pb

# Keeps an answer below gRPC's default message limit; ask again from the last sequence + 1.
MAX_STEPS_PER_ANSWER = 2048


class WorkerServicer:
    """The service of one worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetSteps(
        self, request: pb.GetStepsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStepsResponse:
        """Steps from `since` on, oldest first; `next` is what to ask for next."""
        steps, upcoming = self._engine.steps_since(request.since, MAX_STEPS_PER_ANSWER)
        accounting = self._engine.accounting()
        return pb.GetStepsResponse(
            steps=[
                pb.Step(
                    sequence=step.sequence,
                    kind=step.kind,
                    started_s=step.started_s,
                    duration_s=step.duration_s,
                    num_tokens=step.num_tokens,
                    bucket_tokens=step.bucket_tokens,
                    distinct_experts=step.distinct_experts,
                    request_ids=step.request_ids,
                )
                for step in steps
            ],
            next=steps[-1].sequence + 1 if steps else upcoming,
            blocks_total=accounting.blocks_total,
            blocks_in_use=accounting.blocks_in_use,
            blocks_cached=accounting.blocks_cached,
            leases_open=accounting.leases_open,
            busy_s=self._engine.busy.now_s(),
        )
