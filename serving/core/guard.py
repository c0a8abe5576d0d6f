"""Trust in signatures, withdrawn when decode steps do not follow what they promise.

Each decode placement leaves two predictions of its step time: one from the signatures on the
worker, one from the mean number of experts. When the request ends, both are held against the
time per output token it really had, in logarithms. What signatures promise is the saving, mean
curve over signature prediction; if they know anything, requests that were promised more got
more. So the watch is on the partial correlation of promised and realised time, the mean curve
held fixed: it does not see a slow machine (a constant), nor a load that moves (the mean curve
moves with it), nor whether promises are too rosy by a factor; signatures of other prompts,
whose promises mean nothing, leave it near zero. Trust shrinks towards the mean profile, which
is what no signature at all means.
"""

from __future__ import annotations

import math


class SignatureGuard:
    """Watches predictions and outcomes; see the module.

    Args:
        memory: outcomes the running moments remember.
        warm_up: outcomes before the weight may move.
        lost_below: at this agreement and below the weight is `min_weight`.
        full_above: at this agreement and above it is 1, and linear between.
        min_weight: never below, so that signatures can earn their trust back.
        max_pending: predictions waiting for their outcome at most, oldest dropped.
    """

    def __init__(
        self,
        *,
        memory: int = 200,
        warm_up: int = 50,
        lost_below: float = 0.1,
        full_above: float = 0.3,
        min_weight: float = 0.1,
        max_pending: int = 1 << 16,
    ) -> None:
        if memory < 1 or warm_up < 1 or max_pending < 1:
            raise ValueError(f"{memory=}, {warm_up=} and {max_pending=} must be >= 1")
        if not -1.0 <= lost_below < full_above <= 1.0:
            raise ValueError(f"{lost_below=} must lie in [-1, {full_above=}), that in (-1, 1]")
        if not 0.0 < min_weight <= 1.0:
            raise ValueError(f"{min_weight=} must lie in (0, 1]")
        self._memory = memory
        self._warm_up = warm_up
        self._lost_below = lost_below
        self._full_above = full_above
        self._min_weight = min_weight
        self._max_pending = max_pending
        self._pending: dict[str, tuple[float, float]] = {}
        self._mean = [0.0, 0.0, 0.0]
        # Covariances: promise-promise, promise-mean curve, promise-time, curve-curve,
        # curve-time, time-time.
        self._cov = [0.0] * 6
        self._num_outcomes = 0

    @property
    def agreement(self) -> float:
        """Partial correlation of promised savings and realised ones, in [-1, 1]; 1 before any."""
        if self._num_outcomes < 3:
            return 1.0
        xx, xz, xy, zz, zy, yy = self._cov
        if zz > 0.0:
            xx, xy, yy = xx - xz * xz / zz, xy - xz * zy / zz, yy - zy * zy / zz
        scale = math.sqrt(max(0.0, xx) * max(0.0, yy))
        return min(1.0, max(-1.0, xy / scale)) if scale > 1e-12 else 0.0

    @property
    def weight(self) -> float:
        """Trust in signatures, in [min_weight, 1]."""
        if self._num_outcomes < self._warm_up:
            return 1.0
        share = (self.agreement - self._lost_below) / (self._full_above - self._lost_below)
        return self._min_weight + (1.0 - self._min_weight) * min(1.0, max(0.0, share))

    def expect(self, request_id: str, *, by_signature_s: float, by_mean_s: float) -> None:
        """Notes what a placed request's step should take, seconds > 0."""
        if not (by_signature_s > 0.0 and by_mean_s > 0.0):
            return
        self._pending.pop(request_id, None)
        if len(self._pending) >= self._max_pending:
            del self._pending[next(iter(self._pending))]
        self._pending[request_id] = (by_signature_s, by_mean_s)

    def realise(self, request_id: str, tpot_s: float | None) -> None:
        """Holds a request's predictions against its time per output token, None without one."""
        expected = self._pending.pop(request_id, None)
        if expected is None or tpot_s is None or not tpot_s > 0.0:
            return
        by_signature, by_mean = math.log(expected[0]), math.log(expected[1])
        self._observe(by_signature - by_mean, by_mean, math.log(tpot_s))

    def _observe(self, promise: float, curve: float, taken: float) -> None:
        """Exponentially weighted means and covariances, plain ones until `memory` outcomes."""
        self._num_outcomes += 1
        rate = 1.0 / min(self._num_outcomes, self._memory)
        gone = [
            value - mean for value, mean in zip((promise, curve, taken), self._mean, strict=True)
        ]
        self._mean = [mean + rate * d for mean, d in zip(self._mean, gone, strict=True)]
        x, z, y = gone
        products = (x * x, x * z, x * y, z * z, z * y, y * y)
        self._cov = [
            (1.0 - rate) * (cov + rate * product)
            for cov, product in zip(self._cov, products, strict=True)
        ]
