from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from serving.core.errors import ArtefactError
from serving.replay.compare import RunResult, compare
from serving.replay.drift import recovery
from serving.replay.report import Report
from serving.replay.results import (
    Found,
    PublishedResult,
    claim,
    loads_table,
    main_table,
    share_of,
    workloads_table,
    worst,
)
from serving.replay.results_page import bars, page, recovered
from serving.results_main import BEGIN, END, ResultsConfig, read_reports, replaced, run

ROOT = Path(__file__).resolve().parents[3]
POLICIES = ("jsq", "eldr_online", "expert_cost")
CELLS = {f"{w}-batch-{b}": w for w in ("task", "language") for b in (8, 16)}


def result(cell: str, policy: str, seed: int, p50: float, p99: float, **more) -> RunResult:
    metrics = {
        "tpot_ms_p50": p50,
        "tpot_ms_p99": p99,
        "tpot_ms_mean": p50,
        "tpot_ms_p99_low": 0.98 * p99,
        "tpot_ms_p99_high": 1.02 * p99,
        "num_requests": 400.0,
        "num_repeated_prompts": 4.0,
        "cached_share": 0.01,
        "num_rejected": 0.0,
        "rate_per_s": 20.0,
        "shift_request": 200.0,
    }
    return RunResult(cell=cell, policy=policy, seed=seed, metrics=metrics, **more)


def report_of(results: list[RunResult], groups: dict[str, str], name: str = "main") -> Report:
    return Report(
        schema_version=1,
        name=name,
        seeds=(0, 1),
        num_missing=0,
        sources={},
        cells=tuple(results),
        comparisons=tuple(
            compare(results, groups=groups, baselines=["jsq"], references=["eldr_online"])
        ),
    )


@pytest.fixture
def main_report() -> Report:
    values = {"jsq": (100.0, 120.0), "eldr_online": (90.0, 115.0), "expert_cost": (88.0, 108.0)}
    results = [
        result(cell, policy, seed, values[policy][0] + 0.1 * seed, values[policy][1])
        for cell in CELLS
        for seed in (0, 1)
        for policy in POLICIES
    ]
    return report_of(results, CELLS)


PUBLISHED = [
    PublishedResult(workload="task", model="Q", artefact=(-12.2, -5.6), paper=(-13.9, -6.0))
]


def test_the_page_says_what_the_reports_say(main_report):
    text = "\n".join(page([main_report], PUBLISHED))
    rule = main_report.comparisons
    mean = next(
        c
        for c in rule
        if (c.cell, c.policy, c.against, c.metric)
        == ("mean over task", "expert_cost", "best_of_baselines", "tpot_ms_p50")
    )
    assert f"{mean.mean_pct:+.1f}" in text
    assert "-12.2 / -5.6; -13.9 / -6.0" in text
    assert "12 runs of at least 400" not in text  # three policies, four cells, two seeds
    assert "24 runs of at least 400 measured requests; repeated prompts at most 1.0%" in text
    rows = main_table(Found([main_report]), PUBLISHED)
    assert any(row.startswith("| task, batch 8 |") for row in rows)


def test_bars_hold_miss_or_have_not_run(main_report):
    found = {bar.text: bar for bar in bars(Found([main_report]))}
    assert found["task P50 at most -10%"].holds
    assert found["task P99 at most -7%"].holds
    assert found["language P99 against ELDR online at most -4%"].holds
    assert found["token-table signatures keep 60% of the P50 gain"].holds is None
    worse = [
        msgspec.structs.replace(
            run,
            metrics={
                n: v * (1.5 if run.policy == "expert_cost" else 1.0) for n, v in run.metrics.items()
            },
        )
        for run in main_report.cells
    ]
    missed = {bar.text: bar for bar in bars(Found([report_of(worse, CELLS)]))}
    assert missed["task P50 at most -10%"].holds is False
    assert "**missed**" in missed["task P50 at most -10%"].line()


def test_a_bar_over_cells_does_not_hold_while_one_has_not_run(main_report):
    def said(report: Report) -> dict[str, bool | None]:
        return {bar.text: bar.holds for bar in bars(Found([report]))}

    never = "expert_cost P99 never above +1% in a cell of main grids and substrates"
    key = next(text for text in said(main_report) if text.startswith(never))
    assert said(main_report)[key] is True
    gone = [r for r in main_report.cells if (r.cell, r.policy) != ("task-batch-8", "expert_cost")]
    assert said(report_of(gone, CELLS))[key] is None


def test_a_share_of_no_gain_is_none_of_it():
    results = [
        result("a", policy, seed, 100.0, value + seed)
        for seed in (0, 1)
        for policy, value in (("jsq", 100.0), ("eldr_online", 110.0), ("expert_cost", 90.0))
    ]
    found = Found([report_of(results, {})])
    assert share_of(found, ("a", "expert_cost"), ("a", "eldr_online"), "tpot_ms_p99") == 0.0


def test_shares_and_the_worst_cell(main_report):
    found = Found([main_report])
    cells = found.cells("task-batch-")
    top = worst(found, cells, "expert_cost", "tpot_ms_p99")
    assert top is not None
    assert top.mean_pct == pytest.approx(-10.0)
    assert share_of(
        found, (cells[0], "eldr_online"), (cells[0], "expert_cost"), "tpot_ms_p99"
    ) == pytest.approx((115 / 120 - 1) / (108 / 120 - 1))
    assert math.isnan(share_of(found, ("none", "a"), (cells[0], "expert_cost"), "tpot_ms_p99"))


def ablated(values: dict[str, list[float]]) -> Report:
    """Cells with a row without IDF, so much above ELDR online in P50 per draw, in percent."""
    results = [
        result(
            cell, policy, seed, 50.0 * (1.0 + (pct / 100.0 if policy != "eldr_online" else 0)), 9
        )
        for cell, per_seed in values.items()
        for seed, pct in enumerate(per_seed)
        for policy in ("eldr_online", "eldr_no_idf")
    ]
    return report_of(results, {}, "ablations")


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        # Clear by itself, and after counting the cell that says nothing.
        ({"ablations": [4.0, 5.0, 6.0], "ablations-b": [1.0, -1.0, 0.5]}, True),
        # p = .03 alone is .06 over two cells.
        ({"ablations": [3.0, 4.6, 6.2], "ablations-b": [1.0, -1.0, 0.5]}, False),
        ({"ablations": [-4.0, -5.0, -6.0]}, False),
        ({"other": [4.0, 5.0, 6.0]}, None),
    ],
)
def test_a_claim_counts_every_cell_that_asked(values, holds):
    report = ablated(values)
    bar = claim(Found([report]), "IDF helps", [("eldr_no_idf", "eldr_online")], "tpot_ms_p50")
    assert bar.holds is holds
    assert all((cell in bar.measured) == (holds is not None) for cell in values)
    text = "\n".join(page([report], PUBLISHED))
    assert "| eldr_gates | eldr_online | not run |" in text
    if holds is not None:
        assert "| eldr_no_idf | eldr_online | ablations | 3 |" in text


def test_what_the_fits_measured_is_shown_by_draws(main_report):
    def fit(spearman: float) -> dict[str, str]:
        return {
            "sha256": "x",
            "metric spearman": f"{spearman}",
            "metric prefill_decode_correlation": "0.71",
            "metric union_reduction_task_8": "0.12",
        }

    sources = {
        "a/tasks-s10/fit/manifest.json": fit(0.6912),
        "a/tasks-s11/fit/manifest.json": fit(0.7),
        "a/tasks-s11/fit-no-idf/manifest.json": fit(0.1),
        "a/tasks-s11/bank.npz": {"sha256": "y"},
    }
    lines = workloads_table([msgspec.structs.replace(main_report, sources=sources)])
    assert lines[2:] == [
        "| tasks | task | 2 | 0.691..0.700 | 0.710..0.710 | 0.120..0.120 |  |  |  |"
    ]
    assert workloads_table([main_report]) == ["Not run."]


def test_every_load_of_a_substrate_is_shown_or_said_to_be_missing():
    results = [
        result("none-batch-8", policy, seed, 50.0 - (policy == "expert_cost"), 60.0)
        for policy in ("jsq", "expert_cost")
        for seed in (0, 1)
    ]
    lines = loads_table(Found([report_of(results, {})]), ["none"], "expert_cost")
    missing = " | not run" * 3
    assert lines[-1] == f"| none | -2.0 (-2.0..-2.0) / +0.0 (+0.0..+0.0){missing} |"


def test_recovery_finds_when_the_gain_is_back():
    base = [[100.0] * 12] * 2
    mine = [[80.0] * 4 + [100.0, 98.0, 90.0] + [80.0] * 5] * 2
    found = recovery(mine, base, shift_at=4.0, stretch_s=5.0)
    assert found.before_pct == pytest.approx(20.0)
    assert found.settled_pct == pytest.approx(20.0)
    assert found.first_pct == pytest.approx(4.0)
    assert found.recover_s == pytest.approx(15.0)
    never = recovery([[80.0] * 4 + [101.0] * 8], [[100.0] * 12], shift_at=4.0, stretch_s=5.0)
    assert math.isnan(never.recover_s)
    with pytest.raises(ValueError, match="both sides"):
        recovery(mine, base, shift_at=0.0, stretch_s=5.0)


def test_a_drift_cell_recovers_at_the_shift_of_its_measured_requests():
    series = {"jsq": (100.0,) * 8, "eldr_static": (80.0, 80.0, *(100.0,) * 3, *(90.0,) * 3)}
    results = [
        result("drift", policy, seed, 1.0, 1.0, series=values)
        for policy, values in series.items()
        for seed in (0, 1)
    ]
    found = recovered(Found([report_of(results, {})]), "drift", "eldr_static")
    assert found is not None
    assert found.before_pct == pytest.approx(20.0)
    assert recovered(Found([report_of(results, {})]), "drift", "eldr_online") is None


def test_the_page_goes_between_the_markers(main_report, tmp_path):
    (tmp_path / "r/main").mkdir(parents=True)
    (tmp_path / "r/main/report.json").write_bytes(msgspec.json.encode(main_report))
    notes = tmp_path / "n.md"
    notes.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    config = ResultsConfig(
        reports=str(tmp_path / "r"),
        published=str(ROOT / "configs/replay/eldr/published.yaml"),
        notes=str(notes),
    )
    lines = run(config)
    text = notes.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old figures" not in text
    assert lines[0] in text
    assert run(config) == lines
    assert notes.read_text() == text


def test_missing_markers_and_reports_are_named(tmp_path):
    with pytest.raises(ArtefactError, match="begin"):
        replaced(tmp_path / "n.md", "no markers", [])
    with pytest.raises(ArtefactError, match=r"report\.json"):
        read_reports(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/report.json").write_text("{}")
    with pytest.raises(ArtefactError, match="must be a report"):
        read_reports(tmp_path)
