"""The state machine of one request inside the relay (relay.py says what it promises)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.decision import OutcomeStatus
from serving.core.errors import (
    DeadlineExceeded,
    EldrError,
    InvalidRequest,
    KvLost,
    Rejected,
    RejectReason,
    WorkerLost,
)
from serving.core.placed import Placed
from serving.core.request import Request
from serving.core.signature import Signature
from serving.core.worker import Phase, Role, WorkerInfo
from serving.engines.base import (
    CallStopped,
    Engine,
    EngineCall,
    KvHandover,
    PrefillResult,
    StopSwitch,
)
from serving.engines.grpc_errors import StillEnding
from serving.engines.pulled import pulled_of

if TYPE_CHECKING:
    from serving.engines.relay import Relay

_log = logging.getLogger(__name__)


class Journey:
    """One request on its way; `Relay` owns it, one task drives `answers`."""

    def __init__(
        self,
        relay: Relay,
        request: Request,
        template: pb.GenerateRequest,
        forwarded: tuple[tuple[str, str], ...],
        trailers: dict[str, str],
    ) -> None:
        self.stopped = False
        self.num_tokens = 0
        self._relay = relay
        self._original = request
        self._request = request
        self._template = template
        self._forwarded = forwarded
        self._trailers = trailers
        self._switch = StopSwitch()
        self._stop_error: EldrError | None = None
        self._num_losses = 0
        self._last_loss = ("", "")
        self._excluded: frozenset[str] = frozenset()
        self._prefill_worker_id: str | None = None
        self._handover: KvHandover | None = None
        self._signature: Signature | None = None
        self._calling: tuple[Engine, str, Phase] | None = None
        self._sent: list[int] = []
        self._tokens_this_call = 0
        self._num_completed = 0
        self._first_token_at_s = 0.0
        self._last_token_at_s = 0.0

    def stop(self, error: EldrError | None) -> None:
        """Ends the journey: with `error`, or as an aborted answer."""
        self.stopped = True
        self._stop_error = error
        self._switch.throw()

    def ended(self, status: OutcomeStatus, error: str = "") -> None:
        """Gives everything back; called exactly once."""
        router, request_id = self._relay.router, self._original.request_id
        if status is OutcomeStatus.OK:
            router.done(
                request_id,
                num_output_tokens=self.num_tokens,
                ttft_s=self._ttft_s(),
                tpot_s=self._tpot_s(),
            )
        else:
            router.failed(request_id, status, error, num_output_tokens=self.num_tokens)
        self._drop_call()
        self._drop_handover()
        self._relay.line.next()

    async def answers(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The engines' answers over all attempts."""
        while True:
            try:
                async with contextlib.aclosing(self._attempt()) as stream:
                    async for answer in stream:
                        self._note(answer)
                        yield answer
                return
            except CallStopped:
                if self._is_whole():
                    return
                if self._stop_error is not None:
                    raise self._stop_error from None
                yield _closing("abort")
                return
            except (WorkerLost, Rejected) as error:
                if self._is_whole():
                    return  # the answer is whole; how its connection ended is nobody's loss
                if (ending := self._ending()) is not None:
                    self._drop_call()
                    yield ending
                    return
                self._recover(error)
            except DeadlineExceeded:
                raise DeadlineExceeded(num_tokens=self.num_tokens) from None

    async def _attempt(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        self._tokens_this_call = 0
        if self._switch.thrown:
            raise CallStopped
        if self._handover is not None and not self._usable(self._handover):
            self._drop_handover()
        stream = self._decode() if self._handover is not None else await self._from_prompt()
        async with contextlib.aclosing(stream) as answers:
            async for answer in answers:
                yield answer

    async def _from_prompt(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Places and, on a prefill worker, runs the prompt; the answers that follow."""
        relay, expected = self._relay, None
        if relay.router.looks_ahead:
            expected = relay.signatures.predicted(self._request)
        placed = relay.router.place_prefill(
            self._request, signature=expected, exclude=self._excluded
        )
        self._record(placed)
        worker = placed.worker
        if worker.role is Role.BOTH or self._request.max_tokens == 1:
            return self._whole(worker)
        if self._template.sampling_params.n > 1:
            raise InvalidRequest(
                "sampling_params.n",
                self._template.sampling_params.n,
                "must be 1 where prefill and decode run on separate workers",
            )
        result = await self._prefill(worker)
        ended = result.complete.finish_reason != "length" and result.handover is None
        return _replay(result) if ended else self._decode()

    async def _whole(self, worker: WorkerInfo) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The whole request in one call on one worker."""
        router, request = self._relay.router, self._request
        if request.max_tokens > 1:
            placed = router.place_decode(
                request,
                signature=self._relay.signatures.predicted(request),
                prefill_worker_id=worker.worker_id,
                only=worker.worker_id,
            )
            self._record(placed)
        engine, call = self._call(worker, Phase.PREFILL, whole=True)
        async with contextlib.aclosing(engine.generate(call)) as answers:
            async for answer in answers:
                if not self._tokens_this_call:
                    router.prefill_done(request.request_id)
                yield answer
        self._finished(call)

    async def _prefill(self, worker: WorkerInfo) -> PrefillResult:
        relay, request = self._relay, self._request
        engine, call = self._call(worker, Phase.PREFILL)
        running = asyncio.ensure_future(engine.prefill(call))
        try:
            result = await self._switch.wait(asyncio.shield(running), math.inf)
        except (CallStopped, asyncio.CancelledError):
            # Its answer may be on the way, and with it KV that only its lease can free.
            self._calling = None
            name = call.engine_request_id
            relay.behind(_abandon(engine, name, running), f"abort {name} on {worker.worker_id}")
            raise
        self._finished(call)
        self._handover = result.handover
        self._prefill_worker_id = worker.worker_id
        relay.router.prefill_done(request.request_id)
        self._signature = relay.signatures.best(result.signature, request)
        return result

    async def _decode(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Continues from the KV at hand; without any, the decode worker computes the prompt."""
        placed = await self._place_decode()
        self._record(placed)
        engine, call = self._call(placed.worker, Phase.DECODE)
        async with contextlib.aclosing(engine.generate(call, self._handover)) as answers:
            async for answer in answers:
                self._handover = None  # the engine took it: nothing is left to give back
                yield answer
        self._finished(call)
        pulled = pulled_of(call.trailers)
        if pulled is not None and self._prefill_worker_id is not None:
            self._relay.on_pulled(self._prefill_worker_id, placed.worker.worker_id, pulled)

    async def _place_decode(self) -> Placed:
        """A decode worker; waits a little for room, since the prefill is already paid for."""
        relay = self._relay
        give_up_s = relay.clock.monotonic_s() + relay.config.decode_wait_s
        give_up_s = min(give_up_s, self._original.deadline_s)
        waited = False
        while True:
            refused: Rejected | None = None
            if waited or not len(relay.line):  # nobody overtakes those who wait
                try:
                    placed = relay.router.place_decode(
                        self._request,
                        signature=self._signature,
                        prefill_worker_id=self._prefill_worker_id,
                        exclude=self._excluded,
                    )
                    if waited:
                        relay.line.next()  # there may be room for one more
                    return placed
                except Rejected as error:
                    if error.why is not RejectReason.NO_CAPACITY:
                        raise
                    refused = error
            left_s = give_up_s - relay.clock.monotonic_s()
            try:
                await relay.line.wait(self._switch, max(0.0, left_s), in_front=waited)
            except TimeoutError:
                if relay.clock.monotonic_s() >= self._original.deadline_s:
                    raise DeadlineExceeded() from None
                raise refused or Rejected(
                    RejectReason.QUEUE_FULL, f"{len(relay.line)} finished prefills wait for room"
                ) from None
            waited = True

    def _record(self, placed: Placed) -> None:
        """Writes the decision line behind the dispatch."""
        asyncio.get_running_loop().call_soon(self._relay.router.record, placed)

    def _call(
        self, worker: WorkerInfo, phase: Phase, *, whole: bool = False
    ) -> tuple[Engine, EngineCall]:
        """Names the next engine call, so that it can be aborted from outside."""
        engine = self._relay.engines[worker.worker_id]
        base = self._original.request_id
        name = f"{base}~{self._num_losses}" if self._num_losses else base
        self._calling = (engine, name, phase)
        wanted = self._template.sampling_params.min_tokens
        return engine, EngineCall(
            engine_request_id=name,
            token_ids=self._request.token_ids,
            max_tokens=self._request.max_tokens,
            min_tokens=max(0, wanted - self.num_tokens),
            template=self._template,
            deadline_s=self._original.deadline_s,
            forwarded=self._forwarded,
            # A prefill is stopped by `_abandon`, which still reads its answer.
            switch=StopSwitch() if phase is Phase.PREFILL and not whole else self._switch,
        )

    def _finished(self, call: EngineCall) -> None:
        """An engine call ended well: nothing to abort, and the client learns who ran it."""
        assert self._calling is not None
        engine, _, phase = self._calling
        self._calling = None
        self._trailers[f"eldr-{phase.value}-worker"] = engine.worker.worker_id
        for key, value in call.trailers.items():
            self._trailers[f"eldr-{phase.value}-{key.removeprefix('eldr-')}"] = value
        self._trailers["eldr-losses"] = str(self._num_losses)

    def _recover(self, error: WorkerLost | Rejected) -> None:
        """Prepares the next attempt after a loss.

        Raises:
            WorkerLost, Rejected: there is to be no further attempt.
        """
        relay = self._relay
        if self._calling is None:  # a placement was refused: no worker is to blame
            if self.num_tokens:
                why = f"{self._last_loss[1]}; no other worker: {error}"
                raise WorkerLost(self._last_loss[0], why, num_tokens=self.num_tokens)
            raise error
        engine = self._calling[0]
        worker_id = engine.worker.worker_id
        self._num_losses += 1
        self._last_loss = (worker_id, str(error))
        self._drop_call()
        _log.warning("request %s: %s", self._original.request_id, error)
        kv_only = isinstance(error, KvLost)
        if not kv_only and not isinstance(error, StillEnding):
            self._excluded |= {worker_id}
        if isinstance(error, WorkerLost):
            relay.on_loss(self._handover.worker_id if kv_only and self._handover else worker_id)
        # KV serves another decode worker only where the engine enforces its lease.
        if self._handover is not None and (kv_only or not self._handover.lease):
            self._drop_handover()
        final = self._num_losses > relay.config.max_losses
        if self._tokens_this_call:
            if final or not self._original.allow_restart:
                raise WorkerLost(worker_id, str(error), num_tokens=self.num_tokens)
            self._request = self._continued()
        elif final:
            if self.num_tokens:
                raise WorkerLost(worker_id, str(error), num_tokens=self.num_tokens)
            raise error

    def _continued(self) -> Request:
        """Prompt plus tokens so far as the prompt of what is left to generate."""
        original, left = self._original, self._original.max_tokens - self.num_tokens
        token_ids = np.concatenate([original.token_ids, np.array(self._sent, np.int32)])
        token_ids.setflags(write=False)
        band = original.length
        return dataclasses.replace(
            original,
            token_ids=token_ids,
            max_tokens=left,
            length=dataclasses.replace(
                band,
                mean_tokens=max(1.0, min(band.mean_tokens - self.num_tokens, left)),
                p95_tokens=max(1.0, min(band.p95_tokens - self.num_tokens, left)),
            ),
        )

    def _ending(self) -> pb.GenerateResponse | None:
        """The closing message of an answer whose last token came but whose end did not."""
        params = self._template.sampling_params
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._relay.config.eos_token_ids
        if params.n > 1 or not self._tokens_this_call:
            return None
        if self._sent[-1] in stops and self.num_tokens >= params.min_tokens:
            return _closing("stop")
        return _closing("length") if self.num_tokens >= self._original.max_tokens else None

    def _is_whole(self) -> bool:
        """Whether every sample's closing message has passed."""
        return self._num_completed >= max(1, self._template.sampling_params.n)

    def _usable(self, handover: KvHandover) -> bool:
        age_s = self._relay.clock.monotonic_s() - handover.created_at_s
        return bool(handover.lease) or age_s < self._relay.config.kv_lease_s

    def _note(self, answer: pb.GenerateResponse) -> None:
        """Counts tokens and times as the answer passes."""
        num_new = 0
        if answer.HasField("chunk"):
            self._sent.extend(answer.chunk.token_ids)
            num_new = len(answer.chunk.token_ids)
        elif answer.HasField("complete"):
            self._num_completed += 1
            if not self._tokens_this_call:  # an engine that answered in one piece
                self._sent.extend(answer.complete.output_ids)
                num_new = len(answer.complete.output_ids)
        if not num_new:
            return
        now_s = self._relay.clock.monotonic_s()
        if not self.num_tokens:
            self._first_token_at_s = now_s
            self._relay.router.first_token(self._original.request_id)
        self._last_token_at_s = now_s
        self.num_tokens += num_new
        self._tokens_this_call += num_new

    def _ttft_s(self) -> float | None:
        return None if not self.num_tokens else self._first_token_at_s - self._original.arrival_s

    def _tpot_s(self) -> float | None:
        if self.num_tokens < 2:
            return None
        return (self._last_token_at_s - self._first_token_at_s) / (self.num_tokens - 1)

    def _drop_call(self) -> None:
        """Aborts the engine call under way, if any."""
        if self._calling is not None:
            engine, name, _ = self._calling
            self._calling = None
            self._relay.behind(engine.abort(name), f"abort {name} on {engine.worker.worker_id}")

    def _drop_handover(self) -> None:
        """Gives KV back that no decode call took."""
        if self._handover is not None:
            handover, self._handover = self._handover, None
            engine = self._relay.engines.get(handover.worker_id)
            if engine is not None:
                self._relay.behind(engine.release(handover), f"release KV on {handover.worker_id}")


async def _abandon(
    engine: Engine, engine_request_id: str, running: asyncio.Future[PrefillResult]
) -> None:
    """Ends a prefill nobody waits for, and frees the KV of one that had just finished."""
    try:
        await engine.abort(engine_request_id)
    finally:
        # An engine that hangs keeps its own time limits; what it raises is nobody's business.
        done = await asyncio.gather(running, return_exceptions=True)
    if isinstance(done[0], PrefillResult) and done[0].handover is not None:
        await engine.release(done[0].handover)


async def _replay(result: PrefillResult) -> AsyncGenerator[pb.GenerateResponse, None]:
    """The answer of a request that ended with its first token."""
    complete = result.complete
    yield pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=result.token_ids,
            cached_tokens=complete.cached_tokens,
            output_logprobs=complete.output_logprobs
            if complete.HasField("output_logprobs")
            else None,
            input_logprobs=complete.input_logprobs if complete.HasField("input_logprobs") else None,
        )
    )
    yield pb.GenerateResponse(complete=complete)


def _closing(finish_reason: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=finish_reason))
