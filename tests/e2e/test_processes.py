"""The fleet as real processes: a router, a prefill and two decode workers; one of them is killed.

Run by `make e2e`; each process compiles the reference model, so it takes a minute or two.
"""

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from serving.proto import embedded_pb2, embedded_pb2_grpc, router_pb2, router_pb2_grpc

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "configs/prompts/demo.jsonl"
START_S = 300.0
NUM_REQUESTS = 16
MAX_TOKENS = 48


class Process:
    """A child that prints lines; its own handle ends it."""

    def __init__(self, module: str, *flags: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first line from here on that matches."""
        while True:
            line = self._queue.get(timeout=timeout_s)
            assert line is not None, "ended early:\n" + "\n".join(self.lines)
            self.lines.append(line)
            if (match := re.search(pattern, line)) is not None:
                return match

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(30)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def fleet(tmp_path):
    """(router process, router address, worker id -> process)."""
    workers: dict[str, Process] = {}
    with contextlib.ExitStack() as stack:
        for worker_id, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
            workers[worker_id] = Process(
                "serving.worker_main",
                f"--role={role}",
                f"--worker_id={worker_id}",
                "--signature=configs/artefacts/signature_model",
                "--token_buckets=16,64,256",
            )
            stack.callback(workers[worker_id].stop)
        sections = []
        for worker_id, process in workers.items():
            address = process.wait_for(r"address=(\S+)", START_S).group(1)
            sections.append(
                {
                    "worker_id": worker_id,
                    "address": address,
                    "role": {"p": "prefill", "d": "decode"}[worker_id[0]],
                    "hardware": "cpu_embedded",
                    "capabilities": {"emits_signature": True, "kv_connector": "eldr_embedded"},
                }
            )
        config = yaml.safe_load((ROOT / "configs/serving/embedded.yaml").read_text())
        del config["embedded"]
        config["workers"] = sections
        config["server"]["port"] = 0
        config["model"]["tokenizer"] = str(ROOT / "configs/artefacts/reference_model")
        config["artefacts"]["signature"] = str(ROOT / "configs/artefacts/signature_model")
        config["costs"]["hardware_dir"] = str(ROOT / "configs/hardware")
        config["log"]["decisions"] = str(tmp_path / "decisions.jsonl")
        path = tmp_path / "server.yaml"
        path.write_text(yaml.safe_dump(config))
        router = Process("serving.server_main", f"--config={path}")
        stack.callback(router.stop)
        address = router.wait_for(r"listening on (\S+)", START_S).group(1)
        router.wait_for("^ready$", START_S)
        yield router, address, workers


async def _generate(channel, text, request_id):
    """(tokens, error or None)."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    call = stub.Generate(
        vllm_engine_pb2.GenerateRequest(
            request_id=request_id,
            text=text,
            stream=True,
            sampling_params=vllm_engine_pb2.SamplingParams(
                temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True
            ),
        ),
        timeout=240,
    )
    tokens: list[int] = []
    try:
        async for message in call:
            tokens.extend(message.chunk.token_ids)
    except grpc.aio.AioRpcError as error:
        return tokens, error
    return tokens, None


def _texts():
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    return [row["prompt"] for row in rows[:: len(rows) // NUM_REQUESTS]][:NUM_REQUESTS]


async def _wave(address, name, after_start=None):
    async with grpc.aio.insecure_channel(address) as channel:
        jobs = [
            asyncio.ensure_future(_generate(channel, text, f"{name}-{i}"))
            for i, text in enumerate(_texts())
        ]
        if after_start is not None:
            await after_start(channel)
        return await asyncio.gather(*jobs)


async def _busy_decoder(channel):
    """A decode worker with requests in flight."""
    router = router_pb2_grpc.RouterStub(channel)
    for _ in range(2400):
        listed = await router.ListWorkers(router_pb2.ListWorkersRequest())
        for worker in listed.workers:
            if worker.role == "decode" and worker.num_inflight >= 2:
                return worker.worker_id
        await asyncio.sleep(0.05)
    raise AssertionError("no decode worker ever held two requests")


def _reason(error):
    status = rpc_status.from_call(error)
    assert status is not None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info.reason
    raise AssertionError(f"no ErrorInfo in {status}")


def test_killing_a_decode_worker_loses_nothing_silently(fleet):
    router, address, workers = fleet
    calm = asyncio.run(_wave(address, "calm"))
    assert [error for _, error in calm] == [None] * NUM_REQUESTS
    assert {len(tokens) for tokens, _ in calm} == {MAX_TOKENS}

    killed = []

    async def kill_one(channel):
        worker_id = await _busy_decoder(channel)
        killed.append(worker_id)
        workers[worker_id].popen.send_signal(signal.SIGKILL)

    stormy = asyncio.run(_wave(address, "stormy", kill_one))
    assert killed
    for (tokens, error), (expected, _) in zip(stormy, calm, strict=True):
        if error is None:
            assert tokens == expected
        else:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert _reason(error) == "WORKER_LOST"
            assert tokens == expected[: len(tokens)]
    # The fleet has one decode worker left and serves on; nothing stays reserved or pinned.
    after = asyncio.run(_wave(address, "after"))
    assert [tokens for tokens, _ in after] == [tokens for tokens, _ in calm]
    asyncio.run(_nothing_left(address, killed[0]))

    router.popen.send_signal(signal.SIGTERM)
    router.wait_for("draining", 30)
    assert router.popen.wait(60) == 0
    for worker_id, process in workers.items():
        if worker_id not in killed:
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(60) == 0


async def _nothing_left(address, dead):
    async with grpc.aio.insecure_channel(address) as channel:
        listed = await router_pb2_grpc.RouterStub(channel).ListWorkers(
            router_pb2.ListWorkersRequest()
        )
    assert sum(worker.num_inflight for worker in listed.workers) == 0
    for worker in listed.workers:
        if worker.worker_id == dead:
            assert not worker.accepts
            continue
        async with grpc.aio.insecure_channel(worker.address) as channel:
            steps = await embedded_pb2_grpc.WorkerStub(channel).GetSteps(
                embedded_pb2.GetStepsRequest(since=2**62)
            )
        assert (steps.blocks_in_use, steps.leases_open) == (0, 0)
