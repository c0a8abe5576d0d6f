"""Admit: limits that hold whatever the fleet looks like. Prices and queues come later."""

from __future__ import annotations

from dataclasses import dataclass

from serving.core.errors import InvalidRequest, Rejected, RejectReason
from serving.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The door's limits.

    Attributes:
        max_prompt_tokens: longest prompt taken.
        max_output_tokens: largest `max_tokens` taken.
        max_open_requests: requests placed and not ended, over this router.
        retry_after_s: what a rejected client is told.
    """

    max_prompt_tokens: int = 1 << 17
    max_output_tokens: int = 1 << 15
    max_open_requests: int = 1 << 16
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_output_tokens", "max_open_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")
        if not self.retry_after_s > 0:
            raise ValueError(f"{self.retry_after_s=} must be > 0")


def check_limits(request: Request, limits: Limits, *, num_open: int, now_s: float) -> None:
    """Lets a request in.

    Raises:
        InvalidRequest: it breaks a limit no fleet could lift.
        Rejected: too many are open, or its deadline has passed.
    """
    if request.num_prompt_tokens > limits.max_prompt_tokens:
        raise InvalidRequest(
            "token_ids",
            f"{request.num_prompt_tokens} tokens",
            f"must be <= {limits.max_prompt_tokens} tokens",
        )
    if request.max_tokens > limits.max_output_tokens:
        raise InvalidRequest(
            "max_tokens", request.max_tokens, f"must be <= {limits.max_output_tokens}"
        )
    if num_open >= limits.max_open_requests:
        raise Rejected(
            RejectReason.QUEUE_FULL,
            f"{num_open} requests are open, the limit is {limits.max_open_requests}",
            retry_after_s=limits.retry_after_s,
        )
    if request.deadline_s <= now_s:
        raise Rejected(
            RejectReason.DEADLINE_UNREACHABLE,
            f"the deadline passed {now_s - request.deadline_s:.3f} s ago",
            retry_after_s=limits.retry_after_s,
        )
