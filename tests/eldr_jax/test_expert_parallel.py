"""The sharded step on eight virtual devices: what one device computes, whatever the mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LOGIT_ERROR = 5e-5
"""Sums over devices add in another order; logits are up to about 10."""


@pytest.fixture(scope="module")
def lines():
    script = Path(__file__).with_name("sharded_cases.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_family_and_mesh_ran_both_phases(lines):
    ran = {(line["family"], tuple(line["mesh"]), line["phase"]) for line in lines}
    for phase in ("prefill", "decode"):
        assert {(family, mesh) for family, mesh, ran_phase in ran if ran_phase == phase} == {
            ("qwen3_moe", (1, 8, 1)),
            ("qwen3_moe", (2, 2, 2)),
            ("olmoe", (1, 4, 2)),
            ("gpt_oss", (1, 4, 2)),
            ("gemma4", (1, 4, 2)),
        }


@pytest.mark.parametrize("what", ["ids_equal", "counts_equal", "next_equal"])
def test_choices_equal_those_of_one_device(lines, what):
    assert [line for line in lines if not line[what]] == []


def test_logits_equal_those_of_one_device(lines):
    assert max(line["logit_error"] for line in lines) <= MAX_LOGIT_ERROR
