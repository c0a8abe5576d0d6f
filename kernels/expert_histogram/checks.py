"""Checked mode: refuses inputs that break the histogram's contract.

With concrete arrays the checks run in NumPy and raise at once. Under a
transformation (`jit`, `scan`, ...) they become `checkify` checks, so the caller
must wrap the outermost function in `jax.experimental.checkify.checkify`; JAX
says so itself where that is missing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.errors import HistogramArgumentError


def check_values(ids: jax.Array, block_of_token: jax.Array, spec: HistogramSpec) -> None:
    """Checks the values of both arrays.

    Args:
        ids: [L, K, T] int32.
        block_of_token: [T] int32.
        spec: the call's sizes.

    Raises:
        HistogramArgumentError: concrete arrays hold an id outside [-1, E), an expert
            twice for one token and layer, a block outside [-1, num_blocks), a falling
            block or more than block_size tokens in one block.
        checkify.JaxRuntimeError: the same, when the caller throws a traced check's error.
    """
    if isinstance(ids, Tracer) or isinstance(block_of_token, Tracer):
        _check_traced(ids, block_of_token, spec)
    else:
        _check_concrete(np.asarray(ids), np.asarray(block_of_token), spec)


def _check_concrete(ids: np.ndarray, block: np.ndarray, spec: HistogramSpec) -> None:
    wrong = (ids < -1) | (ids >= spec.num_experts)
    if wrong.any():
        layer, rank, token = np.argwhere(wrong)[0]
        raise HistogramArgumentError(
            f"ids[{layer}, {rank}, {token}]={ids[layer, rank, token]} "
            f"must lie in [-1, num_experts={spec.num_experts})"
        )
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        layer, rank, token = np.argwhere(twice)[0]
        raise HistogramArgumentError(
            f"ids[{layer}, :, {token}] names expert {ordered[layer, rank, token]} twice; "
            "a token's experts must be distinct"
        )
    wrong = (block < -1) | (block >= spec.num_blocks)
    if wrong.any():
        token = int(np.argmax(wrong))
        raise HistogramArgumentError(
            f"block_of_token[{token}]={block[token]} must lie in [-1, num_blocks={spec.num_blocks})"
        )
    valid = block[block >= 0]
    falls = np.diff(valid) < 0
    if falls.any():
        at = int(np.argmax(falls))
        raise HistogramArgumentError(
            f"block_of_token falls from {valid[at]} to {valid[at + 1]}; "
            "it must not decrease over the tokens that are not padding"
        )
    tokens_in_block = np.bincount(valid, minlength=1)
    if tokens_in_block.max() > spec.block_size:
        full = int(tokens_in_block.argmax())
        raise HistogramArgumentError(
            f"block_of_token puts {tokens_in_block[full]} tokens in block {full}; "
            f"a block holds block_size={spec.block_size}"
        )


def _check_traced(ids: jax.Array, block: jax.Array, spec: HistogramSpec) -> None:
    checkify.check(
        jnp.all((ids >= -1) & (ids < spec.num_experts)),
        "ids must lie in [-1, num_experts={num_experts}); smallest {low}, largest {high}",
        num_experts=jnp.int32(spec.num_experts),
        low=ids.min(),
        high=ids.max(),
    )
    ordered = jnp.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    checkify.check(
        ~jnp.any(twice),
        "ids name an expert twice in {num_twice} places; a token's experts must be distinct",
        num_twice=twice.sum(),
    )
    checkify.check(
        jnp.all((block >= -1) & (block < spec.num_blocks)),
        "block_of_token must lie in [-1, num_blocks={num_blocks}); smallest {low}, largest {high}",
        num_blocks=jnp.int32(spec.num_blocks),
        low=block.min(),
        high=block.max(),
    )
    # The largest block so far, so that padding between two chunks does not hide a fall.
    before = jax.lax.cummax(block)
    checkify.check(
        jnp.all((block < 0) | (block >= before)),
        "block_of_token must not decrease over the tokens that are not padding",
    )
    tokens_in_block = jnp.zeros(spec.num_blocks, jnp.int32)
    tokens_in_block = tokens_in_block.at[jnp.where(block < 0, spec.num_blocks, block)].add(
        1, mode="drop"
    )
    checkify.check(
        tokens_in_block.max() <= spec.block_size,
        "block_of_token puts {most} tokens in one block; a block holds block_size={block_size}",
        most=tokens_in_block.max(),
        block_size=jnp.int32(spec.block_size),
    )
