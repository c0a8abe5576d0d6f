"""What a client asks for, frozen at the door."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from serving.core.errors import InvalidRequest


class SloClass(enum.Enum):
    """Service class; targets and the price of delay come from config (`SloTarget`)."""

    A = "A"
    B = "B"
    C = "C"

    # Members key the decision's dictionaries; Enum's own hash is a Python call each time.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """What a class promises and what a second of its delay is worth.

    Attributes:
        ttft_p99_s: time to first token, seconds; inf where the class has no bound.
        tpot_p99_s: time per output token, seconds; inf where the class has no bound.
        deadline_s: seconds after arrival by which a batch request must end; inf for none.
        lambda_usd_per_s: dollars per second of visible delay (DESIGN, "Placement").
    """

    ttft_p99_s: float
    tpot_p99_s: float
    deadline_s: float
    lambda_usd_per_s: float

    def __post_init__(self) -> None:
        for name in ("ttft_p99_s", "tpot_p99_s", "deadline_s", "lambda_usd_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}={value!r} must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBand:
    """Predicted output tokens: the mean enters costs, p95 enters admission and KV checks.

    Attributes:
        mean_tokens: expected output tokens.
        p95_tokens: 95th percentile, never above the request's max_tokens.
        source: which predictor made it ("max_tokens" is the fallback), for the record.
    """

    mean_tokens: float
    p95_tokens: float
    source: str = "max_tokens"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One generation request; nothing in it changes after the door.

    Attributes:
        request_id: the client's id; idempotent over every door.
        token_ids: prompt, int32 [P], P >= 1, read-only.
        max_tokens: output limit, >= 1.
        arrival_s: monotonic seconds at the door.
        model: variant asked for; "" lets the routing table choose.
        tenant, product, session: accounting and affinity keys ("" when absent).
        slo: service class.
        deadline_s: monotonic seconds after which the answer is worthless; inf for none.
        length: predicted output band.
        cache_salt: separates prefix caches of tenants that must not share ("" shares).
        allow_restart: after a worker is lost mid-decode, the client accepts a re-run from
            the tokens so far.
        num_prompt_tokens: prompt length in tokens.
    """

    request_id: str
    token_ids: np.ndarray
    max_tokens: int
    arrival_s: float
    model: str = ""
    tenant: str = ""
    product: str = ""
    session: str = ""
    slo: SloClass = SloClass.B
    deadline_s: float = float("inf")
    length: LengthBand = field(default_factory=lambda: LengthBand(mean_tokens=1, p95_tokens=1))
    cache_salt: str = ""
    allow_restart: bool = True
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequest("request_id", self.request_id, "must not be empty")
        ids = self.token_ids
        if ids.ndim != 1 or ids.dtype != np.int32:
            raise InvalidRequest(
                "token_ids", f"{ids.dtype} {ids.shape}", "must be one row of int32 token ids"
            )
        if ids.size == 0:
            raise InvalidRequest("token_ids", [], "the prompt must hold at least one token")
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", self.max_tokens, "must be >= 1")
        object.__setattr__(self, "num_prompt_tokens", int(ids.size))
