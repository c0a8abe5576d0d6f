from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.core.decision import decode_line
from serving.core.errors import ConfigError
from serving.replay.bank import write_bank
from serving.replay.compare import BEST, RunResult, compare, interval
from serving.replay.config import load_replay
from serving.replay.report import ReplayRunner

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
schema_version: 1
name: small
scenario:
  bank: bank.npz
  latency: latency.yaml
  fleet: {num_prefill: 2, num_decode: 3, max_num_seqs: 6, kv_blocks: 64, chunk_tokens: 64}
  requests: {num_measured: 30, output_tokens: 10}
cells:
  - {name: light, group: g, change: {load: {mean_batch: 2}}}
  - {name: heavy, group: g, change: {load: {mean_batch: 4}}, policies: [jsq, rr]}
policies: [{name: jsq}, {name: rr}, {name: p2c, label: two}]
baselines: [jsq, rr]
seeds: [0, 1]
quick: {seeds: [0], scenario: {requests: {num_measured: 10}}}
"""


@pytest.fixture
def folder(tmp_path, make_bank, latency_text):
    (tmp_path / "latency.yaml").write_text(latency_text)
    (tmp_path / "c.yaml").write_text(CONFIG)
    write_bank(tmp_path / "bank.npz", make_bank())
    return tmp_path


def told(runner: ReplayRunner) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []
    runner.on_run(lambda name, num: seen.append((name, num)))
    return seen


def test_a_report_says_what_the_contract_says_and_is_the_same_twice(folder):
    config = load_replay(folder / "c.yaml")
    for out in ("one", "two"):
        ReplayRunner(config, folder / out).run()
    one = (folder / "one" / "report.json").read_bytes()
    assert one == (folder / "two" / "report.json").read_bytes()
    report = json.loads(one)
    assert report["schema_version"] == 1
    assert len(report["cells"]) == 2 * (3 + 2)
    assert set(report["cells"][0]) == {"cell", "policy", "seed", "metrics"}
    assert set(report["comparisons"][0]) >= {
        "cell",
        "policy",
        "against",
        "metric",
        "mean_pct",
        "ci_low_pct",
        "ci_high_pct",
        "per_seed_pct",
    }
    for line in (folder / "one" / "decisions.jsonl").read_text().splitlines():
        decode_line(line)


def test_finished_runs_are_kept_and_changed_ones_run_again(folder):
    config = load_replay(folder / "c.yaml")
    first = ReplayRunner(config, folder / "out")
    seen = told(first)
    report = first.run()
    assert len(seen) == first.num_runs() == 10
    assert all(num > 0 for _, num in seen)
    again = ReplayRunner(config, folder / "out")
    seen = told(again)
    assert again.run() == report
    assert [num for _, num in seen] == [0] * 10
    (folder / "c.yaml").write_text(CONFIG.replace("mean_batch: 4", "mean_batch: 5"))
    changed = ReplayRunner(load_replay(folder / "c.yaml"), folder / "out")
    seen = told(changed)
    changed.run()
    assert sum(num > 0 for _, num in seen) == 4
    text = (folder / "latency.yaml").read_text()
    (folder / "latency.yaml").write_text(text.replace("c2_us: 50.0", "c2_us: 51.0"))
    other = ReplayRunner(load_replay(folder / "c.yaml"), folder / "out")
    seen = told(other)
    other.run()
    assert all(num > 0 for _, num in seen)


def test_quick_is_the_files_small_set(folder):
    quick = load_replay(folder / "c.yaml", quick=True)
    assert quick.seeds == (0,)
    assert quick.cells[0].scenario.requests.num_measured == 10
    assert quick.cells[0].scenario.requests.output_tokens == 10


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("num_decode: 3", "num_decoders: 3", "num_decod"),
        ("num_decode: 3", "num_decode: 0", "num_decode"),
        ("mean_batch: 2", "mean_batch: -2", "mean_batch"),
        ("mean_batch: 2", "kind: azure", "path"),
        ("policies: [jsq, rr]", "policies: [nobody]", "policies"),
        ("name: heavy", "name: light", "cells.name"),
        ("label: two", "label: jsq", "policies.label"),
        ("baselines: [jsq, rr]", "baselines: [best]", "baselines"),
        ("schema_version: 1", "schema_version: 2", "schema_version"),
    ],
)
def test_a_wrong_file_names_the_field(folder, old, new, field):
    (folder / "c.yaml").write_text(CONFIG.replace(old, new, 1))
    with pytest.raises(ConfigError, match=field):
        load_replay(folder / "c.yaml")


def test_a_missing_bank_and_an_unknown_policy_are_named(folder):
    (folder / "c.yaml").write_text(CONFIG.replace("bank.npz", "none.npz"))
    with pytest.raises(Exception, match=r"none\.npz"):
        ReplayRunner(load_replay(folder / "c.yaml"), folder / "o").run()
    (folder / "c.yaml").write_text(CONFIG.replace("name: p2c", "name: p3c"))
    with pytest.raises(ConfigError, match="p3c"):
        ReplayRunner(load_replay(folder / "c.yaml"), folder / "o").run()


def result(cell: str, policy: str, seed: int, p50: float) -> RunResult:
    return RunResult(cell=cell, policy=policy, seed=seed, metrics={"tpot_ms_p50": p50})


def test_comparisons_pair_seeds_and_choose_the_best_baseline_by_its_mean():
    results = [
        *(result("c", "a", seed, v) for seed, v in enumerate([10.0, 20.0])),
        *(result("c", "b", seed, v) for seed, v in enumerate([14.0, 12.0])),
        *(result("c", "new", seed, v) for seed, v in enumerate([7.0, 9.0])),
        *(result("d", "a", seed, v) for seed, v in enumerate([10.0, 10.0])),
        *(result("d", "new", seed, v) for seed, v in enumerate([11.0, 11.0])),
    ]
    found = {
        (c.cell, c.policy, c.against): c
        for c in compare(
            results, groups={"c": "g", "d": "g"}, baselines=["a", "b"], references=["a"]
        )
    }
    best = found["c", "new", BEST]
    assert best.baseline == "b"
    np.testing.assert_allclose(best.per_seed_pct, [-50.0, -25.0])
    assert best.mean_pct == pytest.approx(-37.5)
    assert best.ci_low_pct == pytest.approx(-50.0)
    assert best.ci_high_pct == pytest.approx(-25.0)
    np.testing.assert_allclose(found["c", "new", "a"].per_seed_pct, [-30.0, -55.0])
    np.testing.assert_allclose(found["mean over g", "new", BEST].per_seed_pct, [-20.0, -7.5])
    assert ("c", "b", BEST) not in found
    assert ("mean over g", "b", "a") not in found  # b ran in one of the two cells only


def test_an_interval_covers_its_mean_and_narrows():
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=5).tolist(), rng.normal(size=100).tolist()
    for values in (few, many):
        low, high = interval(values)
        assert low <= np.mean(values) <= high
    assert np.ptp(interval(many)) < np.ptp(interval(few))
    assert interval([3.0]) == (3.0, 3.0)


def test_the_command_exits_2_naming_the_field(folder):
    (folder / "c.yaml").write_text(CONFIG.replace("num_decode: 3", "num_decod: 3"))
    done = subprocess.run(
        [sys.executable, "-m", "serving.replay_main", f"--config={folder}/c.yaml", "--out=o"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "num_decod" in done.stderr
    assert "nearest known key is 'num_decode'" in done.stderr


def test_every_replay_file_of_the_tree_reads():
    files = [*(ROOT / "configs/replay").glob("*.yaml")]
    files += [f for f in (ROOT / "configs/replay/eldr").glob("*.yaml") if f.stem != "workloads"]
    assert files
    for file in files:
        for quick in (False, True):
            config = load_replay(file, quick=quick)
            assert msgspec.json.encode(config)
