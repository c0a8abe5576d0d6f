"""The public histogram: checks the call, chooses the backend, nothing else.

Backends (`BACKENDS`), all with the same contract and the same results:

    xla                   plain JAX, any platform; the default on CPU
    pallas_tpu            Mosaic kernel; the default on TPU; also compiles for a TPU
                          ahead of time on a host without one
    pallas_tpu_interpret  the same kernel, interpreted on any platform: for tests
    triton_gpu            Triton kernel through jax_triton; the default on GPU
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
from jax.typing import DTypeLike

from kernels.expert_histogram import checks, pallas_tpu, triton_gpu, xla
from kernels.expert_histogram.arg_specs import HistogramSpec, spec_of_call
from kernels.expert_histogram.errors import BackendUnavailableError, HistogramArgumentError

Backend = Callable[[jax.Array, jax.Array, HistogramSpec], jax.Array]
"""(ids [L, K, T], block_of_token [T], spec) -> counts [num_blocks, L, E]."""

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "xla": xla.expert_histogram,
        "pallas_tpu": pallas_tpu.expert_histogram,
        "pallas_tpu_interpret": pallas_tpu.interpreted_expert_histogram,
        "triton_gpu": triton_gpu.expert_histogram,
    }
)
"""Every backend by name."""

_DEFAULT_BACKENDS = MappingProxyType(
    {"cpu": "xla", "tpu": "pallas_tpu", "gpu": "triton_gpu", "cuda": "triton_gpu"}
)


def expert_histogram(
    ids: jax.Array,
    block_of_token: jax.Array,
    *,
    num_blocks: int,
    num_experts: int,
    block_size: int,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
    checked: bool = False,
) -> jax.Array:
    """Counts, for each KV block and layer, the tokens routed to each expert.

    The discrete counts c[l, e] of ELDR (arXiv 2607.00466), one row per KV block touched
    by the step. Pure, without host transfer, and usable inside `jit`, where every
    keyword argument is static.

    Args:
        ids: [L, K, T] int32 expert ids, tokens last. A token's ids are distinct in
            each layer, as a router's top-k makes them. An id outside [0, num_experts),
            such as the -1 of padding, counts nothing.
        block_of_token: [T] int32 output row of each token, not decreasing over the
            tokens that are not padding; at most `block_size` tokens share a row. A row
            outside [0, num_blocks), such as the -1 of padding, counts nothing.
            `pack_blocks` makes it from the requests' chunks; for one chunk that begins
            at offset o of a block it is (o + arange(T)) // block_size.
        num_blocks: rows of the output; `max_num_blocks` gives a capacity.
        num_experts: E.
        block_size: tokens in a KV block: the largest possible count.
        out_dtype: uint8, uint16 or int32, wide enough for `block_size`; None takes
            uint8 up to 255 tokens and uint16 above.
        backend: a name of `BACKENDS`; None takes the platform's default.
        checked: refuse ids, blocks and duplicates that break the rules above, instead
            of leaving them out (duplicates: of counting them an unspecified number of
            times). Costs a pass over the ids; under `jit` it needs `checkify`.

    Returns:
        [num_blocks, L, E] counts of `out_dtype`; rows without a token are zero.

    Raises:
        HistogramArgumentError: a shape, dtype, size or name breaks a rule, or in
            checked mode a value does.
        BackendUnavailableError: the chosen backend cannot run in this process.
    """
    spec = spec_of_call(
        ids,
        block_of_token,
        num_blocks=num_blocks,
        num_experts=num_experts,
        block_size=block_size,
        out_dtype=out_dtype,
    )
    run = _choose(backend)
    if checked:
        checks.check_values(ids, block_of_token, spec)
    return run(ids, block_of_token, spec)


def _choose(name: str | None) -> Backend:
    if name is None:
        platform = jax.default_backend()
        if platform not in _DEFAULT_BACKENDS:
            raise BackendUnavailableError(
                f"no default backend for {platform=}; choose one of {', '.join(BACKENDS)}"
            )
        name = _DEFAULT_BACKENDS[platform]
    if name not in BACKENDS:
        raise HistogramArgumentError(f"backend={name} must be one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
