"""Tuned parameters of the TPU kernel, as data, one row a chip.

Provenance: chosen from compilations for each chip without the chip, by the static
times that `bench_main` prints (jax 0.10.2, libtpu 0.0.42.1); the figures are in
RESULTS.md beside this file. No chip has run the kernel yet; where one is at hand,
`device_check` measures it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.expert_histogram.errors import HistogramArgumentError

LANES = 128
"""Lanes of a TPU vector register; tokens lie in lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuConfig:
    """Block sizes of the TPU kernel.

    Attributes:
        operand_dtype: what the matrix unit multiplies, "int8" or "float8_e4m3fn": TPU7x
            has no int8 matrix unit, v5e and v6e have no native float8.
        dot_columns: groups of 128 tokens that one matrix product sums over.
        dots_per_step: such products, behind each other, per grid step.
        rows_per_loop: output rows written per iteration of the last loop.
        pipelined: overlap one product's vector work with the last one's matrix work,
            in straight-line code; without it the code is small and slower.
        vmem_bytes: what the kernel may use of the chip's vector memory.
    """

    operand_dtype: str
    dot_columns: int
    dots_per_step: int
    rows_per_loop: int
    pipelined: bool
    vmem_bytes: int

    def __post_init__(self) -> None:
        if self.operand_dtype not in ("int8", "float8_e4m3fn"):
            raise HistogramArgumentError(
                f"operand_dtype={self.operand_dtype} must be int8 or float8_e4m3fn"
            )
        for name in ("dot_columns", "dots_per_step", "rows_per_loop", "vmem_bytes"):
            if getattr(self, name) < 1:
                raise HistogramArgumentError(f"{name}={getattr(self, name)} must be at least 1")


TPU_CONFIGS: Mapping[str, TpuConfig] = MappingProxyType(
    {
        "v5e": TpuConfig(
            operand_dtype="int8",
            dot_columns=4,
            dots_per_step=2,
            rows_per_loop=4,
            pipelined=True,
            vmem_bytes=96 * 2**20,
        ),
        "v6e": TpuConfig(
            operand_dtype="int8",
            dot_columns=4,
            dots_per_step=2,
            rows_per_loop=4,
            pipelined=True,
            vmem_bytes=96 * 2**20,
        ),
        "tpu7x": TpuConfig(
            operand_dtype="float8_e4m3fn",
            dot_columns=4,
            dots_per_step=2,
            rows_per_loop=4,
            pipelined=True,
            vmem_bytes=48 * 2**20,
        ),
    }
)
"""Configuration by chip."""

INTERPRET_CONFIG = TpuConfig(
    operand_dtype="int8",
    dot_columns=1,
    dots_per_step=1,
    rows_per_loop=1,
    pipelined=False,
    vmem_bytes=96 * 2**20,
)
"""For interpretation on a CPU: little code, so that it compiles fast."""
