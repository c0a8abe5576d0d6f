"""The planner's binaries: output contract, progress on stderr, exit code 2 with field and rule."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"bucket_planner.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(1)
    rows = [
        json.dumps({"timestamp": 40 * i, "input_length": int(n), "output_length": 5})
        for i, n in enumerate(rng.integers(1, 900, 400))
    ]
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("semantics", ["prompt", "step"])
def test_plan_file(trace, tmp_path, semantics):
    out = tmp_path / "deep" / "plan.json"
    done = run(
        "plan_main",
        f"--trace={trace}",
        f"--semantics={semantics}",
        "--max_buckets=6",
        f"--out={out}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "held out" in done.stderr
    report = json.loads(out.read_text())
    assert {"buckets", "waste_tokens", "default", "optimal_waste_tokens", "heldout"} <= set(report)
    assert {"buckets", "waste_tokens"} <= set(report["default"])
    assert report["engine_flags"]
    assert len(report["buckets"]) <= 6


def test_cost_and_compiler_report(trace, tmp_path):
    compiled = {"buckets": [{"tokens": 128, "flops": 9e11, "compile_s": 3, "program_bytes": 1e6}]}
    (tmp_path / "compiled.json").write_text(json.dumps(compiled))
    out = tmp_path / "plan.json"
    done = run(
        "plan_main",
        f"--trace={trace}",
        "--max_buckets=6",
        "--cost=configs/buckets/v6e_qwen3_30b_cost.json",
        f"--compiler_report={tmp_path / 'compiled.json'}",
        "--compile_s_budget=60",
        f"--out={out}",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["compile_s"] <= 60
    assert set(report["compiler_flops_divergence_pct"]) == {"128"}


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--max_bucket=3",), ("max_bucket", "max_buckets")),
        (("--max_buckets=many", "--trace=x", "--out=y"), ("max_buckets", "many")),
        (("--max_buckets=0", "--trace=TRACE", "--out=y"), ("max_buckets", ">= 1")),
        (("--max_buckets=3", "--trace=nowhere.csv", "--out=y"), ("nowhere.csv", "readable")),
        (
            ("--max_buckets=3", "--trace=TRACE", "--out=y", "--compile_s_budget=9"),
            ("compile_s_budget", "--cost"),
        ),
        (("--max_buckets=3", "--trace=TRACE", "--out=y", "stray"), ("stray",)),
        (("--max_buckets=3", "--trace=TRACE", "--out=/dev/null/x"), ("out", "/dev/null/x")),
    ],
)
def test_wrong_flags_exit_2_and_name_the_field(trace, arguments, facts):
    done = run("plan_main", *(a.replace("TRACE", str(trace)) for a in arguments))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for fact in facts:
        assert fact in done.stderr


def test_bench_prints_a_row_per_job_and_writes_them(trace, tmp_path):
    out = tmp_path / "bench.json"
    done = run(
        "bench_main",
        f"--trace={trace}",
        "--max_buckets=4",
        "--max_num_batched_tokens=512",
        f"--out={out}",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["semantics"] for row in rows] == ["prompt", "step 512"]
    assert all(row["fitted_is_optimal"] for row in rows)
    assert "step 512" in done.stdout
    assert "2/2" in done.stderr


def test_importing_a_main_declares_no_flags():
    code = (
        "from absl import app, flags; before = set(flags.FLAGS);"
        "import bucket_planner.plan_main, bucket_planner.bench_main, serving.cost_main;"
        "assert set(flags.FLAGS) == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
