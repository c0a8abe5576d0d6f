"""The binaries: wrong input ends with status 2, a small job goes from corpora to a card."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rich.console

from eldr_jax import report_main, train_main
from eldr_jax.checkpoint import load_model_dir
from eldr_jax.config import ConfigError
from eldr_jax.training.data import HELD_OUT_CORPORA, TRAINING_CORPORA

REPO = Path(__file__).parents[2]
MODEL = """
schema_version: 1
name: tiny
model:
  vocab_size: 280
  hidden_size: 16
  num_layers: 1
  num_heads: 2
  num_kv_heads: 1
  head_dim: 8
  num_experts: 4
  num_experts_per_tok: 2
  moe_intermediate_size: 8
  tie_word_embeddings: true
  bos_token_id: 0
"""
RECIPE = """
schema_version: 1
model: {model}
num_steps: 3
batch_sequences: 4
sequence_tokens: 32
peak_learning_rate: 1.0e-3
final_learning_rate: 1.0e-4
warmup_steps: 1
balance_coefficient: 0.1
z_coefficient: 0.0001
information_coefficient: 0.1
information_target: 0.5
information_domains: [code, math]
domain_decay: 0.9
frequency_decay: 0.7
gate_input_decay: 0.5
checkpoint_steps: 100
log_steps: 1
"""


@pytest.fixture
def small_job(tmp_path: Path) -> train_main.TrainJob:
    corpora = tmp_path / "corpora"
    corpora.mkdir()
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]

    def rows(corpus: str, key: str, values: list[str]) -> list[dict[str, str]]:
        return [
            {
                "id": f"handbook/p{n}#{n}" if key == "lang" else f"{corpus}/{value}/{n}",
                key: value,
                "text": " ".join(rng.choice(words, 60)) + f" {value}",
            }
            for value in values
            for n in range(260 if key == "lang" else 24)
        ]

    domains = {
        "task_code": ("domain", ["code"]),
        "task_math": ("domain", ["math"]),
        "task_prompts": ("domain", ["code", "math"]),
        "language_debian_handbook": ("lang", ["de", "zh"]),
        "language_mgsm": ("lang", ["de", "zh"]),
    }
    for corpus in (*TRAINING_CORPORA, *HELD_OUT_CORPORA):
        lines = rows(corpus, *domains[corpus]) if corpus in domains else []
        if corpus == "language_mgsm":
            lines = [row | {"id": f"mgsm/{n}"} for n, row in enumerate(lines)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (corpora / f"{corpus}.jsonl").write_text(text)
    model = tmp_path / "tiny.yaml"
    model.write_text(MODEL)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=model))
    return train_main.TrainJob(
        recipe=recipe,
        corpora=corpora,
        run_dir=tmp_path / "run",
        tokenizer=None,
        stop_after=None,
    )


def _console() -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), width=200)


def test_from_corpora_to_a_card(small_job: train_main.TrainJob, tmp_path: Path) -> None:
    console = _console()
    train_main.run(small_job, console)
    model_dir = small_job.run_dir / "model"
    config, _ = load_model_dir(model_dir)
    assert config.vocab_size == 280
    card = model_dir / "README.md"
    job = report_main.ReportJob(
        model=model_dir,
        corpora=small_job.corpora,
        out=tmp_path / "report",
        card=card,
        run_dir=small_job.run_dir,
        recipe=small_job.recipe,
        max_texts=16,
        num_draws=12,
        seed=0,
    )
    summary = report_main.run(job, console)
    assert json.loads((tmp_path / "report/report.json").read_text()) == summary
    assert summary["groups"].keys() == {"task", "language", "language_mgsm"}
    assert summary["groups"]["task"]["loss"].keys() == {"code", "math"}
    assert "3 steps of 128 tokens" in card.read_text()
    # No terminal: one plain line per record.
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        f"step {step}" for step in (1, 2, 3)
    ]


def test_a_tokenizer_of_another_size_is_refused(small_job: train_main.TrainJob) -> None:
    job = train_main.TrainJob(
        recipe=small_job.recipe,
        corpora=small_job.corpora,
        run_dir=small_job.run_dir,
        tokenizer=REPO / "configs/artefacts/reference_model/tokenizer.json",
        stop_after=None,
    )
    console = _console()
    with pytest.raises(ConfigError, match=r"has 8192 tokens, vocab_size=280"):
        train_main.run(job, console)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eldr_jax.train_main"], "corpora"),
        (["eldr_jax.train_main", "--corpora=nowhere", "--recipe=nowhere.yaml"], "nowhere.yaml"),
        (["eldr_jax.report_main", "--corpora=x", "--num_draw=3"], "num_draw"),
        (["eldr_jax.report_main", "--corpora=x", "stray"], "'stray'"),
    ],
)
def test_wrong_input_ends_with_status_2(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPO,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
