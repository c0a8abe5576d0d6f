"""The worker process: its settings, and its whole life."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from serving.core.errors import ConfigError
from serving.core.worker import Role
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.worker_main import WorkerProcessConfig

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "artefacts" / "reference_model"


def start(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "serving.worker_main", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size_tokens": 0}, "block_size_tokens"),
        ({"max_blocks_per_seq": -1}, "max_blocks_per_seq"),
        ({"drain_s": -1.0}, "drain_s"),
        ({"drain_s": float("nan")}, "drain_s"),
    ],
)
def test_wrong_settings_are_named(changes, field):
    settings = {
        "worker": EmbeddedWorkerConfig(worker_id="w", role=Role.BOTH),
        "model": "m",
        "signature": "",
        "num_blocks": 8,
        "block_size_tokens": 16,
        "max_blocks_per_seq": 8,
        "token_buckets": (16,),
        "drain_s": 1.0,
    }
    WorkerProcessConfig(**settings)
    with pytest.raises(ConfigError) as caught:
        WorkerProcessConfig(**settings | changes)
    assert caught.value.field == field


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--no_such_flag=1", "no_such_flag"),
        ("--role=cook", "prefill|decode|both"),
        ("--port=70000", "port=70000: must lie in [0, 65535]"),
        ("--token_buckets=16,x", "token_buckets"),
        ("--model=/no/such/folder", "/no/such/folder"),
        ("stray", "stray"),
    ],
)
def test_a_wrong_flag_exits_2_and_says_why(flag, told):
    process = start(flag)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 2
    assert told in complaint


@pytest.mark.e2e
def test_a_process_serves_and_drains_on_sigterm():
    if not (MODEL / "model.safetensors").is_file():
        pytest.skip("the reference model's weights are not built")
    process = start("--role=both", "--num_blocks=32", "--token_buckets=16", f"--model={MODEL}")
    try:
        assert process.stdout is not None
        ready = ""
        for line in process.stdout:
            if line.startswith("ready"):
                ready = line
                break
        address = re.fullmatch(r"ready worker_id=\S+ role=both address=(127\.0\.0\.1:\d+)\n", ready)
        assert address, f"no ready line, got {ready!r}"
        with grpc.insecure_channel(address[1]) as channel:
            answers = list(
                pb_grpc.VllmEngineStub(channel).Generate(
                    pb.GenerateRequest(
                        request_id="r",
                        tokenized=pb.TokenizedInput(input_ids=range(1, 40)),
                        sampling_params=pb.SamplingParams(max_tokens=5, ignore_eos=True),
                        stream=True,
                    ),
                    timeout=60,
                )
            )
        assert len(answers) == 6
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert rest.endswith("stopped\n")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.e2e
def test_a_worker_told_to_stop_compiles_no_further():
    process = start(f"--model={MODEL}", "--role=both", "--num_blocks=32")
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("compiled 1 of 6"), first
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert rest.startswith("stopped before it was ready\n")
        assert "ready worker_id" not in rest
        assert "compiled 4" not in rest
    finally:
        process.kill()
        process.communicate()
