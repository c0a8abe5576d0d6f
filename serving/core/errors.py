"""Every error the product raises on purpose, in one tree.

    EldrError
    |-- ConfigError            a config file or flag is wrong: field, value, rule
    |-- ArtefactError          a learned artefact or checkpoint cannot be used
    |-- InvalidRequest         the caller's request is wrong: field, value, rule
    |   |-- UnknownModel       no pool serves the named model
    |   `-- UnknownRequest     nothing is known (any more) of the named request
    |-- Rejected               the request is fine, the fleet cannot take it now
    |-- LeaseError             a reservation is unknown, expired or held by another
    |-- DeadlineExceeded       the request's own deadline passed while it was served
    `-- WorkerLost             a worker vanished while it held the request
        `-- KvLost             the prefill's KV is gone before decode could take it

`serving/rpc/status.py` is the only place that maps these to gRPC codes.
"""

from __future__ import annotations

import enum


class RejectReason(enum.Enum):
    """Why a well-formed request was not placed; the value is the wire name."""

    NO_LIVE_WORKER = "NO_LIVE_WORKER"
    NO_CAPACITY = "NO_CAPACITY"
    QUEUE_FULL = "QUEUE_FULL"
    WORK_BUDGET = "WORK_BUDGET"
    BROWNOUT = "BROWNOUT"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    DRAINING = "DRAINING"


class EldrError(Exception):
    """Root of the tree.

    Attributes:
        reason: upper-snake name put into google.rpc.ErrorInfo.
        retryable: whether the same call may succeed later, unchanged.
    """

    reason: str = "INTERNAL"
    retryable: bool = False

    def facts(self) -> dict[str, str]:
        """The facts behind the message, as strings (ErrorInfo metadata)."""
        return {}


class _FieldError(EldrError):
    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        super().__init__(f"{field}={_short(value)}: {rule}")

    def facts(self) -> dict[str, str]:
        """Field, value and rule."""
        return {"field": self.field, "value": _short(self.value), "rule": self.rule}


class ConfigError(_FieldError):
    """A config file or flag is wrong; `field` is the dotted path to it."""

    reason = "INVALID_CONFIG"


class ArtefactError(EldrError):
    """A learned artefact or checkpoint cannot be used."""

    reason = "BAD_ARTEFACT"

    def __init__(self, path: object, problem: str) -> None:
        self.path = str(path)
        self.problem = problem
        super().__init__(f"{path}: {problem}")

    def facts(self) -> dict[str, str]:
        """Path and problem."""
        return {"path": self.path, "problem": self.problem}


class InvalidRequest(_FieldError):
    """The caller's request breaks a rule; sending it again cannot help."""

    reason = "INVALID_REQUEST"


class UnknownModel(InvalidRequest):
    """No pool serves the named model."""

    reason = "UNKNOWN_MODEL"


class UnknownRequest(InvalidRequest):
    """Nothing is known, or known any more, of the named request."""

    reason = "UNKNOWN_REQUEST"


class Rejected(EldrError):
    """The request is fine but the fleet cannot take it now.

    Attributes:
        why: the reject reason.
        retry_after_s: seconds after which trying again makes sense.
    """

    retryable = True

    def __init__(self, why: RejectReason, detail: str, *, retry_after_s: float = 1.0) -> None:
        self.why = why
        self.reason = why.value
        self.detail = detail
        self.retry_after_s = retry_after_s
        super().__init__(f"{why.value}: {detail} (retry after {retry_after_s:g} s)")

    def facts(self) -> dict[str, str]:
        """Detail and delay."""
        return {"detail": self.detail, "retry_after_s": f"{self.retry_after_s:g}"}


class LeaseError(EldrError):
    """A reservation is unknown, expired, or belongs to another request."""

    reason = "LEASE"

    def __init__(self, lease_id: str, problem: str) -> None:
        self.lease_id = lease_id
        self.problem = problem
        super().__init__(f"lease {lease_id!r}: {problem}")

    def facts(self) -> dict[str, str]:
        """Lease and problem."""
        return {"lease_id": self.lease_id, "problem": self.problem}


class DeadlineExceeded(EldrError):
    """The request's own deadline passed while it was served.

    Attributes:
        num_tokens: output tokens already delivered to the client.
    """

    reason = "DEADLINE_EXCEEDED"

    def __init__(self, *, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"the request's deadline passed after {num_tokens} output tokens")

    def facts(self) -> dict[str, str]:
        """Tokens delivered."""
        return {"num_tokens": str(self.num_tokens)}


class WorkerLost(EldrError):
    """A worker vanished while it held the request.

    Attributes:
        worker_id: the worker.
        num_tokens: output tokens already delivered to the client.
    """

    reason = "WORKER_LOST"
    retryable = True

    def __init__(self, worker_id: str, detail: str, *, num_tokens: int = 0) -> None:
        self.worker_id = worker_id
        self.num_tokens = num_tokens
        super().__init__(f"worker {worker_id!r} lost after {num_tokens} output tokens: {detail}")

    def facts(self) -> dict[str, str]:
        """Tokens delivered."""
        return {"worker_id": self.worker_id, "num_tokens": str(self.num_tokens)}


class KvLost(WorkerLost):
    """The KV of a finished prefill is gone before decode could take it: prefill again.

    `worker_id` is the decode worker that was refused.
    """

    reason = "KV_LOST"


def _short(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
