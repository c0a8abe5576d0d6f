"""Paired comparison of two policies over the same rounds, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serving.demo.accounting import RequestCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A relative difference in percent; negative is less than the baseline.

    Attributes:
        mean_pct: over all rounds.
        low_pct, high_pct: 95% bootstrap interval, requests resampled within rounds.
        per_round_pct: each round alone.
    """

    mean_pct: float
    low_pct: float
    high_pct: float
    per_round_pct: tuple[float, ...]

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low_pct > 0 or self.high_pct < 0


def compare_distinct_experts(
    policy: Sequence[Mapping[str, RequestCost]],
    baseline: Sequence[Mapping[str, RequestCost]],
    rng: np.random.Generator,
    *,
    num_draws: int = 2000,
) -> Comparison:
    """Token-weighted distinct experts per step, policy against baseline.

    Round i of both sent the same prompts at the same times; a draw takes the same resampled
    prompts on both sides, so what a prompt costs by itself cancels.

    Args:
        policy: per round, prompt key -> cost. Prompts missing on one side are left out.
        baseline: the same rounds of the policy compared with.
        rng: for the bootstrap.
        num_draws: bootstrap draws.

    Raises:
        ValueError: no rounds, differing numbers of rounds, or a round without common prompts.
    """
    if not policy or len(policy) != len(baseline):
        raise ValueError(f"{len(policy)=} and {len(baseline)=} must be equal and positive")
    rounds = [_paired(ours, theirs) for ours, theirs in zip(policy, baseline, strict=True)]
    sums = np.zeros((num_draws, 4))
    for pair in rounds:
        drawn = rng.integers(0, len(pair), (num_draws, len(pair)))
        sums += pair[drawn].sum(axis=1)
    drawn_pct = _percent(sums)
    return Comparison(
        mean_pct=float(_percent(np.concatenate(rounds).sum(axis=0)[None])[0]),
        low_pct=float(np.percentile(drawn_pct, 2.5)),
        high_pct=float(np.percentile(drawn_pct, 97.5)),
        per_round_pct=tuple(float(_percent(pair.sum(axis=0)[None])[0]) for pair in rounds),
    )


def _paired(ours: Mapping[str, RequestCost], theirs: Mapping[str, RequestCost]) -> np.ndarray:
    """float64 [prompts, 4]: experts * tokens and tokens of the policy, then of the baseline."""
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ValueError("a round has no prompt that both policies finished")
    return np.array(
        [
            [
                ours[key].distinct_experts * ours[key].num_decode_tokens,
                ours[key].num_decode_tokens,
                theirs[key].distinct_experts * theirs[key].num_decode_tokens,
                theirs[key].num_decode_tokens,
            ]
            for key in common
        ]
    )


def _percent(sums: np.ndarray) -> np.ndarray:
    return 100 * ((sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1)
