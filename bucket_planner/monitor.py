"""Says when drift has made a bucket plan worse than the best plan for what arrives now.

Lengths go into a fixed-size window of the most recent ones. `check` plans that window afresh (a
few milliseconds) and compares: how much more do the running buckets cost than the best ones?
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bucket_planner.buckets import MIN_BUCKET_TOKENS, BucketSet
from bucket_planner.cost_curve import CostCurve
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import IntArray, LengthHistogram, histogram
from bucket_planner.optimize import optimal_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """One comparison.

    Attributes:
      num_lengths: lengths compared.
      worse_pct: how much more the running buckets cost in all than the best plan, percent.
      waste_tokens: padding of the running buckets over the window.
      best_waste_tokens: padding of the best plan.
      best_buckets: that plan.
      should_replan: worse_pct exceeds the threshold.
    """

    num_lengths: int
    worse_pct: float
    waste_tokens: int
    best_waste_tokens: int
    best_buckets: tuple[int, ...]
    should_replan: bool


def compare(
    buckets: BucketSet,
    lengths: LengthHistogram,
    *,
    max_buckets: int,
    curve: CostCurve,
    threshold_pct: float,
) -> DriftReport:
    """Compares running buckets with the best plan for a distribution.

    Lengths above the largest bucket run in chunks of it, as engines do.

    Args:
      buckets: what is compiled now.
      lengths: what arrives now.
      max_buckets: how many a new plan could have.
      curve: cost of a bucket.
      threshold_pct: from here on a new plan is worth its compile time.

    Raises:
      PlannerConfigError: the distribution is empty.
    """
    if lengths.tokens.size == 0:
        raise PlannerConfigError("lengths", 0, "needs at least one length to compare")
    limit = buckets.limit_tokens
    rest = lengths.tokens % limit
    chunks = np.where(rest == 0, limit, rest)
    whole = _merge(chunks, lengths.counts)
    best = optimal_buckets(
        whole,
        max_buckets=max_buckets,
        limit_tokens=limit,
        curve=curve,
        min_bucket_tokens=min(buckets.sizes_tokens[0], MIN_BUCKET_TOKENS),
    )
    sizes = np.array(buckets.sizes_tokens, np.int64)
    padded = sizes[np.searchsorted(sizes, whole.tokens)]
    num_full = int(((lengths.tokens - chunks) // limit * lengths.counts).sum())
    full_cost = num_full * float(curve.cost(np.array([limit], np.int64))[0])
    running_cost = full_cost + float((curve.cost(padded) * whole.counts).sum())
    worse_pct = 100.0 * (running_cost / (full_cost + best.cost) - 1.0)
    return DriftReport(
        num_lengths=int(lengths.counts.sum()),
        worse_pct=worse_pct,
        waste_tokens=int(((padded - whole.tokens) * whole.counts).sum()),
        best_waste_tokens=best.waste_tokens,
        best_buckets=best.buckets,
        should_replan=worse_pct > threshold_pct,
    )


def _merge(tokens: IntArray, counts: IntArray) -> LengthHistogram:
    """Histogram of lengths that may repeat."""
    distinct, row = np.unique(tokens, return_inverse=True)
    merged = np.zeros(distinct.size, np.int64)
    np.add.at(merged, row, counts)
    return LengthHistogram(tokens=distinct, counts=merged)


class DriftMonitor:
    """A window of recent lengths and the plan they are held against."""

    def __init__(
        self,
        buckets: BucketSet,
        *,
        max_buckets: int,
        curve: CostCurve,
        threshold_pct: float = 5.0,
        window_lengths: int = 10_000,
    ) -> None:
        """Args as `compare`; `window_lengths` is how many recent lengths count."""
        if not (np.isfinite(threshold_pct) and threshold_pct > 0):
            raise PlannerConfigError("threshold_pct", threshold_pct, "must be a finite number > 0")
        if window_lengths < 1:
            raise PlannerConfigError("window_lengths", window_lengths, "must be >= 1")
        self._buckets = buckets
        self._max_buckets = max_buckets
        self._curve = curve
        self._threshold_pct = threshold_pct
        self._ring = np.zeros(window_lengths, np.int64)
        self._num_seen = 0

    def observe(self, lengths: Sequence[int]) -> None:
        """Adds lengths (prompt or step tokens, as the plan's semantics), oldest first.

        Raises:
          PlannerConfigError: a length below 1.
        """
        for length in lengths:
            if length < 1:
                raise PlannerConfigError("length", length, "must be >= 1")
            self._ring[self._num_seen % self._ring.size] = length
            self._num_seen += 1

    def check(self) -> DriftReport:
        """Compares the window with the plan.

        Raises:
          PlannerConfigError: nothing was observed yet.
        """
        window = self._ring[: min(self._num_seen, self._ring.size)]
        return compare(
            self._buckets,
            histogram(window),
            max_buckets=self._max_buckets,
            curve=self._curve,
            threshold_pct=self._threshold_pct,
        )
