"""Plans compiled length buckets for a trace; see `--help`."""

from pathlib import Path

from absl import flags

from bucket_planner.buckets import MIN_BUCKET_TOKENS
from bucket_planner.command_line import run_main, say, write_json
from bucket_planner.compile_budget import CompileBudget
from bucket_planner.cost_curve import RooflineCost, TokenCost, flops_divergence_pct
from bucket_planner.cost_file import CostFile, load_compiler_report, load_cost_file
from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import Hardware, load_hardware
from bucket_planner.lengths import read_trace
from bucket_planner.packer import PackerConfig
from bucket_planner.plan import PlanConfig, build_plan

_USAGE = """Plans the best set of compiled length buckets for a trace.

  python -m bucket_planner.plan_main --trace=FILE --max_buckets=16 --out=plan.json

The trace is an Azure LLM csv, a Mooncake jsonl, or one prompt length per line. The plan minimises
padded tokens, or total milliseconds when --cost gives them. Semantics `prompt` pads each prompt
(JetStream, MaxText); `step` pads the tokens of each step (tpu-inference, sgl-jax), found by
replaying the trace through a chunked-prefill packer.
"""


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("trace", None, "Trace file.", required=True)
    flags.DEFINE_string("out", None, "JSON file to write.", required=True)
    flags.DEFINE_integer("max_buckets", None, "Most buckets to compile.", required=True)
    flags.DEFINE_enum("semantics", "prompt", ["prompt", "step"], "What a bucket pads.")
    flags.DEFINE_string("cost", None, "Cost file (JSON): measured or roofline milliseconds.")
    flags.DEFINE_string("compiler_report", None, "Report of eldr_jax.compile_main: cross-check.")
    flags.DEFINE_string("hardware_dir", "configs/hardware", "Where a roofline finds hardware.")
    flags.DEFINE_integer("limit_tokens", 0, "Largest bucket; 0 = next power of two.")
    flags.DEFINE_integer("min_bucket_tokens", MIN_BUCKET_TOKENS, "Smallest bucket.")
    flags.DEFINE_integer("align_tokens", 1, "Buckets are multiples of this.")
    flags.DEFINE_integer("max_num_batched_tokens", 8192, "Step: tokens one step may schedule.")
    flags.DEFINE_integer("max_num_seqs", 256, "Step: requests running at once.")
    flags.DEFINE_enum("role", "mixed", ["mixed", "prefill"], "Step: worker's role.")
    flags.DEFINE_integer("num_workers", 0, "Step: workers sharing the trace; 0 = half load.")
    flags.DEFINE_integer("data_parallel", 1, "Step: sgl-jax data-parallel size.")
    flags.DEFINE_float("compile_s_budget", None, "Most compile seconds of all buckets together.")
    flags.DEFINE_float("program_bytes_budget", None, "Most program bytes of all buckets together.")


def main() -> None:
    """Flags -> plan -> file."""
    values = flags.FLAGS
    say(f"reading {values.trace}")
    trace = read_trace(values.trace)
    cost = _cost(values.cost, values.hardware_dir)
    report = load_compiler_report(values.compiler_report) if values.compiler_report else None
    compile_cost = cost.compile_cost or (report.compile_cost if report else None)
    budget = None
    if values.compile_s_budget is not None or values.program_bytes_budget is not None:
        if compile_cost is None:
            raise PlannerConfigError(
                "compile_s_budget",
                values.compile_s_budget,
                "a compile budget needs compile figures in --cost or --compiler_report",
            )
        budget = CompileBudget(
            compile_s=values.compile_s_budget,
            program_bytes=values.program_bytes_budget,
            cost=compile_cost,
        )
    config = PlanConfig(
        semantics=values.semantics,
        max_buckets=values.max_buckets,
        curve=cost.curve,
        cost_source=cost.source,
        limit_tokens=values.limit_tokens,
        min_bucket_tokens=values.min_bucket_tokens,
        align_tokens=values.align_tokens,
        budget=budget,
        packer=PackerConfig(
            max_num_batched_tokens=values.max_num_batched_tokens,
            max_num_seqs=values.max_num_seqs,
            role=values.role,
            num_workers=values.num_workers,
        ),
        data_parallel=values.data_parallel,
    )
    say(f"planning {len(trace)} requests, {config.semantics} semantics")
    plan = build_plan(trace, config)
    if report and isinstance(config.curve, RooflineCost):
        plan["compiler_flops_divergence_pct"] = flops_divergence_pct(config.curve, report.flops)
    write_json(values.out, plan)
    held = plan["heldout"]
    say(f"buckets {' '.join(map(str, plan['buckets']))}")
    say(
        f"padded tokens {plan['waste_tokens']:,} (default {plan['default']['waste_tokens']:,}); "
        f"held out: {held['cut_pct']:.1f}% less padding, {held['cost_cut_pct']:.1f}% less cost "
        f"({config.curve.unit}), best possible {held['hindsight_cut_pct']:.1f}% less padding"
    )
    say(f"wrote {values.out}")


def _cost(path: str | None, hardware_dir: str) -> CostFile:
    if path is None:
        return CostFile(curve=TokenCost(), compile_cost=None, source="tokens")

    def find_hardware(hardware_id: str) -> Hardware:
        return load_hardware(Path(hardware_dir) / f"{hardware_id}.yaml")

    return load_cost_file(path, find_hardware)


def cli() -> None:
    """Entry point."""
    define_flags()
    run_main(main, usage=_USAGE)


if __name__ == "__main__":
    cli()
