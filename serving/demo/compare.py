"""Paired comparison of two policies over the same rounds, with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serving.demo.accounting import RequestCost, Step


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


class Weighed(NamedTuple):
    """What one request adds to both sides of a ratio: the policy's figure is sum over sum."""

    experts: float
    weight: float


def by_token(costs: Mapping[str, RequestCost]) -> dict[str, Weighed]:
    """Distinct experts over the tokens whose steps touched them."""
    return {
        key: Weighed(sum(cost.step_experts), cost.num_decode_tokens) for key, cost in costs.items()
    }


def experts_by_batch(steps: Iterable[Step], *, min_steps: int = 20) -> dict[int, float]:
    """Mean distinct experts of decode steps of each batch size seen at least `min_steps` times."""
    seen: dict[int, list[float]] = {}
    for step in steps:
        if step.kind == "decode":
            seen.setdefault(step.num_tokens, []).append(step.distinct_experts)
    return {
        batch: float(np.mean(found)) for batch, found in seen.items() if len(found) >= min_steps
    }


def at_equal_batch(
    costs: Mapping[str, RequestCost], expected: Mapping[int, float]
) -> dict[str, Weighed]:
    """Distinct experts over what steps of the same batch sizes touch under the baseline.

    A rule that bunches requests makes bigger steps, one that spreads them smaller ones, and so
    does a machine that slows down for a while: none of that is left in this ratio. Tokens of
    steps whose size is not in `expected` are left out.
    """
    weighed = {}
    for key, cost in costs.items():
        pairs = [
            (experts, expected[batch])
            for experts, batch in zip(cost.step_experts, cost.step_batches, strict=True)
            if batch in expected
        ]
        if pairs:
            weighed[key] = Weighed(*np.sum(pairs, axis=0).tolist())
    return weighed


def compare(
    policy: Sequence[Mapping[str, Weighed]],
    baseline: Sequence[Mapping[str, Weighed]],
    rng: np.random.Generator,
    *,
    num_draws: int = 2000,
) -> Comparison | None:
    """Distinct experts per step, policy against baseline.

    Round i of both sent the same prompts at the same times; a draw takes the same resampled
    prompts on both sides, so what a prompt costs by itself cancels.

    Args:
        policy: per round, prompt key -> `by_token` or `at_equal_batch`. Prompts missing on one
            side are left out.
        baseline: the same rounds of the policy compared with.
        rng: for the bootstrap.
        num_draws: bootstrap draws.

    Returns:
        None when no prompt was weighed on both sides. A round without one counts for nothing.

    Raises:
        ValueError: the numbers of rounds differ.
    """
    pairs = [_paired(ours, theirs) for ours, theirs in zip(policy, baseline, strict=True)]
    rounds = [pair for pair in pairs if len(pair)]
    if not rounds:
        return None
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


def _paired(ours: Mapping[str, Weighed], theirs: Mapping[str, Weighed]) -> np.ndarray:
    """float64 [prompts, 4]: experts and weight of the policy, then of the baseline."""
    common = sorted(ours.keys() & theirs.keys())
    return np.array([[*ours[key], *theirs[key]] for key in common])


def _percent(sums: np.ndarray) -> np.ndarray:
    return 100 * ((sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1)
