"""A failed call to an engine, read back into the error tree."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from serving.core.errors import (
    DeadlineExceeded,
    EldrError,
    InvalidRequest,
    KvLost,
    Rejected,
    RejectReason,
    WorkerLost,
)

_MAX_DETAIL = 300
_DUPLICATE = "DUPLICATE_REQUEST"
_DETAILS_KEY = "grpc-status-details-bin"


class StillEnding(Rejected):
    """The engine is still ending an earlier request of that id; another name will do."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(
            RejectReason.QUEUE_FULL, f"worker {worker_id!r} still ends a request of that id"
        )


def engine_error(
    error: grpc.aio.AioRpcError, worker_id: str, *, deadline_passed: bool = False
) -> EldrError:
    """What the failure means for the request.

    Args:
        error: the failed call.
        worker_id: the worker called.
        deadline_passed: whether the request's own deadline is over; only then is the
            engine's DEADLINE_EXCEEDED the request's fault and not the worker's.
    """
    detail = f"{error.code().name}: {(error.details() or '')[:_MAX_DETAIL]}"
    info = _error_info(error)
    if info is not None and info.reason == KvLost.reason:
        return KvLost(worker_id, detail)
    if info is not None and info.reason == _DUPLICATE:
        return StillEnding(worker_id)
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            facts = dict(info.metadata) if info is not None else {}
            return InvalidRequest(
                facts.get("field", "request"),
                facts.get("value", ""),
                facts.get("rule", f"refused by worker {worker_id!r}: {detail}"),
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Rejected(RejectReason.NO_CAPACITY, f"worker {worker_id!r}: {detail}")
        case grpc.StatusCode.DEADLINE_EXCEEDED if deadline_passed:
            return DeadlineExceeded()
    return WorkerLost(worker_id, detail)


def rich_details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status behind a failed call; empty when the peer sent none.

    A status that cannot be read, or that contradicts the plain one, counts as none.
    """
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            try:
                status.MergeFromString(value)
            except DecodeError:
                break
            if status.code == error.code().value[0]:
                return status
    return status_pb2.Status()


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for detail in rich_details(error).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None
