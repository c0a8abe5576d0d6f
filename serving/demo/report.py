"""What the demo leaves behind: the summary file's content and the table a person reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from serving.demo.accounting import summarise
from serving.demo.compare import (
    Comparison,
    Weighed,
    at_equal_batch,
    by_token,
    compare,
    experts_by_batch,
)
from serving.demo.rounds import POLICIES, Run

SCHEMA_VERSION = 1
BASELINE = "jsq"

_COLUMNS = (
    ("distinct experts\nper step", "distinct_experts_per_step", "{:.2f}"),
    ("mean\nbatch", "mean_batch_per_worker", "{:.2f}"),
    ("step ms\nP50", "step_ms_p50", "{:.2f}"),
    ("TPOT ms\nP50", "tpot_ms_p50", "{:.2f}"),
    ("TPOT ms\nP99", "tpot_ms_p99", "{:.2f}"),
    ("TTFT ms\nP50", "ttft_ms_p50", "{:.1f}"),
    ("TTFT ms\nP99", "ttft_ms_p99", "{:.1f}"),
    ("requests", "num_requests", "{:d}"),
    ("failed", "num_failed", "{:d}"),
)


def summarise_runs(runs: Sequence[Run], *, seed: int) -> dict[str, Any]:
    """Figures per policy and distinct experts against the baseline.

    Args:
        runs: of all rounds, each policy once a round in round order.
        seed: of the bootstrap.
    """
    by_policy = {name: [run for run in runs if run.policy == name] for name in POLICIES}
    policies = {
        name: summarise(
            [cost for run in mine for cost in run.costs.values()],
            [step for run in mine for step in run.steps],
            num_requests=sum(len(run.answers) for run in mine),
            num_failed=sum(run.num_failed for run in mine),
        )
        for name, mine in by_policy.items()
    }
    expected = experts_by_batch(step for run in by_policy[BASELINE] for step in run.steps)

    def against_baseline(
        weigh: Callable[[Run], Mapping[str, Weighed]],
    ) -> dict[str, Comparison | None]:
        base = [weigh(run) for run in by_policy[BASELINE]]
        return {
            name: compare([weigh(run) for run in mine], base, np.random.default_rng(seed))
            for name, mine in by_policy.items()
            if name != BASELINE
        }

    return {
        "policies": policies,
        "comparisons": against_baseline(lambda run: by_token(run.costs)),
        "at_equal_batch": against_baseline(lambda run: at_equal_batch(run.costs, expected)),
    }


def summary_json(
    result: Mapping[str, Any],
    *,
    settings: Mapping[str, Any],
    differing: Sequence[str],
) -> dict[str, Any]:
    """The summary file (DESIGN's contract, with what it rests on beside it)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "outputs_identical": not differing,
        "outputs_differing": list(differing),
        "settings": dict(settings),
        "policies": result["policies"],
        "distinct_experts_against_jsq": _intervals(result["comparisons"]),
        "distinct_experts_against_jsq_at_equal_batch": _intervals(result["at_equal_batch"]),
    }


def _intervals(comparisons: Mapping[str, Comparison | None]) -> dict[str, Any]:
    return {
        name: comparison
        and {
            "mean_pct": comparison.mean_pct,
            "ci_low_pct": comparison.low_pct,
            "ci_high_pct": comparison.high_pct,
            "excludes_zero": comparison.excludes_zero,
            "per_round_pct": list(comparison.per_round_pct),
        }
        for name, comparison in comparisons.items()
    }


def table_of(policies: Mapping[str, Mapping[str, float]]) -> Table:
    """One row per policy."""
    table = Table(title="decode placement, on each worker's own measured step time")
    table.add_column("policy")
    for title, _, _ in _COLUMNS:
        table.add_column(title, justify="right")
    for name, figures in policies.items():
        table.add_row(name, *(form.format(figures[key]) for _, key, form in _COLUMNS))
    return table


def comparison_line(name: str, plain: Comparison | None, equal_batch: Comparison | None) -> str:
    """One policy against the baseline, in a sentence."""
    return (
        f"{name} against {BASELINE}: {_interval(plain)} distinct experts per step; "
        f"at equal batch {_interval(equal_batch)}"
    )


def _interval(comparison: Comparison | None) -> str:
    if comparison is None:
        return "(too few steps)"
    return f"{comparison.mean_pct:+.1f}% ({comparison.low_pct:+.1f} .. {comparison.high_pct:+.1f})"
