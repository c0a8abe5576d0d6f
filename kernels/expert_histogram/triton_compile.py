"""Compiles the Triton kernel for GPUs that are not there, and reads what it needs.

Importing this module needs triton; it needs no GPU. NVIDIA's numbers come from the
`ptxas` in Triton's wheel, AMD's from the metadata of the assembly.
"""

# Triton is installed on GPU hosts only.
# pyright: reportMissingImports=false

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kernels.expert_histogram import triton_kernel
from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.errors import HistogramError

TARGETS: Mapping[str, GPUTarget] = MappingProxyType(
    {
        "sm_90": GPUTarget("cuda", 90, 32),
        "sm_100": GPUTarget("cuda", 100, 32),
        "gfx942": GPUTarget("hip", "gfx942", 64),
    }
)
"""H100/H200, B200 and MI300X."""

_POINTERS = MappingProxyType({"uint8": "*u8", "uint16": "*u16", "int32": "*i32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuResources:
    """What one compiled kernel takes.

    Attributes:
        target: name in `TARGETS`.
        num_registers: vector registers a thread.
        num_spills: spilled registers (AMD) or bytes stored and loaded again (NVIDIA).
        shared_bytes: shared memory of a program.
    """

    target: str
    num_registers: int
    num_spills: int
    shared_bytes: int


def compile_for(target: str, spec: HistogramSpec) -> GpuResources:
    """Compiles `count_row` for a GPU.

    Args:
        target: name in `TARGETS`.
        spec: the call.

    Returns:
        Its resources.

    Raises:
        HistogramError: the assembler refuses the kernel or does not report.
    """
    constants = {
        "num_layers": spec.num_layers,
        "top_k": spec.top_k,
        "num_tokens": spec.num_tokens,
        "num_experts": spec.num_experts,
        **triton_kernel.tile_sizes(
            top_k=spec.top_k,
            num_experts=spec.num_experts,
            block_size=spec.block_size,
            num_tokens=spec.num_tokens,
        ),
    }
    pointers = ("ids_ptr", "block_of_token_ptr", "first_token_ptr", "end_token_ptr")
    signature: dict[str, str] = dict.fromkeys(pointers, "*i32")
    signature["out_ptr"] = _POINTERS[spec.out_dtype]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=triton_kernel.count_row, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": 4})
    if TARGETS[target].backend == "cuda":
        registers, spills = _nvidia_resources(compiled.asm["ptx"], TARGETS[target].arch)
    else:
        registers, spills = _amd_resources(compiled.asm["amdgcn"])
    return GpuResources(
        target=target,
        num_registers=registers,
        num_spills=spills,
        shared_bytes=compiled.metadata.shared,
    )


def _nvidia_resources(ptx: str, arch: int) -> tuple[int, int]:
    name = _number_text(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        done = subprocess.run(
            [get_ptxas(arch).path, "-v", "--gpu-name", name, path, "-o", Path(folder) / "out"],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise HistogramError(f"ptxas refuses the kernel for {name}: {done.stderr}")
    registers = int(_number_text(r"Used (\d+) registers", done.stderr))
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return registers, sum(int(number) for number in spilled)


def _amd_resources(assembly: str) -> tuple[int, int]:
    registers = int(_number_text(r"\.vgpr_count:\s+(\d+)", assembly))
    spilled = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly)
    return registers, sum(int(number) for number in spilled)


def _number_text(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise HistogramError(f"the assembler's report has no {pattern}")
    return found.group(1)
