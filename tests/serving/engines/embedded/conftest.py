"""A tiny random model, shared by all tests, and workers around it that must end clean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from eldr_jax.config import ModelConfig
from eldr_jax.model import block_shapes
from eldr_jax.runner import Chunk, PagedRunner
from serving.core.worker import Role
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.engines.embedded.turn import StepTurn
from serving.engines.embedded.worker import EmbeddedWorker
from serving.proto import embedded_pb2_grpc
from serving.signatures.model import SignatureModel

BLOCK = 4
NUM_BLOCKS = 48
VOCAB = 96


@dataclass
class Client:
    """A worker and stubs on it."""

    worker: EmbeddedWorker
    channel: grpc.aio.Channel
    engine: pb_grpc.VllmEngineStub = field(init=False)
    kv: embedded_pb2_grpc.KvStub = field(init=False)
    steps: embedded_pb2_grpc.WorkerStub = field(init=False)

    def __post_init__(self) -> None:
        self.engine = pb_grpc.VllmEngineStub(self.channel)
        self.kv = embedded_pb2_grpc.KvStub(self.channel)
        self.steps = embedded_pb2_grpc.WorkerStub(self.channel)

    async def complete(
        self, request: pb.GenerateRequest, metadata: tuple[tuple[str, str], ...] = ()
    ) -> pb.GenerateComplete:
        """The closing message; checks that the chunks before it agree with it."""
        chunks: list[int] = []
        async for answer in self.engine.Generate(request, metadata=metadata or None, timeout=300):
            if answer.HasField("complete"):
                assert chunks == (list(answer.complete.output_ids) if request.stream else [])
                return answer.complete
            chunks.extend(answer.chunk.token_ids)
            assert answer.chunk.completion_tokens == len(chunks)
        raise AssertionError("no closing message")

    async def idle(self) -> None:
        """Waits until nothing is held; fails when something stays."""
        for _ in range(6000):
            now = self.worker.accounting()
            if now.idle and now.blocks_in_use == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"something leaked: {now}")


def generate(
    request_id: str, prompt: Sequence[int], max_tokens: int = 6, *, stream: bool = True, **params
) -> pb.GenerateRequest:
    """A GenerateRequest; `params` are sampling parameters."""
    params.setdefault("ignore_eos", True)
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, **params),
        stream=stream,
    )


def prefill_of(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The prefill half of a request."""
    half = pb.GenerateRequest()
    half.CopyFrom(request)
    half.stream = False
    half.sampling_params.max_tokens = 1
    half.sampling_params.min_tokens = 0
    half.kv_transfer_params_json = json.dumps({"do_remote_decode": True})
    return half


def prompt_of(seed: int, length: int) -> list[int]:
    """A random prompt."""
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


@dataclass
class Rig:
    """What a scenario gets."""

    runner: PagedRunner
    signature_model: SignatureModel
    turn: StepTurn = field(default_factory=StepTurn)
    clients: list[Client] = field(default_factory=list)

    # Test modules cannot import a conftest: they find its makers here.
    generate = staticmethod(generate)
    prefill_of = staticmethod(prefill_of)
    prompt_of = staticmethod(prompt_of)

    async def start(self, role: Role, **options) -> Client:
        """A started worker; `runner` and `clock` among the options replace the usual ones."""
        runner, clock = options.pop("runner", self.runner), options.pop("clock", None)
        # Nothing may time out merely because the machine is busy.
        options = {"lease_s": 600.0, "pull_timeout_s": 300.0} | options
        config = EmbeddedWorkerConfig(
            worker_id=f"{role.value}{len(self.clients)}", role=role, **options
        )
        worker = EmbeddedWorker(
            config,
            runner,
            turn=self.turn,
            signature_model=self.signature_model,
            clock=clock,
        )
        await worker.start()
        client = Client(worker, grpc.aio.insecure_channel(worker.address))
        self.clients.append(client)
        return client

    async def hand_over(
        self, prefill: Client, decode: Client, request: pb.GenerateRequest
    ) -> pb.GenerateComplete:
        """Prefill on one worker, decode on the other, as a router does it."""
        first = await prefill.complete(prefill_of(request))
        assert list(first.output_ids)
        request.kv_transfer_params_json = first.kv_transfer_params_json
        complete = await decode.complete(request)
        assert complete.output_ids[0] == first.output_ids[0]
        return complete


@dataclass
class Alone:
    """What the model gives when nothing but the runner is involved."""

    tokens: list[int]
    counts: np.ndarray


class Reference:
    """Runs sequences one at a time, whole prompt first, then token by token."""

    def __init__(self, runner: PagedRunner) -> None:
        self._runner = runner
        self._known: dict[tuple[tuple[int, ...], int], Alone] = {}

    def __call__(self, prompt: Sequence[int], num_tokens: int) -> Alone:
        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            self._known[key] = self._run(list(prompt), num_tokens)
        return self._known[key]

    def _run(self, prompt: list[int], num_tokens: int) -> Alone:
        runner, pool = self._runner, self._runner.new_pool()
        blocks = np.arange(runner.max_blocks_per_seq, dtype=np.int32)[::-1].copy()
        counts = 0
        for start in range(0, len(prompt), runner.token_buckets[-1]):
            ids = np.array(prompt[start : start + runner.token_buckets[-1]], np.int32)
            chunk = Chunk(token_ids=ids, start=start, block_ids=blocks)
            pool, result = runner.step(pool, [chunk])
            counts = counts + result.counts[0].sum(axis=0, dtype=np.uint32)
        tokens = [int(result.next_tokens[0])]
        while len(tokens) < num_tokens:
            start = len(prompt) + len(tokens) - 1
            ids = np.array(tokens[-1:], np.int32)
            pool, result = runner.step(pool, [Chunk(token_ids=ids, start=start, block_ids=blocks)])
            tokens.append(int(result.next_tokens[0]))
        return Alone(tokens=tokens, counts=np.asarray(counts))


@pytest.fixture(scope="session")
def model_config() -> ModelConfig:
    return ModelConfig(
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
        bos_token_id=0,
        eos_token_id=0,
    )


def random_params(config: ModelConfig) -> dict:
    """Weights drawn with NumPy (JAX would compile each draw), wide enough that tokens vary."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("_norm"):
            return np.ones(shape, np.float32)
        return rng.normal(0, 0.5, shape).astype(np.float32)

    return {
        "embed": draw("embed", (config.vocab_size, config.hidden_size)),
        "final_norm": draw("final_norm", (config.hidden_size,)),
        "layers": [
            {name: draw(name, shape) for name, shape in block_shapes(config).items()}
            for _ in range(config.num_layers)
        ],
    }


@pytest.fixture(scope="session")
def runner(model_config: ModelConfig) -> PagedRunner:
    runner = PagedRunner(
        model_config,
        random_params(model_config),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        token_buckets=(16, 32),
        max_blocks_per_seq=24,
    )
    runner.warm_up(runner.new_pool())
    return runner


@pytest.fixture(scope="session")
def alone(runner: PagedRunner) -> Reference:
    return Reference(runner)


@pytest.fixture(scope="session")
def signature_model(model_config: ModelConfig) -> SignatureModel:
    layers = np.arange(model_config.num_layers, dtype=np.int32)
    return SignatureModel(
        version="test-1",
        mask_version="mask-all",
        layers=layers,
        num_layers=model_config.num_layers,
        num_experts=model_config.num_experts,
        top_k=model_config.num_experts_per_tok,
        idf=np.ones((len(layers), model_config.num_experts), np.float32),
    )


@pytest.fixture
def scenario(
    runner: PagedRunner, signature_model: SignatureModel
) -> Callable[[Callable[[Rig], Awaitable[None]]], None]:
    """Runs a coroutine function on a rig; afterwards no worker may hold anything."""

    @asynccontextmanager
    async def rig() -> AsyncIterator[Rig]:
        made = Rig(runner=runner, signature_model=signature_model)
        try:
            yield made
            for client in made.clients:
                await client.idle()
        finally:
            for client in made.clients:
                await client.channel.close()
                await client.worker.stop()
        for client in made.clients:
            assert client.worker.accounting().blocks_in_use == 0

    def run(body: Callable[[Rig], Awaitable[None]]) -> None:
        async def main() -> None:
            async with rig() as made:
                await body(made)

        asyncio.run(main())

    return run
