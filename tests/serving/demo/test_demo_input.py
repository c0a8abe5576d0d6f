"""What the demo is given: prompts read strictly, long ones run in chunks, wrong flags refused."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from eldr_jax.config import ModelConfig
from eldr_jax.model import init_params
from eldr_jax.runner import PagedRunner
from serving.core.errors import ConfigError
from serving.demo.alone import generate_alone
from serving.demo.client import read_prompts

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)


def _runner(params, bucket):
    return PagedRunner(
        CONFIG,
        params,
        num_blocks=16,
        block_size=8,
        token_buckets=(bucket,),
        max_blocks_per_seq=8,
    )


def test_a_prompt_longer_than_a_bucket_gives_the_same_tokens():
    params = init_params(CONFIG, jax.random.key(2))
    prompts = {"long": np.arange(45, dtype=np.int32), "short": np.arange(3, dtype=np.int32)}
    done = []
    small = generate_alone(_runner(params, 16), prompts, 6, done.append)
    assert small == generate_alone(_runner(params, 48), prompts, 6, done.append)
    assert [len(tokens) for tokens in small.values()] == [6, 6]
    assert done == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"", "two prompts or more"),
        (b'{"id": "a", "prompt": "x"}', "two prompts or more"),
        (b'{"id": "a", "prompt": "\\ud800 hi"}', "valid Unicode"),
        (b'{"id": "%s", "prompt": "x"}' % (b"a" * 129), "at most 128"),
        (b"{", "must be JSON"),
        (b"[1]", "must be an object"),
        (b'{"id": "a"}', "non-empty string"),
        (b'{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "unique"),
    ],
)
def test_wrong_prompt_files_are_named(tmp_path, content, rule):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rule):
        read_prompts(path)


def test_shipped_prompts_cover_domains_and_languages():
    path = ROOT / "configs/prompts/demo.jsonl"
    prompts = read_prompts(path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) >= 96
    assert {"code", "math", "medical", "legal"} <= {prompt.domain for prompt in prompts}
    assert len({row["lang"] for row in rows}) >= 6


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--nosuch=1", "nosuch"),
        ("--load=nan", "load=nan"),
        ("--seed=-1", "seed"),
        ("--output_tokens=5000", "output_tokens=5000: must be < 1024"),
        ("--prompts=/nowhere.jsonl", "prompts='/nowhere.jsonl'"),
        ("--config=/nowhere.yaml", "/nowhere.yaml"),
    ],
)
def test_wrong_flags_exit_2(flag, named):
    result = subprocess.run(
        [sys.executable, "-m", "serving.demo_main", flag],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2
    assert named in result.stderr
