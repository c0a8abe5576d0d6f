"""Compiled bucket sets: what engines ship with, what a plan proposes, and the lookup rule.

An engine pads `n` tokens to the smallest bucket >= n. What `n` counts depends on the engine: the
tokens of one PROMPT (JetStream, MaxText) or the tokens scheduled in one STEP over all requests
(tpu-inference, sgl-jax).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError

SCHEMA_VERSION = 1
MIN_BUCKET_TOKENS = 16  # tpu-inference MIN_TOKEN_BUCKET; JetStream's smallest prefill bucket

Semantics = Literal["prompt", "step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSet:
    """An ascending set of bucket sizes.

    Attributes:
      id: name for people and logs.
      semantics: what is padded, a prompt or a step.
      sizes_tokens: bucket sizes, strictly ascending, at least one.
    """

    id: str
    semantics: Semantics
    sizes_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        check_sizes(self.sizes_tokens, field=f"{self.id}.buckets")

    @property
    def limit_tokens(self) -> int:
        """The largest bucket."""
        return self.sizes_tokens[-1]

    def bucket_of(self, num_tokens: int) -> int:
        """Smallest bucket >= num_tokens.

        Raises:
          PlannerConfigError: num_tokens is above the largest bucket.
        """
        index = bisect_left(self.sizes_tokens, num_tokens)
        if index == len(self.sizes_tokens):
            raise PlannerConfigError(
                f"{self.id}.num_tokens", num_tokens, f"must be <= {self.limit_tokens}"
            )
        return self.sizes_tokens[index]

    def padded_tokens(self, num_tokens: int) -> int:
        """Tokens computed for `num_tokens`: full chunks of the largest bucket, then one bucket."""
        full, rest = divmod(num_tokens, self.limit_tokens)
        return full * self.limit_tokens + (self.bucket_of(rest) if rest else 0)


def check_sizes(sizes_tokens: Sequence[int], *, field: str) -> None:
    """Checks that sizes are positive and strictly ascending.

    Raises:
      PlannerConfigError: empty, not positive, unsorted, or two buckets covering the same range.
    """
    if not sizes_tokens:
        raise PlannerConfigError(field, list(sizes_tokens), "must hold at least one bucket")
    for size in sizes_tokens:
        if size < 1:
            raise PlannerConfigError(field, size, "every bucket must be a whole number >= 1")
    for low, high in pairwise(sizes_tokens):
        if high == low:
            raise PlannerConfigError(field, high, "buckets overlap: the same size appears twice")
        if high < low:
            raise PlannerConfigError(field, high, f"buckets must ascend, but {high} follows {low}")


def powers_of_two(limit_tokens: int, *, min_tokens: int = MIN_BUCKET_TOKENS) -> tuple[int, ...]:
    """Doubling sizes from `min_tokens` to the first one >= `limit_tokens`: every engine's default.

    Raises:
      PlannerConfigError: a size below 1.
    """
    if min_tokens < 1 or limit_tokens < 1:
        raise PlannerConfigError("limit_tokens", limit_tokens, "sizes must be >= 1")
    sizes = [min_tokens]
    while sizes[-1] < limit_tokens:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def padding_gap_sizes(
    limit_tokens: int, gap_tokens: int, *, min_tokens: int = MIN_BUCKET_TOKENS
) -> tuple[int, ...]:
    """Sizes tpu-inference builds for `VLLM_TPU_BUCKET_PADDING_GAP=gap_tokens`.

    Doubling from `min_tokens` while <= gap, then steps of the gap until the limit is covered; a
    gap of 0 keeps doubling. Example: min 16, limit 512, gap 64 -> 16, 32, 64, 128, 192 ... 512.
    Source: tpu-inference `runner/utils.py`, `get_token_paddings`.

    Raises:
      PlannerConfigError: the gap is neither 0 nor >= min_tokens.
    """
    if gap_tokens == 0:
        return powers_of_two(limit_tokens, min_tokens=min_tokens)
    if gap_tokens < min_tokens:
        raise PlannerConfigError("padding_gap", gap_tokens, f"must be 0 or >= {min_tokens}")
    sizes = [min_tokens]
    while sizes[-1] * 2 <= gap_tokens:
        sizes.append(sizes[-1] * 2)
    while sizes[-1] < limit_tokens:
        sizes.append(sizes[-1] + gap_tokens)
    return tuple(sizes)


def next_power_of_two(num_tokens: int) -> int:
    """Smallest power of two >= num_tokens (>= 1)."""
    return 1 << (num_tokens - 1).bit_length()


def padding_tokens(
    sizes_tokens: Sequence[int], tokens: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> int:
    """Tokens computed for nothing: sum of counts * (bucket - tokens).

    Args:
      sizes_tokens: ascending buckets.
      tokens: int64[num_lengths] lengths, none above the last bucket.
      counts: int64[num_lengths] how often each occurs.

    Raises:
      PlannerConfigError: a length above the last bucket.
    """
    sizes = np.asarray(sizes_tokens, np.int64)
    if tokens.size and int(tokens.max()) > int(sizes[-1]):
        raise PlannerConfigError("tokens", int(tokens.max()), f"must be <= {int(sizes[-1])}")
    return int(((sizes[np.searchsorted(sizes, tokens)] - tokens) * counts).sum())


class _BucketFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `configs/buckets/ID.yaml`: `buckets`, or `limit_tokens` with an optional gap."""

    schema_version: int
    id: str
    engine: str
    semantics: Semantics
    source: str
    buckets: list[int] | None = None
    min_tokens: int = MIN_BUCKET_TOKENS
    limit_tokens: int | None = None
    padding_gap: int = 0


def load_bucket_set(path: str | Path) -> BucketSet:
    """Reads one bucket file.

    Raises:
      PlannerConfigError: names file, field, value and rule.
    """
    file = str(path)
    spec = load_yaml(path, _BucketFile)
    try:
        if spec.schema_version != SCHEMA_VERSION:
            raise PlannerConfigError(
                "schema_version", spec.schema_version, f"must be {SCHEMA_VERSION}"
            )
        if (spec.buckets is None) == (spec.limit_tokens is None):
            raise PlannerConfigError(
                "buckets", spec.buckets, "give exactly one of buckets and limit_tokens"
            )
        if spec.buckets is not None:
            sizes = tuple(spec.buckets)
        else:
            limit = spec.limit_tokens or 0
            sizes = padding_gap_sizes(limit, spec.padding_gap, min_tokens=spec.min_tokens)
        return BucketSet(id=spec.id, semantics=spec.semantics, sizes_tokens=sizes)
    except PlannerConfigError as error:
        raise error.in_file(file) from None
