"""Plans under a compile budget: a shortest path with two limited resources, solved exactly.

For every number of buckets k, the recursion with each bucket charged its Lagrangian share of the
budgets gives a lower bound and, reading its paths, good feasible plans. Where the bound leaves
room for something better, partial plans are extended bucket by bucket; one is dropped when its
bound reaches the best plan known, when it breaks a budget, or when another one ending at the same
bucket is no worse in cost and both resources (Handler & Zang, Networks 10, 1980).

Partial plans are capped in number. When the cap bites, the bound of what was dropped is returned,
so that the caller knows how far from the optimum the plan can be.
"""

from dataclasses import dataclass

import numpy as np

from bucket_planner.cost_curve import CompileCost
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import FloatArray, IntArray
from bucket_planner.recursion import Recursion

MAX_PARTIAL_PLANS = 600
_BISECTIONS = 12
_WORTH_SLIDING = 1.01  # a plan this close to the best known may slide below it


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileBudget:
    """What compiling all buckets together may take; None = no limit.

    Attributes:
      compile_s: seconds in all.
      program_bytes: bytes in all.
      cost: what each bucket takes.
    """

    compile_s: float | None = None
    program_bytes: float | None = None
    cost: CompileCost

    def __post_init__(self) -> None:
        for name in ("compile_s", "program_bytes"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if not (np.isfinite(limit) and limit > 0):
                raise PlannerConfigError(f"budget.{name}", limit, "must be a finite number > 0")
            if getattr(self.cost, name) is None:
                raise PlannerConfigError(
                    f"budget.{name}", limit, f"needs {name} of each bucket in the cost file"
                )

    def limits(self) -> FloatArray:
        """float64[2] limits of seconds and bytes, inf where there is none."""
        given = (self.compile_s, self.program_bytes)
        return np.array([np.inf if limit is None else limit for limit in given])

    def needs(self, sizes: IntArray) -> FloatArray:
        """float64[2, n] seconds and bytes of buckets of int64[n] tokens."""
        return np.stack([self.cost.seconds(sizes), self.cost.num_bytes(sizes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partial:
    """Partial plans of equal length, one a row.

    Attributes:
      end: int64[P] position where each ends.
      cost: float64[P] cost so far.
      used: float64[2, P] resources so far.
      parent: int64[P] row in the previous generation.
    """

    end: IntArray
    cost: FloatArray
    used: FloatArray
    parent: IntArray

    def rows(self, index: IntArray) -> "_Partial":
        return _Partial(
            end=self.end[index],
            cost=self.cost[index],
            used=self.used[:, index],
            parent=self.parent[index],
        )


class BudgetSearch:
    """One problem: the recursion, what each candidate needs, and the limits."""

    def __init__(self, recursion: Recursion, needs: FloatArray, limits: FloatArray) -> None:
        self._recursion = recursion
        self._needs = needs
        self._limits = limits
        self._limited = np.flatnonzero(np.isfinite(limits))

    def used(self, ends: list[int]) -> FloatArray:
        """float64[2] resources of a plan."""
        return self._needs[:, np.array(ends) - 1].sum(axis=1)

    def fits(self, ends: list[int]) -> bool:
        """Whether a plan keeps both limits."""
        return bool((self.used(ends) <= self._limits).all())

    def solve(self, max_buckets: int) -> tuple[list[int], float]:
        """The cheapest plan of at most `max_buckets` within the limits.

        Returns:
          the plan's end positions, and a cost that no plan within the limits can go below.

        Raises:
          PlannerConfigError: the limit's own bucket alone breaks a budget.
        """
        incumbent = [self._recursion.num_candidates]
        if not self.fits(incumbent):
            needs = self.used(incumbent)
            index = int(np.flatnonzero(needs > self._limits)[0])
            raise PlannerConfigError(
                f"budget.{('compile_s', 'program_bytes')[index]}",
                float(self._limits[index]),
                f"must pay at least for the limit's bucket, which takes {needs[index]:g}",
            )
        bounds: list[tuple[float, int, FloatArray]] = []
        for num in range(1, self._most_buckets(max_buckets) + 1):
            low, share, incumbent = self._lagrangian(num, incumbent)
            bounds.append((low, num, share))
        unproven = np.inf
        for low, num, share in sorted(bounds, key=lambda bound: bound[:2]):
            if low < _just_below(self._recursion.plan_cost(incumbent)):
                incumbent, left_over = self._extend(num, share, incumbent)
                unproven = min(unproven, left_over)
        return incumbent, min(unproven, self._recursion.plan_cost(incumbent))

    def _most_buckets(self, max_buckets: int) -> int:
        """How many buckets the limits could pay for if all but the last were the cheapest."""
        cheapest = np.sort(self._needs[:, :-1], axis=1)[:, : max_buckets - 1]
        totals = self._needs[:, -1:] + np.cumsum(cheapest, axis=1)
        return 1 + int(np.all(totals <= self._limits[:, None], axis=0).sum())

    def _better(self, one: list[int], other: list[int]) -> list[int]:
        cost = self._recursion.plan_cost
        return other if self.fits(other) and cost(other) < cost(one) else one

    def _slide(self, ends: list[int]) -> list[int]:
        """Moves single buckets to their cheapest feasible place until none moves."""
        run_cost, served = self._recursion.run_cost, self._recursion.served
        moved = self.fits(ends)
        while moved:
            moved = False
            for k in range(len(ends) - 1):
                low, at, high = (ends[k - 1] if k else 0), ends[k], ends[k + 1]
                places = np.arange(low + 1, high)
                cost = run_cost[places - 1] * (served[places] - served[low])
                cost += run_cost[high - 1] * (served[high] - served[places])
                rest = self.used(ends) - self._needs[:, at - 1]
                total = rest[:, None] + self._needs[:, places - 1]
                fits = np.all(total <= self._limits[:, None], axis=0)
                best = int(np.argmin(np.where(fits, cost, np.inf)))
                if fits[best] and cost[best] < _just_below(float(cost[at - low - 1])):
                    ends = [*ends[:k], int(places[best]), *ends[k + 1 :]]
                    moved = True
        return ends

    def _lagrangian(
        self, num_buckets: int, incumbent: list[int]
    ) -> tuple[float, FloatArray, list[int]]:
        """Prices of the budgets for plans of exactly `num_buckets`, by bisection on each in turn.

        Returns:
          the best lower bound found, its prices [2], and the best plan met on the way.
        """
        share = np.zeros(2)
        best_low, best_share = -np.inf, share.copy()
        everything = self._recursion.plan_cost([self._recursion.num_candidates])
        for index in [*self._limited, *self._limited[:-1]]:  # the first again, knowing the second
            low, high = 0.0, everything / self._limits[index]
            for step in range(_BISECTIONS):
                share[index] = (low + high) / 2.0 if step else 0.0
                layers = self._recursion.layers(num_buckets, share @ self._needs, exactly=True)
                ends = layers.ends(num_buckets)
                over = self.used(ends) - self._limits
                cost = self._recursion.plan_cost(ends)
                if cost < _WORTH_SLIDING * self._recursion.plan_cost(incumbent):
                    incumbent = self._better(incumbent, self._slide(ends))
                value = cost + float(share[self._limited] @ over[self._limited])
                if value > best_low:
                    best_low, best_share = value, share.copy()
                if over[index] > 0:
                    low = share[index]
                elif step:
                    high = share[index]
                else:
                    break  # this budget does not bind
            share[index] = high if over[index] > 0 or step else 0.0
        return best_low, best_share, incumbent

    def _extend(
        self, num_buckets: int, share: FloatArray, incumbent: list[int]
    ) -> tuple[list[int], float]:
        """Extends partial plans to exactly `num_buckets` buckets.

        Returns:
          the best plan known, and a bound under every partial plan the cap dropped (inf if none).
        """
        end = self._recursion.num_candidates
        offset = float(share[self._limited] @ self._limits[self._limited])
        penalty = share @ self._needs
        ahead = self._recursion.layers(num_buckets, penalty, exactly=True).cost
        upper = self._recursion.plan_cost(incumbent)
        generations: list[_Partial] = []
        partial = _Partial(
            end=np.zeros(1, np.int64),
            cost=np.zeros(1),
            used=np.zeros((2, 1)),
            parent=np.zeros(1, np.int64),
        )
        dropped = np.inf
        for left in range(num_buckets - 1, -1, -1):
            generations.append(partial)
            partial = self._next(partial, ahead[left], penalty, share, upper + offset)
            if not partial.end.size:
                return incumbent, dropped
            for cap in (10 * MAX_PARTIAL_PLANS, MAX_PARTIAL_PLANS):
                bound = partial.cost + ahead[left][partial.end] + share @ partial.used - offset
                if bound.size > cap:
                    order = np.argpartition(bound, cap)
                    dropped = min(dropped, float(bound[order[cap]]))
                    partial = partial.rows(np.sort(order[:cap]))
                partial = partial.rows(_undominated(partial))
        best = int(np.argmin(partial.cost))
        if partial.cost[best] < upper:
            path, row = [end], int(partial.parent[best])
            for generation in reversed(generations[1:]):
                path.append(int(generation.end[row]))
                row = int(generation.parent[row])
            incumbent = path[::-1]
        return incumbent, dropped

    def _next(
        self,
        partial: _Partial,
        ahead: FloatArray,
        penalty: FloatArray,
        share: FloatArray,
        ceiling: float,
    ) -> _Partial:
        """All extensions by one bucket whose bound stays under `ceiling` and which keep limits."""
        run_cost, served = self._recursion.run_cost, self._recursion.served
        found: list[tuple[IntArray, IntArray, FloatArray]] = []
        charged = partial.cost + share @ partial.used
        for node in np.unique(partial.end):
            rows = np.flatnonzero(partial.end == node)
            places = np.arange(node + 1, self._recursion.num_candidates + 1)
            step = run_cost[places - 1] * (served[places] - served[node])
            below = step + penalty[places - 1] + ahead[places]
            open_places = below + charged[rows].min() < _just_below(ceiling)
            places, step, below = places[open_places], step[open_places], below[open_places]
            keep = charged[rows][:, None] + below[None, :] < _just_below(ceiling)
            for index in self._limited:
                total = partial.used[index][rows][:, None] + self._needs[index][places - 1][None, :]
                keep &= total <= self._limits[index]
            row, column = np.nonzero(keep)
            found.append((places[column], rows[row], step[column]))
        end = np.concatenate([item[0] for item in found])
        parent = np.concatenate([item[1] for item in found])
        return _Partial(
            end=end,
            cost=partial.cost[parent] + np.concatenate([item[2] for item in found]),
            used=partial.used[:, parent] + self._needs[:, end - 1],
            parent=parent,
        )


def _undominated(partial: _Partial) -> IntArray:
    """Rows left when those no better than another row of the same end are dropped.

    Sorted by (end, seconds, bytes, cost), only an earlier row of its end can dominate a row; the
    rows not dominated so far are kept as a front of (cost, bytes) pairs.
    """
    order = np.lexsort((partial.cost, partial.used[1], partial.used[0], partial.end))
    keep = np.ones(order.size, bool)
    end, cost, num_bytes = partial.end[order], partial.cost[order], partial.used[1][order]
    front: list[tuple[float, float]] = []
    for i in range(order.size):
        if i and end[i] != end[i - 1]:
            front = []
        if any(c <= cost[i] and b <= num_bytes[i] for c, b in front):
            keep[i] = False
            continue
        front = [(c, b) for c, b in front if not (cost[i] <= c and num_bytes[i] <= b)]
        front.append((float(cost[i]), float(num_bytes[i])))
    return order[keep]


def _just_below(value: float) -> float:
    """A bound this close under the incumbent is the same plan seen through rounding."""
    return value - 1e-12 * abs(value)
