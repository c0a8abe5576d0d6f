"""The `eldr.router.v1.Router` door: placement for clients that talk to engines themselves.

A route stays open from Route until Report says done or failed, or until its leases run out.
While it is open the same request_id with the same prompt answers the same placement. A
decision is short and runs on the event loop, so a stream has one of its requests in flight at
a time: gRPC's flow control holds the rest back at the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import msgspec

from serving.core.clock import Clock
from serving.core.decision import OutcomeStatus, encode_line
from serving.core.errors import InvalidRequest, LeaseError, UnknownRequest
from serving.core.placed import Placed
from serving.core.request import Request
from serving.core.router import Router
from serving.core.signature import Signature
from serving.core.worker import Phase
from serving.engines.relay import Relay
from serving.engines.vllm_grpc import SIGNATURE_KEY
from serving.explain import explain_text, nearest_ids
from serving.proto import router_pb2 as pb
from serving.rpc import convert, metadata, status
from serving.rpc.binding import Malformed, parsed
from serving.rpc.convert import DoorLimits
from serving.rpc.gate import DrainGate

SERVICE = pb.DESCRIPTOR.services_by_name["Router"]
_MAX_EXTEND_S = 3600.0


@dataclass(slots=True, kw_only=True)
class _OpenRoute:
    """A request whose client drives it.

    Attributes:
        request: as placed.
        prefill_only: the client asked to place decode later.
        prefill, decode: the placements, decode None until placed.
    """

    request: Request
    prefill_only: bool
    prefill: Placed
    decode: Placed | None = None

    @property
    def latest_s(self) -> float:
        """Monotonic seconds at which the last of its leases ends."""
        decode_s = 0.0 if self.decode is None else self.decode.lease.expires_at_s
        return max(self.prefill.lease.expires_at_s, decode_s)


class RouterService:
    """Servicer of `eldr.router.v1.Router` (bind it with `binding.bind`)."""

    def __init__(
        self,
        *,
        router: Router,
        relay: Relay,
        gate: DrainGate,
        limits: DoorLimits,
        clock: Clock,
    ) -> None:
        self._router = router
        self._relay = relay
        self._gate = gate
        self._limits = limits
        self._clock = clock
        self._open: dict[str, _OpenRoute] = {}

    def expire(self, now_s: float) -> None:
        """Takes back leases nobody reported or renewed; called by the sweep."""
        self._router.expire(now_s)
        # A lease may also go because its worker did; then the client has its time to report.
        for request_id in [r for r, route in self._open.items() if route.latest_s <= now_s]:
            if all(self._router.fleet.lease_of(request_id, phase) is None for phase in Phase):
                self._close(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id is open."""
        return request_id in self._open

    async def Route(
        self, message: pb.RouteRequest, context: grpc.aio.ServicerContext
    ) -> pb.RouteResponse:
        """Places one request."""
        return self._route(message, self._metadata(context))

    async def RouteStream(
        self,
        messages: AsyncIterator[pb.RouteRequest | Malformed],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.RouteResponse]:
        """Places many; what fails answers with `error` and the stream goes on."""
        call = self._metadata(context)
        async for message in messages:
            try:
                yield self._route(parsed(message), call)
            except Exception as error:
                request_id = "" if isinstance(message, Malformed) else message.request_id
                yield pb.RouteResponse(request_id=request_id, error=_route_error(error))

    async def Report(
        self, message: pb.ReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReportResponse:
        """Takes what became of a reservation."""
        event = message.WhichOneof("event")
        if event is None:
            raise InvalidRequest(
                "event", None, "must be one of prefill_done, first_token, done, failed"
            )
        route = self._held(message)
        router, request_id = self._router, message.request_id
        if event == "prefill_done":
            return self._prefill_done(route, message.prefill_done)
        if event == "first_token":
            router.first_token(request_id)
            return pb.ReportResponse()
        if event == "done":
            done = message.done
            for name in ("ttft_s", "tpot_s"):
                value = getattr(done, name)
                if not 0 <= value < float("inf"):
                    raise InvalidRequest(f"done.{name}", value, "must be finite and >= 0")
            router.done(
                request_id,
                num_output_tokens=done.num_output_tokens,
                ttft_s=done.ttft_s or None,
                tpot_s=done.tpot_s or None,
            )
        else:
            router.failed(
                request_id,
                OutcomeStatus.FAILED,
                message.failed.reason or "UNKNOWN",
                num_output_tokens=message.failed.num_output_tokens,
            )
        self._close(request_id)
        return pb.ReportResponse()

    async def Renew(
        self, message: pb.RenewRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewResponse:
        """Extends a lease from now."""
        if not 0 < message.extend_s <= _MAX_EXTEND_S:
            raise InvalidRequest(
                "extend_s", message.extend_s, f"must lie in (0, {_MAX_EXTEND_S:g}]"
            )
        lease = self._router.renew(message.lease_id, extend_s=message.extend_s)
        left_s = lease.expires_at_s - self._clock.monotonic_s()
        return pb.RenewResponse(lease_expires_in_s=max(0.0, left_s))

    async def Explain(
        self, message: pb.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExplainResponse:
        """Why a recent request went where it went."""
        lines = self._router.explain(message.request_id)
        if not lines:
            near = nearest_ids(message.request_id, self._router.recent_ids())
            raise UnknownRequest(
                "request_id",
                message.request_id,
                f"no decision of it is kept in memory; nearest known: {', '.join(near) or 'none'}",
            )
        return pb.ExplainResponse(
            lines_json=[encode_line(line).decode().rstrip() for line in lines],
            text=explain_text(lines),
        )

    async def ListWorkers(
        self, message: pb.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListWorkersResponse:
        """The fleet as the router sees it."""
        views = [self._router.view(phase) for phase in Phase]
        return pb.ListWorkersResponse(workers=convert.worker_statuses(views))

    def _metadata(self, context: grpc.aio.ServicerContext) -> metadata.CallMetadata:
        return metadata.parse(context.invocation_metadata() or (), now_s=self._clock.monotonic_s())

    def _route(self, message: pb.RouteRequest, call: metadata.CallMetadata) -> pb.RouteResponse:
        self._gate.check()
        request = convert.route_request(
            message, call, self._limits, now_s=self._clock.monotonic_s()
        )
        prefill_only = message.stage == pb.RouteRequest.STAGE_PREFILL
        route = self._open.get(request.request_id)
        if route is None:
            route = self._place(request, prefill_only)
        elif not _same(route, request, prefill_only):
            raise InvalidRequest(
                "request_id",
                request.request_id,
                "is open with another prompt, limit or stage: ids name one request",
            )
        return self._answer(route)

    def _place(self, request: Request, prefill_only: bool) -> _OpenRoute:
        if self._relay.runs(request.request_id):
            raise InvalidRequest("request_id", request.request_id, "is running through Generate")
        expected = None
        if not prefill_only or self._router.looks_ahead:
            expected = self._relay.signatures.predicted(request)
        route = _OpenRoute(
            request=request,
            prefill_only=prefill_only,
            prefill=self._router.place_prefill(request, signature=expected),
        )
        self._record(route.prefill)
        if not prefill_only:
            try:
                self._place_decode(route, expected)
            except Exception:
                self._router.failed(request.request_id, OutcomeStatus.REJECTED, "NO_DECODE_WORKER")
                raise
        self._gate.arrive()  # a drain waits for its end: the client still has to report
        self._open[request.request_id] = route
        return route

    def _close(self, request_id: str) -> None:
        del self._open[request_id]
        self._gate.leave()

    def _place_decode(self, route: _OpenRoute, signature: Signature | None) -> Placed:
        route.decode = self._router.place_decode(
            route.request,
            signature=signature,
            prefill_worker_id=route.prefill.worker.worker_id,
        )
        self._record(route.decode)
        return route.decode

    def _record(self, placed: Placed) -> None:
        """Writes the decision line once the answer is on its way."""
        asyncio.get_running_loop().call_soon(self._router.record, placed)

    def _answer(self, route: _OpenRoute) -> pb.RouteResponse:
        return pb.RouteResponse(
            request_id=route.request.request_id,
            model=route.prefill.variant,
            pool=route.prefill.pool,
            prefill=self._placement(route.prefill),
            decode=None if route.decode is None else self._placement(route.decode),
        )

    def _placement(self, placed: Placed) -> pb.Placement:
        lease = self._router.fleet.lease_of(placed.request_id, placed.phase) or placed.lease
        return convert.placement(placed, lease, now_s=self._clock.monotonic_s())

    def _held(self, message: pb.ReportRequest) -> _OpenRoute:
        """The open route whose lease the report names."""
        route = self._open.get(message.request_id)
        if route is None:
            raise LeaseError(
                message.lease_id, f"request {message.request_id!r} holds none (ended or expired)"
            )
        held = {placed.lease.lease_id for placed in (route.prefill, route.decode) if placed}
        if message.lease_id not in held:
            raise LeaseError(message.lease_id, f"is not a lease of request {message.request_id!r}")
        return route

    def _prefill_done(self, route: _OpenRoute, done: pb.PrefillDone) -> pb.ReportResponse:
        signature = self._signature(route.request, done)  # refuses before anything changes
        self._router.prefill_done(route.request.request_id)
        if route.decode is None:
            self._place_decode(route, signature)
        assert route.decode is not None
        return pb.ReportResponse(decode=self._placement(route.decode))

    def _signature(self, request: Request, done: pb.PrefillDone) -> Signature | None:
        if not done.kv_transfer_params_json:
            return self._relay.signatures.predicted(request)
        try:
            params = msgspec.json.decode(done.kv_transfer_params_json, type=dict)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                "kv_transfer_params_json", done.kv_transfer_params_json, f"must be JSON: {error}"
            ) from error
        return self._relay.signatures.best(params.get(SIGNATURE_KEY), request)


def _same(route: _OpenRoute, request: Request, prefill_only: bool) -> bool:
    known = route.request
    return (
        route.prefill_only == prefill_only
        and known.max_tokens == request.max_tokens
        and known.cache_salt == request.cache_salt
        and known.token_ids.tobytes() == request.token_ids.tobytes()
    )


def _route_error(error: Exception) -> pb.RouteError:
    shown = status.public(error)
    return pb.RouteError(
        reason=shown.reason,
        message=str(shown),
        facts=shown.facts(),
        retry_after_s=status.retry_after_s(shown) or 0.0,
        retryable=shown.retryable,
    )
