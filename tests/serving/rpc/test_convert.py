"""Wire messages become requests, or an error naming field, value and rule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.errors import InvalidRequest, UnknownModel
from serving.core.request import SloClass
from serving.proto import router_pb2
from serving.rpc.convert import DoorLimits, generate_request, prompt_array, route_request
from serving.rpc.metadata import CallMetadata

LIMITS = DoorLimits(
    models=frozenset({"m"}),
    max_context_tokens=100,
    vocab_size=50,
    default_max_tokens=16,
    default_slo=SloClass.B,
    allow_restart=True,
)


def _message(ids: list[int] | None = None, **params: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3] if ids is None else ids),
        sampling_params=pb.SamplingParams(**params),
    )


def _convert(message: pb.GenerateRequest, call: CallMetadata | None = None):
    ids = prompt_array(message.tokenized.input_ids)
    return generate_request(message, ids, call or CallMetadata(), LIMITS, now_s=7.0)


def test_a_plain_request() -> None:
    request = _convert(_message(max_tokens=5), CallMetadata(tenant="t", slo=SloClass.A, model="m"))
    assert request.token_ids.tolist() == [1, 2, 3]
    assert request.token_ids.dtype == np.int32
    assert not request.token_ids.flags.writeable
    assert (request.max_tokens, request.arrival_s, request.slo) == (5, 7.0, SloClass.A)
    assert (request.length.mean_tokens, request.length.p95_tokens) == (5, 5)
    assert request.allow_restart


def test_defaults() -> None:
    assert _convert(_message()).max_tokens == 16
    assert _convert(_message(ids=[1] * 95)).max_tokens == 5
    assert _convert(_message()).slo is SloClass.B


@pytest.mark.parametrize(
    ("message", "field", "rule"),
    [
        (_message(ids=[]), "token_ids", "at least one token"),
        (_message(ids=[1] * 100), "token_ids", "must be < 100 tokens"),
        (_message(ids=[1, 50]), "token_ids[1]", "must be < 50"),
        (_message(ids=[1, 2**32 - 1]), "token_ids[1]", "must be <= 2147483647"),
        (_message(max_tokens=0), "max_tokens", "must be >= 1"),
        (_message(max_tokens=98), "max_tokens", "must be <= 97"),
        (_message(max_tokens=3, min_tokens=4), "sampling_params.min_tokens", "max_tokens=3"),
    ],
)
def test_bad_requests(message: pb.GenerateRequest, field: str, rule: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _convert(message)
    assert caught.value.field == field
    assert rule in caught.value.rule


def test_bad_ids_and_models() -> None:
    message = _message()
    message.request_id = "x" * 300
    with pytest.raises(InvalidRequest, match="request_id"):
        _convert(message)
    message.request_id = ""
    with pytest.raises(InvalidRequest, match="request_id"):
        _convert(message)
    with pytest.raises(UnknownModel, match="served: m"):
        _convert(_message(), CallMetadata(model="other"))


def test_client_kv_parameters_are_refused() -> None:
    message = _message()
    message.kv_transfer_params_json = "{}"
    with pytest.raises(InvalidRequest, match="kv_transfer_params"):
        _convert(message)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.sampling_params, "n", 2),
        lambda m: setattr(m.sampling_params, "regex", "a*"),
        lambda m: setattr(m.sampling_params, "prompt_logprobs", 1),
        lambda m: setattr(m.sampling_params, "presence_penalty", 0.5),
        lambda m: m.mm_inputs.SetInParent(),
    ],
)
def test_some_answers_cannot_be_continued(change: Callable[[pb.GenerateRequest], None]) -> None:
    message = _message(max_tokens=5)
    change(message)
    assert not _convert(message, CallMetadata(allow_restart=True)).allow_restart


def test_the_client_may_refuse_restarts() -> None:
    assert not _convert(_message(), CallMetadata(allow_restart=False)).allow_restart


def test_route_requests() -> None:
    message = router_pb2.RouteRequest(
        request_id="r", model="m", token_ids=[1, 2], max_tokens=4, cache_salt="s"
    )
    request = route_request(message, CallMetadata(), LIMITS, now_s=1.0)
    assert (request.model, request.cache_salt, request.max_tokens) == ("m", "s", 4)
    message.max_tokens = 0
    with pytest.raises(InvalidRequest, match="max_tokens"):
        route_request(message, CallMetadata(), LIMITS, now_s=1.0)
    message.max_tokens = 4
    with pytest.raises(InvalidRequest, match="x-eldr-model"):
        route_request(message, CallMetadata(model="n"), LIMITS, now_s=1.0)
    message.stage = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="STAGE_PREFILL"):
        route_request(message, CallMetadata(), LIMITS, now_s=1.0)
