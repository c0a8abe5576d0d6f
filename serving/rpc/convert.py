"""Wire messages to core types and back; the only code that knows both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.errors import InvalidRequest, UnknownModel
from serving.core.lease import Lease
from serving.core.placed import Placed
from serving.core.request import LengthBand, Request, SloClass
from serving.core.worker import FleetView
from serving.proto import router_pb2
from serving.rpc.metadata import CallMetadata

_MAX_REQUEST_ID = 240  # engines take 256; an attempt's suffix must fit
_MAX_INT32 = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """What a request may ask of this deployment.

    Attributes:
        models: model names served.
        max_context_tokens: prompt plus output of one request.
        vocab_size: token ids lie below it; 0 leaves the check to the engines.
        default_max_tokens: output limit of requests that name none.
        default_slo: class of requests that name none.
        allow_restart: whether the deployment re-runs requests from their tokens so far.
    """

    models: frozenset[str]
    max_context_tokens: int
    vocab_size: int
    default_max_tokens: int
    default_slo: SloClass
    allow_restart: bool


def prompt_array(token_ids: Iterable[int]) -> np.ndarray:
    """Token ids of a message (uint32) as a read-only int32 [P].

    Raises:
        InvalidRequest: an id does not fit int32.
    """
    wide = np.array(token_ids, np.uint32)
    if wide.size and int(wide.max()) > _MAX_INT32:
        where = int(wide.argmax())
        raise InvalidRequest(f"token_ids[{where}]", int(wide[where]), f"must be <= {_MAX_INT32}")
    ids = wide.astype(np.int32)
    ids.setflags(write=False)
    return ids


def generate_request(
    message: pb.GenerateRequest,
    token_ids: np.ndarray,
    call: CallMetadata,
    limits: DoorLimits,
    *,
    now_s: float,
) -> Request:
    """A Request from a Generate call.

    Args:
        message: the client's message.
        token_ids: its prompt, int32 [P].
        call: its metadata.
        limits: see `DoorLimits`.
        now_s: monotonic seconds of its arrival.

    Raises:
        InvalidRequest: names the field, its value and the rule.
    """
    params = message.sampling_params
    if message.HasField("kv_transfer_params") or message.HasField("kv_transfer_params_json"):
        raise InvalidRequest(
            "kv_transfer_params", "given", "must be absent: hand-overs are the router's business"
        )
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    request = _request(
        message.request_id,
        token_ids,
        max_tokens,
        call.model,
        call.cache_salt,
        call,
        limits,
        now_s,
        restartable=_restartable(message),
    )
    if params.min_tokens > request.max_tokens:
        raise InvalidRequest(
            "sampling_params.min_tokens",
            params.min_tokens,
            f"must be <= max_tokens={request.max_tokens}",
        )
    return request


def route_request(
    message: router_pb2.RouteRequest, call: CallMetadata, limits: DoorLimits, *, now_s: float
) -> Request:
    """A Request from a Route call; arguments and errors as `generate_request`."""
    if message.model and call.model and message.model != call.model:
        raise InvalidRequest(
            "model", message.model, f"must equal the metadata's x-eldr-model {call.model!r}"
        )
    if message.stage not in router_pb2.RouteRequest.Stage.values():
        known = ", ".join(router_pb2.RouteRequest.Stage.keys())
        raise InvalidRequest("stage", message.stage, f"must be one of {known}")
    if message.cache_salt and call.cache_salt and message.cache_salt != call.cache_salt:
        raise InvalidRequest(
            "cache_salt",
            message.cache_salt,
            f"must equal the metadata's x-eldr-cache-salt {call.cache_salt!r}",
        )
    return _request(
        message.request_id,
        prompt_array(message.token_ids),
        message.max_tokens,
        message.model or call.model,
        message.cache_salt or call.cache_salt,
        call,
        limits,
        now_s,
        restartable=False,
    )


def placement(placed: Placed, lease: Lease, *, now_s: float) -> router_pb2.Placement:
    """A placed stage as clients see it."""
    return router_pb2.Placement(
        worker_id=placed.worker.worker_id,
        address=placed.worker.address,
        lease_id=lease.lease_id,
        lease_expires_in_s=max(0.0, lease.expires_at_s - now_s),
        runner_up_worker_id=placed.runner_up.worker_id if placed.runner_up else "",
        score_delta=placed.score_delta,
        score_unit=placed.unit,
    )


def worker_statuses(views: Sequence[FleetView]) -> list[router_pb2.WorkerStatus]:
    """One row per worker, in registration order within a phase; a worker once."""
    rows: dict[str, router_pb2.WorkerStatus] = {}
    for view in views:
        for i, worker in enumerate(view.workers):
            rows.setdefault(
                worker.worker_id,
                router_pb2.WorkerStatus(
                    worker_id=worker.worker_id,
                    address=worker.address,
                    role=worker.role.value,
                    state=worker.state.value,
                    pool=worker.pool,
                    model=worker.model,
                    hardware=worker.hardware,
                    ici_domain=worker.ici_domain,
                    num_running=int(view.num_running[i]),
                    num_waiting=int(view.num_waiting[i]),
                    num_inflight=int(view.num_inflight[i]),
                    kv_blocks_free=int(view.kv_blocks_free[i]),
                    telemetry_age_s=float(view.age_s[i]),
                    accepts=bool(view.accepts[i]),
                ),
            )
    return list(rows.values())


def _request(
    request_id: str,
    token_ids: np.ndarray,
    max_tokens: int | None,
    model: str,
    cache_salt: str,
    call: CallMetadata,
    limits: DoorLimits,
    now_s: float,
    *,
    restartable: bool,
) -> Request:
    if len(request_id) > _MAX_REQUEST_ID:
        raise InvalidRequest("request_id", request_id, f"must be <= {_MAX_REQUEST_ID} characters")
    if model and model not in limits.models:
        served = ", ".join(sorted(limits.models))
        raise UnknownModel("model", model, f"is not served here; served: {served}")
    _check_prompt(token_ids, limits)
    room = limits.max_context_tokens - len(token_ids)
    if max_tokens is None:
        max_tokens = min(limits.default_max_tokens, room)
    elif max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            max_tokens,
            f"must be <= {room}: {len(token_ids)} prompt tokens of a context of "
            f"{limits.max_context_tokens}",
        )
    allowed = limits.allow_restart if call.allow_restart is None else call.allow_restart
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        max_tokens=max_tokens,
        arrival_s=now_s,
        model=model,
        tenant=call.tenant,
        product=call.product,
        session=call.session,
        slo=call.slo or limits.default_slo,
        deadline_s=call.deadline_s,
        length=LengthBand(mean_tokens=max_tokens, p95_tokens=max_tokens),
        cache_salt=cache_salt,
        allow_restart=allowed and restartable,
    )


def _check_prompt(token_ids: np.ndarray, limits: DoorLimits) -> None:
    """Length and vocabulary; Request itself refuses an empty prompt."""
    if len(token_ids) >= limits.max_context_tokens:
        raise InvalidRequest(
            "token_ids",
            f"{len(token_ids)} tokens",
            f"must be < {limits.max_context_tokens} tokens, the context of the largest worker",
        )
    if limits.vocab_size and len(token_ids):
        top = int(token_ids.argmax())
        if token_ids[top] >= limits.vocab_size:
            raise InvalidRequest(
                f"token_ids[{top}]",
                int(token_ids[top]),
                f"must be < {limits.vocab_size}, the vocabulary size",
            )


def _restartable(message: pb.GenerateRequest) -> bool:
    """Whether prompt plus tokens so far continues the same answer.

    Not so where engine state follows the OUTPUT tokens: a grammar, penalties on what was
    generated, several samples; nor where the prompt's own log-probabilities were asked for.
    """
    params = message.sampling_params
    return not (
        params.n > 1
        or params.WhichOneof("constraint")
        or params.HasField("prompt_logprobs")
        or params.frequency_penalty
        or params.presence_penalty
        or message.HasField("mm_inputs")
        or message.HasField("media_refs")
        or message.extra_mm_inputs
    )
