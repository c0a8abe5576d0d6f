"""A whole router on a tiny random model, shared by the tests of its doors.

The model compiles once per session; every scenario gets a fresh server with its embedded
fleet on loopback, and must leave nothing behind: no reservation, no running request, no KV
block, no lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

if TYPE_CHECKING:
    from serving.app import App
    from serving.config import ServerConfig

VOCAB = 96
BLOCK = 4
CONTEXT = 96
Body = Callable[["Rig"], Awaitable[None]]


@dataclass(frozen=True)
class Failure:
    """A failed call, read."""

    code: grpc.StatusCode
    message: str
    reason: str
    domain: str
    facts: dict[str, str]
    retry_s: float | None

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Failure:
        from serving.engines.grpc_errors import rich_details

        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        delay_s = None
        for detail in rich_details(error).details:
            detail.Unpack(info)
            if detail.Unpack(retry):
                delay_s = retry.retry_delay.ToMilliseconds() / 1000
        return cls(
            code=error.code(),
            message=error.details() or "",
            reason=info.reason,
            domain=info.domain,
            facts=dict(info.metadata),
            retry_s=delay_s,
        )


@dataclass
class Answer:
    """What came of one Generate call."""

    tokens: list[int] = field(default_factory=list)
    complete: pb.GenerateComplete | None = None
    failure: Failure | None = None
    trailers: dict[str, str] = field(default_factory=dict)


@dataclass
class Rig:
    """A running server and stubs on its doors."""

    app: App
    channel: grpc.aio.Channel
    engine: pb_grpc.VllmEngineStub = field(init=False)
    router: Any = field(init=False)
    health: health_pb2_grpc.HealthStub = field(init=False)

    def __post_init__(self) -> None:
        from serving.proto import router_pb2_grpc

        self.engine = pb_grpc.VllmEngineStub(self.channel)
        self.router = router_pb2_grpc.RouterStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    @staticmethod
    def message(
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 6,
        *,
        stream: bool = True,
        **params,
    ) -> pb.GenerateRequest:
        """A GenerateRequest; `params` are sampling parameters."""
        params.setdefault("ignore_eos", True)
        return pb.GenerateRequest(
            request_id=request_id,
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, **params),
            stream=stream,
        )

    @staticmethod
    def prompt(seed: int, length: int) -> list[int]:
        """A random prompt."""
        return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()

    async def generate(
        self,
        message: pb.GenerateRequest,
        metadata: Sequence[tuple[str, str]] = (),
        on_token: Callable[[int], None] = lambda count: None,
    ) -> Answer:
        """Runs a call to its end, good or bad."""
        answer = Answer()
        call = self.engine.Generate(message, metadata=tuple(metadata), timeout=60)
        try:
            async for item in call:
                if item.HasField("complete"):
                    answer.complete = item.complete
                else:
                    assert item.chunk.completion_tokens == len(item.chunk.token_ids)
                    answer.tokens.extend(item.chunk.token_ids)
                    on_token(len(answer.tokens))
            answer.trailers = {k: str(v) for k, v in await call.trailing_metadata() or ()}
        except grpc.aio.AioRpcError as error:
            answer.failure = Failure.of(error)
        return answer

    @staticmethod
    async def failure(call: Awaitable[Any]) -> Failure:
        """The failure of a call that must fail."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return Failure.of(caught.value)

    def held(self, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """Everything that must be nothing once all requests have ended.

        Args:
            ignore: ids of workers that were killed.
        """
        from serving.core.worker import Phase

        app = self.app
        held: dict[str, Any] = {
            "running": app.relay.num_running,
            "open requests": app.router.num_open,
            "reservations": len(app.fleet.ledger),
        }
        for phase in Phase:
            view = app.router.view(phase)
            for worker, num in zip(view.workers, view.num_inflight, strict=True):
                # What a dead worker last said of itself stays until it is back.
                if worker.worker_id not in ignore:
                    held[f"{worker.worker_id} {phase.value} inflight"] = int(num)
        assert app.embedded is not None
        for worker_id, worker in app.embedded.workers.items():
            if worker_id in ignore:
                continue
            now = worker.accounting()
            held[f"{worker_id} blocks"] = now.blocks_in_use
            held[f"{worker_id} leases"] = now.leases_open
            held[f"{worker_id} requests"] = now.num_running + now.num_waiting
        return {name: value for name, value in held.items() if value}

    async def settled(self, *, ignore: Sequence[str] = ()) -> None:
        """Waits until nothing is held; fails when something stays.

        Args:
            ignore: ids of workers that were killed.
        """
        held: dict[str, Any] = {}
        # A hand-over whose answer crossed its caller's hang-up is freed by its lease (30 s).
        for _ in range(2000):
            await self.app.relay.settle()
            held = self.held(ignore)
            if not held:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"something stayed: {held}")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a word-level tokenizer."""
    import jax

    from eldr_jax.checkpoint import save_model_dir
    from eldr_jax.config import ModelConfig
    from eldr_jax.model import init_params

    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
    )
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path_factory.mktemp("model")
    save_model_dir(folder, config, init_params(config, jax.random.key(0)), tokenizer.to_str())
    return folder


@pytest.fixture(scope="session")
def signature_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signature artefact of the tiny model's geometry, from random counts."""
    from serving.signatures.artefact import CalibrationSet, write_artefact
    from serving.signatures.profiles import DecodeProfiles

    rng = np.random.default_rng(0)
    num_prompts, experts, top_k, length = 12, 8, 2, 20

    def counts() -> np.ndarray:
        picks = rng.random((num_prompts, 2, length, experts)).argsort(axis=-1)[..., :top_k]
        one_hot = np.eye(experts, dtype=np.uint32)[picks]
        return one_hot.sum(axis=(2, 3), dtype=np.uint32)

    prefill, decode = counts(), counts()
    vectors = prefill.reshape(num_prompts, -1).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    folder = tmp_path_factory.mktemp("signature")
    write_artefact(
        folder,
        model_name="tiny",
        layers=np.arange(2, dtype=np.int32),
        idf=np.ones((2, experts), np.float32),
        num_layers=2,
        top_k=top_k,
        profiles=DecodeProfiles(
            centroids=vectors[:2],
            profiles=(decode[:2] / length).reshape(2, -1).astype(np.float32),
            sizes=np.array([6, 6], np.int32),
            layer_scale=np.ones(2, np.float32),
            shrink_tokens=16.0,
        ),
        calibration=CalibrationSet(
            prefill=prefill,
            decode=decode,
            num_decode_tokens=np.full(num_prompts, length, np.int32),
        ),
        token_table=None,
        prefitted={},
        regions_seed=0,
        step_time=None,
        metrics={},
        provenance={"test": "random counts"},
    )
    return folder


@pytest.fixture(scope="session")
def server_config(model_dir: Path, signature_dir: Path) -> Callable[..., ServerConfig]:
    """Makes configs; keyword arguments replace sections (dicts of changed fields)."""
    from serving.config import ServerConfig

    slo = {
        "A": {"ttft_p99_s": 30.0, "tpot_p99_s": 10.0, "lambda_usd_per_s": 1e-2},
        "B": {"ttft_p99_s": 60.0, "tpot_p99_s": 20.0, "lambda_usd_per_s": 1e-3},
        "C": {"deadline_s": 3600.0, "lambda_usd_per_s": 1e-5},
    }
    step = dict.fromkeys(("base_s", "c0_s", "c2_s", "c3_s", "attention_s"), 1e-4)
    cell = {
        "model": "tiny",
        "hardware": "cpu_embedded",
        "version": "test",
        "prefill": {"chunk_s": 1e-3, "token_s": 1e-4},
        "step": {**step, "num_moe_layers": 2, "num_experts": 8, "top_k": 2},
        "kv_bytes_per_token": 128,
    }
    hardware_dir = Path(__file__).parents[2] / "configs" / "hardware"
    base: dict[str, Any] = {
        "schema_version": 1,
        "server": {"port": 0, "drain_grace_s": 5.0},
        "router": {
            "compiled": False,
            "lease_s": 60.0,
            "sweep_every_s": 0.05,
            "stale_after_s": 60.0,
        },
        "slo": slo,
        "model": {"name": "tiny", "tokenizer": str(model_dir)},
        "artefacts": {"signature": str(signature_dir)},
        "embedded": {
            "model_dir": str(model_dir),
            "num_prefill": 2,
            "num_decode": 2,
            "num_blocks": 96,
            "block_size_tokens": BLOCK,
            "max_blocks_per_seq": CONTEXT // BLOCK,
            "token_buckets": [16],
        },
        "telemetry": {"poll_interval_s": 0.1, "lost_after": 2, "timeout_s": 30.0},
        "costs": {"hardware_dir": str(hardware_dir), "cells": [cell]},
    }

    def make(**sections: dict[str, Any]) -> ServerConfig:
        merged = {**base}
        for name, changes in sections.items():
            merged[name] = {**merged.get(name, {}), **changes}
        return msgspec.convert(merged, ServerConfig)

    return make


@pytest.fixture(scope="session")
def shared_runner(server_config: Callable[..., ServerConfig], model_dir: Path) -> Any:
    """The tiny model, compiled once."""
    from serving.engines.embedded_fleet import load_runner

    section = server_config().embedded
    assert section is not None
    runner = load_runner(section, model_dir)
    runner.warm_up(runner.new_pool())
    return runner


@pytest.fixture(scope="session")
def alone(shared_runner: Any) -> Callable[[Sequence[int], int], list[int]]:
    """Tokens of a prompt when nothing but the model is involved."""
    from eldr_jax.runner import Chunk

    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def run(prompt: Sequence[int], num_tokens: int) -> list[int]:
        pool = shared_runner.new_pool()
        blocks = np.arange(shared_runner.max_blocks_per_seq, dtype=np.int32)
        ids, start, tokens = list(prompt), 0, []
        while len(tokens) < num_tokens:
            chunk = Chunk(token_ids=np.array(ids[:16], np.int32), start=start, block_ids=blocks)
            pool, result = shared_runner.step(pool, [chunk])
            start += len(ids[:16])
            ids = ids[16:]
            if not ids:
                ids = [int(result.next_tokens[0])]
                tokens += ids
        return tokens

    def remembered(prompt: Sequence[int], num_tokens: int) -> list[int]:
        key = (tuple(prompt), num_tokens)
        if key not in known:
            known[key] = run(prompt, num_tokens)
        return known[key]

    return remembered


@pytest.fixture
def scenario(server_config: Callable[..., ServerConfig], shared_runner: Any) -> Callable[..., None]:
    """Runs a coroutine function on a rig; afterwards nothing may be held."""

    from serving.app import App

    def run(body: Body, *, killed: Sequence[str] = (), **sections: dict[str, Any]) -> None:
        async def main() -> None:
            async with (
                App(server_config(**sections), runner=shared_runner) as app,
                grpc.aio.insecure_channel(app.address) as channel,
            ):
                rig = Rig(app, channel)
                await body(rig)
                await rig.settled(ignore=killed)

        asyncio.run(main())

    return run
