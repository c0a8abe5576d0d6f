"""`vllm.grpc.engine.VllmEngine` of one worker, with the semantics of vLLM's own servicer.

With `stream` every token is a chunk and the closing message follows; without it only the
closing message comes. Unlike vLLM's (NETWORK.md), a chunk's `completion_tokens` counts the
answer so far and the closing message repeats all output ids. Methods that are not here answer
UNIMPLEMENTED.

Trailing metadata of Generate tells where the request stood on the worker's busy clock:
`eldr-busy-arrived-s`, `eldr-busy-first-token-s`, `eldr-busy-last-token-s`.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from eldr_jax.config import ModelConfig
from serving.core.clock import Clock
from serving.core.errors import InvalidRequest
from serving.core.worker import Role
from serving.engines.embedded.config import KV_CONNECTOR, EmbeddedWorkerConfig
from serving.engines.embedded.engine import Engine
from serving.engines.embedded.generate_request import GenerateSpec, Limits, parse_generate
from serving.engines.embedded.hand_over import HandOver, encode_hand_over
from serving.engines.embedded.kv_transfer import KvPuller
from serving.engines.embedded.sampling import TokenLogprobs
from serving.engines.embedded.sequence import (
    Broken,
    Ended,
    Event,
    PullWanted,
    Sequence,
    TokenMade,
)
from serving.engines.embedded.tokenizer_archive import zip_tokenizer
from serving.engines.embedded.work import KvBlocks
from serving.engines.pulled import Pulled
from serving.signatures.model import SignatureModel
from serving.signatures.wire import encode_signature

# Separates the prefix caches of callers that must not share; not set shares with everybody.
CACHE_SALT_KEY = "x-eldr-cache-salt"
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
_MAX_SALT_CHARACTERS = 128
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.02


class VllmServicer:
    """The service of one worker; construct it on its event loop.

    Attributes:
        port: port the worker listens on, for hand-overs; set before the first request.
    """

    def __init__(
        self,
        config: EmbeddedWorkerConfig,
        model: ModelConfig,
        engine: Engine,
        puller: KvPuller,
        *,
        limits: Limits,
        block_size: int,
        signature_model: SignatureModel | None,
        clock: Clock,
    ) -> None:
        self.port = 0
        self._config = config
        self._model = model
        self._engine = engine
        self._puller = puller
        self._limits = limits
        self._block_size = block_size
        self._signature_model = signature_model
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._last_received_s = 0.0

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Runs one request; leaving it early, however, aborts it and gives everything back."""
        self._last_received_s = self._clock.wall_s()
        spec = parse_generate(request, self._limits, _cache_salt(context))
        if spec.pull is not None:
            self._puller.check(spec)
        events: asyncio.Queue[Event] = asyncio.Queue()
        sequence = self._engine.submit(spec, events.put_nowait)
        answer = _Answer(spec)
        ended: Ended | None = None
        trailers: tuple[tuple[str, str], ...] = ()
        # An offered hand-over is the client's from the moment it is sent, even if it hangs up then.
        offered = False
        try:
            while ended is None:
                match await events.get():
                    case PullWanted(first_block=first_block):
                        began_s = self._clock.monotonic_s()
                        blocks = await self._puller.pull(spec, first_block)
                        trailers = _pulled(blocks, self._clock.monotonic_s() - began_s)
                        self._engine.deliver(sequence, first_block, blocks)
                    case TokenMade() as made:
                        chunk = answer.add(made, sequence.num_cached_tokens)
                        if spec.stream:
                            yield pb.GenerateResponse(chunk=chunk)
                    case Broken(error=error):
                        raise error
                    case Ended() as ended:
                        pass
            context.set_trailing_metadata((*_busy_times(sequence), *trailers))
            complete = answer.complete(ended, sequence.num_cached_tokens)
            if ended.lease is not None:
                complete.kv_transfer_params_json = self._hand_over(ended)
            offered = True
            yield pb.GenerateResponse(complete=complete)
        finally:
            self._engine.leave(sequence, keep_lease=offered)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends requests; their streams close with finish_reason "abort"."""
        self._engine.abort_ids(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        """Whether the worker takes requests, and if not why."""
        problem = self._engine.unhealthy or ("draining" if self._engine.draining else "")
        return pb.HealthCheckResponse(healthy=not problem, message=problem or "ok")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        """What the model is."""
        limits = self._limits
        return pb.GetModelInfoResponse(
            model_path=self._config.model_dir or self._config.model_name,
            is_generation=True,
            max_context_length=limits.max_context_tokens,
            vocab_size=limits.vocab_size,
            served_model_name=self._config.model_name,
            tokenizer_path=self._config.model_dir,
            model_type=self._model.family,
            architectures=["Qwen3MoeForCausalLM"],
            eos_token_ids=sorted(limits.eos_token_ids),
            bos_token_id=self._model.bos_token_id or 0,
            max_req_input_len=min(limits.max_context_tokens - 1, limits.pool_tokens),
            default_sampling_params_json=json.dumps({"temperature": 0.0}),
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """What the worker is, and how it hands KV over."""
        accounting = self._engine.accounting()
        return pb.GetServerInfoResponse(
            active_requests=accounting.num_running + accounting.num_waiting,
            is_paused=self._engine.draining,
            last_receive_timestamp=self._last_received_s,
            uptime_seconds=self._clock.monotonic_s() - self._started_s,
            server_type="vllm-grpc",
            kv_connector=KV_CONNECTOR,
            kv_role=_KV_ROLES[self._config.role],
            kv_engine_id=self._config.worker_id,
            data_parallel_size=1,
            kv_cache_dtype="float32",
            block_size=self._block_size,
            model_dtype="torch.float32",
            max_num_seqs=self._config.max_num_seqs,
        )

    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        """How it stands.

        Used tokens are those of blocks that running requests or unpulled hand-overs hold or have
        reserved; cached blocks nobody holds are free.
        """
        now = self._engine.accounting()
        in_use, total = now.blocks_in_use, now.blocks_total
        hit_rate = now.num_cached_prompt_tokens / max(now.num_prompt_tokens, 1)
        load = pb.SchedulerLoad(
            num_running_reqs=now.num_running,
            num_waiting_reqs=now.num_waiting,
            num_total_reqs=now.num_running + now.num_waiting,
            num_used_tokens=in_use * self._block_size,
            max_total_num_tokens=total * self._block_size,
            token_usage=in_use / total,
            gen_throughput=self._engine.output_tokens_per_s(),
            cache_hit_rate=hit_rate,
            utilization=now.num_running / self._config.max_num_seqs,
            max_running_requests=self._config.max_num_seqs,
            num_waiting_uncached_tokens=now.num_uncached_waiting_tokens,
        )
        stamp = datetime.datetime.fromtimestamp(self._clock.wall_s(), datetime.UTC)
        return pb.GetLoadsResponse(
            timestamp=stamp.isoformat(), version="eldr-embedded", dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as one zip archive; the last chunk carries its SHA-256."""
        data = await asyncio.to_thread(zip_tokenizer, self._config.model_dir)
        parts = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
        for part in parts[:-1]:
            yield common_pb2.GetTokenizerChunk(data=part)
        digest = hashlib.sha256(data).hexdigest()
        yield common_pb2.GetTokenizerChunk(data=parts[-1], sha256=digest)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        """Forgets cached prefixes once no request is in flight, at most `timeout_s` later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(request.timeout_s, 0.0)):
                while not self._engine.flush_cache():
                    await asyncio.sleep(_POLL_S)
                return common_pb2.FlushCacheResponse(success=True, message="flushed")
        message = f"requests still in flight after {request.timeout_s:g} s"
        return common_pb2.FlushCacheResponse(success=False, message=message)

    def _hand_over(self, ended: Ended) -> str:
        lease, model = ended.lease, self._signature_model
        assert lease is not None
        assert ended.counts is not None
        signature = None
        if model is not None:
            masked = model.mask(ended.counts)
            signature = encode_signature(masked, lease.num_tokens, model.mask_version)
        return encode_hand_over(
            HandOver(
                remote_host=self._config.advertise_host or self._config.host,
                remote_port=self.port,
                remote_block_ids=lease.block_ids,
                remote_request_id=lease.remote_request_id,
                lease=lease.lease_id,
                eldr_sig=signature,
            )
        )


class _Answer:
    """Gathers a request's tokens into messages."""

    def __init__(self, spec: GenerateSpec) -> None:
        self._spec = spec
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, made: TokenMade, cached_tokens: int) -> pb.GenerateStreamChunk:
        """Notes one token; returns its chunk."""
        self._token_ids.append(made.token_id)
        chunk = pb.GenerateStreamChunk(
            token_ids=[made.token_id],
            prompt_tokens=len(self._spec.token_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=cached_tokens,
        )
        if made.logprobs is not None:
            self._logprobs.append(made.logprobs)
            chunk.output_logprobs.CopyFrom(_logprobs_message([made.token_id], [made.logprobs]))
        return chunk

    def complete(self, ended: Ended, cached_tokens: int) -> pb.GenerateComplete:
        """The closing message."""
        message = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=ended.reason.value,
            prompt_tokens=len(self._spec.token_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=cached_tokens,
        )
        if ended.matched_stop is not None:
            message.matched_token_id = ended.matched_stop
        if self._logprobs:
            message.output_logprobs.CopyFrom(_logprobs_message(self._token_ids, self._logprobs))
        return message


def _logprobs_message(token_ids: list[int], reports: list[TokenLogprobs]) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_ids=token_ids,
        token_logprobs=[report.chosen for report in reports],
        top_logprobs=[
            pb.TopLogProbs(values=report.top_values, token_ids=report.top_ids) for report in reports
        ],
    )


def _cache_salt(context: grpc.aio.ServicerContext) -> str:
    given = [value for key, value in context.invocation_metadata() or () if key == CACHE_SALT_KEY]
    if not given:
        return ""
    salt = given[0]
    if len(given) > 1 or not isinstance(salt, str) or not 1 <= len(salt) <= _MAX_SALT_CHARACTERS:
        rule = f"must be given once, 1 to {_MAX_SALT_CHARACTERS} characters"
        raise InvalidRequest(CACHE_SALT_KEY, given, rule)
    return salt


def _pulled(blocks: KvBlocks, seconds: float) -> tuple[tuple[str, str], ...]:
    """The hand-over in figures; nothing where the prompt's blocks were all here."""
    arrays = blocks.keys, blocks.values, blocks.counts
    num_bytes = sum(array.nbytes for array in arrays)
    if not num_bytes or seconds <= 0.0:
        return ()
    moved = Pulled(num_blocks=len(blocks.counts), num_bytes=num_bytes, seconds=seconds)
    return moved.trailers()


def _busy_times(sequence: Sequence) -> tuple[tuple[str, str], ...]:
    times = {
        "eldr-busy-arrived-s": sequence.arrived_busy_s,
        "eldr-busy-first-token-s": sequence.first_token_busy_s,
        "eldr-busy-last-token-s": sequence.last_token_busy_s,
    }
    return tuple((key, f"{value:.9f}") for key, value in times.items() if value is not None)
