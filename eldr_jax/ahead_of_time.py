"""Compiles the sharded step from shapes alone and says what the program needs.

No weight is ever made. `compile_main` is the command; here is what it compiles and reports.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.expert_parallel import Phase, sharded_step
from eldr_jax.paged import num_count_rows
from eldr_jax.sharded_state import cache_shapes, step_shapes
from eldr_jax.sharding import (
    MeshPlan,
    attention_shards,
    held_kv_heads,
    pattern_length,
    stacked_shapes,
)
from eldr_jax.step_work import Step, step_flops
from eldr_jax.tiled_attention import KEY_TILE_TOKENS, QUERY_TILE_ROWS
from kernels.expert_histogram.arg_specs import HistogramSpec, default_out_dtype

_GIB = 2**30
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT])"
_NEEDS = re.compile(
    rf"(?:[Uu]sed {_SIZE} of {_SIZE} hbm|\({_SIZE}\) exceeds available HBM \({_SIZE}\))"
)


class ProgramOutOfMemoryError(Exception):
    """A program that does not fit the device's memory, by the compiler's word.

    Attributes:
      needed_bytes: what the program needs of one device; None if the compiler did not say.
      usable_bytes: what the compiler may use of it; None if it did not say.
    """

    def __init__(self, message: str) -> None:
        """Reads the compiler's message."""
        super().__init__(message)
        found = _NEEDS.search(message)
        self.needed_bytes: float | None = None
        self.usable_bytes: float | None = None
        if found:
            needed, unit, usable, usable_unit = (part for part in found.groups() if part)
            self.needed_bytes = float(needed) * _UNITS[unit]
            self.usable_bytes = float(usable) * _UNITS[usable_unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """What all programs of a run share.

    Attributes:
      config: geometry.
      plan: devices along each axis.
      mesh: the devices.
      dtype: of weights, activations and cache.
      block_size: tokens per KV block.
      num_blocks: KV blocks of each replica.
      max_context_tokens: longest sequence.
      histogram: backend that counts experts.
      compiler_options: of the target's chip.
    """

    config: ModelConfig
    plan: MeshPlan
    mesh: Mesh
    dtype: str
    block_size: int
    num_blocks: int
    max_context_tokens: int
    histogram: str | None
    compiler_options: Mapping[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled size.

    Attributes:
      phase: "prefill" or "decode".
      num_tokens: rows of each replica; for decode, its sequences.
      num_sequences: most sequences in a step of each replica.
    """

    phase: Phase
    num_tokens: int
    num_sequences: int

    @property
    def label(self) -> str:
        """For people."""
        rows = "tokens" if self.phase == "prefill" else "requests"
        return f"{self.phase} of {self.num_tokens} {rows}"

    def step(self, job: CompileJob) -> Step:
        """The work of a full step: one prompt from its start, or the longest even contexts."""
        is_decode = self.phase == "decode"
        share = job.num_blocks * job.block_size // self.num_tokens
        context_tokens = max(1, min(job.max_context_tokens, share))
        return Step(
            num_tokens=self.num_tokens,
            num_logits=self.num_sequences,
            first_position=context_tokens - 1 if is_decode else 0,
            is_decode=is_decode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """What the compiler says of one program; memory is that of one device.

    Attributes:
      tokens: rows of each replica.
      flops: of a full step of one replica on all its devices, from the model's shapes.
      compiler_flops: of one device as XLA counts: a loop's body once, an expert product for
        every pair of row and expert, wherever the expert lies.
      expected_compiler_flops: the same from the model's shapes; what the two differ by is work
        that the model does not know of.
      compiler_bytes: memory traffic of one device as XLA counts it, in the same way.
      argument_bytes: weights, cache and inputs.
      temp_bytes: what the program needs beside them while it runs.
      output_bytes: results that are not written over an argument.
      program_bytes: the code; None where the compiler does not say.
      hbm_bytes: all of it.
      compile_s: seconds the compiler took.
    """

    tokens: int
    flops: float
    compiler_flops: float
    expected_compiler_flops: float
    compiler_bytes: float
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    program_bytes: int | None
    hbm_bytes: int
    compile_s: float


def program_arguments(job: CompileJob, program: Program) -> tuple[Any, Any, Any]:
    """Shapes and shardings of (params, cache, step)."""
    dtype = jnp.dtype(job.dtype)
    max_blocks = -(-max(job.max_context_tokens, program.num_tokens) // job.block_size)
    return (
        stacked_shapes(job.config, job.plan, job.mesh, dtype),
        cache_shapes(
            job.config,
            job.plan,
            job.mesh,
            num_blocks=job.num_blocks,
            block_size=job.block_size,
            dtype=dtype,
        ),
        step_shapes(
            job.plan,
            job.mesh,
            num_tokens=program.num_tokens,
            num_sequences=program.num_sequences,
            max_blocks=max_blocks,
        ),
    )


def compile_program(job: CompileJob, program: Program) -> CompiledProgram:
    """Compiles one size.

    Args:
      job: what the programs share.
      program: the size.

    Returns:
      The compiler's figures.

    Raises:
      ProgramOutOfMemoryError: it does not fit the device's memory.
    """
    step = sharded_step(job.config, job.plan, job.mesh, program.phase, histogram=job.histogram)
    start_s = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh):
            lowered = step.lower(*program_arguments(job, program))
            compiled = lowered.compile(compiler_options=dict(job.compiler_options))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise ProgramOutOfMemoryError(str(error)) from error
        raise
    compile_s = time.perf_counter() - start_s
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    code_bytes = memory.generated_code_size_in_bytes
    output_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledProgram(
        tokens=program.num_tokens,
        flops=step_flops(job.config, program.step(job)),
        compiler_flops=float(cost.get("flops", 0.0)),
        expected_compiler_flops=_counted_flops(job, program),
        compiler_bytes=float(cost.get("bytes accessed", 0.0)),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=output_bytes,
        program_bytes=code_bytes or None,
        hbm_bytes=(
            memory.argument_size_in_bytes + output_bytes + memory.temp_size_in_bytes + code_bytes
        ),
        compile_s=compile_s,
    )


def _counted_flops(job: CompileJob, program: Program) -> float:
    """FLOPs of one device where each loop runs once: one pattern of layers, one attention tile."""
    config, shards, rows = job.config, job.plan.num_shards, program.num_tokens
    head = 2.0 * program.num_sequences * config.hidden_size * config.vocab_size / shards
    per_tile = max(1, KEY_TILE_TOKENS // job.block_size) * job.block_size
    queries = rows if program.phase == "decode" else min(QUERY_TILE_ROWS, rows)
    flops = head
    for layer in range(pattern_length(config)):
        held = attention_shards(config, job.plan)
        for name, shape in block_shapes(config, layer).items():
            width = 2.0 * rows * math.prod(shape[-2:]) if len(shape) > 1 else 0.0
            if name in ("w_gate", "w_up", "w_down"):
                flops += config.num_experts_per_tok * width / job.plan.tensor
            elif name in ("wq", "wo"):
                flops += width / held
            elif name in ("wk", "wv"):
                kind = config.layer_attention(layer)
                copies = held_kv_heads(config, layer, job.plan) / kind.num_kv_heads
                flops += width * copies / held
            elif name.startswith("dense_"):
                flops += width / shards
            elif name == "gate":
                flops += width
        query_width = config.layer_attention(layer).query_width / held
        flops += 4.0 * queries * per_tile * query_width
    return flops


def export_program(job: CompileJob, program: Program) -> bytes:
    """Portable StableHLO of one size, for a TPU of the job's mesh.

    Returns:
      A module that any later StableHLO reads; shapes, shardings and kernels included.
    """
    step = sharded_step(job.config, job.plan, job.mesh, program.phase, histogram=job.histogram)
    with jax.sharding.use_abstract_mesh(job.mesh.abstract_mesh):
        exported = jax.export.export(step, platforms=["tpu"])(*program_arguments(job, program))
    return exported.mlir_module_serialized


def histogram_call(job: CompileJob, program: Program) -> HistogramSpec:
    """The histogram inside a program, as one device runs it."""
    return HistogramSpec(
        num_layers=-(-job.config.num_layers // job.plan.num_shards),
        top_k=job.config.num_experts_per_tok,
        num_tokens=program.num_tokens,
        num_blocks=num_count_rows(program.num_tokens, program.num_sequences, job.block_size),
        num_experts=job.config.num_experts,
        block_size=job.block_size,
        out_dtype=default_out_dtype(job.block_size).name,
    )


def in_words(error: ProgramOutOfMemoryError, job: CompileJob, program: Program) -> str:
    """One sentence on what does not fit, with the parts that are known from shapes."""
    weights, cache, _ = program_arguments(job, program)
    parts = (
        f"weights {_held_bytes(weights) / _GIB:.2f} GiB, "
        f"KV cache {_held_bytes(cache) / _GIB:.2f} GiB"
    )
    if error.needed_bytes is None or error.usable_bytes is None:
        need = f"does not fit each device's memory; the compiler says: {error}"
    else:
        need = (
            f"needs {error.needed_bytes / _GIB:.2f} GiB of memory on each device, which has "
            f"{error.usable_bytes / _GIB:.2f} GiB for programs"
        )
    return (
        f"out of memory: {program.label} {need} ({parts}); take a larger slice, a smaller cache "
        "(--kv_cache_tokens), or fewer replicas (--data)"
    )


def fits_at_no_size(error: ProgramOutOfMemoryError, job: CompileJob, program: Program) -> bool:
    """Whether weights and cache alone are more than the compiler may use."""
    weights, cache, _ = program_arguments(job, program)
    held_bytes = _held_bytes(weights) + _held_bytes(cache)
    return error.usable_bytes is not None and held_bytes > error.usable_bytes


def _held_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes that one device holds."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total
