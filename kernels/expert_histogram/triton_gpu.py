# Triton is installed on GPU hosts only.
# pyright: reportMissingImports=false
"""The histogram as a Triton kernel, called from JAX through jax_triton on a GPU host.

Nothing of Triton is imported before the first call.
"""

import jax
import jax.numpy as jnp

from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.errors import BackendUnavailableError

_NUM_WARPS = 4


def row_ranges(block_of_token: jax.Array, spec: HistogramSpec) -> tuple[jax.Array, jax.Array]:
    """[num_blocks] first token of each row, and one past its last; (0, 0) without tokens."""
    token = jnp.arange(spec.num_tokens, dtype=jnp.int32)[None, :]
    row = jnp.arange(spec.num_blocks, dtype=jnp.int32)[:, None]
    here = block_of_token[None, :] == row
    end = jnp.where(here, token + 1, 0).max(axis=1)
    first = jnp.where(here, token, spec.num_tokens).min(axis=1)
    return jnp.minimum(first, end), end


def call_kernel(
    ids: jax.Array,
    block_of_token: jax.Array,
    spec: HistogramSpec,
    *,
    compute_capability: int | None = None,
) -> jax.Array:
    """Calls the Triton kernel.

    Args:
        ids: [L, K, T] int32.
        block_of_token: [T] int32.
        spec: the call's sizes.
        compute_capability: of the GPU to compile for, such as 90; None asks the device.

    Returns:
        [num_blocks, L, E] of `spec.dtype`.

    Raises:
        BackendUnavailableError: triton or jax_triton cannot be imported.
    """
    try:
        import jax_triton

        from kernels.expert_histogram import triton_kernel
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend=triton_gpu needs triton, jax_triton and a JAX with GPU support: {error}"
        ) from error
    first, end = row_ranges(block_of_token, spec)
    return jax_triton.triton_call(
        ids,
        block_of_token,
        first,
        end,
        kernel=triton_kernel.count_row,
        out_shape=jax.ShapeDtypeStruct(spec.out_shape, spec.dtype),
        grid=(spec.num_blocks, spec.num_layers),
        name="expert_histogram",
        num_warps=_NUM_WARPS,
        compute_capability=compute_capability,
        num_layers=spec.num_layers,
        top_k=spec.top_k,
        num_tokens=spec.num_tokens,
        num_experts=spec.num_experts,
        **triton_kernel.tile_sizes(
            top_k=spec.top_k,
            num_experts=spec.num_experts,
            block_size=spec.block_size,
            num_tokens=spec.num_tokens,
        ),
    )


def expert_histogram(ids: jax.Array, block_of_token: jax.Array, spec: HistogramSpec) -> jax.Array:
    """See `kernels.expert_histogram.api.expert_histogram`; the arguments are checked.

    Args:
        ids: [L, K, T] int32.
        block_of_token: [T] int32.
        spec: the call's sizes.

    Returns:
        [num_blocks, L, E] of `spec.dtype`.

    Raises:
        BackendUnavailableError: there is no GPU, or triton or jax_triton is missing.
    """
    platform = jax.default_backend()
    if platform not in ("gpu", "cuda", "rocm"):
        raise BackendUnavailableError(
            f"backend=triton_gpu needs a GPU, but JAX runs on {platform=}"
        )
    return call_kernel(ids, block_of_token, spec)
