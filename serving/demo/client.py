"""The demo's client: sends a round of prompts over gRPC and reads the workers' step logs.

It knows the product only by its doors: `VllmEngine` of the router for the prompts, `Router` for
the worker list, `eldr.embedded.v1.Worker` of each worker for its measured steps.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from serving.core.errors import ConfigError
from serving.demo.accounting import Step
from serving.proto import embedded_pb2, embedded_pb2_grpc, router_pb2, router_pb2_grpc

_FLUSH_WAIT_S = 10.0
_MAX_ID = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the set: `key` is its id, `domain` enters reports only."""

    key: str
    domain: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back.

    Attributes:
        request_id, prompt_key: whose.
        token_ids: output.
        ttft_s, tpot_s: on the workers' busy clocks (serving/demo/accounting.py).
        decode_worker: who made the tokens, "" when nobody did.
        error: status of a failed request, "" otherwise.
    """

    request_id: str
    prompt_key: str
    token_ids: tuple[int, ...]
    ttft_s: float
    tpot_s: float
    decode_worker: str
    error: str


def read_prompts(path: Path) -> list[Prompt]:
    """Reads a JSONL file of {id, prompt, domain?}.

    Raises:
        ConfigError: names file, line, field and rule.
    """
    prompts: dict[str, Prompt] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompts", str(path), f"cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"prompts[{path.name}:{number}]"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(where, line, f"must be JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(where, row, "must be an object with id and prompt")
        for field in ("id", "prompt"):
            if not isinstance(row.get(field), str) or not row[field]:
                raise ConfigError(f"{where}.{field}", row.get(field), "must be a non-empty string")
            if not _is_unicode(row[field]) or (field == "id" and len(row["id"]) > _MAX_ID):
                rule = f"must be valid Unicode, an id of at most {_MAX_ID} characters"
                raise ConfigError(f"{where}.{field}", row[field], rule)
        if row["id"] in prompts:
            raise ConfigError(f"{where}.id", row["id"], "must be unique in the file")
        domain = str(row.get("domain", ""))
        prompts[row["id"]] = Prompt(key=row["id"], domain=domain, text=row["prompt"])
    if len(prompts) < 2:
        raise ConfigError("prompts", str(path), "must hold two prompts or more: one is no batch")
    return list(prompts.values())


def _is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates, which no tokenizer and no message takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class DemoClient:
    """Open connections to a router and its workers; use it as an async context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._engine = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._router = router_pb2_grpc.RouterStub(self._channel)
        self._workers: dict[str, grpc.aio.Channel] = {}
        self._next_step: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        listed = await self._router.ListWorkers(router_pb2.ListWorkersRequest())
        for worker in listed.workers:
            self._workers[worker.worker_id] = grpc.aio.insecure_channel(worker.address)
        return self

    async def __aexit__(self, *error: object) -> None:
        for channel in (*self._workers.values(), self._channel):
            await channel.close()

    async def run(
        self,
        prompts: Sequence[Prompt],
        start_s: Sequence[float],
        *,
        run_id: str,
        max_tokens: int,
        progress: Callable[[int], None],
    ) -> list[Answer]:
        """Sends `prompts[i]` at `start_s[i]` seconds from now; waits for all answers.

        Args:
            prompts: what to send.
            start_s: when, ascending or not.
            run_id: prefix of the request ids.
            max_tokens: tokens of every answer (end-of-text is ignored).
            progress: called with the number of answers so far.
        """
        num_done = 0

        async def one(prompt: Prompt, delay_s: float) -> Answer:
            nonlocal num_done
            await asyncio.sleep(delay_s)
            answer = await self._generate(prompt, f"{run_id}/{prompt.key}", max_tokens)
            num_done += 1
            progress(num_done)
            return answer

        return await asyncio.gather(*map(one, prompts, start_s))

    async def _generate(self, prompt: Prompt, request_id: str, max_tokens: int) -> Answer:
        call = self._engine.Generate(
            vllm_engine_pb2.GenerateRequest(
                request_id=request_id,
                text=prompt.text,
                stream=True,
                sampling_params=vllm_engine_pb2.SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, ignore_eos=True
                ),
            )
        )
        token_ids: list[int] = []
        error, trailers = "", {}
        try:
            async for message in call:
                if message.HasField("chunk"):
                    token_ids.extend(message.chunk.token_ids)
            trailers = dict(await call.trailing_metadata() or ())
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"

        def told(name: str) -> float:
            return float(trailers.get(name, math.nan))

        gaps = max(len(token_ids) - 1, 1)  # the decode worker makes the first token as well
        decode_s = told("eldr-decode-busy-last-token-s") - told("eldr-decode-busy-first-token-s")
        return Answer(
            request_id=request_id,
            prompt_key=prompt.key,
            token_ids=tuple(token_ids),
            ttft_s=told("eldr-prefill-busy-first-token-s") - told("eldr-prefill-busy-arrived-s"),
            tpot_s=decode_s / gaps,
            decode_worker=str(trailers.get("eldr-decode-worker", "")),
            error=error,
        )

    async def forget(self) -> None:
        """Empties every worker's prefix cache, so that each run starts alike."""
        for worker_id, channel in self._workers.items():
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            request = common_pb2.FlushCacheRequest(timeout_s=_FLUSH_WAIT_S)
            if not (answer := await stub.FlushCache(request)).success:
                raise RuntimeError(f"worker {worker_id} kept its cache: {answer.message}")

    async def new_steps(self) -> list[Step]:
        """The workers' steps since the last call."""
        steps: list[Step] = []
        for worker_id, channel in self._workers.items():
            stub = embedded_pb2_grpc.WorkerStub(channel)
            while True:
                since = self._next_step.get(worker_id, 0)
                answer = await stub.GetSteps(embedded_pb2.GetStepsRequest(since=since))
                self._next_step[worker_id] = answer.next
                if not answer.steps:
                    break
                steps.extend(
                    Step(
                        worker_id=worker_id,
                        kind=step.kind,
                        duration_s=step.duration_s,
                        num_tokens=step.num_tokens,
                        distinct_experts=step.distinct_experts,
                        request_ids=tuple(step.request_ids),
                    )
                    for step in answer.steps
                )
        return steps

    async def explain(self, request_id: str) -> str:
        """The router's own account of a decision."""
        answer = await self._router.Explain(router_pb2.ExplainRequest(request_id=request_id))
        return answer.text
