"""The Triton kernel without a GPU: interpreted, compiled, and lowered into a JAX program.

Each part needs a package that only GPU hosts install; it is skipped where that is absent.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.expert_histogram import BackendUnavailableError, expert_histogram, triton_gpu
from kernels.expert_histogram.arg_specs import HistogramSpec

ROOT = Path(__file__).resolve().parents[3]
NUM_INTERPRETED_CASES = 400

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_jax_triton = pytest.mark.skipif(
    find_spec("jax_triton") is None or find_spec("jax_cuda13_plugin") is None,
    reason="jax_triton and jax_cuda13_plugin are not installed",
)


def spec_of(**changes):
    sizes = {
        "num_layers": 48,
        "top_k": 8,
        "num_tokens": 8192,
        "num_blocks": 65,
        "num_experts": 128,
        "block_size": 128,
        "out_dtype": "uint8",
    }
    return HistogramSpec(**(sizes | changes))


@needs_triton
@needs_torch
def test_interpreted_kernel_agrees_with_numpy():
    script = Path(__file__).with_name("triton_interpreted_cases.py")
    done = subprocess.run(
        [sys.executable, script, str(NUM_INTERPRETED_CASES)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(NUM_INTERPRETED_CASES)]


@needs_triton
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 512, "top_k": 10, "block_size": 1024, "out_dtype": "uint16"},
        {"num_experts": 2, "top_k": 1, "block_size": 16, "num_tokens": 16, "num_blocks": 2},
    ],
    ids=["prefill", "wide", "small"],
)
def test_kernel_compiles_without_spills(monkeypatch, target, changes):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    from kernels.expert_histogram import triton_compile

    resources = triton_compile.compile_for(target, spec_of(**changes))
    assert resources.num_spills == 0
    assert resources.num_registers <= 64
    assert resources.shared_bytes <= 4096


@needs_triton
@needs_jax_triton
def test_kernel_lowers_into_a_jax_program_for_cuda(monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    spec = spec_of()

    def histogram(ids, block_of_token):
        return triton_gpu.call_kernel(ids, block_of_token, spec, compute_capability=90)

    ids = jax.ShapeDtypeStruct((48, 8, 8192), jnp.int32)
    blocks = jax.ShapeDtypeStruct((8192,), jnp.int32)
    lowered = jax.jit(histogram).trace(ids, blocks).lower(lowering_platforms=("cuda",))
    assert "triton_kernel_call" in lowered.as_text()


@pytest.mark.skipif(find_spec("jax_triton") is not None, reason="jax_triton is installed")
def test_without_jax_triton_the_call_says_so():
    ids = jax.ShapeDtypeStruct((48, 8, 8192), jnp.int32)
    blocks = jax.ShapeDtypeStruct((8192,), jnp.int32)
    with pytest.raises(BackendUnavailableError, match="needs triton, jax_triton"):
        jax.eval_shape(lambda i, b: triton_gpu.call_kernel(i, b, spec_of()), ids, blocks)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this host has a GPU")
def test_without_a_gpu_the_backend_says_so():
    ids, blocks = jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros(3, jnp.int32)
    with pytest.raises(BackendUnavailableError, match="needs a GPU, but JAX runs on"):
        expert_histogram(
            ids, blocks, num_blocks=2, num_experts=4, block_size=16, backend="triton_gpu"
        )


def test_row_ranges_hold_every_token_of_a_row():
    blocks = jnp.asarray([-1, 0, 0, -1, 0, 2, 2, -1, 4, 9], jnp.int32)
    spec = spec_of(num_tokens=10, num_blocks=5)
    first, end = jax.jit(triton_gpu.row_ranges, static_argnums=1)(blocks, spec)
    np.testing.assert_array_equal(first, [1, 0, 5, 0, 8])
    np.testing.assert_array_equal(end, [5, 0, 7, 0, 9])
