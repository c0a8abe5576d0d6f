"""Static times of the histogram kernels on accelerators that are not there.

Compiles the TPU kernel for each chip over a table of geometries and estimates each
call's time from the final schedule (see `static_time`); compiles the Triton kernel for
three GPUs and prints registers, shared memory and spills. What is not installed is
skipped with one line. No figure here comes from a running accelerator.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kernels.expert_histogram import tpu_compile
from kernels.expert_histogram.arg_specs import HistogramSpec, default_out_dtype
from kernels.expert_histogram.errors import HistogramArgumentError

SCHEMA_VERSION = 1
_PACKAGES = ("jax", "jaxlib", "libtpu", "triton")
_COLUMNS = "| chip | E | K | B | T | kernel us | profile us | total us | HBM floor us | ratio |"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What to compile.

    Attributes:
        chips: names of `tpu_compile.CHIPS`.
        experts: E.
        top_ks: K.
        block_sizes: B.
        tokens: T.
        num_layers: L.
        profile: also ask for the compiler's static profile.
        out: JSON file, or None.
    """

    chips: tuple[str, ...]
    experts: tuple[int, ...]
    top_ks: tuple[int, ...]
    block_sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    num_layers: int
    profile: bool
    out: Path | None

    def __post_init__(self) -> None:
        for chip in self.chips:
            if chip not in tpu_compile.CHIPS:
                raise HistogramArgumentError(
                    f"--chips={chip} must be among {', '.join(tpu_compile.CHIPS)}"
                )
        for name in ("experts", "top_ks", "block_sizes", "tokens"):
            if not all(value >= 1 for value in getattr(self, name)):
                raise HistogramArgumentError(f"--{name}={getattr(self, name)} must be positive")

    def specs(self) -> list[HistogramSpec]:
        """One long request per geometry, which may begin inside a block."""
        return [
            HistogramSpec(
                num_layers=self.num_layers,
                top_k=top_k,
                num_tokens=num_tokens,
                num_blocks=-(-num_tokens // block_size) + 1,
                num_experts=num_experts,
                block_size=block_size,
                out_dtype=default_out_dtype(block_size).name,
            )
            for num_experts in self.experts
            for top_k in self.top_ks
            for block_size in self.block_sizes
            for num_tokens in self.tokens
        ]


def run(config: BenchConfig, report_line: Callable[[str], None]) -> None:
    """Compiles, reports the tables line by line and writes the file."""
    report = {
        "schema_version": SCHEMA_VERSION,
        "versions": _versions(),
        "num_layers": config.num_layers,
        "tpu": _tpu_rows(config, report_line),
        "gpu": _gpu_rows(config.num_layers, report_line),
    }
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(json.dumps(report, indent=1) + "\n")
        report_line(f"wrote {config.out}")


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _tpu_rows(config: BenchConfig, report_line: Callable[[str], None]) -> list[dict]:
    if not tpu_compile.has_libtpu():
        report_line("TPU: skipped, libtpu is not installed (pip install 'jax[tpu]')")
        return []
    report_line(f"{_COLUMNS}\n{'|---' * _COLUMNS.count(' | ')}|---|")
    rows = []
    for chip in config.chips:
        for spec, answer in compile_calls(chip, config.specs(), profile=config.profile):
            rows.append({"chip": chip, **_sizes(spec), **answer})
            report_line(_markdown(rows[-1], tpu_compile.CHIPS[chip].clock_hz))
    return rows


def _sizes(spec: HistogramSpec) -> dict[str, int]:
    return {
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "block_size": spec.block_size,
        "num_tokens": spec.num_tokens,
    }


def _markdown(row: dict, clock_hz: float) -> str:
    sizes = f"| {row['chip']} | {row['num_experts']} | {row['top_k']} | {row['block_size']} "
    sizes += f"| {row['num_tokens']} |"
    if "error" in row:
        return f"{sizes} {row['error']} | | | | |"
    kernel_us = row["kernel_bundles"] / clock_hz * 1e6
    ratio = row["static_us"] / row["floor_us"]
    profile_us = "" if row["profile_us"] is None else f"{row['profile_us']:.2f}"
    return (
        f"{sizes} {kernel_us:.2f} | {profile_us} | {row['static_us']:.2f} | {row['floor_us']:.2f} "
        f"| {ratio:.1f} |"
    )


def compile_calls(
    chip: str, specs: Sequence[HistogramSpec], *, profile: bool = False
) -> Iterable[tuple[HistogramSpec, dict]]:
    """Compiles calls for a chip and estimates their times.

    In a process of its own, which is started again whenever libtpu takes it down.

    Args:
        chip: name of `tpu_compile.CHIPS`.
        specs: the calls.
        profile: also ask for the compiler's static profile.

    Yields:
        Each call with its `tpu_compile.KernelTime` fields, or {"error": TEXT}.
    """
    waiting = list(specs)
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            worker = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kernels.expert_histogram.bench_worker_main",
                    f"--dump_folder={folder}",
                    f"--profile={profile}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert worker.stdin is not None
            assert worker.stdout is not None
            answered = True
            while waiting and answered:
                spec = waiting.pop(0)
                worker.stdin.write(json.dumps({"chip": chip, "spec": asdict(spec)}) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                answered = bool(line)
                yield spec, json.loads(line) if answered else {"error": "the compiler aborted"}
            worker.stdin.close()
            worker.stdout.close()
            worker.wait()


def _gpu_rows(num_layers: int, report_line: Callable[[str], None]) -> list[dict]:
    if find_spec("triton") is None:
        report_line("GPU: skipped, triton is not installed (pip install triton)")
        return []
    from kernels.expert_histogram import triton_compile

    report_line(
        "\n| GPU | E | K | B | registers | shared bytes | spills |\n|---|---|---|---|---|---|---|"
    )
    rows = []
    for target in triton_compile.TARGETS:
        for num_experts, top_k, block_size in ((64, 4, 16), (128, 8, 128), (512, 8, 1024)):
            spec = HistogramSpec(
                num_layers=num_layers,
                top_k=top_k,
                num_tokens=8192,
                num_blocks=8192 // block_size + 1,
                num_experts=num_experts,
                block_size=block_size,
                out_dtype=default_out_dtype(block_size).name,
            )
            resources = triton_compile.compile_for(target, spec)
            rows.append({**_sizes(spec), **asdict(resources)})
            report_line(
                f"| {target} | {num_experts} | {top_k} | {block_size} | {resources.num_registers} "
                f"| {resources.shared_bytes} | {resources.num_spills} |"
            )
    return rows
