"""Compiling from shapes: the report, the planner that reads it, running out of memory."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from bucket_planner.cost_file import load_compiler_report
from eldr_jax import compile_report
from eldr_jax.ahead_of_time import (
    CompileJob,
    Program,
    ProgramOutOfMemoryError,
    compile_program,
    in_words,
    program_arguments,
)
from eldr_jax.compile_report import CompileOptions, compile_all
from eldr_jax.config import ModelConfig
from eldr_jax.expert_parallel import sharded_step
from eldr_jax.sharding import MeshPlan, ShardingError, make_mesh, plan_for
from eldr_jax.topology import parse_target

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=48,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    num_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
)
PREFILL = Program(phase="prefill", num_tokens=64, num_sequences=4)
LABELS = ("prefill of 64 tokens", "decode of 4 requests")
DECODE = Program(phase="decode", num_tokens=4, num_sequences=4)


@pytest.fixture(scope="module")
def job():
    plan = MeshPlan()
    return CompileJob(
        config=CONFIG,
        plan=plan,
        mesh=make_mesh(plan, jax.devices()[:1]),
        dtype="float32",
        block_size=16,
        num_blocks=32,
        max_context_tokens=128,
        histogram="xla",
        compiler_options={},
    )


@pytest.fixture
def known_kernel_time(monkeypatch):
    """A kernel time without the TPU compiler."""

    def compile_calls(chip, specs):
        return [(spec, {"kernel_bundles": 1750, "static_us": 1.5}) for spec in specs]

    monkeypatch.setattr(compile_report, "compile_calls", compile_calls)


def options_of(tmp_path, programs=(PREFILL, DECODE), hbm_bytes=2**30):
    return CompileOptions(
        model="m.yaml", programs=programs, hbm_bytes=hbm_bytes, out=tmp_path, export=None
    )


def test_memory_and_flops_follow_from_the_shapes(job):
    compiled = compile_program(job, PREFILL)
    cache_bytes = 2 * CONFIG.num_layers * 32 * 16 * CONFIG.kv_width * 4
    assert compiled.argument_bytes >= CONFIG.num_params * 4 + cache_bytes
    assert compiled.argument_bytes <= (CONFIG.num_params * 4 + cache_bytes) * 1.05
    # The donated cache is written in place.
    assert compiled.output_bytes < cache_bytes / 4
    assert compiled.hbm_bytes > compiled.argument_bytes + compiled.temp_bytes
    assert compiled.compile_s > 0


def test_the_planner_reads_the_report(job, tmp_path, known_kernel_time):
    lines, labels = [], []
    target = parse_target("v6e:1x1")
    report = compile_all(job, target, options_of(tmp_path), labels.append, lines.append)
    assert labels == list(LABELS)
    assert len(lines) == 2
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    read = load_compiler_report(path)
    assert list(read.flops) == [64]
    assert read.flops[64] == report["buckets"][0]["flops"]
    assert read.compile_cost is not None
    histogram = report["decode"][0]["histogram"]
    assert histogram["kernel_cycles"] == 1750
    floor_us = report["decode"][0]["step_floor_us"]
    assert histogram["share_of_step_floor_pct"] == pytest.approx(150 / floor_us)


def test_more_than_the_given_memory_does_not_fit(job, tmp_path, known_kernel_time):
    options = options_of(tmp_path, programs=(DECODE,), hbm_bytes=2**20)
    lines = []
    report = compile_all(job, parse_target("v6e:1x1"), options, len, lines.append)
    assert report["decode"] == []
    assert lines == ["decode of 4 requests: does not fit"]
    assert "needs 0.00 GiB of memory on each device" in report["failed"][0]["message"]
    assert report["failed"][0]["needed_bytes"] > 2**20


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (63.63G) exceeds available HBM (31.25G).",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 63.63G of 31.25G hbm.",
    ],
)
def test_out_of_memory_is_said_in_words(job, message):
    error = ProgramOutOfMemoryError(message)
    assert error.needed_bytes == pytest.approx(63.63 * 2**30)
    text = in_words(error, job, PREFILL)
    assert text.startswith("out of memory: prefill of 64 tokens needs 63.63 GiB")
    assert "has 31.25 GiB for programs" in text
    assert "take a larger slice" in text


@pytest.mark.parametrize(
    ("usable", "tried"), [("0.1M", ["prefill of 64 tokens"]), ("31G", list(LABELS))]
)
def test_it_stops_where_weights_and_cache_alone_are_too_large(
    job, tmp_path, monkeypatch, usable, tried
):
    def too_large(job, program):
        raise ProgramOutOfMemoryError(f"RESOURCE_EXHAUSTED: Used 63.0G of {usable} hbm.")

    monkeypatch.setattr(compile_report, "compile_program", too_large)
    labels, lines = [], []
    target = parse_target("v6e:1x1")
    report = compile_all(job, target, options_of(tmp_path), labels.append, lines.append)
    assert labels == tried
    assert len(report["failed"]) == len(tried)
    assert ("no other size is tried" in lines[-1]) == (len(tried) == 1)


@pytest.mark.parametrize("message", ["too much", "Used 130.1M of 128.0M vmem"])
def test_a_message_about_something_else_is_passed_on(job, message):
    text = in_words(ProgramOutOfMemoryError(f"RESOURCE_EXHAUSTED: {message}"), job, PREFILL)
    assert f"the compiler says: RESOURCE_EXHAUSTED: {message}" in text


@pytest.mark.parametrize("program", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_a_step_waits_for_no_host(job, program):
    step = sharded_step(CONFIG, job.plan, job.mesh, program.phase, histogram="xla")
    text = step.lower(*program_arguments(job, program)).as_text()
    assert "stablehlo.dot_general" in text
    assert not re.search(r"stablehlo\.(infeed|outfeed|send|recv)|callback", text)


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ({"expert": 3}, "expert=3 must divide num_experts=16"),
        ({"tensor": 5}, "tensor=5 must divide moe_intermediate_size=32"),
        ({"expert": 16}, "expert\\*tensor=16 must divide num_heads=8"),
        ({"data": 0}, "data=0 must be at least 1"),
    ],
)
def test_a_mesh_that_the_model_cannot_be_cut_over_is_refused(plan, rule):
    with pytest.raises(ShardingError, match=rule):
        MeshPlan(**plan).check(CONFIG)


def test_experts_are_cut_first():
    assert plan_for(CONFIG, 8) == MeshPlan(expert=8)


def run_command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "eldr_jax.compile_main", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_wrong_target_exits_2():
    done = run_command("--model=configs/models/eldr_ref.yaml", "--target=v9:2x2")
    assert done.returncode == 2
    assert "chip 'v9' must be one of" in done.stderr


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("--hbm_gib=0", "--hbm_gib=0.0 must be positive"),
        ("--buckets=", "nothing to compile"),
        ("--kv_cache_tokens=1", "--kv_cache_tokens=1 must hold a sequence"),
        ("--out=/dev/null/report.json", "/dev/null"),
        ("--export=/dev/null/programs", "/dev/null"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_compiled(flag, rule):
    model = "--model=configs/models/eldr_ref.yaml"
    done = run_command(model, "--target=v6e:1x1", "--decode_batches=", flag)
    assert done.returncode == 2
    assert rule in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_model_larger_than_the_slice_exits_3():
    done = run_command(
        "--model=configs/models/qwen3_30b_a3b.yaml",
        "--target=v6e:1x1",
        "--buckets=128",
        "--decode_batches=",
    )
    assert done.returncode == 3
    assert "out of memory: prefill of 128 tokens needs" in done.stderr


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_model_that_fits_is_compiled_reported_and_exported(tmp_path):
    out, folder = tmp_path / "report.json", tmp_path / "programs"
    done = run_command(
        "--model=configs/models/eldr_ref.yaml",
        "--target=v6e:2x2",
        "--buckets=128",
        "--decode_batches=8",
        f"--out={out}",
        f"--export={folder}",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["mesh"] == {"data": 1, "expert": 4, "tensor": 1}
    for row in (report["buckets"][0], report["decode"][0]):
        # So small a model spends a tenth on norms and choices, which shapes do not count.
        assert 1.0 <= row["compiler_flops"] / row["expected_compiler_flops"] < 1.3
        assert row["histogram"]["kernel_cycles"] > 0
    for name in ("prefill_128", "decode_8"):
        assert b"StableHLO_v" in (folder / f"{name}.stablehlo").read_bytes()[:64]
