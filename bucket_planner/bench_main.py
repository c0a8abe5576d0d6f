"""Measures plans on traces: fitted on the first half, scored on the second; see `--help`."""

import sys
import time
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bucket_planner.command_line import run_main, say, write_json
from bucket_planner.lengths import Trace, read_trace
from bucket_planner.packer import PackerConfig
from bucket_planner.plan import PlanConfig, build_plan

_USAGE = """Fits plans on the first half of each trace and scores them on the second.

  python -m bucket_planner.bench_main --trace=A.csv --trace=B.jsonl [--out=bench.json]

Rows: padded tokens saved against powers of two, the best saving hindsight allows, and the planning
time, per prompt and per step (tokens scheduled by a chunked-prefill packer).
"""
_COLUMNS = ("trace", "semantics", "N", "cut %", "hindsight %", "points", "optimal fit", "plan s")


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_multi_string("trace", None, "Trace file; repeat the flag.", required=True)
    flags.DEFINE_multi_integer("max_buckets", [8, 16], "Numbers of buckets.")
    flags.DEFINE_multi_integer("max_num_batched_tokens", [2048, 8192], "Step sizes to pack to.")
    flags.DEFINE_string("out", None, "JSON file to write besides the table.")


def main() -> None:
    """Flags -> rows -> table."""
    values = flags.FLAGS
    traces = [read_trace(path) for path in values.trace]
    jobs = [
        (trace, step_tokens, max_buckets)
        for trace in traces
        for step_tokens in (0, *values.max_num_batched_tokens)
        for max_buckets in values.max_buckets
    ]
    rows: list[dict[str, Any]] = []
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for job in progress.track(jobs, description="planning"):
            rows.append(measure(*job))
            if not console.is_terminal:
                say(f"{len(rows)}/{len(jobs)} {rows[-1]['trace']} {rows[-1]['semantics']}")
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(
            row["trace"],
            row["semantics"],
            str(row["max_buckets"]),
            f"{row['cut_pct']:.1f}",
            f"{row['hindsight_cut_pct']:.1f}",
            f"{row['points_from_hindsight']:.1f}",
            "yes" if row["fitted_is_optimal"] else "no",
            f"{row['plan_s']:.2f}",
        )
    Console(file=sys.stdout, width=120).print(table)
    if values.out:
        write_json(values.out, {"schema_version": 1, "rows": rows})


def measure(trace: Trace, step_tokens: int, max_buckets: int) -> dict[str, Any]:
    """One row: `step_tokens` 0 plans prompts, else steps of at most that many tokens."""
    config = PlanConfig(
        semantics="step" if step_tokens else "prompt",
        max_buckets=max_buckets,
        packer=PackerConfig(max_num_batched_tokens=step_tokens or 8192),
    )
    start = time.perf_counter()
    plan = build_plan(trace, config)
    held = plan["heldout"]
    return {
        "trace": Path(trace.name).stem,
        "semantics": f"step {step_tokens}" if step_tokens else "prompt",
        "max_buckets": max_buckets,
        "cut_pct": held["cut_pct"],
        "hindsight_cut_pct": held["hindsight_cut_pct"],
        "points_from_hindsight": held["points_from_hindsight"],
        "fitted_is_optimal": held["fitted_waste_tokens"] == held["fitted_optimal_waste_tokens"],
        "default_waste_tokens": held["default_waste_tokens"],
        "waste_tokens": held["waste_tokens"],
        "scored_tokens": held["scored_tokens"],
        "buckets": held["buckets"],
        "plan_s": time.perf_counter() - start,
    }


def cli() -> None:
    """Entry point."""
    define_flags()
    run_main(main, usage=_USAGE)


if __name__ == "__main__":
    cli()
