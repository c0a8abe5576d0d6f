from __future__ import annotations

import contextlib
import json
import math

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.errors import InvalidRequest
from serving.core.worker import Role
from serving.engines.embedded.generate_request import Limits, parse_generate
from serving.engines.embedded.hand_over import HandOver, encode_hand_over, parse_transfer_params

LIMITS = Limits(
    role=Role.BOTH,
    vocab_size=50,
    max_context_tokens=64,
    pool_tokens=48,
    eos_token_ids=frozenset({0}),
)
HAND_OVER = HandOver(
    remote_host="127.0.0.1",
    remote_port=7,
    remote_block_ids=(3, 1),
    remote_request_id="r-1",
    lease="x.y",
)


def request(**fields) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=pb.SamplingParams(max_tokens=4),
    )
    message.MergeFrom(pb.GenerateRequest(**fields))
    return message


def sampled(**params) -> pb.GenerateRequest:
    return request(sampling_params=pb.SamplingParams(**params))


def prompt(*token_ids: int) -> pb.GenerateRequest:
    message = request()
    message.tokenized.input_ids[:] = token_ids
    return message


def parse(message: pb.GenerateRequest, limits: Limits = LIMITS):
    return parse_generate(message, limits, "")


def test_defaults():
    spec = parse(request())
    assert spec.sampling.greedy
    assert spec.eos_token_ids == {0}
    assert (spec.max_tokens, spec.min_tokens, spec.hands_over, spec.pull) == (4, 0, False, None)
    assert spec.num_kv_tokens == 6
    spec = parse(sampled(ignore_eos=True, temperature=0.5, seed=9, top_k=3, stop_token_ids=[4]))
    assert spec.eos_token_ids == frozenset()
    assert (spec.sampling.seed, spec.sampling.top_k, spec.stop_token_ids) == (9, 3, {4})


def test_without_max_tokens_the_room_is_taken():
    message = request()
    message.sampling_params.ClearField("max_tokens")
    assert parse(message).max_tokens == 46
    assert parse(message).num_kv_tokens == LIMITS.pool_tokens


def test_an_unseeded_request_draws_the_same_on_prefill_and_decode():
    one, two = parse(sampled(temperature=1.0)), parse(sampled(temperature=1.0))
    assert one.sampling.seed == two.sampling.seed
    other = sampled(temperature=1.0)
    other.request_id = "s"
    assert parse(other).sampling.seed != one.sampling.seed
    resumed = sampled(temperature=1.0)
    resumed.request_id += "~1"
    assert parse(resumed).sampling.seed == one.sampling.seed


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (prompt(), "tokenized.input_ids"),
        (prompt(1, 50), "tokenized.input_ids[1]"),
        (prompt(2**32 - 1), "tokenized.input_ids[0]"),
        (prompt(*[1] * 49), "tokenized.input_ids"),
        (prompt(*[1] * 64), "tokenized.input_ids"),
        (prompt(*[1] * 46), "sampling_params.max_tokens"),
        (request(text="hello"), "input"),
        (sampled(max_tokens=0), "sampling_params.max_tokens"),
        (sampled(max_tokens=47), "sampling_params.max_tokens"),
        (sampled(min_tokens=5), "sampling_params.min_tokens"),
        (sampled(n=2), "sampling_params.n"),
        (sampled(temperature=-1.0), "sampling_params.temperature"),
        (sampled(temperature=math.nan), "sampling_params.temperature"),
        (sampled(temperature=math.inf), "sampling_params.temperature"),
        (sampled(temperature=1e-6), "sampling_params.temperature"),
        (sampled(top_p=1.5), "sampling_params.top_p"),
        (sampled(top_p=-0.5), "sampling_params.top_p"),
        (sampled(top_p=math.nan), "sampling_params.top_p"),
        (sampled(min_p=2.0), "sampling_params.min_p"),
        (sampled(min_p=math.nan), "sampling_params.min_p"),
        (sampled(frequency_penalty=0.1), "sampling_params.frequency_penalty"),
        (sampled(presence_penalty=math.nan), "sampling_params.presence_penalty"),
        (sampled(repetition_penalty=1.2), "sampling_params.repetition_penalty"),
        (sampled(logprobs=-1), "sampling_params.logprobs"),
        (sampled(logprobs=21), "sampling_params.logprobs"),
        (sampled(prompt_logprobs=0), "sampling_params.prompt_logprobs"),
        (sampled(truncate_prompt_tokens=1), "sampling_params.truncate_prompt_tokens"),
        (sampled(stop=["x"]), "sampling_params.stop"),
        (sampled(stop_token_ids=[50]), "sampling_params.stop_token_ids"),
        (sampled(min_tokens=1, stop_token_ids=list(range(50))), "sampling_params.stop_token_ids"),
        (sampled(logit_bias={1: 2.0}), "sampling_params.logit_bias"),
        (sampled(regex="a"), "sampling_params.regex"),
        (sampled(json_object=True), "sampling_params.json_object"),
        (request(request_id="x" * 300), "request_id"),
        (request(data_parallel_rank=1), "data_parallel_rank"),
        (request(kv_transfer_params=pb.KvTransferParams(remote_host="h")), "kv_transfer_params"),
        (request(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (request(kv_transfer_params_json="{"), "kv_transfer_params_json"),
        (request(kv_transfer_params_json="[]"), "kv_transfer_params_json"),
        (request(kv_transfer_params_json='{"lease": "x"}'), "kv_transfer_params_json"),
        (request(kv_transfer_params_json='{"do_remote_prefill": true}'), "kv_transfer_params_json"),
        (request(kv_transfer_params_json='{"do_remote_decode": 1}'), "kv_transfer_params_json"),
        (
            request(kv_transfer_params_json='{"do_remote_decode": true}'),
            "sampling_params.max_tokens",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(message, field):
    with pytest.raises(InvalidRequest) as caught:
        parse(message)
    assert caught.value.field == field
    assert caught.value.rule


def test_an_empty_id_is_refused():
    message = request()
    message.request_id = ""
    with pytest.raises(InvalidRequest, match="request_id=''"):
        parse(message)


def test_a_prefill_worker_makes_one_token_and_pulls_nothing():
    limits = Limits(**{**{s: getattr(LIMITS, s) for s in LIMITS.__slots__}, "role": Role.PREFILL})
    message = request()
    with pytest.raises(InvalidRequest, match="must be 1 on a prefill worker"):
        parse(message, limits)
    message.sampling_params.ClearField("max_tokens")
    with pytest.raises(InvalidRequest, match="must be 1 on a prefill worker"):
        parse(message, limits)
    message.sampling_params.max_tokens = 1
    assert parse(message, limits).max_tokens == 1
    message.kv_transfer_params_json = encode_hand_over(HAND_OVER)
    with pytest.raises(InvalidRequest, match="pulls no KV"):
        parse(message, limits)


def test_hand_over_round_trip():
    text = encode_hand_over(HAND_OVER)
    assert "eldr_sig" not in text
    assert parse_transfer_params(text).hand_over == HAND_OVER
    assert HAND_OVER.address == "127.0.0.1:7"
    both = '{"do_remote_decode": true, "do_remote_prefill": true' + ", " + text[1:]
    with pytest.raises(InvalidRequest, match="at once"):
        parse_transfer_params(both)
    assert parse_transfer_params('{"do_remote_decode": true, "tp_size": 1}').do_remote_decode
    left_out = '{"do_remote_decode": true, "remote_host": null, "remote_block_ids": null}'
    assert parse_transfer_params(left_out).do_remote_decode
    with pytest.raises(InvalidRequest, match="missing required field"):
        parse_transfer_params('{"remote_host": "127.0.0.1", "remote_port": 7}')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_MEMBERS = [
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_request_id",
    "lease",
    "eldr_sig",
    "do_remote_decode",
    "do_remote_prefill",
]


@given(st.dictionaries(st.sampled_from(_MEMBERS), json_values))
@settings(max_examples=80, deadline=None)
def test_no_params_object_escapes_the_error_tree(members):
    with contextlib.suppress(InvalidRequest):
        params = parse_transfer_params(json.dumps(members))
        assert params.hand_over is None or params.hand_over.remote_block_ids


@given(st.text(max_size=60) | st.just("[" * 5000) | st.just('{"a":' * 5000))
@settings(max_examples=60, deadline=None)
def test_no_params_text_escapes_the_error_tree(text):
    with contextlib.suppress(InvalidRequest):
        assert parse_transfer_params(text).hand_over is None


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_message_escapes_the_error_tree(data):
    message = pb.GenerateRequest()
    with contextlib.suppress(DecodeError, InvalidRequest):
        message.ParseFromString(data)
        assert len(parse(message).token_ids)
