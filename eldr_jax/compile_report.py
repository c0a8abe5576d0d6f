"""Compiles a list of programs and gathers what a planner and an operator want to know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eldr_jax.ahead_of_time import (
    CompiledProgram,
    CompileJob,
    Program,
    ProgramOutOfMemoryError,
    compile_program,
    export_program,
    fits_at_no_size,
    histogram_call,
    in_words,
)
from eldr_jax.step_work import read_bytes, step_flops
from eldr_jax.topology import CHIPS, Target
from kernels.expert_histogram.bench import compile_calls

SCHEMA_VERSION = 1
_GIB = 2**30
_ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What to compile and where to write.

    Attributes:
      model: the model file, for the report.
      programs: sizes, in order.
      hbm_bytes: memory of one device; a program that the compiler accepts but that needs more
        does not fit.
      out: JSON report, or None.
      export: folder for StableHLO, or None.
    """

    model: str
    programs: tuple[Program, ...]
    hbm_bytes: int
    out: Path | None
    export: Path | None


def compile_all(
    job: CompileJob,
    target: Target,
    options: CompileOptions,
    starting: Callable[[str], None],
    finished: Callable[[str], None],
) -> dict[str, Any]:
    """Compiles every program.

    Args:
      job: what the programs share.
      target: the slice.
      options: what to compile.
      starting: called with the label of each program before it is compiled.
      finished: called with a line after it.

    Returns:
      The report: "buckets" (prefill) and "decode" with one entry for each program that fits,
      "failed" with a sentence for each that does not; where weights and cache alone are too
      large, for the first.
    """
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": options.model,
        "target": target.name,
        "num_devices": target.num_devices,
        "mesh": asdict(job.plan),
        "dtype": job.dtype,
        "block_size": job.block_size,
        "kv_cache_tokens": job.num_blocks * job.block_size,
        "max_context_tokens": job.max_context_tokens,
        "hbm_bytes_per_device": options.hbm_bytes,
        "compiler_options": dict(job.compiler_options),
        "versions": _versions(),
        "buckets": [],
        "decode": [],
        "failed": [],
    }
    for program in options.programs:
        starting(program.label)
        try:
            compiled = compile_program(job, program)
        except ProgramOutOfMemoryError as error:
            _fail(report, program, in_words(error, job, program), error.needed_bytes, finished)
            if fits_at_no_size(error, job, program):
                finished("weights and KV cache alone do not fit: no other size is tried")
                break
            continue
        if compiled.hbm_bytes > options.hbm_bytes:
            message = (
                f"out of memory: {program.label} needs {compiled.hbm_bytes / _GIB:.2f} GiB of "
                f"memory on each device, which has {options.hbm_bytes / _GIB:.2f} GiB"
            )
            _fail(report, program, message, compiled.hbm_bytes, finished)
            continue
        row = {**asdict(compiled), "fits": True, **_speed(job, target, program)}
        report["buckets" if program.phase == "prefill" else "decode"].append(row)
        finished(_line(program, compiled, row, options.hbm_bytes))
        if options.export is not None:
            options.export.mkdir(parents=True, exist_ok=True)
            path = options.export / f"{program.phase}_{program.num_tokens}.stablehlo"
            path.write_bytes(export_program(job, program))
    return report


def _fail(
    report: dict[str, Any],
    program: Program,
    message: str,
    needed_bytes: float | None,
    finished: Callable[[str], None],
) -> None:
    report["failed"].append(
        {
            "phase": program.phase,
            "tokens": program.num_tokens,
            "needed_bytes": needed_bytes,
            "message": message,
        }
    )
    finished(f"{program.label}: does not fit")


def _speed(job: CompileJob, target: Target, program: Program) -> dict[str, Any]:
    """The fastest the step can be by the chip's peaks, and the histogram's share of that."""
    chip, step = CHIPS[target.chip], program.step(job)
    itemsize, shards = _ITEMSIZE[job.dtype], job.plan.num_shards
    compute_s = step_flops(job.config, step) / shards / chip.bf16_flops_per_s
    memory_s = read_bytes(job.config, step, itemsize) / shards / chip.hbm_bytes_per_s
    floor_us = max(compute_s, memory_s) * 1e6
    answer = next(
        answer for _, answer in compile_calls(target.chip, [histogram_call(job, program)])
    )
    if "error" in answer:
        return {"step_floor_us": floor_us, "histogram": answer}
    share = 100.0 * answer["static_us"] / floor_us
    histogram = {
        "kernel_cycles": answer["kernel_bundles"],
        "static_us": answer["static_us"],
        "share_of_step_floor_pct": share,
    }
    return {"step_floor_us": floor_us, "histogram": histogram}


def _line(program: Program, compiled: CompiledProgram, row: dict[str, Any], hbm_bytes: int) -> str:
    kernel = row["histogram"]
    if "error" in kernel:
        told = f"histogram: {kernel['error']}"
    else:
        told = (
            f"histogram {kernel['kernel_cycles']} cycles, {kernel['static_us']:.2f} us "
            f"({kernel['share_of_step_floor_pct']:.3f}%)"
        )
    return (
        f"{program.label}: compiled in {compiled.compile_s:.1f} s, "
        f"{compiled.hbm_bytes / _GIB:.2f} of {hbm_bytes / _GIB:.2f} GiB "
        f"(temporary {compiled.temp_bytes / _GIB:.2f}), {compiled.flops:.3g} FLOPs (compiler "
        f"{100 * compiled.compiler_flops / compiled.expected_compiler_flops - 100:+.1f}%), "
        f"at least {row['step_floor_us']:.0f} us, {told}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
