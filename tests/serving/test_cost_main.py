"""The cost binary: file, table, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.cost_main", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_table_and_file(tmp_path):
    out = tmp_path / "deep" / "cost.json"
    done = run("--table", f"--out={out}")
    assert done.returncode == 0, done.stderr
    cells = json.loads(out.read_text())["cells"]
    keys = {"variant", "hardware", "chips", "prefill_usd_per_mtok", "decode_usd_per_mtok"}
    assert all(keys | {"tpot_ms"} <= cell.keys() for cell in cells)
    assert len(done.stdout.splitlines()) >= len(cells) + 2
    assert "70b-int8 stands in for 70b-fp8" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--tabel",), ("tabel",)),
        (("--table", "--basis=spot"), ("basis", "spot")),
        (("--table", "--variants=nowhere.yaml"), ("nowhere.yaml",)),
        (("--table", "extra"), ("extra",)),
    ],
)
def test_wrong_flags_exit_2_and_name_the_field(arguments, facts):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for fact in facts:
        assert fact in done.stderr
