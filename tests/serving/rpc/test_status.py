"""The error tree as gRPC statuses: code, ErrorInfo, RetryInfo, and nothing leaked."""

from __future__ import annotations

import logging

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from serving.core.errors import (
    ArtefactError,
    ConfigError,
    DeadlineExceeded,
    EldrError,
    InvalidRequest,
    KvLost,
    LeaseError,
    Rejected,
    RejectReason,
    UnknownModel,
    UnknownRequest,
    WorkerLost,
)
from serving.rpc import status

Code = grpc.StatusCode


def _details(
    rich: status_pb2.Status,
) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo | None]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert rich.details[0].Unpack(info)
    if len(rich.details) == 1:
        return info, None
    assert rich.details[1].Unpack(retry)
    return info, retry


@pytest.mark.parametrize(
    ("error", "code", "reason", "retry_s"),
    [
        (InvalidRequest("f", 1, "r"), Code.INVALID_ARGUMENT, "INVALID_REQUEST", None),
        (UnknownModel("model", "x", "r"), Code.NOT_FOUND, "UNKNOWN_MODEL", None),
        (UnknownRequest("request_id", "x", "r"), Code.NOT_FOUND, "UNKNOWN_REQUEST", None),
        (LeaseError("l", "p"), Code.FAILED_PRECONDITION, "LEASE", None),
        (DeadlineExceeded(num_tokens=2), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", None),
        (WorkerLost("w", "gone"), Code.UNAVAILABLE, "WORKER_LOST", 0.5),
        (WorkerLost("w", "gone", num_tokens=3), Code.ABORTED, "WORKER_LOST", 0.5),
        (KvLost("w", "gone"), Code.UNAVAILABLE, "KV_LOST", 0.5),
    ],
)
def test_codes_and_reasons(
    error: EldrError, code: grpc.StatusCode, reason: str, retry_s: float | None
) -> None:
    rich = status.rich_status(error)
    info, retry = _details(rich)
    assert rich.code == code.value[0]
    assert rich.message == str(error)
    assert (info.reason, info.domain) == (reason, "eldr.router")
    assert dict(info.metadata) == error.facts()
    assert (retry and retry.retry_delay.ToMilliseconds() / 1000) == retry_s


@pytest.mark.parametrize("why", list(RejectReason))
def test_every_reject_reason_has_a_code_and_a_delay(why: RejectReason) -> None:
    rich = status.rich_status(Rejected(why, "full", retry_after_s=2.5))
    info, retry = _details(rich)
    assert rich.code in (Code.UNAVAILABLE.value[0], Code.RESOURCE_EXHAUSTED.value[0])
    assert info.reason == why.value
    assert retry is not None
    assert retry.retry_delay.ToMilliseconds() == 2500


def _subclasses(root: type[EldrError]) -> set[type[EldrError]]:
    return {root}.union(*(_subclasses(child) for child in root.__subclasses__()))


def test_every_error_of_the_tree_is_mapped_on_purpose() -> None:
    wrong = {InvalidRequest, UnknownModel, UnknownRequest}
    mapped = wrong | {LeaseError, DeadlineExceeded, WorkerLost, KvLost}
    internal = {EldrError, ConfigError, ArtefactError}
    named = {cls for cls in _subclasses(EldrError) if not cls.__name__.startswith("_")}
    here = {cls for cls in named if cls.__module__ == "serving.core.errors"}
    assert here == mapped | internal | {Rejected}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("secret path /etc/shadow"),
        KeyError("secret"),
        ArtefactError("/secret/model", "broken"),
        ConfigError("secret", 1, "rule"),
    ],
)
def test_other_failures_show_an_incident_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="serving.rpc.status"):
        rich = status.rich_status(error)
    info, retry = _details(rich)
    assert rich.code == Code.INTERNAL.value[0]
    assert retry is None
    assert "secret" not in rich.message
    assert "secret" not in str(info)
    incident = info.metadata["incident"]
    assert incident in rich.message
    assert incident in caplog.text
    assert "secret" in caplog.text


def test_long_values_stay_short() -> None:
    rich = status.rich_status(InvalidRequest("text", "x" * 100_000, "too long"))
    assert rich.ByteSize() < 2000
