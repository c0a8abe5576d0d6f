from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from calibration import prepare_replay_main
from calibration.capture_checks import Geometry
from calibration.captures import CaptureWriter, PromptCapture, capture_in_memory, read_capture
from calibration.prepare_replay_main import PrepareConfig, load_prepare, run
from serving.core.errors import ConfigError
from serving.replay.bank import read_bank
from serving.signatures.artefact import load_artefact

REPOSITORY = Path(__file__).resolve().parents[2]
GEOMETRY = Geometry(num_layers=2, num_experts=8, top_k=2)
PREPARE = """
schema_version: 1
workloads: workloads.yaml
num_calibrate: 12
num_serve: 10
rows_per_prompt: 3
num_regions: [2]
sets:
  - workload: tiny
    seeds: [0, 1]
    token_table: true
    fits: [{}, {name: no-idf, idf: false}, {name: no-mask, layer_mask: false},
           {name: half, domains: [a]}]
"""
WORKLOADS = """
schema_version: 1
workloads:
  - name: tiny
    group: task
    substrate: olmoe
    geometry: {num_layers: 2, num_experts: 8, top_k: 2}
    mix: {a: 0.5, b: 0.5}
    tables: {"": wiki}
    min_prompt_tokens: 2
    max_prompt_tokens: 6
    decode_tokens: 5
"""


def prompt(number: int, seed: int, num_decode: int, *, keep: bool) -> PromptCapture:
    rng = np.random.default_rng([seed, number])

    def routed(count: int) -> np.ndarray:
        rows = [[rng.permutation(8)[:2] for _ in range(2)] for _ in range(count)]
        return np.array(rows, np.int32).reshape(count, 2, 2)

    def counted(experts: np.ndarray) -> np.ndarray:
        counts = [np.bincount(experts[:, layer].ravel(), minlength=8) for layer in range(2)]
        return np.array(counts, np.uint32)

    prefill, decode = routed(4), routed(num_decode)
    return PromptCapture(
        prompt_id=f"p{number}",
        domain="ab"[number % 2],
        token_ids=np.arange(4, dtype=np.int32) + number,
        prefill=counted(prefill),
        decode=counted(decode),
        decode_experts=decode,
        prefill_experts=prefill if keep else None,
    )


class DrawnSource:
    """Prompts drawn from a seed in place of texts and tables."""

    def __init__(self, corpora: str, routing: str) -> None:
        del corpora, routing

    def router(self, workload):
        return workload

    def captures(self, router, side, num_prompts, *, keep_prefill_experts=False):
        seed = 2 * router.seed + (side == "serve")
        for number in range(num_prompts):
            yield prompt(number, seed, router.decode_tokens, keep=keep_prefill_experts)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_replay_main, "ProfileSource", DrawnSource)
    monkeypatch.setattr(prepare_replay_main, "provenance_of", lambda router, side: {"side": side})
    (tmp_path / "prepare.yaml").write_text(PREPARE)
    (tmp_path / "workloads.yaml").write_text(WORKLOADS)
    return PrepareConfig(
        config=str(tmp_path / "prepare.yaml"),
        corpora="c",
        routing="r",
        out=str(tmp_path / "out"),
    )


def test_every_seed_gets_a_bank_and_its_fits_and_what_is_there_stays(config, tmp_path):
    assert run(config) == 10
    banks = [read_bank(tmp_path / f"out/tiny-s{seed}/bank.npz") for seed in (0, 1)]
    assert [bank.num_prompts for bank in banks] == [10, 10]
    assert not np.array_equal(banks[0].rows, banks[1].rows)
    fits = {
        name: load_artefact(tmp_path / f"out/tiny-s0/{name}")
        for name in ("fit", "fit-no-idf", "fit-no-mask", "fit-half")
    }
    assert fits["fit"].token_table is not None
    assert fits["fit-no-idf"].token_table is None
    assert (fits["fit-no-idf"].model.idf == 1.0).all()
    assert fits["fit-no-mask"].model.layers.tolist() == [0, 1]
    assert fits["fit-no-mask"].manifest.provenance["without"] == "layer_mask"
    assert fits["fit-half"].manifest.metrics["num_prompts"] == 6
    (tmp_path / "out/tiny-s1/bank.npz").unlink()
    assert run(config) == 1


def test_some_seeds_can_be_asked_for(config, tmp_path):
    some = dataclasses.replace(config, seeds=(1,))
    assert run(some) == 5
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny-s1"]
    with pytest.raises(ConfigError, match="seeds"):
        run(dataclasses.replace(config, seeds=(2,)))


def test_only_known_workloads_can_be_asked_for(config):
    wrong = PrepareConfig(
        config=config.config, corpora="c", routing="r", out=config.out, only=("big",)
    )
    with pytest.raises(ConfigError, match="must be a workload of the file"):
        run(wrong)


def test_the_shipped_file_loads():
    file = load_prepare(REPOSITORY / "configs/replay/eldr/prepare.yaml")
    assert file.sets[0].workload == "task_qwen3_30b"


def test_a_capture_in_memory_is_what_its_files_would_give(tmp_path):
    prompts = [prompt(n, 0, 3, keep=True) for n in range(5)]
    given = {"geometry": GEOMETRY, "model_name": "m", "provenance": {"texts": "t"}}
    writer = CaptureWriter(tmp_path / "c", chunk_prompts=2, **given)
    for item in prompts:
        writer.add(item)
    writer.close()
    read, made = read_capture(tmp_path / "c"), capture_in_memory(prompts, **given)
    assert made.prompt_ids == read.prompt_ids
    assert made.domains == read.domains
    for name in ("prefill", "decode", "token_ids", "decode_experts", "prefill_experts"):
        np.testing.assert_array_equal(getattr(made, name), getattr(read, name))
    half = made.of_domains(["b"])
    assert half.prompt_ids == ("p1", "p3")
    assert len(half.token_ids) == 8
    assert half.without_prefill_experts().prefill_experts is None
