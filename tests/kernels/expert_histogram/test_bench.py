"""The bench command: what it refuses, what it skips, and one compilation per chip."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernels.expert_histogram import bench, tpu_compile

ROOT = Path(__file__).resolve().parents[3]


def config(**changes):
    fields = {
        "chips": ("v5e", "v6e", "tpu7x"),
        "experts": (64,),
        "top_ks": (4,),
        "block_sizes": (128,),
        "tokens": (512,),
        "num_layers": 8,
        "profile": False,
        "out": None,
    }
    return bench.BenchConfig(**(fields | changes))


def run_command(module, *flags):
    return subprocess.run(
        [sys.executable, "-m", f"kernels.expert_histogram.{module}", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_wrong_flag_exits_2_and_names_the_rule():
    done = run_command("bench_main", "--chips=v9")
    assert done.returncode == 2
    assert "--chips=v9 must be among v5e, v6e, tpu7x" in done.stderr


@pytest.mark.skipif(tpu_compile.has_libtpu(), reason="libtpu is installed")
@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed")
def test_without_compilers_it_says_so_and_writes_an_empty_report(tmp_path):
    out = tmp_path / "folder" / "report.json"
    lines = []
    bench.run(config(out=out), lines.append)
    assert lines[0].startswith("TPU: skipped, libtpu is not installed")
    assert lines[1].startswith("GPU: skipped, triton is not installed")
    report = json.loads(out.read_text())
    assert report["tpu"] == report["gpu"] == []
    assert "jax" in report["versions"]


@pytest.mark.skipif(not tpu_compile.has_libtpu(), reason="libtpu is not installed")
def test_the_kernel_compiles_for_every_chip(tmp_path):
    out = tmp_path / "report.json"
    bench.run(config(out=out), lambda line: None)
    rows = json.loads(out.read_text())["tpu"]
    assert [row["chip"] for row in rows] == ["v5e", "v6e", "tpu7x"]
    for row in rows:
        assert "error" not in row
        assert 0 < row["floor_us"] < row["static_us"] < 100
