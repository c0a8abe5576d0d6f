"""Puts the results page together: tables, bars, and how the runs were (see `replay/results.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from serving.replay.compare import BEST, Comparison
from serving.replay.drift import Recovery, recovery
from serving.replay.report import Report
from serving.replay.results import (
    ABLATIONS,
    MEAN,
    MISSING,
    ONLINE,
    P50,
    P99,
    RULE,
    Bar,
    Found,
    PublishedResult,
    ablation_table,
    claim,
    loads_table,
    main_table,
    pct,
    policies_table,
    run_facts,
    share_of,
    workloads_table,
    worst,
)

_SUBSTRATES = {
    "task-tables": "published tables as they are, task",
    "language-tables": "published tables as they are, language",
    "task-64": "calibrated, 64 experts, task",
    "reference": "our reference model's own routing (6 layers, 64 experts)",
    "none": "no structure",
    "mixtral": "Mixtral's tables, 8 experts",
}
_ABLATIONS = (
    ("eldr_gates", ONLINE),
    ("eldr_static_gates", "eldr_static"),
    ("eldr_no_idf", ONLINE),
    ("eldr_static_no_idf", "eldr_static"),
    ("eldr_no_mask", ONLINE),
    ("eldr_tau_0", ONLINE),
    ("eldr_tau_0.2", ONLINE),
    ("eldr_tau_0.3", ONLINE),
    ("eldr_static", ONLINE),
    ("eldr_vanilla", "eldr_static"),
    ("eldr_static_tau_0", "eldr_static"),
    ("expert_cost_no_prior", RULE),
    ("expert_cost_p2", RULE),
    ("expert_cost_ema", RULE),
)
_SCALING = "decoders-"
SHARED = "expert_cost_shared"
_DRIFTS = {"drift": "fitted on two of the domains", "drift-known": "fitted on all four"}
_DRIFTING = ("eldr_static", ONLINE, RULE, "expert_cost_ema")
_STRETCH = 100  # requests per value of a series, as variants.yaml asks for


def page(reports: Sequence[Report], published: Sequence[PublishedResult]) -> list[str]:
    """The whole page, as Markdown lines without a heading."""
    found = Found(reports)
    main_cells = [c for c in found.cells() if c.startswith(("task-batch-", "language-batch-"))]
    groups = [f"mean over {group}" for group in _SUBSTRATES]
    variants = [
        c
        for c in found.cells()
        if c not in main_cells and not _of_group(c) and not c.startswith(ABLATIONS)
    ]
    lines = [
        "Percent against the best of random, round robin, jsq and p2c (chosen per cell and metric "
        "by its mean over draws), TPOT; intervals are 95% percentile bootstraps over draws, each "
        "a structure, texts and arrivals of its own (the reference model cannot be drawn again: "
        f"there, fits and arrivals). Draws reported: {_draws(reports)}. Arrivals are Poisson and "
        "paired with our texts: the pairing is our composition.",
        "",
        "The workloads as drawn, before any rule ran:",
        "",
        *workloads_table(reports),
        "",
        *main_table(found, published),
        "",
        _how(found, main_cells),
        "",
        "Other rules, means over loads, P50 / P99:",
        "",
        *policies_table(
            found,
            ["mean over task", "mean over language"],
            ["expert_cost_spread", "eldr_static", "domain", "p2c_work"],
        ),
        "",
        "Other substrates, means over the four loads, P50 / P99 ("
        + "; ".join(f"{key}: {text}" for key, text in _SUBSTRATES.items())
        + "):",
        "",
        *policies_table(found, groups, [ONLINE, RULE]),
        "",
        *loads_table(found, list(_SUBSTRATES), ONLINE),
        "",
        *loads_table(found, list(_SUBSTRATES), RULE),
        "",
        _how(found, [c for c in found.cells() if _of_group(c)]),
        "",
        "Ablations at batch 16 unless the cell says otherwise; p is Holm's over the cells of a "
        "variant, all of which are listed (the bars below count the cells of both rules):",
        "",
        *ablation_table(found, found.cells(ABLATIONS), _ABLATIONS),
        "",
        _how(found, found.cells(ABLATIONS)),
        "",
        "One thing changed at a time, task, batch 16, P50 / P99:",
        "",
        *policies_table(
            found,
            [c for c in variants if not c.startswith(_SCALING)],
            [ONLINE, RULE, "expert_cost_guard", SHARED, "expert_cost_spread"],
        ),
        "",
        "Other numbers of decode workers, task, batch 8, one draw, against the better of jsq and "
        "p2c:",
        "",
        *policies_table(
            found,
            [c for c in variants if c.startswith(_SCALING)],
            [ONLINE, RULE, "expert_cost_no_regions", "p2c_work"],
        ),
        "",
        _how(found, variants),
        "",
        *_drift_lines(found),
        "",
        "| bar | measured | |",
        "|---|---|---|",
        *(bar.line() for bar in bars(found)),
    ]
    missing = sum(report.num_missing for report in reports)
    if missing:
        lines += ["", f"{missing} runs of the suite had not been made when this was written."]
    return lines


def bars(found: Found) -> list[Bar]:
    """What must be shown, with what was."""
    main_cells = [c for c in found.cells() if c.startswith(("task-batch-", "language-batch-"))]
    sub_cells = [c for c in found.cells() if _of_group(c)]
    out = []
    for workload, p50, p99 in (("task", -10.0, -7.0), ("language", -6.0, -4.0)):
        cell = f"mean over {workload}"
        for metric, limit in ((P50, p50), (P99, p99)):
            out.append(_below(found.get(cell, RULE, metric), f"{workload} {_name(metric)}", limit))
    for metric in (P50, P99):
        cells = [*main_cells, *sub_cells]
        top = worst(found, cells, RULE, metric)
        made = [item for cell in cells if (item := found.get(cell, RULE, metric)) is not None]
        text = f"expert_cost {_name(metric)} never above +1% in a cell of main grids and "
        text += "substrates (+2.5% upper end)"
        measured = _at(top)
        if high := [item for item in made if item.ci_high_pct > 2.5 and item is not top]:
            measured += "; above +2.5% reach " + ", ".join(map(_at, high))
        holds = all(item.mean_pct <= 1.0 and item.ci_high_pct <= 2.5 for item in made)
        whole = bool(made) and len(made) == len(cells)
        out.append(Bar(text=text, measured=measured, holds=holds if whole else None))
    for workload, limit in (("task", -2.0), ("language", -4.0)):
        item = found.get(f"mean over {workload}", RULE, P99, ONLINE)
        out.append(_below(item, f"{workload} P99 against ELDR online", limit, clear=False))
    top = worst(found, main_cells, RULE, MEAN, ONLINE)
    out.append(
        Bar(
            text="mean TPOT within +.5% of ELDR online in every cell of the main grids",
            measured=_at(top),
            holds=None if top is None else top.mean_pct <= 0.5,
        )
    )
    for substrate in ("none", "mixtral"):
        out.append(_no_gain(found, substrate, sub_cells))
    out += _variant_bars(found)
    return out


def _variant_bars(found: Found) -> list[Bar]:
    token = share_of(found, ("token-table", RULE), ("plain", RULE), P50)
    own_token = share_of(found, ("reference-token-table", RULE), ("reference-batch-16", RULE), P50)
    four = share_of(found, ("stale-200ms-4-routers", SHARED), ("plain", RULE), P99)
    herd = found.get("stale-1s-4-routers", SHARED, P99)
    out = [
        _share("token-table signatures keep 60% of the P50 gain", token, 0.6),
        _share("the same on the reference model's routing, batch 16", own_token, 0.6),
        _share("4 routers at 200 ms keep 70% of one router's P99 gain", four, 0.7),
        Bar(
            text="4 routers at 1 s do not herd: P99 at most +2%",
            measured=pct(herd),
            holds=None if herd is None else herd.mean_pct <= 2.0,
        ),
    ]
    for cell in ("wrong-10", "wrong-30", "wrong-100"):
        items = [found.get(cell, "expert_cost_guard", metric) for metric in (P50, P99)]
        made = [item for item in items if item is not None]
        out.append(
            Bar(
                text=f"{cell}: with the guard at most +2%",
                measured=" / ".join(map(pct, items)) if made else MISSING,
                holds=all(item.mean_pct <= 2.0 for item in made) if made else None,
            )
        )
    for text, variants, metric in (
        ("counts beat gate probabilities (P50)", ("eldr_gates", "eldr_static_gates"), P50),
        ("IDF helps (P50)", ("eldr_no_idf", "eldr_static_no_idf"), P50),
        ("vanilla k-means hurts the tail (P99)", ("eldr_vanilla",), P99),
        ("tau 0 hurts P99", ("eldr_tau_0", "eldr_static_tau_0"), P99),
    ):
        pairs = [pair for pair in _ABLATIONS if pair[0] in variants]
        out.append(claim(found, text, pairs, metric))
    item, best = found.get("phases-200", RULE, P99, ONLINE), found.get("phases-200", RULE, P99)
    out.append(
        Bar(
            text="broken assumption (one domain at a time): P99 not above ELDR online",
            measured=f"{pct(item)}; against the best of four {pct(best)}",
            holds=None if item is None else item.mean_pct <= 0.0,
        )
    )
    return out


def _no_gain(found: Found, substrate: str, cells: Sequence[str]) -> Bar:
    """Who gains where nothing is to be gained has been given something it should not have.

    ELDR's rule may lose there: it picks among few workers by regions that mean nothing, as a
    choice of two does, which is told beside it. Ours is to be what least loaded is.
    """
    own = [c for c in cells if c.startswith(f"{substrate}-batch-")]
    items = [found.get(c, p, m) for c in own for p in (ONLINE, RULE) for m in (P50, P99)]
    made = [item for item in items if item is not None]
    text = (
        f"no gain on {_SUBSTRATES[substrate]}: no rule 1% better in a cell, expert_cost within 1%"
    )
    if not made:
        return Bar(text=text, measured=MISSING, holds=None)
    best = min(made, key=lambda item: item.mean_pct)
    worst = max(made, key=lambda item: item.mean_pct)
    two = found.get(worst.cell, "p2c", worst.metric)
    measured = f"from {_at(best)} ({best.policy}) to {_at(worst)} ({worst.policy}; p2c {pct(two)})"
    ours = all(abs(item.mean_pct) <= 1.0 for item in made if item.policy == RULE)
    holds = best.mean_pct >= -1.0 and ours
    return Bar(text=text, measured=measured, holds=holds if len(made) == len(items) else None)


def _below(item: Comparison | None, text: str, limit: float, *, clear: bool = True) -> Bar:
    holds = None
    if item is not None:
        holds = item.mean_pct <= limit and (item.ci_high_pct < 0.0 or not clear)
    return Bar(text=f"{text} at most {limit:+.0f}%", measured=pct(item), holds=holds)


def _share(text: str, share: float, least: float) -> Bar:
    if math.isnan(share):
        return Bar(text=text, measured=MISSING, holds=None)
    return Bar(text=text, measured=f"{100 * share:.0f}%", holds=share >= least)


def _drift_lines(found: Found) -> list[str]:
    lines = [
        "Drift: code and math only, then legal and medical only, from the middle of the run on. "
        "Gain in mean TPOT over jsq, percent, and seconds until 90% of the settled gain:",
        "",
        "| fit | rule | before | just after | settled | recovered after |",
        "|---|---|---|---|---|---|",
    ]
    for cell, fit in _DRIFTS.items():
        for policy in _DRIFTING:
            item = recovered(found, cell, policy)
            if item is None:
                continue
            after = "never" if math.isnan(item.recover_s) else f"{item.recover_s:.0f} s"
            lines.append(
                f"| {fit} | {policy} | {item.before_pct:.1f} | {item.first_pct:.1f} | "
                f"{item.settled_pct:.1f} | {after} |"
            )
    return lines


def recovered(found: Found, cell: str, policy: str) -> Recovery | None:
    """A rule's recovery in a drift cell, over the seeds that it and jsq have; None without."""
    mine = {run.seed: run for run in found.runs.get((cell, policy), [])}
    other = {run.seed: run for run in found.runs.get((cell, "jsq"), [])}
    seeds = sorted(set(mine) & set(other))
    if not seeds:
        return None
    metrics = mine[seeds[0]].metrics
    num, rate = metrics["num_requests"], metrics["rate_per_s"]
    # The mix shifts at a share of all requests, warm-up included; the series is of the measured.
    shift = metrics["shift_request"] / _STRETCH
    if not 0 < shift < num / _STRETCH:
        return None
    return recovery(
        [mine[seed].series for seed in seeds],
        [other[seed].series for seed in seeds],
        shift_at=shift,
        stretch_s=_STRETCH / rate,
    )


def _draws(reports: Sequence[Report]) -> str:
    """The least and the greatest seed behind a page."""
    seeds = sorted({run.seed for report in reports for run in report.cells})
    return f"{seeds[0]} to {seeds[-1]}" if seeds else MISSING


def _of_group(cell: str) -> bool:
    return any(cell.startswith(f"{group}-batch-") for group in _SUBSTRATES)


def _how(found: Found, cells: Sequence[str]) -> str:
    policies = sorted({policy for _, policy in found.runs})
    facts = run_facts(found, cells, policies)
    if not facts:
        return f"Runs: {MISSING}."
    return (
        f"{facts['num_runs']:.0f} runs of at least {facts['num_requests']:.0f} measured requests; "
        f"repeated prompts at most {100 * facts['repeated']:.1f}% of them, prompt tokens from the "
        f"prefix cache at most {100 * facts['cached_share']:.1f}%; half width of P99's interval "
        f"within a run {facts['p99_half_width_pct']:.1f}% (median); {facts['num_rejected']:.0f} "
        "requests rejected."
    )


def _name(metric: str) -> str:
    return {P50: "P50", P99: "P99", MEAN: "mean"}[metric]


def _at(item: Comparison | None) -> str:
    if item is None:
        return MISSING
    against = "" if item.against == BEST else f", {item.policy}"
    return f"{pct(item)} at {item.cell}{against}"
