"""The state machine of one request inside the relay (relay.py says what it promises)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
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
    WorkerLost,
)
from serving.core.request import Request
from serving.core.router import Placed
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
        self._last_loss = ""
        self._excluded: dict[Phase, frozenset[str]] = dict.fromkeys(Phase, frozenset())
        self._prefill_worker_id: str | None = None
        self._handover: KvHandover | None = None
        self._signature: Signature | None = None
        self._calling: tuple[Engine, str] | None = None
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
                if self._stop_error is not None:
                    raise self._stop_error from None
                yield _closing("abort")
                return
            except (WorkerLost, Rejected) as error:
                if self._num_completed:
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
        if self._handover is None:
            placed = self._place(Phase.PREFILL)
            worker = placed.worker
            if worker.role is Role.BOTH or self._request.max_tokens == 1:
                stream = self._whole(worker)
            elif self._template.sampling_params.n > 1:
                raise InvalidRequest(
                    "sampling_params.n",
                    self._template.sampling_params.n,
                    "must be 1 where prefill and decode run on separate workers",
                )
            else:
                ending = await self._prefill(worker)
                stream = _replay(ending) if ending is not None else self._decode()
        else:
            stream = self._decode()
        async with contextlib.aclosing(stream) as answers:
            async for answer in answers:
                yield answer

    async def _whole(self, worker: WorkerInfo) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The whole request in one call on one worker."""
        router, request = self._relay.router, self._request
        if request.max_tokens > 1:
            self._place(Phase.DECODE, only=worker.worker_id)
        engine, call = self._call(worker)
        async with contextlib.aclosing(engine.generate(call)) as answers:
            async for answer in answers:
                if not self._tokens_this_call:
                    router.prefill_done(request.request_id)
                yield answer
        self._finished(Phase.PREFILL, call)

    async def _prefill(self, worker: WorkerInfo) -> PrefillResult | None:
        """Runs the prompt; the result itself when the request ended with its first token."""
        relay, request = self._relay, self._request
        engine, call = self._call(worker)
        result = await engine.prefill(call)
        self._finished(Phase.PREFILL, call)
        self._handover = result.handover
        self._prefill_worker_id = worker.worker_id
        relay.router.prefill_done(request.request_id)
        self._signature = relay.signature_of(result.signature, request)
        ended = result.complete.finish_reason != "length"
        return result if ended and result.handover is None else None

    async def _decode(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Continues from the KV at hand; without any, the decode worker computes the prompt."""
        placed = self._place(Phase.DECODE)
        engine, call = self._call(placed.worker)
        async with contextlib.aclosing(engine.generate(call, self._handover)) as answers:
            async for answer in answers:
                self._handover = None  # the engine took it: nothing is left to give back
                yield answer
        self._finished(Phase.DECODE, call)

    def _place(self, phase: Phase, *, only: str | None = None) -> Placed:
        """A worker for the request's phase; its record is written behind the dispatch."""
        relay, router = self._relay, self._relay.router
        self._calling = None
        try:
            if phase is Phase.PREFILL:
                placed = router.place_prefill(self._request, exclude=self._excluded[phase])
            else:
                exclude = self._excluded[phase]
                if only is not None:
                    exclude = frozenset(relay.engines) - {only}
                placed = router.place_decode(
                    self._request,
                    signature=self._signature,
                    prefill_worker_id=only or self._prefill_worker_id,
                    exclude=exclude,
                )
        except Rejected as error:
            raise self._no_worker(error) from error
        asyncio.get_running_loop().call_soon(router.record, placed)
        return placed

    def _call(self, worker: WorkerInfo) -> tuple[Engine, EngineCall]:
        """Names the next engine call, so that it can be aborted from outside."""
        engine = self._relay.engines[worker.worker_id]
        base = self._original.request_id
        name = f"{base}~{self._num_losses}" if self._num_losses else base
        self._calling = (engine, name)
        wanted = self._template.sampling_params.min_tokens
        return engine, EngineCall(
            engine_request_id=name,
            token_ids=self._request.token_ids,
            max_tokens=self._request.max_tokens,
            min_tokens=max(0, wanted - self.num_tokens),
            template=self._template,
            deadline_s=self._original.deadline_s,
            forwarded=self._forwarded,
            switch=self._switch,
        )

    def _finished(self, phase: Phase, call: EngineCall) -> None:
        """An engine call ended well: nothing to abort, and the client learns who ran it."""
        assert self._calling is not None
        worker, self._calling = self._calling[0].worker, None
        self._trailers[f"eldr-{phase.value}-worker"] = worker.worker_id
        for key, value in call.trailers.items():
            self._trailers[f"eldr-{phase.value}-{key.removeprefix('eldr-')}"] = value
        self._trailers["eldr-losses"] = str(self._num_losses)

    def _recover(self, error: WorkerLost | Rejected) -> None:
        """Prepares the next attempt after a loss.

        Raises:
            WorkerLost, Rejected: there is to be no further attempt.
        """
        relay = self._relay
        if self._calling is None:  # the placement failed, not a worker
            raise error
        worker_id = self._calling[0].worker.worker_id
        self._num_losses += 1
        self._drop_call()
        _log.warning("request %s: %s", self._original.request_id, error)
        if isinstance(error, WorkerLost) and not isinstance(error, KvLost):
            relay.on_loss(worker_id)
        if isinstance(error, KvLost):
            self._drop_handover()
        else:
            for phase in Phase:
                self._excluded[phase] |= {worker_id}
            if self._handover is not None and not self._handover.lease:
                self._drop_handover()
        if self._tokens_this_call and not self._original.allow_restart:
            raise WorkerLost(worker_id, str(error), num_tokens=self.num_tokens)
        if self._num_losses > relay.config.max_losses:
            if self.num_tokens:
                raise WorkerLost(worker_id, str(error), num_tokens=self.num_tokens)
            raise error
        self._last_loss = worker_id
        if self._tokens_this_call:
            self._continue_from_tokens()

    def _continue_from_tokens(self) -> None:
        """Prompt plus tokens so far become the prompt of what is left to generate."""
        original, left = self._original, self._original.max_tokens - self.num_tokens
        token_ids = np.concatenate([original.token_ids, np.array(self._sent, np.int32)])
        token_ids.setflags(write=False)
        band = original.length
        self._request = dataclasses.replace(
            original,
            token_ids=token_ids,
            max_tokens=left,
            length=dataclasses.replace(
                band,
                mean_tokens=max(1.0, min(band.mean_tokens - self.num_tokens, left)),
                p95_tokens=max(1.0, min(band.p95_tokens - self.num_tokens, left)),
            ),
        )
        self._signature = None

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

    def _no_worker(self, error: Rejected) -> EldrError:
        """What a refused placement means: after tokens were sent, the loss before it."""
        if self.num_tokens:
            return WorkerLost(
                self._last_loss, f"and no other worker: {error}", num_tokens=self.num_tokens
            )
        return error

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
            engine, name = self._calling
            self._calling = None
            self._relay.behind(engine.abort(name), f"abort {name} on {engine.worker.worker_id}")

    def _drop_handover(self) -> None:
        """Gives KV back that no decode call took."""
        if self._handover is not None:
            handover, self._handover = self._handover, None
            engine = self._relay.engines.get(handover.worker_id)
            if engine is not None:
                self._relay.behind(engine.release(handover), f"release KV on {handover.worker_id}")


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
