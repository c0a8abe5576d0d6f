"""Trust in signatures, lowered when decode steps run against what they predict.

Each decode placement leaves two predictions of its step time: one from the signatures on the
worker, one from the mean number of experts. When the request ends, both are held against the
time per output token it really had. As long as signatures predict better, they are trusted in
full; as they predict worse, their weight shrinks towards the mean profile, which is what no
signature at all means. A constant slowness of the machine is nobody's error: each predictor's
own running bias is taken out first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class _Score:
    """Running bias and error of one predictor, in log seconds."""

    bias: float = 0.0
    error: float = 0.0

    def observe(self, log_ratio: float, rate: float) -> None:
        self.bias += rate * (log_ratio - self.bias)
        self.error += rate * (abs(log_ratio - self.bias) - self.error)


class SignatureGuard:
    """Watches predictions and outcomes; see the module.

    Args:
        memory: outcomes the running means remember.
        warm_up: outcomes before the weight may move.
        worst_ratio: at this ratio of the errors (signatures over mean curve) and above, the
            weight is `min_weight`; at 1 and below it is 1, and linear between.
        min_weight: never below, so that signatures can earn their trust back.
        max_pending: predictions waiting for their outcome at most, oldest dropped.
    """

    def __init__(
        self,
        *,
        memory: int = 200,
        warm_up: int = 50,
        worst_ratio: float = 1.25,
        min_weight: float = 0.1,
        max_pending: int = 1 << 16,
    ) -> None:
        if memory < 1 or warm_up < 1 or max_pending < 1:
            raise ValueError(f"{memory=}, {warm_up=} and {max_pending=} must be >= 1")
        if not worst_ratio > 1.0:
            raise ValueError(f"{worst_ratio=} must be > 1")
        if not 0.0 < min_weight <= 1.0:
            raise ValueError(f"{min_weight=} must lie in (0, 1]")
        self._memory = memory
        self._warm_up = warm_up
        self._worst_ratio = worst_ratio
        self._min_weight = min_weight
        self._max_pending = max_pending
        self._pending: dict[str, tuple[float, float]] = {}
        self._by_signature, self._by_mean = _Score(), _Score()
        self._num_outcomes = 0

    @property
    def error_ratio(self) -> float:
        """Error of the signatures' predictions over the mean curve's; 1.0 before any."""
        if self._num_outcomes == 0 or self._by_mean.error == 0.0:
            return 1.0
        return self._by_signature.error / self._by_mean.error

    @property
    def weight(self) -> float:
        """Trust in signatures, in [min_weight, 1]."""
        if self._num_outcomes < self._warm_up:
            return 1.0
        excess = (self.error_ratio - 1.0) / (self._worst_ratio - 1.0)
        return min(1.0, max(self._min_weight, 1.0 - excess * (1.0 - self._min_weight)))

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
        self._num_outcomes += 1
        rate = 1.0 / min(self._num_outcomes, self._memory)
        self._by_signature.observe(math.log(tpot_s / expected[0]), rate)
        self._by_mean.observe(math.log(tpot_s / expected[1]), rate)
