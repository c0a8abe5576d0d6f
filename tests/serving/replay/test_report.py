from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats

from serving import replay_main
from serving.core.decision import decode_line
from serving.core.errors import ArtefactError, ConfigError
from serving.replay.bank import write_bank
from serving.replay.compare import BEST, RunResult, compare, holm, interval, t_test
from serving.replay.config import load_replay, load_suite
from serving.replay.report import ReplayRunner
from serving.replay_main import ReplayMainConfig

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
    assert set(report["cells"][0]) == {"cell", "policy", "seed", "metrics", "series"}
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
    assert len(seen) == first.config.num_runs == 10
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


def test_a_replay_that_may_not_go_on_reports_what_is_there(folder):
    config = load_replay(folder / "c.yaml")
    left = iter([True] * 7 + [False] * 3)
    some = ReplayRunner(config, folder / "out", may_begin=lambda: next(left)).run()
    assert some.num_missing == 3
    assert [(run.cell, run.seed) for run in some.cells].count(("heavy", 1)) == 0
    assert {run.seed for run in some.cells if run.cell == "light"} == {0, 1}
    whole = ReplayRunner(config, folder / "out").run()
    assert whole.num_missing == 0
    assert len(whole.cells) == 10


def test_two_processes_leave_what_one_leaves(folder):
    (folder / "c.yaml").write_text(
        CONFIG.replace("policies: [jsq, rr]}", "policies: [jsq, rr], num_seeds: 1}")
    )
    for jobs in (1, 2):
        given = {"out": str(folder / f"o{jobs}"), "config": str(folder / "c.yaml"), "jobs": jobs}
        (report,) = replay_main.run(ReplayMainConfig(**given))
        assert report.num_missing == 0
        assert [run.seed for run in report.cells if run.cell == "heavy"] == [0, 0]
        assert len(report.cells) == 2 * 3 + 2
    for name in ("report.json", "decisions.jsonl"):
        assert (folder / "o1" / name).read_bytes() == (folder / "o2" / name).read_bytes()
    (folder / "bank.npz").write_bytes(b"broken")
    with pytest.raises(ArtefactError, match="bank"):
        replay_main.run(
            ReplayMainConfig(out=str(folder / "o3"), config=str(folder / "c.yaml"), jobs=2)
        )


def test_a_rule_may_know_another_fit_than_its_cell(folder):
    known = "p2c, label: two, artefact: '{artefact}-else'"
    text = CONFIG.replace("  bank: bank.npz\n", "  bank: bank.npz\n  artefact: 'fit-{seed}'\n")
    (folder / "c.yaml").write_text(text.replace("p2c, label: two", known))
    for name in ("fit-0", "fit-1"):
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")
    runner = ReplayRunner(load_replay(folder / "c.yaml"), folder / "out")
    with pytest.raises(ArtefactError, match="fit-0"):
        runner.run()
    cell = runner.config.cells[0]
    given = msgspec.structs.replace(cell, policies=cell.policies[2:])
    only = msgspec.structs.replace(runner.config, cells=(given,))
    with pytest.raises(ConfigError, match="fit-0-else/manifest"):
        ReplayRunner(only, folder / "out").run()


def test_a_path_may_hold_the_seed(folder, make_bank):
    for seed in (0, 1):
        write_bank(folder / f"bank-{seed}.npz", make_bank(seed=seed))
    (folder / "c.yaml").write_text(CONFIG.replace("bank.npz", '"bank-{seed}.npz"'))
    report = ReplayRunner(load_replay(folder / "c.yaml"), folder / "out").run()
    assert {"bank-0.npz", "bank-1.npz"} <= set(report.sources)


def test_a_cell_may_be_like_an_earlier_one(folder):
    late = "  - {name: late, like: heavy, change: {requests: {output_tokens: 9}}}\n"
    (folder / "c.yaml").write_text(CONFIG.replace("policies: [{", late + "policies: [{"))
    cell = load_replay(folder / "c.yaml").cells[2]
    assert cell.scenario.load.mean_batch == 4
    assert cell.scenario.requests.output_tokens == 9
    (folder / "c.yaml").write_text(CONFIG.replace("group: g,", "group: g, like: heavy,", 1))
    with pytest.raises(ConfigError, match="like"):
        load_replay(folder / "c.yaml")


def test_a_suite_runs_its_replays_and_shares_what_is_done(folder):
    (folder / "d.yaml").write_text(CONFIG.replace("name: small", "name: again"))
    (folder / "all.yaml").write_text(
        "{schema_version: 1, replays: [c.yaml, d.yaml], quick: [c.yaml]}"
    )
    given = {"out": str(folder / "o"), "suite": str(folder / "all.yaml")}
    reports = replay_main.run(ReplayMainConfig(**given))
    assert [report.name for report in reports] == ["small", "again"]
    assert reports[0].comparisons == reports[1].comparisons
    assert len(list((folder / "o/runs").iterdir())) == 10
    assert (folder / "o/again/report.json").exists()
    assert len(replay_main.run(ReplayMainConfig(**given, quick=True))) == 1
    assert replay_main.run(ReplayMainConfig(**given, max_minutes=1e-9))[0].num_missing == 0
    with pytest.raises(ConfigError, match="not both"):
        ReplayMainConfig(out="o", config="c", suite="s")
    with pytest.raises(ConfigError, match="max_minutes"):
        ReplayMainConfig(out="o", config="c", max_minutes=-1.0)


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


def test_holm_corrects_over_the_cells_that_ask_the_same():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    values = [-2.0, -3.0, -2.5, -1.5, -2.2]
    assert t_test(values) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert t_test([-2.0]) == t_test([0.0, 0.0]) == 1.0
    assert t_test([-2.0, -2.0]) == 0.0
    drops = ([-10.0, -12.0, -11.0], [0.5, -0.4, 0.1])
    results = []
    for cell, pcts in zip("cd", drops, strict=True):
        for seed, pct in enumerate(pcts):
            results += [result(cell, "a", seed, 100.0), result(cell, "b", seed, 100.0 + pct)]
    found = compare(results, groups={}, baselines=["a"], references=[])
    b = {item.cell: item for item in found if item.policy == "b"}
    assert b["c"].p_holm == pytest.approx(2 * b["c"].p_value)
    assert b["d"].p_holm == pytest.approx(b["d"].p_value)


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
    others = {"workloads", "prepare", "all", "published"}
    files += [f for f in (ROOT / "configs/replay/eldr").glob("*.yaml") if f.stem not in others]
    assert files
    for file in files:
        for quick in (False, True):
            config = load_replay(file, quick=quick)
            assert msgspec.json.encode(config)
    names = [config.name for config in load_suite(ROOT / "configs/replay/eldr/all.yaml")]
    assert names[0] == "main"
    assert set(names) == {"main", "ablations", "variants", "substrates", "rules", "scaling"}
