"""Static time of a compiled TPU kernel: instruction bundles times loop counts.

The TPU compiler can write out the final schedule of every operation. A chip issues one
bundle a cycle unless it waits for memory, so bundles in straight-line code, times the
trip counts of the loops around them, are the compute time. This module reads such a
schedule; `bench_main` makes them. Nothing here imports JAX.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.expert_histogram.errors import HistogramError

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s*(LB|PF|PB|LH|LE|CT)?\s*:[>\s]*\{")
_START_REGION = re.compile(r"Start region (\d+)")
_BACK_BRANCH = re.compile(r"sbr\.rel.*?target = \$region(\d+)")
_BRANCH_DELAY_BUNDLES = 4


class ScheduleError(HistogramError, ValueError):
    """A schedule does not have the loops that the kernel's source has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Loops of one scheduled operation, in the order in which they begin.

    Attributes:
        num_bundles: bundles of the operation.
        loops: (first bundle, last bundle) of each loop.
    """

    num_bundles: int
    loops: tuple[tuple[int, int], ...]

    def own_bundles(self) -> tuple[int, tuple[int, ...]]:
        """Bundles outside of every loop, and of each loop outside of its inner loops."""
        own = [last - first + 1 for first, last in self.loops]
        outside = self.num_bundles
        for index, (first, last) in enumerate(self.loops):
            parents = [
                other
                for other in range(index)
                if self.loops[other][0] <= first and last <= self.loops[other][1]
            ]
            if parents:
                own[parents[-1]] -= last - first + 1
            else:
                outside -= last - first + 1
        return outside, tuple(own)

    def cycles(self, trip_counts: Sequence[int]) -> int:
        """Bundles issued, if each loop's body runs its trip count in all.

        Args:
            trip_counts: runs of each loop's body over the whole operation, in the order
                in which the loops begin.

        Raises:
            ScheduleError: the schedule has another number of loops.
        """
        outside, own = self.own_bundles()
        if len(own) != len(trip_counts):
            raise ScheduleError(f"the schedule has {len(own)} loops, the kernel {len(trip_counts)}")
        return outside + sum(
            bundles * trips for bundles, trips in zip(own, trip_counts, strict=True)
        )


def read_schedule(text: str) -> Schedule:
    """Reads a `*-final_bundles.txt` of the TPU compiler.

    Args:
        text: the file.

    Returns:
        Its bundles and loops.

    Raises:
        ScheduleError: a loop has no end, or there is no bundle.
    """
    starts: list[tuple[int, frozenset[str]]] = []
    branches: list[tuple[int, str]] = []
    is_body = False
    num_bundles = 0
    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle:
            num_bundles += 1
            is_body = bundle.group(1) == "LB"
        if is_body and (regions := _START_REGION.findall(line)):
            starts.append((num_bundles - 1, frozenset(regions)))
            is_body = False
        branches += [(num_bundles - 1, region) for region in _BACK_BRANCH.findall(line)]
    if not num_bundles:
        raise ScheduleError("the schedule has no bundle")
    loops = []
    for first, regions in starts:
        backward = [at for at, region in branches if region in regions and at >= first]
        if not backward:
            raise ScheduleError(f"the loop at bundle {first} has no end")
        loops.append((first, min(backward[-1] + _BRANCH_DELAY_BUNDLES, num_bundles - 1)))
    return Schedule(num_bundles=num_bundles, loops=tuple(loops))
