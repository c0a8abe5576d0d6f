"""What the router asks of an inference engine, whichever wire it speaks.

The messages of `vllm.grpc.engine` are what doors and engines have in common; an adapter for
another wire (OpenAI HTTP, SGLang) translates them. An engine never retries: it raises from
the error tree and the relay decides.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.errors import WorkerLost
from serving.core.worker import WorkerInfo
from serving.fleet.fleet import LoadReport

T = TypeVar("T")


class CallStopped(Exception):
    """A call was ended through its `StopSwitch`; no failure of anybody."""


class EngineUnhealthy(WorkerLost):
    """The engine answers, and says that it takes no requests (draining, broken)."""

    reason = "WORKER_UNHEALTHY"


class StopSwitch:
    """Ends the engine call of a request from outside the task that reads it."""

    def __init__(self) -> None:
        self.thrown = False
        self._scope: asyncio.Timeout | None = None

    def throw(self) -> None:
        """Ends the wait in progress, and every later one, with `CallStopped`."""
        self.thrown = True
        if self._scope is not None:
            self._scope.reschedule(0.0)

    async def wait(self, answer: Awaitable[T], limit_s: float) -> T:
        """Awaits one answer of the engine.

        Raises:
            CallStopped: the switch was thrown.
            TimeoutError: nothing came within `limit_s` seconds (inf: wait for ever).
        """
        try:
            limit = None if math.isinf(limit_s) else limit_s
            async with asyncio.timeout(0.0 if self.thrown else limit) as self._scope:
                return await answer
        except TimeoutError:
            if self.thrown:
                raise CallStopped from None
            raise
        finally:
            self._scope = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineCall:
    """One generation as an engine gets it.

    Attributes:
        engine_request_id: unique on the engine; differs between attempts of one request.
        token_ids: the whole prompt, int32 [P].
        max_tokens: output tokens wanted of this call, >= 1.
        template: the client's own message; everything the router does not decide (sampling,
            fields it does not know) is taken from it. Never written to.
        deadline_s: monotonic seconds after which the answer is worthless, inf for none.
        min_tokens: output tokens before a stop may count; replaces the template's.
        forwarded: trace headers of the client's call.
        switch: ends the call from outside.
        trailers: filled when the call ends: what the engine says about it beside the answer
            (trailing metadata `eldr-...`).
    """

    engine_request_id: str
    token_ids: np.ndarray
    max_tokens: int
    template: pb.GenerateRequest
    deadline_s: float
    min_tokens: int = 0
    forwarded: tuple[tuple[str, str], ...] = ()
    switch: StopSwitch = field(default_factory=StopSwitch)
    trailers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvHandover:
    """The KV of one finished prefill, waiting on its worker for exactly one decode call.

    Bound to one request: never used for another, never after it was taken (NETWORK.md: an
    engine without leases answers such a use with wrong tokens, not with an error).

    Attributes:
        engine_request_id: the prefill call it came from.
        worker_id: the prefill worker holding the blocks.
        params: the engine's own parameters, without the signature.
        created_at_s: monotonic seconds.
    """

    engine_request_id: str
    worker_id: str
    params: Mapping[str, Any]
    created_at_s: float

    @property
    def lease(self) -> str:
        """The lease the engine enforces, "" when its connector has none."""
        lease = self.params.get("lease", "")
        return lease if isinstance(lease, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillResult:
    """What a prefill worker answered.

    Attributes:
        complete: the engine's closing message.
        token_ids: output tokens (one).
        handover: where decode finds the KV; None when the engine kept none (the request
            ended with its first token, or the worker cannot hand over).
        signature: the engine's raw `eldr_sig` member, None when it sent none.
    """

    complete: pb.GenerateComplete
    token_ids: tuple[int, ...]
    handover: KvHandover | None
    signature: object


class Engine(Protocol):
    """One worker's engine. Safe for any number of concurrent calls of one event loop."""

    @property
    def worker(self) -> WorkerInfo:
        """The worker behind the engine."""
        ...

    async def prefill(self, call: EngineCall) -> PrefillResult:
        """Runs the prompt, one output token, and keeps the KV for a hand-over.

        Raises:
            InvalidRequest: the engine refuses the request itself.
            Rejected: the engine is full.
            WorkerLost: the engine vanished, stalled or broke.
            DeadlineExceeded: the call's deadline passed.
            CallStopped: its switch was thrown.
        """
        ...

    def generate(
        self, call: EngineCall, handover: KvHandover | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Streams the answer; decode of `handover`'s prefill, or the whole request without.

        Closing the iterator early cancels the request on the engine.

        Raises:
            KvLost: before the first token; the KV behind `handover` is gone.
            InvalidRequest, Rejected, WorkerLost, DeadlineExceeded, CallStopped: as `prefill`.
        """
        ...

    async def abort(self, engine_request_id: str) -> None:
        """Ends a request on the engine, whatever its state; unknown ids are fine.

        Raises:
            WorkerLost: the engine did not answer.
        """
        ...

    async def release(self, handover: KvHandover) -> None:
        """Gives unpulled KV back; KV already taken or expired is fine.

        Raises:
            WorkerLost: the engine did not answer.
        """
        ...

    async def load(self) -> LoadReport:
        """How the worker stands now.

        Raises:
            EngineUnhealthy: it answers that it takes no requests.
            WorkerLost: unreachable, or no answer in time.
        """
        ...

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What the engine says about its model.

        Raises:
            WorkerLost: the engine did not answer.
        """
        ...

    async def server_info(self) -> pb.GetServerInfoResponse:
        """What the engine says about itself.

        Raises:
            WorkerLost: the engine did not answer.
        """
        ...

    async def close(self) -> None:
        """Closes the connection; calls in flight end with WorkerLost."""
        ...
