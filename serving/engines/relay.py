"""One request through its engines: prefill, hand-over, decode, and what happens on a loss.

    place prefill -> prefill (one token, KV kept) -> place decode with the live signature
                  -> decode from that KV -> answers

- A worker that serves both phases runs the whole request in one call; a request for one token
  ends with its prefill.
- Loss before the first token of a decode call: the next decode worker, from the same KV where
  the engine enforces a lease on it, else from a fresh prefill (KV taken twice is silently
  wrong on engines without leases).
- Loss after it: prompt plus tokens so far become a new prompt, where the client allowed that;
  else the loss is reported with the number of tokens already sent.
- However a request ends, its reservations go back, its engine calls are aborted and its KV is
  released; those calls run behind it and `settle` waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.clock import Clock
from serving.core.decision import OutcomeStatus
from serving.core.errors import EldrError, InvalidRequest, Rejected, WorkerLost
from serving.core.request import Request
from serving.core.router import Router
from serving.core.signature import Signature
from serving.core.worker import Phase
from serving.engines.base import Engine
from serving.engines.journey import Journey
from serving.engines.pulled import Pulled
from serving.engines.room import RoomLine

_log = logging.getLogger(__name__)


class SignatureFinder(Protocol):
    """Where the relay gets signatures (serving/engines/signature_reader.py)."""

    def best(self, sent: object, request: Request) -> Signature | None:
        """The signature of a prefill answer, `sent` being its `eldr_sig` member or None."""
        ...

    def predicted(self, request: Request) -> Signature | None:
        """What can be said before prefill."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """Limits of the relay.

    Attributes:
        max_losses: workers one request may lose before the loss is reported.
        decode_wait_s: how long a finished prefill waits for a decode worker with room.
        kv_lease_s: how long unpulled KV is trusted on engines that enforce no lease.
        eos_token_ids: tokens that end an answer by themselves.
    """

    max_losses: int = 3
    decode_wait_s: float = 10.0
    kv_lease_s: float = 20.0
    eos_token_ids: frozenset[int] = frozenset()


class Relay:
    """Carries requests; one per server, used from its event loop only."""

    def __init__(
        self,
        *,
        router: Router,
        engines: Mapping[str, Engine],
        clock: Clock,
        config: RelayConfig,
        signatures: SignatureFinder,
        on_loss: Callable[[str], None] = lambda worker_id: None,
        on_pulled: Callable[[str, str, Pulled], None] = lambda source, target, pulled: None,
    ) -> None:
        self.router = router
        self.engines = engines
        self.clock = clock
        self.config = config
        self.signatures = signatures
        self.on_loss = on_loss
        self.on_pulled = on_pulled
        self.line = RoomLine()
        self._running: dict[str, Journey] = {}
        self._behind: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    def runs(self, request_id: str) -> bool:
        """Whether a request of that id is under way."""
        return request_id in self._running

    async def serve(
        self,
        request: Request,
        template: pb.GenerateRequest,
        *,
        forwarded: tuple[tuple[str, str], ...] = (),
        trailers: dict[str, str] | None = None,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the engines' answers; token ids are never repeated after a restart.

        Closing the iterator early cancels the request everywhere.

        Args:
            request: the request.
            template: the client's message (see `EngineCall`).
            forwarded: trace headers.
            trailers: filled with who served it (`eldr-prefill-worker`, `eldr-decode-worker`,
                `eldr-losses`) and what the engines said beside their answers.

        Raises:
            InvalidRequest: the request cannot be served, or its id is running already.
            Rejected: the fleet cannot take it now.
            WorkerLost: lost for good, with the number of tokens already yielded.
            DeadlineExceeded: its deadline passed.
        """
        if request.request_id in self._running:
            raise InvalidRequest("request_id", request.request_id, "is running already")
        journey = Journey(
            self, request, template, forwarded, trailers if trailers is not None else {}
        )
        self._running[request.request_id] = journey
        try:
            async with contextlib.aclosing(journey.answers()) as answers:
                async for answer in answers:
                    yield answer
            if journey.stopped:
                journey.ended(OutcomeStatus.CANCELLED, "ABORTED")
            else:
                journey.ended(OutcomeStatus.OK)
        except EldrError as error:
            rejected = isinstance(error, Rejected | InvalidRequest) and not journey.num_tokens
            status = OutcomeStatus.REJECTED if rejected else OutcomeStatus.FAILED
            journey.ended(status, error.reason)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            journey.ended(OutcomeStatus.CANCELLED, "CANCELLED")
            raise
        except BaseException:
            journey.ended(OutcomeStatus.FAILED, "INTERNAL")
            raise
        finally:
            del self._running[request.request_id]

    def abort(self, request_id: str) -> bool:
        """Ends a running request; its stream closes with finish_reason "abort".

        Returns:
            False when no such request runs (which is fine).
        """
        journey = self._running.get(request_id)
        if journey is None:
            return False
        journey.stop(None)
        return True

    def abort_all(self, error: EldrError) -> int:
        """Ends every running request with `error`; returns how many there were."""
        for journey in self._running.values():
            journey.stop(error)
        return len(self._running)

    def keep_alive(self, now_s: float) -> None:
        """Renews the leases of running requests and lets the head of the line try.

        Called by the sweep, oftener than leases end.
        """
        self.line.next()
        lease_s = self.router.config.lease_s
        for request_id in self._running:
            for phase in Phase:
                lease = self.router.fleet.lease_of(request_id, phase)
                if lease is not None and lease.expires_at_s - now_s < lease_s / 2:
                    self.router.renew(lease.lease_id, lease_s)

    async def settle(self) -> None:
        """Waits for the aborts and releases still under way."""
        # A finished task is still in the set until the loop comes round, and from Python 3.12 on
        # waiting for finished tasks alone does not let it.
        while pending := [task for task in self._behind if not task.done()]:
            await asyncio.gather(*pending, return_exceptions=True)

    def behind(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Runs a clean-up call without anybody waiting for it."""
        task = asyncio.get_running_loop().create_task(_quietly(work, what))
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)


async def _quietly(work: Coroutine[Any, Any, None], what: str) -> None:
    try:
        await work
    except WorkerLost as error:
        # Nothing is left to clean on a worker that is gone; its leases expire by themselves.
        _log.info("%s: %s", what, error)
