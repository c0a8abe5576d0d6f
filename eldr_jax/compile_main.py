"""Compiles a model's steps for a TPU slice that is not there, and says whether they fit.

    python -m eldr_jax.compile_main --model=configs/models/qwen3_30b_a3b.yaml --target=v6e:2x2

Prefill for every bucket and decode for every batch, sharded over the slice, from shapes alone.
`--out` writes what `bucket_planner.plan_main --compiler_report` reads; `--export` writes the
programs as portable StableHLO. Exits 3 when a program does not fit the memory, 2 on wrong input.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rich.console
import rich.progress
from absl import flags

from eldr_jax.ahead_of_time import CompileJob, Program
from eldr_jax.command_line import run_binary
from eldr_jax.compile_report import CompileOptions, compile_all
from eldr_jax.config import ConfigError, load_model_config
from eldr_jax.sharding import MeshPlan, ShardingError, make_mesh, plan_for
from eldr_jax.topology import CHIPS, Target, TargetError, devices_of, parse_target
from kernels.expert_histogram import HistogramArgumentError

_OUT_OF_MEMORY = 3


class CompileFlagError(ValueError):
    """A flag of this binary that breaks a rule."""


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("model", None, "Model file of configs/models.", required=True)
    flags.DEFINE_string("target", None, "TPU slice, such as v6e:2x2.", required=True)
    flags.DEFINE_list(
        "buckets",
        ["128", "256", "512", "1024", "2048", "4096", "8192"],
        "Prefill sizes in tokens; empty for none.",
    )
    flags.DEFINE_list("decode_batches", ["8", "32", "128"], "Decode sizes in requests.")
    flags.DEFINE_integer("data", 1, "Replicas in the slice.", lower_bound=1)
    flags.DEFINE_integer("expert", None, "Devices that share the experts.", lower_bound=1)
    flags.DEFINE_integer("tensor", None, "Devices that share an expert.", lower_bound=1)
    flags.DEFINE_string("dtype", "bfloat16", "Type of weights and cache.")
    flags.DEFINE_integer("block_size", 128, "Tokens per KV block.", lower_bound=1)
    flags.DEFINE_integer("kv_cache_tokens", 65536, "KV cache of a replica.", lower_bound=1)
    flags.DEFINE_integer("max_context_tokens", 8192, "Longest sequence.", lower_bound=1)
    flags.DEFINE_integer("max_sequences", 16, "Most requests in a prefill.", lower_bound=1)
    flags.DEFINE_float("hbm_gib", None, "Memory of a device; default: the chip's.", lower_bound=0)
    flags.DEFINE_string("out", None, "JSON report to write.")
    flags.DEFINE_string("export", None, "Folder for portable StableHLO.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A bar on a terminal, plain lines elsewhere."""

    console: rich.console.Console
    bar: rich.progress.Progress
    task: rich.progress.TaskID

    def starting(self, label: str) -> None:
        """Names what is compiled now."""
        if self.console.is_terminal:
            self.bar.update(self.task, description=label)

    def finished(self, line: str) -> None:
        """Reports one program."""
        self.console.print(line, highlight=False, soft_wrap=True)
        self.bar.advance(self.task)


def run(
    job: CompileJob, target: Target, options: CompileOptions, console: rich.console.Console
) -> bool:
    """Compiles everything, prints and writes the report.

    Returns:
      Whether every program fits.
    """
    total = len(options.programs)
    with rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        progress = Progress(console=console, bar=bar, task=bar.add_task("", total=total))
        report = compile_all(job, target, options, progress.starting, progress.finished)
    for failure in report["failed"]:
        sys.stderr.write(f"{failure['message']}\n")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"wrote {options.out}", highlight=False)
    return not report["failed"]


def main() -> None:
    """Flags to job to `run`."""
    values = flags.FLAGS
    config, target = load_model_config(values.model), parse_target(values.target)
    plan = _plan(
        config_devices=target.num_devices, values=values, fit=lambda n: plan_for(config, n)
    )
    plan.check(config)
    if values.dtype not in ("bfloat16", "float32"):
        raise CompileFlagError(f"--dtype={values.dtype} must be bfloat16 or float32")
    job = CompileJob(
        config=config,
        plan=plan,
        mesh=make_mesh(plan, devices_of(target)),
        dtype=values.dtype,
        block_size=values.block_size,
        num_blocks=-(-values.kv_cache_tokens // values.block_size),
        max_context_tokens=values.max_context_tokens,
        histogram="pallas_tpu",
        compiler_options=CHIPS[target.chip].compiler_options,
    )
    programs = [
        Program(phase="prefill", num_tokens=size, num_sequences=min(values.max_sequences, size))
        for size in _sizes("buckets", values.buckets)
    ]
    programs += [
        Program(phase="decode", num_tokens=size, num_sequences=size)
        for size in _sizes("decode_batches", values.decode_batches)
    ]
    if not programs:
        raise CompileFlagError("--buckets and --decode_batches are both empty: nothing to compile")
    if values.hbm_gib is not None and not 0 < values.hbm_gib < math.inf:
        raise CompileFlagError(f"--hbm_gib={values.hbm_gib} must be positive and finite")
    if values.kv_cache_tokens < values.max_context_tokens:
        rule = f"must hold a sequence of --max_context_tokens={values.max_context_tokens}"
        raise CompileFlagError(f"--kv_cache_tokens={values.kv_cache_tokens} {rule}")
    # What cannot be written is told before minutes of compilation.
    if values.export:
        Path(values.export).mkdir(parents=True, exist_ok=True)
    if values.out:
        Path(values.out).parent.mkdir(parents=True, exist_ok=True)
        if Path(values.out).is_dir():
            raise CompileFlagError(f"--out={values.out} must be a file, it is a folder")
    options = CompileOptions(
        model=values.model,
        programs=tuple(programs),
        hbm_bytes=int(values.hbm_gib * 2**30) if values.hbm_gib else target.hbm_bytes,
        out=Path(values.out) if values.out else None,
        export=Path(values.export) if values.export else None,
    )
    if not run(job, target, options, rich.console.Console()):
        sys.exit(_OUT_OF_MEMORY)


def _plan(
    *, config_devices: int, values: flags.FlagValues, fit: Callable[[int], MeshPlan]
) -> MeshPlan:
    """The mesh of the flags; what they leave open is chosen."""
    if config_devices % values.data:
        raise ShardingError(f"data={values.data} must divide the {config_devices} devices")
    shards = config_devices // values.data
    if values.expert is None and values.tensor is None:
        found = fit(shards)
        return MeshPlan(data=values.data, expert=found.expert, tensor=found.tensor)
    expert = values.expert if values.expert is not None else shards // values.tensor
    tensor = values.tensor if values.tensor is not None else shards // expert
    return MeshPlan(data=values.data, expert=max(1, expert), tensor=max(1, tensor))


def _sizes(name: str, texts: list[str]) -> list[int]:
    try:
        sizes = [int(text) for text in texts if text]
    except ValueError as error:
        raise CompileFlagError(f"--{name}={','.join(texts)} must be integers") from error
    if any(size < 1 for size in sizes) or sizes != sorted(set(sizes)):
        raise CompileFlagError(f"--{name}={','.join(texts)} must be positive and ascending")
    return sizes


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(
        main, (ConfigError, ShardingError, TargetError, CompileFlagError, HistogramArgumentError)
    )


if __name__ == "__main__":
    cli()
