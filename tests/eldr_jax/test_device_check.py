"""The device check: what it says without a device, and its prefill on whatever there is."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from eldr_jax import device_check_main
from eldr_jax.config import ModelConfig
from eldr_jax.device_check import check_prefill

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    tie_word_embeddings=True,
)


def run_command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "eldr_jax.device_check_main", *flags],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="this host has an accelerator")
def test_without_an_accelerator_it_says_so():
    done = run_command()
    assert done.returncode == 0
    assert done.stdout.splitlines() == [device_check_main.NO_DEVICE]


def test_counting_changes_nothing_in_the_output(draw_params):
    result = check_prefill(CONFIG, draw_params(CONFIG), bucket=40, rounds=2, seed=3)
    assert result.same_output
    assert result.counts_agree
    assert result.with_us > 0
    assert result.without_us > 0
