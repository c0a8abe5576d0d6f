"""Call metadata -> tenant, class, deadline ...: strict, so that a typo never means a default."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from serving.core import metadata as keys
from serving.core.errors import InvalidRequest
from serving.core.request import SloClass

_PREFIX = "x-eldr-"
_MAX_TEXT = 128
_MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
_FORWARDED = ("traceparent", "tracestate", "baggage", "x-request-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMetadata:
    """What the metadata of one call says; the keys are those of serving/core/metadata.py.

    Attributes:
        deadline_s: monotonic seconds, inf when none was given.
        allow_restart: None when the client did not say.
        cache_salt: separates prefix caches, "" shares.
        forwarded: trace headers and cache salt, handed on to engines.
    """

    tenant: str = ""
    slo: SloClass | None = None
    product: str = ""
    session: str = ""
    model: str = ""
    deadline_s: float = math.inf
    allow_restart: bool | None = None
    cache_salt: str = ""
    forwarded: tuple[tuple[str, str], ...] = ()


def of_call(context: grpc.aio.ServicerContext, *, now_s: float) -> CallMetadata:
    """`parse` of a call; its gRPC deadline counts where it is the earlier one."""
    call = parse(context.invocation_metadata() or (), now_s=now_s)
    remaining_s = context.time_remaining()
    if remaining_s is None or now_s + remaining_s >= call.deadline_s:
        return call
    return dataclasses.replace(call, deadline_s=now_s + remaining_s)


def parse(metadata: Iterable[tuple[str, str | bytes]], *, now_s: float) -> CallMetadata:
    """Reads the keys of every door.

    Args:
        metadata: (key, value) pairs, keys in lower case as gRPC delivers them.
        now_s: monotonic seconds at the door; relative deadlines start here.

    Raises:
        InvalidRequest: unknown x-eldr- key, a key given twice, or a value breaking its rule.
    """
    values: dict[str, str] = {}
    forwarded: list[tuple[str, str]] = []
    for key, value in metadata or ():
        if key.startswith(_PREFIX):
            values[key] = _accepted(key, value, already=key in values)
        elif key in _FORWARDED and isinstance(value, str):
            forwarded.append((key, value))
    if not values and not forwarded:
        return CallMetadata()
    salt = values.get(keys.CACHE_SALT, "")
    if salt:
        forwarded.append((keys.CACHE_SALT, salt))
    return CallMetadata(
        tenant=values.get(keys.TENANT, ""),
        slo=_slo(values.get(keys.SLO_CLASS)),
        product=values.get(keys.PRODUCT, ""),
        session=values.get(keys.SESSION, ""),
        model=values.get(keys.MODEL, ""),
        deadline_s=_deadline_s(values.get(keys.DEADLINE_MS), now_s),
        allow_restart=_allow_restart(values.get(keys.RESTART)),
        cache_salt=salt,
        forwarded=tuple(forwarded),
    )


def _accepted(key: str, value: str | bytes, *, already: bool) -> str:
    if key not in keys.ALL:
        nearest = difflib.get_close_matches(key, keys.ALL, n=1, cutoff=0.0)[0]
        raise InvalidRequest(key, value, f"unknown key; nearest known key is '{nearest}'")
    if already:
        raise InvalidRequest(key, value, "must be given at most once")
    if not isinstance(value, str) or not value or len(value) > _MAX_TEXT:
        raise InvalidRequest(key, value, f"must be text of 1 to {_MAX_TEXT} characters")
    return value


def _slo(value: str | None) -> SloClass | None:
    if value is None:
        return None
    try:
        return SloClass(value)
    except ValueError:
        rule = f"must be one of {', '.join(slo.value for slo in SloClass)}"
        raise InvalidRequest(keys.SLO_CLASS, value, rule) from None


def _deadline_s(value: str | None, now_s: float) -> float:
    if value is None:
        return math.inf
    plain = value.isascii() and value.isdigit()
    if not plain or not 1 <= int(value) <= _MAX_DEADLINE_MS:
        rule = f"must be whole milliseconds from now, 1 to {_MAX_DEADLINE_MS}"
        raise InvalidRequest(keys.DEADLINE_MS, value, rule)
    return now_s + int(value) / 1000


def _allow_restart(value: str | None) -> bool | None:
    if value is None:
        return None
    if value not in ("allow", "never"):
        raise InvalidRequest(keys.RESTART, value, "must be 'allow' or 'never'")
    return value == "allow"
