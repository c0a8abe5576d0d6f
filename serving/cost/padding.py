"""Padding as a cost of placement: what a request adds to the bucket a prefill worker would run.

Where an engine pads STEPS, the waste depends on who else is in the step: a request that tips the
queued tokens into the next bucket causes that bucket's padding, one that fits the padding already
there costs nothing extra. So a request is charged the tokens it ADDS to what the worker computes,
and the waste is what of that is not its own (negative when it fills padding others caused). Where
an engine pads each PROMPT, the charge does not depend on the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bucket_planner.buckets import BucketSet, Semantics
from serving.core.errors import ConfigError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddingCharge:
    """What placing a request costs in computed tokens, per worker.

    Attributes:
        bucket_tokens: int64[W], bucket the request's last step would run in.
        computed_tokens: int64[W], tokens the worker computes more because of the request.
        waste_tokens: int64[W], of these, tokens that are not the request's own; negative where
            the request fills padding that is there anyway.
    """

    bucket_tokens: IntArray
    computed_tokens: IntArray
    waste_tokens: IntArray


class PaddingModel:
    """Buckets of one prefill pool."""

    def __init__(self, buckets: BucketSet) -> None:
        """Args: the compiled buckets and what they pad."""
        self._semantics: Semantics = buckets.semantics
        self._sizes = np.array(buckets.sizes_tokens, np.int64)

    def charge(self, new_tokens: IntArray, queued_tokens: IntArray) -> PaddingCharge:
        """Charges a request against each worker of the pool.

        Args:
            new_tokens: int64[W], uncached prompt tokens on each worker, >= 0.
            queued_tokens: int64[W], prompt tokens already queued there, >= 0.

        Raises:
            ConfigError: shapes differ or a count is negative.
        """
        if new_tokens.shape != queued_tokens.shape:
            raise ConfigError(
                "queued_tokens", queued_tokens.shape, f"must have shape {new_tokens.shape}"
            )
        for name, values in (("new_tokens", new_tokens), ("queued_tokens", queued_tokens)):
            if values.size and int(values.min()) < 0:
                raise ConfigError(name, int(values.min()), "must be >= 0")
        if self._semantics == "prompt":
            computed = self.padded(new_tokens)
            bucket = self._last_bucket(new_tokens)
        else:
            together = queued_tokens + new_tokens
            computed = self.padded(together) - self.padded(queued_tokens)
            bucket = self._last_bucket(together)
        return PaddingCharge(
            bucket_tokens=bucket, computed_tokens=computed, waste_tokens=computed - new_tokens
        )

    def padded(self, tokens: IntArray) -> IntArray:
        """int64[W] tokens computed for int64[W]: full steps of the largest bucket, then one."""
        limit = self._sizes[-1]
        rest = tokens % limit
        tail = self._sizes[np.searchsorted(self._sizes, rest)]
        return tokens - rest + np.where(rest > 0, tail, 0)

    def _last_bucket(self, tokens: IntArray) -> IntArray:
        """Bucket of the last step; 0 where nothing runs."""
        limit = self._sizes[-1]
        rest = tokens % limit
        tail = self._sizes[np.searchsorted(self._sizes, rest)]
        return np.where(rest > 0, tail, np.where(tokens > 0, limit, 0))


def waste_usd(
    charge: PaddingCharge, prefill_s_per_token: float, usd_per_s: float
) -> npt.NDArray[np.float64]:
    """float64[W] dollars of the waste at a worker's prefill speed and price.

    Args:
        charge: of one request.
        prefill_s_per_token: seconds per computed token.
        usd_per_s: price of the worker.
    """
    return charge.waste_tokens.astype(np.float64) * (prefill_s_per_token * usd_per_s)
