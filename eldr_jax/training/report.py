"""What a trained model does on texts it has not seen: loss, expert load, shared experts.

The figure that decides whether expert-aware placement can pay is the distinct-expert reduction:
how many fewer experts a decode step of n sequences touches when the sequences share a domain than
when they are mixed. It is measured step by step, one token of each sequence at a time, each at a
place of its own, on the text itself (teacher forcing), with the exact gate and no capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eldr_jax.training.reading import RoutedText


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Distinct experts of same-domain against mixed decode batches.

    Attributes:
      batch: sequences of a step.
      num_draws: batches drawn of each kind.
      same: [L] mean distinct experts of a same-domain step.
      mixed: [L] the same of a mixed step.
      reduction: [L] 1 - same/mixed.
      mean: the reduction of the sums over layers.
      ci_low: lower end of the 95% bootstrap interval of `mean`, over draws.
      ci_high: its upper end.
      by_domain: `mean` of each domain against the same mixed batches.
    """

    batch: int
    num_draws: int
    same: list[float]
    mixed: list[float]
    reduction: list[float]
    mean: float
    ci_low: float
    ci_high: float
    by_domain: dict[str, float]


def loss_by_domain(texts: Mapping[str, Sequence[RoutedText]]) -> dict[str, dict[str, float]]:
    """Held-out loss of each domain.

    Args:
      texts: domain -> texts.

    Returns:
      Domain -> {`num_texts`, `num_tokens`, `nats_per_token`, `bits_per_byte`}.
    """
    table = {}
    for domain, members in texts.items():
        losses = np.concatenate([text.losses for text in members])
        num_bytes = sum(text.num_bytes for text in members)
        table[domain] = {
            "num_texts": len(members),
            "num_tokens": int(losses.size),
            "nats_per_token": float(losses.mean()),
            "bits_per_byte": float(losses.sum() / np.log(2) / num_bytes),
        }
    return table


def expert_shares(texts: Mapping[str, Sequence[RoutedText]], num_experts: int) -> np.ndarray:
    """Share of choices per expert when every domain sends equally many tokens.

    Args:
      texts: domain -> texts.
      num_experts: E.

    Returns:
      [L, E] float64, rows that sum to one.
    """
    shares = []
    for members in texts.values():
        ids = np.concatenate([text.ids for text in members], axis=1)
        counts = np.stack([np.bincount(row.ravel(), minlength=num_experts) for row in ids])
        shares.append(counts / counts.sum(axis=1, keepdims=True))
    return np.mean(shares, axis=0)


def load_table(shares: np.ndarray) -> list[dict[str, float]]:
    """How even a load is.

    Args:
      shares: [L, E] from `expert_shares`, or a mean of such.

    Returns:
      Per layer {`max_over_mean`, `min_over_mean`, `cv`}, cv the coefficient of variation.
    """
    load = shares * shares.shape[1]
    return [
        {
            "max_over_mean": float(row.max()),
            "min_over_mean": float(row.min()),
            "cv": float(row.std()),
        }
        for row in load
    ]


def distinct_reduction(
    texts: Mapping[str, Sequence[RoutedText]],
    num_experts: int,
    *,
    batch: int,
    num_draws: int,
    steps: int,
    rng: np.random.Generator,
) -> Reduction:
    """Measures how many experts same-domain decode batches save.

    A same-domain batch is `batch` different texts of one domain, domains in turn; a mixed batch
    draws a domain for each place, evenly, and a text of it. Each text starts at a random place
    and is read for `steps` steps; texts shorter than that are left out.

    Args:
      texts: domain -> texts.
      num_experts: E.
      batch: sequences of a step, n.
      num_draws: batches of each kind.
      steps: decode steps of a batch.
      rng: draws.

    Returns:
      The table's figures.

    Raises:
      ValueError: a domain has fewer than `batch` texts that are long enough.
    """
    pools: dict[str, list[np.ndarray]] = {}
    for domain, members in texts.items():
        pools[domain] = [text.ids for text in members if text.ids.shape[1] >= steps]
        if len(pools[domain]) < batch:
            raise ValueError(
                f"domain {domain!r} has {len(pools[domain])} texts of {steps} tokens, "
                f"needs {batch=}"
            )
    domains = sorted(pools)
    same, mixed = [], []
    for draw in range(num_draws):
        pool = pools[domains[draw % len(domains)]]
        chosen = rng.choice(len(pool), size=batch, replace=False)
        same.append(_distinct([pool[i] for i in chosen], num_experts, steps, rng))
        members = []
        for index in rng.integers(len(domains), size=batch):
            pool = pools[domains[index]]
            members.append(pool[rng.integers(len(pool))])
        mixed.append(_distinct(members, num_experts, steps, rng))
    same_draws, mixed_draws = np.array(same), np.array(mixed)
    same_total, mixed_total = same_draws.sum(axis=1), mixed_draws.sum(axis=1)
    resampled = [
        1.0 - rng.choice(same_total, num_draws).mean() / rng.choice(mixed_total, num_draws).mean()
        for _ in range(1000)
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    same_mean, mixed_mean = same_draws.mean(axis=0), mixed_draws.mean(axis=0)
    return Reduction(
        batch=batch,
        num_draws=num_draws,
        same=same_mean.tolist(),
        mixed=mixed_mean.tolist(),
        reduction=(1.0 - same_mean / mixed_mean).tolist(),
        mean=float(1.0 - same_total.mean() / mixed_total.mean()),
        ci_low=float(low),
        ci_high=float(high),
        by_domain={
            domain: float(1.0 - same_total[place :: len(domains)].mean() / mixed_total.mean())
            for place, domain in enumerate(domains)
        },
    )


def _distinct(
    members: Sequence[np.ndarray], num_experts: int, steps: int, rng: np.random.Generator
) -> np.ndarray:
    """Mean distinct experts per layer, [L], of texts [L, N, K] read side by side."""
    hit = np.zeros((members[0].shape[0], steps, num_experts), bool)
    layers = np.arange(hit.shape[0])[:, None, None]
    rows = np.arange(steps)[None, :, None]
    for ids in members:
        start = int(rng.integers(ids.shape[1] - steps + 1))
        hit[layers, rows, ids[:, start : start + steps]] = True
    return hit.sum(axis=2).mean(axis=1)


def summarise(
    groups: Mapping[str, Mapping[str, Sequence[RoutedText]]],
    num_experts: int,
    *,
    batches: Sequence[int],
    num_draws: int,
    steps: Mapping[str, int],
    seed: int,
) -> dict[str, Any]:
    """All figures of the card.

    Args:
      groups: group (`task`, `language`, ...) -> domain -> texts.
      num_experts: E.
      batches: batch sizes n.
      num_draws: batches of each kind and size.
      steps: group -> decode steps of a batch.
      seed: of the draws.

    Returns:
      group -> {`loss`, `load`, `reduction`}, ready for JSON.
    """
    summary: dict[str, Any] = {}
    for number, (group, texts) in enumerate(groups.items()):
        rng = np.random.default_rng([seed, number])
        reductions = [
            distinct_reduction(
                texts, num_experts, batch=batch, num_draws=num_draws, steps=steps[group], rng=rng
            )
            for batch in batches
        ]
        summary[group] = {
            "loss": loss_by_domain(texts),
            "load": load_table(expert_shares(texts, num_experts)),
            "steps": steps[group],
            "reduction": [
                {name: getattr(item, name) for name in Reduction.__dataclass_fields__}
                for item in reductions
            ],
        }
    return summary
