"""The binaries as an operator calls them: flags in, files or exit 2 out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from calibration import fit_main
from calibration.evaluate import EvaluationConfig
from serving.core.errors import ConfigError

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
        ("evaluate_main", ["--capture=x", "--out=x", "--card=c"], ["card_commands", "required"]),
        ("capture_main", ["--out=x"], ["corpora", "--prompts"]),
        ("profile_main", ["--out=x", "--sides=both"], ["sides"]),
    ],
)
def test_what_is_wrong_is_named_and_exits_2(main, arguments, words):
    done = call(main, *arguments)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


FIT = {
    "capture": "c",
    "out": "o",
    "latency_table": None,
    "latency_min_tokens": 16,
    "latency_max_tokens": 256,
    "num_pairs": 10,
    "num_clusters": 2,
    "shrink_tokens": 0.0,
    "regions": (2,),
    "seed": 0,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_pairs", 0),
        ("num_clusters", 0),
        ("latency_min_tokens", 0),
        ("latency_max_tokens", 15),
        ("shrink_tokens", -1.0),
        ("shrink_tokens", float("nan")),
        ("regions", (2, 2)),
        ("regions", (0,)),
        ("seed", -1),
    ],
)
def test_a_wrong_fit_config_names_the_field(field, value):
    fit_main.FitMainConfig(**FIT)
    with pytest.raises(ConfigError) as caught:
        fit_main.FitMainConfig(**FIT | {field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_pairs", 0), ("union_draws", 0), ("union_batches", (8, 0)), ("seed", -1)],
)
def test_a_wrong_evaluation_config_names_the_field(field, value):
    with pytest.raises(ConfigError) as caught:
        EvaluationConfig(**{field: value})
    assert caught.value.field == field
