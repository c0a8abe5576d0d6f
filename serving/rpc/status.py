"""The one place where errors become gRPC statuses.

Every status carries google.rpc.ErrorInfo {reason, domain, metadata = the error's facts} and,
when trying again can help, google.rpc.RetryInfo, both in the standard
`grpc-status-details-bin` trailer. Anything outside the error tree becomes INTERNAL with an
incident id: the id goes to the client, the stack trace to the log, never the other way round.

    ConfigError, ArtefactError   INTERNAL             (the operator's fault, logged with an id)
    InvalidRequest               INVALID_ARGUMENT
      UnknownModel, -Request     NOT_FOUND
    Rejected                     RESOURCE_EXHAUSTED for lack of room or budget, else UNAVAILABLE
    LeaseError                   FAILED_PRECONDITION
    DeadlineExceeded             DEADLINE_EXCEEDED
    WorkerLost                   UNAVAILABLE before the first token, ABORTED after it
"""

from __future__ import annotations

import logging
import uuid
from typing import NoReturn

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving.core.errors import (
    ArtefactError,
    ConfigError,
    DeadlineExceeded,
    EldrError,
    InvalidRequest,
    LeaseError,
    Rejected,
    RejectReason,
    UnknownModel,
    UnknownRequest,
    WorkerLost,
)

DOMAIN = "eldr.router"
_RETRY_AFTER_LOSS_S = 0.5

_log = logging.getLogger(__name__)

_REJECT_CODES = {
    RejectReason.NO_LIVE_WORKER: grpc.StatusCode.UNAVAILABLE,
    RejectReason.NO_CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RejectReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RejectReason.WORK_BUDGET: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RejectReason.BROWNOUT: grpc.StatusCode.UNAVAILABLE,
    RejectReason.DEADLINE_UNREACHABLE: grpc.StatusCode.UNAVAILABLE,
    RejectReason.DRAINING: grpc.StatusCode.UNAVAILABLE,
}


def code_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC code of an error; INTERNAL for everything outside the tree."""
    match error:
        case UnknownModel() | UnknownRequest():
            return grpc.StatusCode.NOT_FOUND
        case InvalidRequest():
            return grpc.StatusCode.INVALID_ARGUMENT
        case Rejected():
            return _REJECT_CODES[error.why]
        case LeaseError():
            return grpc.StatusCode.FAILED_PRECONDITION
        case DeadlineExceeded():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case WorkerLost():
            nothing_sent = error.num_tokens == 0
            return grpc.StatusCode.UNAVAILABLE if nothing_sent else grpc.StatusCode.ABORTED
    return grpc.StatusCode.INTERNAL


def retry_after_s(error: BaseException) -> float | None:
    """Seconds after which the same call may succeed, or None when it cannot."""
    if not isinstance(error, EldrError) or not error.retryable:
        return None
    return error.retry_after_s if isinstance(error, Rejected) else _RETRY_AFTER_LOSS_S


def public(error: BaseException) -> EldrError:
    """The error as a client may see it.

    Errors outside the tree, and those that speak about the operator's files, are logged with
    their stack trace under a fresh incident id and replaced by an `EldrError` naming the id.
    """
    if isinstance(error, EldrError) and not isinstance(error, ConfigError | ArtefactError):
        return error
    incident = uuid.uuid4().hex[:12]
    _log.error("incident %s: %s", incident, error, exc_info=error)
    return _Internal(incident)


def rich_status(error: BaseException) -> status_pb2.Status:
    """The google.rpc.Status of an error, with ErrorInfo and RetryInfo where they apply."""
    shown = public(error)
    status = status_pb2.Status(code=code_of(shown).value[0], message=str(shown))
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=shown.reason, domain=DOMAIN, metadata=shown.facts())
    )
    delay_s = retry_after_s(shown)
    if delay_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(1, round(delay_s * 1000)))
        status.details.add().Pack(retry)
    return status


async def abort(context: grpc.aio.ServicerContext, error: BaseException) -> NoReturn:
    """Ends a call with the rich status of `error`.

    Raises:
        grpc.aio.AbortError: always; it ends the handler.
    """
    status = rpc_status.to_status(rich_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


class _Internal(EldrError):
    """What a client learns about a failure it cannot act on."""

    reason = "INTERNAL"

    def __init__(self, incident: str) -> None:
        self.incident = incident
        super().__init__(f"internal error; the router's log has it as incident {incident}")

    def facts(self) -> dict[str, str]:
        return {"incident": self.incident}
