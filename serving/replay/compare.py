"""Paired comparisons: the same seed, the same randomness, another policy.

A comparison is the mean over seeds of a metric's relative difference, with a percentile
bootstrap over seeds. "best_of_baselines" is, per cell and metric, the baseline with the lowest
mean over seeds: it is chosen once and then compared seed by seed. Few seeds make percentile
intervals narrower than they should be; the per-seed values are always reported, and so is
Student's t of their mean, corrected by Holm over the cells that ask the same question (the same
policy, the same opponent, the same metric).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

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
    """One run: a cell, a policy, a seed.

    Attributes:
        metrics: name -> value, see `metrics.run_metrics`.
        series: mean TPOT in ms per stretch of requests, see `metrics.tpot_series`.
    """

    cell: str
    policy: str
    seed: int
    metrics: dict[str, float]
    series: tuple[float | None, ...] = ()


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A policy against another, in percent of the other (negative is lower).

    Attributes:
        cell: a cell, or `mean over GROUP`.
        against: a policy, or `best_of_baselines` (`baseline` says which it was).
        per_seed_pct: in the order of the seeds.
        p_value: two-sided, of a mean of 0 (Student's t over seeds); 1 with fewer than two.
        p_holm: the same after Holm's correction over the report's cells.
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
    p_value: float = 1.0
    p_holm: float = 1.0


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
    found: list[Comparison] = []
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
                    found.append(_comparison(cell, policy, against, metric, pct, baseline))
                    key = (groups.get(cell, ""), policy, against, metric)
                    pooled.setdefault(key, []).append(pct)
    out = _holm(found)
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


def t_test(values: Sequence[float]) -> float:
    """Two-sided p of a mean of 0; 1 when there is nothing to test."""
    array = np.asarray(values, np.float64)
    if len(array) < 2 or not array.any():
        return 1.0
    spread = float(array.std(ddof=1))
    if spread == 0.0:
        return 0.0
    t = float(array.mean()) / (spread / np.sqrt(len(array)))
    return float(2.0 * stats.t.sf(abs(t), len(array) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    out, worst = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        out[i] = worst
    return out


def _holm(found: Sequence[Comparison]) -> list[Comparison]:
    """Corrects each family: same policy, opponent and metric, over cells."""
    families: dict[tuple[str, str, str], list[int]] = {}
    for place, item in enumerate(found):
        families.setdefault((item.policy, item.against, item.metric), []).append(place)
    out = list(found)
    for places in families.values():
        corrected = holm([found[place].p_value for place in places])
        for place, p in zip(places, corrected, strict=True):
            out[place] = msgspec.structs.replace(found[place], p_holm=p)
    return out


def _best(
    table: dict[tuple[str, str], dict[int, dict[str, float]]],
    cell: str,
    baselines: Sequence[str],
    metric: str,
) -> str | None:
    if not baselines:
        return None
    # Seeds that all of them have: a replay that was stopped early may lack some of the last.
    seeds = set.intersection(*(set(table[cell, policy]) for policy in baselines))
    means = {}
    for policy in baselines:
        runs = [table[cell, policy][seed] for seed in sorted(seeds)]
        values = [run[metric] for run in runs if metric in run]
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
    p_value = t_test(values)
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
        p_value=p_value,
        p_holm=p_value,
    )
