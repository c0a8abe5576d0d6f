"""The layered recursion behind every plan, one layer in O(U log U) NumPy steps.

Serving the lengths after position i up to candidate j with bucket j costs
w(i, j) = c_j * (F_j - F_i): c_j the cost of one run of bucket j, F the cumulative count of
lengths. Layer r holds, for every start i, the best completion with r buckets:

    H_r[i] = min over j > i of w(i, j) + penalty_j + H_{r-1}[j],    H_0[end] = 0

w has the Monge property because c never falls, so the best j moves right as i does.
"""

from dataclasses import dataclass

import numpy as np

from bucket_planner.lengths import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Tables of the recursion.

    Attributes:
      cost: cost[r] is float64[U + 1], the best completion of r buckets from each position.
      choice: choice[r] is int64[U + 1], the end position of its first bucket.
    """

    cost: list[FloatArray]
    choice: list[IntArray]

    def ends(self, num_buckets: int) -> list[int]:
        """End positions (1..U, ascending) of the best plan from position 0."""
        node, out = 0, []
        last = self.cost[0].size - 1
        for r in range(num_buckets, 0, -1):
            if node == last:
                break
            node = int(self.choice[r][node])
            out.append(node)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Recursion:
    """One distribution over its candidate buckets.

    Attributes:
      run_cost: float64[U] cost of one run of each candidate, nondecreasing.
      served: float64[U + 1] how many lengths fit candidate j - 1, nondecreasing from 0.
    """

    run_cost: FloatArray
    served: FloatArray

    @property
    def num_candidates(self) -> int:
        """U, the number of candidate buckets."""
        return self.run_cost.size

    def layers(
        self, num_layers: int, penalty: FloatArray | None = None, *, exactly: bool = False
    ) -> Layers:
        """Solves layers 0..num_layers.

        Args:
          num_layers: at most U.
          penalty: float64[U] extra cost of using each candidate at all; None = 0.
          exactly: layer r uses exactly r buckets instead of at most r.
        """
        end = self.num_candidates
        cost = [np.full(end + 1, np.inf)]
        cost[0][end] = 0.0
        choice = [np.full(end + 1, end, np.int64)]
        fixed = self.run_cost * self.served[1:] + (0.0 if penalty is None else penalty)
        for r in range(1, num_layers + 1):
            ahead = np.concatenate([[np.inf], fixed + cost[-1][1:]])
            num_rows = end + 1 - r if exactly else end  # later starts cannot hold r more buckets
            best, arg = self._row_minima(ahead, num_rows)
            cost.append(np.full(end + 1, np.inf))
            cost[r][:num_rows] = best
            choice.append(np.full(end + 1, end, np.int64))
            choice[r][:num_rows] = arg
            if not exactly:
                cost[r][end] = 0.0
        return Layers(cost=cost, choice=choice)

    def plan_cost(self, ends: list[int]) -> float:
        """Cost of the plan whose buckets end at `ends` (ascending, the last one U)."""
        at = np.array(ends)
        counts = np.diff(self.served[np.concatenate([[0], at])])
        return float((self.run_cost[at - 1] * counts).sum())

    def _row_minima(self, ahead: FloatArray, num_rows: int) -> tuple[FloatArray, IntArray]:
        """Minima over j > i of ahead[j] - run_cost[j - 1] * served[i], for i = 0..num_rows-1.

        Rows are solved at halving strides: each searches only between the argmins of its solved
        neighbours, and all rows of one stride are one pass.

        Args:
          ahead: float64[U + 1]; entry 0 is unused.
          num_rows: how many starts to solve.

        Returns:
          minima float64[num_rows] and their columns int64[num_rows], the leftmost on a tie.
        """
        cost_of = np.concatenate([[0.0], self.run_cost])
        best = np.empty(num_rows)
        arg = np.empty(num_rows + 2, np.int64)  # row i at i + 1, with a guard on either side
        arg[0], arg[num_rows + 1] = 1, self.num_candidates
        stride = 1 << max(num_rows - 1, 1).bit_length()
        while stride >= 1:
            rows = np.arange(stride - 1, num_rows, 2 * stride)
            if rows.size:
                low = np.maximum(arg[np.maximum(rows - stride + 1, 0)], rows + 1)
                high = arg[np.minimum(rows + stride, num_rows) + 1]
                widths = high - low + 1
                starts = np.cumsum(widths) - widths
                segment = np.repeat(np.arange(rows.size), widths)
                columns = np.arange(segment.size) + (low - starts)[segment]
                values = ahead[columns] - cost_of[columns] * self.served[rows][segment]
                minima = np.minimum.reduceat(values, starts)
                hits = np.flatnonzero(values == minima[segment])
                best[rows] = minima
                arg[rows + 1] = columns[hits[np.searchsorted(hits, starts)]]
            stride //= 2
        return best, arg[1:-1].copy()
