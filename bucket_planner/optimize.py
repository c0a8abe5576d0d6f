"""The exact best set of at most N buckets for a length distribution, by dynamic programming.

A bucket is never better between two lengths, so the candidates are the lengths themselves
(rounded up to the alignment) and the limit. `recursion` solves the choice among them in
milliseconds; `compile_budget` adds limits on compile seconds and program bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bucket_planner.buckets import MIN_BUCKET_TOKENS, padding_tokens
from bucket_planner.compile_budget import BudgetSearch, CompileBudget
from bucket_planner.cost_curve import CostCurve
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import IntArray, LengthHistogram
from bucket_planner.recursion import Recursion


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """A set of buckets and what it costs on the distribution it was fitted to.

    Attributes:
      buckets: ascending sizes in tokens, the last one the limit.
      cost: total cost of all runs, in the curve's unit.
      lower_bound: no plan within the constraints costs less; equals `cost` when exact.
      waste_tokens: padded tokens.
      compile_s: compile seconds of the plan; 0 without a budget.
      program_bytes: program bytes of the plan; 0 without a budget.
    """

    buckets: tuple[int, ...]
    cost: float
    lower_bound: float
    waste_tokens: int
    compile_s: float = 0.0
    program_bytes: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the plan is the proven optimum."""
        return self.lower_bound >= self.cost


def optimal_buckets(
    lengths: LengthHistogram,
    *,
    max_buckets: int,
    limit_tokens: int,
    curve: CostCurve,
    min_bucket_tokens: int = MIN_BUCKET_TOKENS,
    align_tokens: int = 1,
    budget: CompileBudget | None = None,
) -> BucketPlan:
    """The cheapest at most `max_buckets` buckets, the last of which is `limit_tokens`.

    Args:
      lengths: the distribution to serve.
      max_buckets: how many buckets may be compiled.
      limit_tokens: the largest bucket, always in the plan.
      curve: cost of running a bucket.
      min_bucket_tokens: no bucket is smaller.
      align_tokens: every bucket but the limit is a multiple of it.
      budget: limits on compiling.

    Raises:
      PlannerConfigError: a length above the limit, a setting below 1, or a budget that does not
        even pay for the limit's bucket.
    """
    for name, value in (
        ("max_buckets", max_buckets),
        ("min_bucket_tokens", min_bucket_tokens),
        ("align_tokens", align_tokens),
    ):
        if value < 1:
            raise PlannerConfigError(name, value, "must be >= 1")
    if min_bucket_tokens > limit_tokens:
        raise PlannerConfigError(
            "min_bucket_tokens", min_bucket_tokens, f"must be <= the limit, {limit_tokens}"
        )
    check_covered(lengths, limit_tokens)
    rounded = -(-np.maximum(lengths.tokens, min_bucket_tokens) // align_tokens) * align_tokens
    sizes = np.unique(np.append(rounded[rounded <= limit_tokens], limit_tokens))
    recursion = _recursion(lengths, sizes, curve)
    max_buckets = min(max_buckets, sizes.size)
    ends = recursion.layers(max_buckets).ends(max_buckets)
    lower_bound = recursion.plan_cost(ends)
    used = np.zeros(2)
    if budget is not None:
        search = BudgetSearch(recursion, budget.needs(sizes), budget.limits())
        if not search.fits(ends):
            ends, lower_bound = search.solve(max_buckets)
        used = search.used(ends)
    buckets = tuple(int(sizes[end - 1]) for end in ends)
    return BucketPlan(
        buckets=buckets,
        cost=recursion.plan_cost(ends),
        lower_bound=lower_bound,
        waste_tokens=padding_tokens(buckets, lengths.tokens, lengths.counts),
        compile_s=float(used[0]),
        program_bytes=float(used[1]),
    )


def optimal_extra_buckets(
    lengths: LengthHistogram,
    base: Sequence[int],
    *,
    num_extra: int,
    curve: CostCurve,
    align_tokens: int = 1,
) -> tuple[int, ...]:
    """The best at most `num_extra` sizes to add to a base set an engine compiles anyway.

    Base sizes cut the lengths into segments that do not influence each other: each segment is
    solved for every number of extras, then a small recursion shares the extras out.

    Args:
      lengths: the distribution to serve, none above the last base size.
      base: ascending sizes compiled anyway.
      num_extra: how many may be added.
      curve: cost of running a bucket.
      align_tokens: added sizes are multiples of it.

    Returns:
      The added sizes, ascending, all above the smallest base size.

    Raises:
      PlannerConfigError: a length above the base, or a negative number of extras.
    """
    if num_extra < 0:
        raise PlannerConfigError("num_extra", num_extra, "must be >= 0")
    check_covered(lengths, base[-1])
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (num_extra + 1)
    low = base[0]  # shorter lengths run in the smallest base size whatever is added
    for high in base[1:]:
        inside = (lengths.tokens > low) & (lengths.tokens <= high)
        part = LengthHistogram(tokens=lengths.tokens[inside], counts=lengths.counts[inside])
        rounded = -(-part.tokens // align_tokens) * align_tokens
        sizes = np.unique(np.append(rounded[rounded < high], high))
        layers = _recursion(part, sizes, curve).layers(min(num_extra + 1, sizes.size))
        options = [
            (float(layers.cost[r][0]), tuple(int(sizes[end - 1]) for end in layers.ends(r)[:-1]))
            for r in range(1, len(layers.cost))
        ]
        best = [
            min(
                (
                    (best[total - extra][0] + cost, best[total - extra][1] + added)
                    for extra, (cost, added) in enumerate(options[: total + 1])
                ),
                key=lambda option: option[0],
            )
            for total in range(num_extra + 1)
        ]
        low = high
    return best[num_extra][1]


def check_covered(lengths: LengthHistogram, limit_tokens: int) -> None:
    """Checks that no length is above the limit.

    Raises:
      PlannerConfigError: says how many are.
    """
    over = lengths.tokens > limit_tokens
    if over.any():
        raise PlannerConfigError(
            "limit_tokens",
            limit_tokens,
            f"must cover every length, but {int(lengths.counts[over].sum())} are longer, "
            f"up to {int(lengths.tokens[-1])}",
        )


def _recursion(lengths: LengthHistogram, sizes: IntArray, curve: CostCurve) -> Recursion:
    """The recursion over candidate `sizes`, the last of which covers every length."""
    cumulative = np.concatenate([[0], np.cumsum(lengths.counts)])
    served = cumulative[np.searchsorted(lengths.tokens, sizes, side="right")]
    return Recursion(
        run_cost=curve.cost(sizes), served=np.concatenate([[0], served]).astype(np.float64)
    )
