"""The binaries as an operator calls them: flags in, files or exit 2 out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def call(main: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"calibration.{main}", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_fit_then_evaluate(topic_capture_dir, held_out_capture_dir, tmp_path):
    artefact = tmp_path / "artefact"
    fit = call("fit_main", f"--capture={topic_capture_dir}", f"--out={artefact}", "--regions=2,4")
    assert fit.returncode == 0, fit.stderr
    assert "fit: layer mask" in fit.stderr
    commands = tmp_path / "commands"
    commands.write_text("make it again")
    report, card = tmp_path / "report.json", tmp_path / "README.md"
    evaluate = call(
        "evaluate_main",
        f"--artefact={artefact}",
        f"--capture={held_out_capture_dir}",
        f"--out={report}",
        f"--card={card}",
        f"--card_commands={commands}",
        "--batches=8",
    )
    assert evaluate.returncode == 0, evaluate.stderr
    written = json.loads(report.read_text())
    assert written["schema_version"] == 1
    assert written["artefact"] in card.read_text()
    assert written["metrics"]["spearman"] > 0.5


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        ("fit_main", ["--capture=nowhere", "--out=x"], ["nowhere", "must be readable"]),
        ("fit_main", ["--capture=x", "--out=x", "--regions=2,two"], ["regions", "whole numbers"]),
        ("fit_main", ["--capture=x", "--out=x", "--num_pairs=0"], ["num_pairs", ">= 1"]),
        ("evaluate_main", ["--capture=x", "--out=x", "--artefact=no"], ["no", "cannot be read"]),
        ("evaluate_main", ["--capture=x", "--out=x", "--card=c"], ["card_commands", "required"]),
        ("capture_main", ["--out=x"], ["corpora", "--prompts"]),
        ("capture_main", ["--out=x", "--corpora=c", "--model=no"], ["no"]),
    ],
)
def test_what_is_wrong_is_named_and_exits_2(main, arguments, words):
    done = call(main, *arguments)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
