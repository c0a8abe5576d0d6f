"""The prefill half of J; what its terms are stands in serving/core/objective.py."""

from __future__ import annotations

import numpy as np

from serving.core.costs import WorkerCosts
from serving.core.decision import TermKind
from serving.core.placement import PlacementContext, TermMatrix


class PrefillPrices:
    """Prices of running the prompt; at least its last token is always computed.

    Attributes:
        score_usd: float64 [W], J.
        queue_s: float64 [W], of these the ones before its own tokens are computed.
        ttft_s: float64 [W], predicted seconds from now to the first token.
    """

    def __init__(self, context: PlacementContext, costs: WorkerCosts) -> None:
        self._context = context
        view = context.view
        num_tokens = context.request.num_prompt_tokens
        self._cached = np.minimum(context.cached_tokens, num_tokens - 1)
        self._uncached = num_tokens - self._cached
        self._charge = charge = costs.charge(
            self._uncached, view.queued_prefill_tokens, view.started_prefill_tokens
        )
        self._token_s = costs.prefill_token_s * view.speed_factor
        self._chunk_s = costs.prefill_chunk_s * view.speed_factor
        self.queue_s = charge.before_tokens * self._token_s
        self.queue_s += charge.before_chunks * self._chunk_s
        run_s = charge.computed_tokens * self._token_s
        run_s += charge.num_chunks * self._chunk_s
        self._price = context.target.lambda_usd_per_s
        self._rate = costs.rate_for(context.request.slo)
        self.ttft_s = self.queue_s + run_s
        score = run_s * (self._rate + self._price)
        score += self.queue_s * self._price
        # A step that computes a prompt holds up whoever decodes on the same worker.
        decoding = view.decoding_usd_per_s
        self._held_up = decoding if decoding is not None and np.count_nonzero(decoding) else None
        if self._held_up is not None:
            score += run_s * self._held_up
        self._run_s = run_s
        self.score_usd = score

    def keeps_target(self) -> bool:
        """Whether `breaks_target` is False everywhere."""
        return float(self.ttft_s.max(initial=0.0)) <= self._ttft_left_s()

    def breaks_target(self) -> np.ndarray:
        """First token later than the class's TTFT after arrival, bool [W]."""
        return self.ttft_s > self._ttft_left_s()

    def _ttft_left_s(self) -> float:
        waited_s = self._context.view.taken_at_s - self._context.request.arrival_s
        return self._context.target.ttft_p99_s - max(0.0, waited_s)

    def packed(self, limit_s: float) -> tuple[np.ndarray, np.ndarray]:
        """J with delay free inside an allowance: what packing compares.

        Args:
            limit_s: seconds from arrival to the first token that may be used up.

        Returns:
            float64 [W] compute in dollars, and bool [W] who stays inside.
        """
        waited_s = self._context.view.taken_at_s - self._context.request.arrival_s
        usd = self._run_s * self._rate
        if self._held_up is not None:
            usd = usd + self._run_s * self._held_up
        return usd, self.ttft_s <= limit_s - max(0.0, waited_s)

    def matrix(self) -> TermMatrix:
        """The terms, float64 [W, 6 or 7]."""
        rate, price, charge = self._rate, self._price, self._charge
        padding_s = (charge.computed_tokens - self._uncached) * self._token_s
        prefill_s = self._uncached * self._token_s + charge.num_chunks * self._chunk_s
        saving_s = self._cached * self._token_s
        columns = [
            ("queue", TermKind.COST, self.queue_s, self.queue_s * price),
            ("prefill_delay", TermKind.COST, prefill_s, prefill_s * price),
            ("prefill_compute", TermKind.COST, prefill_s, prefill_s * rate),
            ("padding", TermKind.COST, padding_s, padding_s * (rate + price)),
        ]
        if self._held_up is not None:
            held_up = self._run_s * self._held_up
            columns.append(("interference", TermKind.COST, self._run_s, held_up))
        columns += [
            ("prefix_saving", TermKind.INFO, saving_s, saving_s * (rate + price)),
            ("ttft", TermKind.INFO, self.ttft_s, self.ttft_s * price),
        ]
        names, kinds, seconds, usd = zip(*columns, strict=True)
        speed = np.where(self._token_s > 0, self._token_s, np.inf)
        return TermMatrix(
            names=names,
            kinds=kinds,
            seconds=np.stack(seconds, axis=1),
            usd=np.stack(usd, axis=1),
            facts=(
                ("uncached_tokens", self._uncached),
                ("padded_tokens", charge.computed_tokens),
                ("tokens_before", charge.before_tokens),
                ("prefill_tokens_per_s", 1.0 / speed),
                ("ttft_s", self.ttft_s),
            ),
        )
