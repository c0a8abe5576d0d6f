"""Paired comparisons: the same seed, the same randomness, another policy.

A comparison is the mean over seeds of a metric's relative difference, with a percentile
bootstrap over seeds. "best_of_baselines" is, per cell and metric, the baseline with the lowest
mean over seeds: it is chosen once and then compared seed by seed. Few seeds make narrow
intervals narrower than they should be; the per-seed values are always reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

METRICS = (
    "tpot_ms_p50",
    "tpot_ms_p99",
    "tpot_ms_mean",
    "ttft_ms_p99",
    "distinct_experts_per_step",
)
BEST = "best_of_baselines"
_RESAMPLES = 10_000


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a cell, a policy, a seed."""

    cell: str
    policy: str
    seed: int
    metrics: dict[str, float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A policy against another, in percent of the other (negative is lower).

    Attributes:
        cell: a cell, or `mean over GROUP`.
        against: a policy, or `best_of_baselines` (`baseline` says which it was).
        per_seed_pct: in the order of the seeds.
    """

    cell: str
    policy: str
    against: str
    metric: str
    mean_pct: float
    ci_low_pct: float
    ci_high_pct: float
    per_seed_pct: tuple[float, ...]
    baseline: str = ""


def compare(
    results: Sequence[RunResult],
    *,
    groups: dict[str, str],
    baselines: Sequence[str],
    references: Sequence[str],
) -> list[Comparison]:
    """All comparisons of a report.

    Args:
        results: every run.
        groups: cell -> group, "" for none; a group's mean is over its cells.
        baselines: policies behind `best_of_baselines`.
        references: policies that every other one is compared with as well.
    """
    table: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for run in results:
        table.setdefault((run.cell, run.policy), {})[run.seed] = run.metrics
    cells = list(dict.fromkeys(run.cell for run in results))
    out: list[Comparison] = []
    pooled: dict[tuple[str, str, str, str], list[dict[int, float]]] = {}
    for cell in cells:
        policies = [policy for at, policy in table if at == cell]
        for metric in METRICS:
            best = _best(table, cell, [b for b in baselines if b in policies], metric)
            for policy in policies:
                for against in dict.fromkeys([BEST, *references]):
                    other = best if against == BEST else against
                    if other is None or (cell, other) not in table or other == policy:
                        continue
                    pct = _per_seed(table[cell, policy], table[cell, other], metric)
                    if not pct:
                        continue
                    baseline = other if against == BEST else ""
                    out.append(_comparison(cell, policy, against, metric, pct, baseline))
                    key = (groups.get(cell, ""), policy, against, metric)
                    pooled.setdefault(key, []).append(pct)
    for (group, policy, against, metric), parts in pooled.items():
        if not group or len(parts) != sum(groups.get(cell) == group for cell in cells):
            continue
        seeds = sorted(set.intersection(*(set(part) for part in parts)))
        mean = {seed: float(np.mean([part[seed] for part in parts])) for seed in seeds}
        if mean:
            out.append(_comparison(f"mean over {group}", policy, against, metric, mean, ""))
    return out


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% percentile bootstrap of a mean; the value itself when there is only one."""
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(len(array))
    drawn = array[rng.integers(0, len(array), (_RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _best(
    table: dict[tuple[str, str], dict[int, dict[str, float]]],
    cell: str,
    baselines: Sequence[str],
    metric: str,
) -> str | None:
    means = {}
    for policy in baselines:
        values = [m[metric] for m in table[cell, policy].values() if metric in m]
        if values:
            means[policy] = float(np.mean(values))
    return min(means, key=lambda name: means[name]) if means else None


def _per_seed(
    mine: dict[int, dict[str, float]], other: dict[int, dict[str, float]], metric: str
) -> dict[int, float]:
    out = {}
    for seed in sorted(set(mine) & set(other)):
        a, b = mine[seed].get(metric), other[seed].get(metric)
        if a is not None and b:
            out[seed] = 100.0 * (a / b - 1.0)
    return out


def _comparison(
    cell: str, policy: str, against: str, metric: str, pct: dict[int, float], baseline: str
) -> Comparison:
    values = tuple(pct[seed] for seed in sorted(pct))
    low, high = interval(values)
    return Comparison(
        cell=cell,
        policy=policy,
        against=against,
        metric=metric,
        mean_pct=float(np.mean(values)),
        ci_low_pct=low,
        ci_high_pct=high,
        per_seed_pct=values,
        baseline=baseline,
    )
