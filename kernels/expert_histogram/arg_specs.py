"""The static side of one call: shapes, sizes and dtypes, checked once.

Every backend receives a `HistogramSpec` that has passed `__post_init__`, so no
backend repeats a check and all of them refuse the same calls.
"""

from dataclasses import dataclass
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kernels.expert_histogram.errors import HistogramArgumentError

OUT_DTYPES = ("uint8", "uint16", "int32")
"""Count dtypes that every backend produces."""

MAX_NUM_COUNTS = 2**31 - 1
"""Backends address counts by int32, as XLA does without 64-bit mode."""


def default_out_dtype(block_size: int) -> np.dtype:
    """Smallest dtype that holds a block's largest possible count.

    Args:
        block_size: tokens in a KV block. A token's ids are distinct, so no
            expert of a block counts more than this.

    Returns:
        uint8 up to 255 tokens, uint16 up to 65,535, else int32.
    """
    fits = (name for name in OUT_DTYPES if block_size <= np.iinfo(name).max)
    return np.dtype(next(fits, OUT_DTYPES[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSpec:
    """Sizes of one histogram call.

    Attributes:
        num_layers: L, MoE layers in `ids`.
        top_k: K, experts per token.
        num_tokens: T, tokens of the step, padding included.
        num_blocks: rows of the output.
        num_experts: E.
        block_size: tokens in a KV block; bounds every count.
        out_dtype: "uint8", "uint16" or "int32".

    Raises:
        HistogramArgumentError: a size or the dtype breaks a rule.
    """

    num_layers: int
    top_k: int
    num_tokens: int
    num_blocks: int
    num_experts: int
    block_size: int
    out_dtype: str

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "top_k",
            "num_tokens",
            "num_blocks",
            "num_experts",
            "block_size",
        ):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise HistogramArgumentError(f"{name}={value!r} must be an integer of at least 1")
        if self.top_k > self.num_experts:
            raise HistogramArgumentError(
                f"top_k={self.top_k} must not exceed num_experts={self.num_experts}: "
                "a token's experts are distinct"
            )
        if self.out_dtype not in OUT_DTYPES:
            raise HistogramArgumentError(
                f"out_dtype={self.out_dtype} must be one of {', '.join(OUT_DTYPES)}"
            )
        largest = np.iinfo(self.out_dtype).max
        if self.block_size > largest:
            raise HistogramArgumentError(
                f"out_dtype={self.out_dtype} holds counts up to {largest}, but a block of "
                f"block_size={self.block_size} tokens may count {self.block_size}: "
                f"use {default_out_dtype(self.block_size).name}"
            )
        num_counts = self.num_blocks * self.num_layers * self.num_experts
        if num_counts > MAX_NUM_COUNTS:
            raise HistogramArgumentError(
                f"num_blocks * num_layers * num_experts = {num_counts} "
                f"must not exceed {MAX_NUM_COUNTS}"
            )

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """[num_blocks, L, E]."""
        return (self.num_blocks, self.num_layers, self.num_experts)

    @property
    def dtype(self) -> np.dtype:
        """`out_dtype` as a NumPy dtype."""
        return np.dtype(self.out_dtype)


def spec_of_call(
    ids: jax.Array,
    block_of_token: jax.Array,
    *,
    num_blocks: int,
    num_experts: int,
    block_size: int,
    out_dtype: DTypeLike | None,
) -> HistogramSpec:
    """Checks the arrays' shapes and dtypes and gathers the sizes.

    Args:
        ids: [L, K, T] int32.
        block_of_token: [T] int32.
        num_blocks: rows of the output.
        num_experts: E.
        block_size: tokens in a KV block.
        out_dtype: None chooses `default_out_dtype(block_size)`.

    Returns:
        The checked sizes.

    Raises:
        HistogramArgumentError: an argument breaks a rule.
    """
    if ids.ndim != 3 or ids.dtype != jnp.int32:
        raise HistogramArgumentError(
            f"ids has shape {ids.shape} and dtype {ids.dtype}; it must be [L, K, T] int32"
        )
    num_layers, top_k, num_tokens = ids.shape
    if block_of_token.shape != (num_tokens,) or block_of_token.dtype != jnp.int32:
        raise HistogramArgumentError(
            f"block_of_token has shape {block_of_token.shape} and dtype {block_of_token.dtype}; "
            f"it must be [T={num_tokens}] int32"
        )
    if out_dtype is None:
        chosen = (
            default_out_dtype(block_size) if isinstance(block_size, Integral) else OUT_DTYPES[-1]
        )
    else:
        chosen = out_dtype
    try:
        dtype_name = np.dtype(chosen).name
    except TypeError:
        dtype_name = str(chosen)  # the rule below refuses it by name
    return HistogramSpec(
        num_layers=num_layers,
        top_k=top_k,
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        num_experts=num_experts,
        block_size=block_size,
        out_dtype=dtype_name,
    )
