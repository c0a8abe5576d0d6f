"""The results page: what the suite's reports say of ELDR's claim, beside what ELDR published.

Every figure is read from a `report.json`; a cell that has not run is said to be missing. Bars
are printed with what was measured, whether they hold or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from serving.replay.compare import BEST, Comparison, RunResult, holm
from serving.replay.report import Report

P50, P99, MEAN = "tpot_ms_p50", "tpot_ms_p99", "tpot_ms_mean"
ONLINE, RULE = "eldr_online", "expert_cost"
MISSING = "not run"
ABLATIONS = "ablations"  # cells of ablations begin with it


class PublishedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published row: P50 and P99 against the best of four, percent."""

    workload: str
    model: str
    artefact: tuple[float, float]
    paper: tuple[float, float]


class PublishedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`published.yaml`."""

    schema_version: int
    results: tuple[PublishedResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that should hold.

    Attributes:
        text: the bar.
        measured: what was found.
        holds: None when its cells have not run.
    """

    text: str
    measured: str
    holds: bool | None

    def line(self) -> str:
        """As the page prints it."""
        state = {True: "holds", False: "**missed**", None: MISSING}[self.holds]
        return f"| {self.text} | {self.measured} | {state} |"


class Found:
    """Look-ups in the reports of a suite, by cell."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = tuple(reports)
        self._table: dict[tuple[str, str, str, str], Comparison] = {}
        runs: dict[tuple[str, str], dict[int, RunResult]] = {}
        for report in reports:
            for run in report.cells:
                runs.setdefault((run.cell, run.policy), {})[run.seed] = run
            for item in report.comparisons:
                key = item.cell, item.policy, item.against, item.metric
                known = self._table.get(key)
                # Two replays may share cells: the one with more seeds speaks for them.
                if known is None or len(known.per_seed_pct) < len(item.per_seed_pct):
                    self._table[key] = item
        self.runs = {key: list(of_seed.values()) for key, of_seed in runs.items()}

    def get(self, cell: str, policy: str, metric: str, against: str = BEST) -> Comparison | None:
        """A comparison, None when it was not made."""
        return self._table.get((cell, policy, against, metric))

    def cells(self, prefix: str = "") -> list[str]:
        """Cells that ran, in order, without the means over groups."""
        names = dict.fromkeys(run.cell for report in self.reports for run in report.cells)
        return [name for name in names if name.startswith(prefix)]

    def metric(self, cell: str, policy: str, name: str) -> float | None:
        """A metric's mean over seeds."""
        values = [r.metrics[name] for r in self.runs.get((cell, policy), []) if name in r.metrics]
        return float(np.mean(values)) if values else None


def pct(item: Comparison | None, *, interval: bool = True) -> str:
    """A comparison as text: mean and, with several seeds, its interval."""
    if item is None:
        return MISSING
    text = f"{item.mean_pct:+.1f}"
    if interval and len(item.per_seed_pct) > 1:
        text += f" ({item.ci_low_pct:+.1f}..{item.ci_high_pct:+.1f})"
    return text


def main_table(found: Found, published: Sequence[PublishedResult]) -> list[str]:
    """The claim: both workloads, every load and their mean, and the published rows."""
    lines = [
        "| cell | ELDR online P50 / P99 | expert_cost P50 / P99 | expert_cost against ELDR online "
        "P50 / P99 / mean | seeds |",
        "|---|---|---|---|---|",
    ]
    for workload in ("task", "language"):
        cells = found.cells(f"{workload}-batch-")
        for cell in [*cells, f"mean over {workload}"]:
            lines.append(_main_row(found, cell, cell.replace(f"{workload}-batch-", "batch ")))
            if not cell.startswith("mean"):
                lines[-1] = lines[-1].replace("| batch", f"| {workload}, batch", 1)
        for row in published:
            if row.workload == workload:
                lines.append(
                    f"| *published, {workload}, {row.model}: artefact; paper* | "
                    f"*{row.artefact[0]:+.1f} / {row.artefact[1]:+.1f}; "
                    f"{row.paper[0]:+.1f} / {row.paper[1]:+.1f}* | | | 1 |"
                )
    return lines


def _main_row(found: Found, cell: str, name: str) -> str:
    online, rule = ((found.get(cell, p, P50), found.get(cell, p, P99)) for p in (ONLINE, RULE))
    against = [found.get(cell, RULE, metric, ONLINE) for metric in (P50, P99, MEAN)]
    seeds = len(rule[0].per_seed_pct) if rule[0] else 0
    return (
        f"| {name} | {pct(online[0], interval=False)} / {pct(online[1], interval=False)} | "
        f"{pct(rule[0])} / {pct(rule[1])} | {' / '.join(pct(item) for item in against)} | {seeds} |"
    )


def policies_table(found: Found, cells: Sequence[str], policies: Sequence[str]) -> list[str]:
    """P50 / P99 against the best of four: a row per cell, a column per policy."""
    lines = [f"| cell | {' | '.join(policies)} |", "|---" * (len(policies) + 1) + "|"]
    for cell in cells:
        columns = []
        for policy in policies:
            items = found.get(cell, policy, P50), found.get(cell, policy, P99)
            columns.append("" if items == (None, None) else " / ".join(map(pct, items)))
        if any(columns):
            lines.append(f"| {cell} | {' | '.join(columns)} |")
    return lines if len(lines) > 2 else [f"{MISSING[0].upper()}{MISSING[1:]}."]


def claim(found: Found, text: str, pairs: Sequence[tuple[str, str]], metric: str) -> Bar:
    """What leaving a part out costs, over all cells that asked: one clear cell is enough.

    Args:
        found: the reports.
        text: the claim, in words.
        pairs: (a rule with the part left out, the rule itself); Holm's p is over the cells of all.
        metric: which has to rise.

    Returns:
        A bar that holds where in some cell the interval lies above 0 and Holm's p over all of
        them is below .05.
    """
    items = [
        item
        for variant, against in pairs
        for cell in found.cells(ABLATIONS)
        if (item := found.get(cell, variant, metric, against)) is not None
    ]
    corrected = holm([item.p_value for item in items])
    clear = [p < 0.05 and i.ci_low_pct > 0.0 for p, i in zip(corrected, items, strict=True)]
    shown = [
        f"{pct(item)} p {p:.3f} at {item.cell}, {item.policy}"
        for p, item in zip(corrected, items, strict=True)
    ]
    return Bar(
        text=f"{text} in some cell: interval above 0, Holm's p < .05",
        measured="; ".join(shown) or MISSING,
        holds=any(clear) if items else None,
    )


def ablation_table(
    found: Found, cells: Sequence[str], policies: Sequence[tuple[str, str]]
) -> list[str]:
    """Variants of a rule against the rule itself, with Holm's p over cells.

    Args:
        found: the reports.
        cells: where they ran.
        policies: (variant, what it is compared with); p is over the cells of one row of these.
    """
    lines = [
        "| variant | against | cell | draws | P50 | p | P99 | p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, against in policies:
        rows = []
        for cell in cells:
            p50, p99 = (found.get(cell, variant, metric, against) for metric in (P50, P99))
            if p50 is not None and p99 is not None:
                rows.append(
                    f"| {variant} | {against} | {cell} | {len(p99.per_seed_pct)} | {pct(p50)} | "
                    f"{p50.p_holm:.3f} | {pct(p99)} | {p99.p_holm:.3f} |"
                )
        lines += rows or [f"| {variant} | {against} | {MISSING} | | | | | |"]
    return lines


def loads_table(found: Found, groups: Sequence[str], policy: str) -> list[str]:
    """P50 / P99 against the best of four: a row per group of cells, a column per load."""
    loads = ("8", "16", "32", "64")
    lines = [f"| {policy} | {' | '.join(f'batch {load}' for load in loads)} |", "|---" * 5 + "|"]
    for group in groups:
        columns = []
        for load in loads:
            items = [found.get(f"{group}-batch-{load}", policy, metric) for metric in (P50, P99)]
            columns.append(" / ".join(map(pct, items)) if any(items) else MISSING)
        lines.append(f"| {group} | {' | '.join(columns)} |")
    return lines


def workloads_table(reports: Sequence[Report]) -> list[str]:
    """What the fits behind the runs measured of their workloads: least and most over draws.

    A row per group of domains that a workload's prompts come from, tasks or languages.
    """
    # .../WORKLOAD-s3/fit/manifest.json; other folders hold ablations of the same prompts.
    fits = [
        (match[1], facts)
        for name, facts in sorted({n: f for r in reports for n, f in r.sources.items()}.items())
        if (match := re.search(r"([^/]+)-s\d+/fit/manifest\.json$", name))
    ]
    lines = [
        "| workload | domains | draws | signature Spearman | prefill/decode correlation | "
        "fewer experts in one domain's batch of 8 | 16 | 32 | 64 |",
        "|---" * 9 + "|",
    ]
    for workload in dict.fromkeys(name for name, _ in fits):
        own = [facts for name, facts in fits if name == workload]
        for group in ("task", "language"):
            reductions = [f"metric union_reduction_{group}_{size}" for size in (8, 16, 32, 64)]
            if not any(reductions[0] in facts for facts in own):
                continue
            columns = []
            for fact in ("metric spearman", "metric prefill_decode_correlation", *reductions):
                values = [float(facts[fact]) for facts in own if fact in facts]
                columns.append(f"{min(values):.3f}..{max(values):.3f}" if values else "")
            lines.append(f"| {workload} | {group} | {len(own)} | {' | '.join(columns)} |")
    return lines if len(lines) > 2 else [f"{MISSING[0].upper()}{MISSING[1:]}."]


def share_of(found: Found, part: tuple[str, str], whole: tuple[str, str], metric: str) -> float:
    """A gain over another gain, both against their cells' best of four.

    nan where one is missing, 0 where the full gain is none.

    Args:
        found: the reports.
        part: (cell, policy) of the gain asked about.
        whole: (cell, policy) of the full gain.
        metric: of both.
    """
    mine = found.get(part[0], part[1], metric)
    full = found.get(whole[0], whole[1], metric)
    if mine is None or full is None:
        return float("nan")
    if full.mean_pct >= 0.0:
        return 0.0
    return mine.mean_pct / full.mean_pct


def worst(
    found: Found, cells: Sequence[str], policy: str, metric: str, against: str = BEST
) -> Comparison | None:
    """The comparison with the highest mean over some cells; None when none was made."""
    items = [found.get(cell, policy, metric, against) for cell in cells]
    made = [item for item in items if item is not None]
    return max(made, key=lambda item: item.mean_pct) if made else None


def run_facts(found: Found, cells: Sequence[str], policies: Sequence[str]) -> Mapping[str, float]:
    """How the runs behind a table were: requests, repeats, cache, width of P99's interval.

    Returns:
        `num_runs`, least `num_requests`, most `repeated` (share of measured requests), most
        `cached_share`, median `p99_half_width_pct`, `num_rejected`.
    """
    runs = [run for c in cells for p in policies for run in found.runs.get((c, p), [])]
    if not runs:
        return {}
    metrics = [run.metrics for run in runs]
    widths = [
        50.0 * (m["tpot_ms_p99_high"] - m["tpot_ms_p99_low"]) / m["tpot_ms_p99"] for m in metrics
    ]
    return {
        "num_runs": float(len(runs)),
        "num_requests": min(m["num_requests"] for m in metrics),
        "repeated": max(m["num_repeated_prompts"] / m["num_requests"] for m in metrics),
        "cached_share": max(m["cached_share"] for m in metrics),
        "p99_half_width_pct": float(np.median(widths)),
        "num_rejected": sum(m["num_rejected"] for m in metrics),
    }
