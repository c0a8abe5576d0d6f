"""VllmEngine's GenerateRequest -> what the engine runs, or a refusal that names the field.

A parameter is honoured or refused, never ignored: a client that asks for a penalty or a stop
string and silently gets neither is worse off than one that is told. Zero in a proto3 scalar
without presence means "not set", as for vLLM.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.core.errors import InvalidRequest
from serving.core.worker import Role
from serving.engines.embedded.hand_over import HandOver, parse_transfer_params
from serving.engines.embedded.sampling import Sampling

MAX_LOGPROBS = 20
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 100.0
# Sampling fields this engine does not compute -> the values that leave them off.
_UNSUPPORTED_NUMBERS = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (0.0, 1.0),
}
_MAX_ID_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a worker can take.

    Attributes:
        role: prefill workers produce one token per request.
        vocab_size: token ids lie below.
        max_context_tokens: prompt plus output of one request.
        pool_tokens: tokens the whole KV pool holds.
        eos_token_ids: tokens that end a sequence unless told otherwise.
    """

    role: Role
    vocab_size: int
    max_context_tokens: int
    pool_tokens: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateSpec:
    """One checked request.

    Attributes:
        request_id: the client's id, unique among running requests.
        token_ids: prompt, int32 [P].
        max_tokens: output tokens at most.
        min_tokens: output tokens before a stop token may come.
        eos_token_ids: tokens that end it silently; empty with ignore_eos.
        stop_token_ids: tokens that end it and are reported as the match.
        sampling: how tokens are drawn.
        stream: whether each token is sent as it comes.
        hands_over: its KV is kept under a lease for a decode worker.
        pull: where its prompt's KV lies, or None to compute it here.
        cache_salt: separates prefix caches ("" shares).
    """

    request_id: str
    token_ids: np.ndarray
    max_tokens: int
    min_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    sampling: Sampling
    stream: bool
    hands_over: bool
    pull: HandOver | None
    cache_salt: str

    @property
    def num_kv_tokens(self) -> int:
        """Positions it will ever write: the last output token's KV is never needed."""
        return len(self.token_ids) + self.max_tokens - 1


def parse_generate(request: pb.GenerateRequest, limits: Limits, cache_salt: str) -> GenerateSpec:
    """Checks a request.

    Args:
        request: as it came.
        limits: of this worker.
        cache_salt: from the call's metadata.

    Raises:
        InvalidRequest: names the field, its value and the rule.
    """
    _check_id(request.request_id)
    _refuse_unsupported(request)
    token_ids = _prompt(request, limits)
    params = request.sampling_params
    transfer = parse_transfer_params(request.kv_transfer_params_json)
    max_tokens = _max_tokens(params, len(token_ids), limits)
    if transfer.do_remote_decode and max_tokens != 1:
        rule = "must be 1 with do_remote_decode: decode makes every token"
        raise InvalidRequest("sampling_params.max_tokens", max_tokens, rule)
    if params.min_tokens > max_tokens:
        rule = f"must be <= max_tokens={max_tokens}"
        raise InvalidRequest("sampling_params.min_tokens", params.min_tokens, rule)
    if transfer.hand_over is not None and limits.role is Role.PREFILL:
        rule = "a prefill worker pulls no KV, send it to a decode worker"
        raise InvalidRequest("kv_transfer_params_json", request.kv_transfer_params_json, rule)
    return GenerateSpec(
        request_id=request.request_id,
        token_ids=token_ids,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=frozenset() if params.ignore_eos else limits.eos_token_ids,
        stop_token_ids=_stop_token_ids(params, limits),
        sampling=_sampling(request, limits),
        stream=request.stream,
        hands_over=transfer.do_remote_decode,
        pull=transfer.hand_over,
        cache_salt=cache_salt,
    )


def _check_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= _MAX_ID_CHARACTERS:
        rule = f"must have 1 to {_MAX_ID_CHARACTERS} characters"
        raise InvalidRequest("request_id", request_id, rule)


def _prompt(request: pb.GenerateRequest, limits: Limits) -> np.ndarray:
    if request.WhichOneof("input") != "tokenized":
        given = request.WhichOneof("input")
        rule = "must be tokenized.input_ids: this worker takes token ids only"
        raise InvalidRequest("input", given, rule)
    given_ids = request.tokenized.input_ids
    if not given_ids:
        rule = "the prompt must hold at least one token"
        raise InvalidRequest("tokenized.input_ids", [], rule)
    if len(given_ids) >= limits.max_context_tokens:
        rule = f"must be < {limits.max_context_tokens} tokens, the context, to leave room for one"
        raise InvalidRequest("tokenized.input_ids", f"{len(given_ids)} tokens", rule)
    if len(given_ids) > limits.pool_tokens:
        rule = f"must be <= {limits.pool_tokens} tokens, the worker's whole KV pool"
        raise InvalidRequest("tokenized.input_ids", f"{len(given_ids)} tokens", rule)
    token_ids = np.asarray(given_ids, np.int64)
    wrong = np.flatnonzero(token_ids >= limits.vocab_size)
    if wrong.size:
        place = int(wrong[0])
        rule = f"must be < vocab_size={limits.vocab_size}"
        raise InvalidRequest(f"tokenized.input_ids[{place}]", int(token_ids[place]), rule)
    return token_ids.astype(np.int32)


def _max_tokens(params: pb.SamplingParams, num_prompt: int, limits: Limits) -> int:
    field = "sampling_params.max_tokens"
    # The last output token needs no KV, so a request may end one token past its blocks.
    room = min(limits.max_context_tokens, limits.pool_tokens + 1) - num_prompt
    if limits.role is Role.PREFILL:
        if not params.HasField("max_tokens") or params.max_tokens != 1:
            given = params.max_tokens if params.HasField("max_tokens") else None
            raise InvalidRequest(field, given, "must be 1 on a prefill worker")
        return 1
    if not params.HasField("max_tokens"):
        return room
    if params.max_tokens < 1:
        raise InvalidRequest(field, params.max_tokens, "must be >= 1")
    if params.max_tokens > room:
        rule = (
            f"must be <= {room} for {num_prompt} prompt tokens (context "
            f"{limits.max_context_tokens}, KV pool {limits.pool_tokens} tokens)"
        )
        raise InvalidRequest(field, params.max_tokens, rule)
    return params.max_tokens


def _stop_token_ids(params: pb.SamplingParams, limits: Limits) -> frozenset[int]:
    for token_id in params.stop_token_ids:
        if token_id >= limits.vocab_size:
            rule = f"must be < vocab_size={limits.vocab_size}"
            raise InvalidRequest("sampling_params.stop_token_ids", token_id, rule)
    stops = frozenset(params.stop_token_ids)
    if params.min_tokens and len(stops | limits.eos_token_ids) >= limits.vocab_size:
        rule = "must leave a token that may come before min_tokens"
        raise InvalidRequest("sampling_params.stop_token_ids", f"{len(stops)} tokens", rule)
    return stops


def _sampling(request: pb.GenerateRequest, limits: Limits) -> Sampling:
    params = request.sampling_params
    temperature = params.temperature if params.HasField("temperature") else 0.0
    if temperature != 0.0 and not _MIN_TEMPERATURE <= temperature <= _MAX_TEMPERATURE:
        rule = f"must be 0 (greedy) or lie in [{_MIN_TEMPERATURE}, {_MAX_TEMPERATURE:g}]"
        raise InvalidRequest("sampling_params.temperature", temperature, rule)
    top_p = params.top_p or 1.0
    if not 0 < top_p <= 1:
        raise InvalidRequest("sampling_params.top_p", top_p, "must lie in (0, 1]")
    if not 0 <= params.min_p <= 1:
        raise InvalidRequest("sampling_params.min_p", params.min_p, "must lie in [0, 1]")
    num_logprobs = params.logprobs if params.HasField("logprobs") else None
    most = min(MAX_LOGPROBS, limits.vocab_size)
    if num_logprobs is not None and not 0 <= num_logprobs <= most:
        raise InvalidRequest("sampling_params.logprobs", num_logprobs, f"must lie in [0, {most}]")
    return Sampling(
        temperature=temperature,
        top_k=params.top_k,
        top_p=top_p,
        min_p=params.min_p,
        # Without a seed the id is one: prefill and decode of a request draw the same first token.
        seed=params.seed if params.HasField("seed") else _seed_of(request.request_id),
        num_logprobs=num_logprobs,
    )


def _seed_of(request_id: str) -> int:
    # A request resumed after a loss comes as "id~1" (serving/engines/journey.py): the same draws.
    request_id = request_id.partition("~")[0]
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big")


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    params = request.sampling_params
    for name, off in _UNSUPPORTED_NUMBERS.items():
        value = getattr(params, name)
        if value not in off or math.isnan(value):
            raise InvalidRequest(f"sampling_params.{name}", value, "is not supported, leave it out")
    if params.n > 1:
        rule = "must be 1: send one request per sample"
        raise InvalidRequest("sampling_params.n", params.n, rule)
    if params.stop:
        rule = "is not supported: this worker sees token ids only, use stop_token_ids"
        raise InvalidRequest("sampling_params.stop", list(params.stop), rule)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if params.HasField(name):
            rule = "is not supported, leave it out"
            raise InvalidRequest(f"sampling_params.{name}", getattr(params, name), rule)
    if params.logit_bias:
        rule = "is not supported, leave it out"
        raise InvalidRequest("sampling_params.logit_bias", dict(params.logit_bias), rule)
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        rule = "structured output is not supported, leave it out"
        raise InvalidRequest(f"sampling_params.{constraint}", "given", rule)
    if request.HasField("kv_transfer_params"):
        rule = "is deprecated and not supported, use kv_transfer_params_json"
        raise InvalidRequest("kv_transfer_params", "given", rule)
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        raise InvalidRequest("mm_inputs", "given", "this model reads text only")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        rule = "must be 0: a worker is one rank"
        raise InvalidRequest("data_parallel_rank", request.data_parallel_rank, rule)
