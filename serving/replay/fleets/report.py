"""All runs of a fleet replay, and what they come to: $ per million output tokens at equal SLOs.

Dollars are powered chip-seconds at the catalogue's amortised price, idle workers included until
they are parked and waking ones from the moment they are woken; busy-only dollars stand beside
them. A comparison counts only where every class's attainment lies within half a point of the
reference's or above it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from serving import native_kernels
from serving.core.request import SloClass
from serving.core.router_config import DEFAULT_TARGETS
from serving.cost.catalogue import Catalogue, load_catalogue
from serving.replay.compare import interval
from serving.replay.fleets.config import FleetReplayConfig, PolicySection
from serving.replay.fleets.machines import machines_of, sustainable_rate
from serving.replay.fleets.simulation import FleetSimulation, Outcome
from serving.replay.fleets.traffic import Traffic, draw_domains, draw_traffic

SCHEMA_VERSION = 1
ATTAINMENT_POINTS = 0.5
# A run that is kept is a function of its config and of this code.
_RUN_VERSION = "2"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    policy: str
    load: float
    seed: int
    metrics: dict[str, float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The reference against another policy, percent of the other's $/Mtok (negative: cheaper).

    Attributes:
        attainment_points: per class the reference's attainment less the other's, in points.
        counts: no class of the reference lies more than half a point below the other's.
    """

    load: float
    against: str
    mean_pct: float
    ci_low_pct: float
    ci_high_pct: float
    per_seed_pct: tuple[float, ...]
    busy_mean_pct: float
    attainment_points: dict[str, float]
    counts: bool


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """`report.json`."""

    schema_version: int
    name: str
    reference: str
    rate_per_s: dict[str, float]
    runs: tuple[Run, ...]
    comparisons: tuple[Comparison, ...]


def run_fleets(
    config: FleetReplayConfig, out: Path, told: Callable[[str, int, int], None]
) -> FleetReport:
    """Runs what is missing, keeps each run on disk, and compares.

    Args:
        config: what to run.
        out: folder of the report and of finished runs.
        told: (name, done, total) after each run.

    Raises:
        ConfigError: a pool cannot exist.
    """
    catalogue = load_catalogue(config.path(config.variants), config.path(config.hardware_dir))
    machines_of(config, catalogue)
    rate = sustainable_rate(config, catalogue, config.traffic)
    (out / "runs").mkdir(parents=True, exist_ok=True)
    per_load = sum(len(policy.seeds(config.seeds)) for policy in config.policies)
    total = len(config.loads) * per_load
    runs: list[Run] = []
    # Seed by seed, so that a replay cut short is a whole one of fewer seeds.
    for seed in config.seeds:
        for load in config.loads:
            for policy in config.policies:
                if seed not in policy.seeds(config.seeds):
                    continue
                file = out / "runs" / f"{_key(config, policy, load, seed)}.json"
                if file.exists():
                    run = msgspec.json.decode(file.read_bytes(), type=Run)
                else:
                    run = run_one(config, policy, catalogue, load=load, rate=rate, seed=seed)
                    part = file.with_suffix(".part")
                    part.write_bytes(msgspec.json.encode(run))
                    part.replace(file)
                runs.append(run)
                told(f"load {load:g} seed {seed} {policy.label}", len(runs), total)
    report = FleetReport(
        schema_version=SCHEMA_VERSION,
        name=config.name,
        reference=config.reference,
        rate_per_s={f"{load:g}": load * rate for load in config.loads},
        runs=tuple(runs),
        comparisons=tuple(compare(config, runs)),
    )
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def run_one(
    config: FleetReplayConfig,
    policy: PolicySection,
    catalogue: Catalogue,
    *,
    load: float,
    rate: float,
    seed: int,
) -> Run:
    """One policy at one load; the same seed gives every policy the same requests."""
    traffic = draw_traffic(config.traffic, load * rate, seed)
    moe = catalogue.variant(config.pools[0].variant).moe
    domains = None if moe is None else draw_domains(config.traffic, moe, seed)
    machines = machines_of(config, catalogue)
    native_kernels.load()
    simulation = FleetSimulation(config, policy, catalogue, machines, traffic, domains, seed=seed)
    metrics = metrics_of(simulation.run(), traffic)
    return Run(policy=policy.label, load=load, seed=seed, metrics=metrics)


def metrics_of(outcome: Outcome, traffic: Traffic) -> dict[str, float]:
    """Metric name -> value, over requests that arrived after the warm-up."""
    measured = traffic.arrival_s >= traffic.section.warmup_s
    found = {
        "num_requests": float(measured.sum()),
        "usd_per_mtok": 1e6 * outcome.usd_powered / max(1, outcome.num_tokens),
        "busy_usd_per_mtok": 1e6 * outcome.usd_busy / max(1, outcome.num_tokens),
        "mean_powered": outcome.mean_powered,
        "mean_batch": outcome.mean_batch,
        "cached_share": outcome.cached_share,
        "padding_share": outcome.padding_share,
    }
    tpot_s = np.nan_to_num(outcome.tpot_s, nan=0.0)
    for slo in SloClass:
        of_class = measured & np.array([item is slo for item in traffic.slo], bool)
        if not of_class.any():
            continue
        target = DEFAULT_TARGETS[slo]
        kept = (outcome.ttft_s <= target.ttft_p99_s) & (tpot_s <= target.tpot_p99_s)
        found[f"attained_{slo.value}"] = 100.0 * float(kept[of_class].mean())
        found[f"ttft_ms_p99_{slo.value}"] = 1e3 * float(np.quantile(outcome.ttft_s[of_class], 0.99))
        found[f"tpot_ms_p50_{slo.value}"] = 1e3 * float(np.quantile(tpot_s[of_class], 0.5))
        found[f"tpot_ms_p99_{slo.value}"] = 1e3 * float(np.quantile(tpot_s[of_class], 0.99))
    return found


def compare(config: FleetReplayConfig, runs: list[Run]) -> list[Comparison]:
    """The reference against every other policy, load by load, paired by seed."""
    table = {(run.policy, run.load, run.seed): run.metrics for run in runs}
    out = []
    for load in config.loads:
        for policy in config.policies:
            if policy.label == config.reference:
                continue
            both = [
                seed
                for seed in config.seeds
                if {(config.reference, load, seed), (policy.label, load, seed)} <= table.keys()
            ]
            mine = [table[config.reference, load, seed] for seed in both]
            other = [table[policy.label, load, seed] for seed in both]
            pct = _pct(mine, other, "usd_per_mtok")
            low, high = interval(pct)
            points = {
                slo.value: float(
                    np.mean([a[name] - b[name] for a, b in zip(mine, other, strict=True)])
                )
                for slo in SloClass
                if (name := f"attained_{slo.value}") in mine[0]
            }
            out.append(
                Comparison(
                    load=load,
                    against=policy.label,
                    mean_pct=float(np.mean(pct)),
                    ci_low_pct=low,
                    ci_high_pct=high,
                    per_seed_pct=tuple(pct),
                    busy_mean_pct=float(np.mean(_pct(mine, other, "busy_usd_per_mtok"))),
                    attainment_points=points,
                    counts=all(value >= -ATTAINMENT_POINTS for value in points.values()),
                )
            )
    return out


def summary(report: FleetReport) -> list[str]:
    """The report for people: one line per load and policy, then the comparisons."""
    runs: dict[tuple[float, str], list[dict[str, float]]] = {}
    for run in report.runs:
        runs.setdefault((run.load, run.policy), []).append(run.metrics)
    beside = {(c.load, c.against): c for c in report.comparisons}
    head = (
        f"{'load':>4s}  {'policy':14s} {'$/Mtok':>8s} {'busy':>7s} {'powered':>7s} {'batch':>6s} "
        f"{'A %':>6s} {'B %':>6s} {'C %':>6s} {'cached':>6s} {'padded':>6s}  "
        f"{report.reference} against it"
    )
    lines = [head]
    for (load, policy), found in runs.items():
        mean = {name: float(np.mean([m[name] for m in found if name in m])) for name in found[0]}
        attained = " ".join(f"{mean.get(f'attained_{s.value}', 100.0):6.2f}" for s in SloClass)
        line = (
            f"{load:4.2f}  {policy:14s} {mean['usd_per_mtok']:8.4f} "
            f"{mean['busy_usd_per_mtok']:7.4f} {mean['mean_powered']:7.2f} "
            f"{mean['mean_batch']:6.1f} {attained} {100 * mean['cached_share']:6.1f} "
            f"{100 * mean['padding_share']:6.1f}"
        )
        found_pair = beside.get((load, policy))
        if found_pair is not None:
            line += (
                f"  {found_pair.mean_pct:+.2f}% [{found_pair.ci_low_pct:+.2f}, "
                f"{found_pair.ci_high_pct:+.2f}]"
            )
            line += "" if found_pair.counts else " (attainment differs: does not count)"
        lines.append(line)
    return lines


def _pct(mine: list[dict[str, float]], other: list[dict[str, float]], name: str) -> list[float]:
    return [100.0 * (a[name] / b[name] - 1.0) for a, b in zip(mine, other, strict=True)]


def _key(config: FleetReplayConfig, policy: PolicySection, load: float, seed: int) -> str:
    """Name of a kept run: what it depends on, hashed."""
    inputs = [
        config.path(config.variants),
        *sorted(config.path(config.hardware_dir).glob("*.yaml")),
    ]
    parts = [
        _RUN_VERSION.encode(),
        msgspec.json.encode((config.pools, config.traffic, config.parking)),
        msgspec.json.encode(msgspec.structs.replace(policy, num_seeds=0)),
        msgspec.json.encode((load, seed, config.capacity_tpot_s)),
        *(file.read_bytes() for file in inputs),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
