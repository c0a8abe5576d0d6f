"""Regions that follow the traffic: a sliding window of signatures, refitted on a beat.

Centroids move, the IDF weights and the layer mask do not. After a refit new centroids are
matched to the old ones, so each worker goes on with the region nearest to its own
(`serving.signatures.regions.refit_regions`). A refit costs tens of milliseconds and more:
take the job on the loop, work it out in a thread, adopt the result on the loop.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass

import numpy as np

from serving.core.placed import Placed
from serving.core.worker import Phase
from serving.signatures.regions import FittedRegions, refit_regions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RefitJob:
    """A refit to work out anywhere; frozen values in, centroids out.

    Attributes:
        vectors: float32 [N, M], signatures of the window, N >= 1.
        regions: what they move.
    """

    vectors: np.ndarray
    regions: FittedRegions

    def run(self) -> np.ndarray:
        """New centroids, float32 [K, M], row i continuing worker i's region."""
        return refit_regions(self.vectors, self.regions.centroids)


class OnlineRegions:
    """The window and the regions in force; a `PlacementObserver`.

    Args:
        regions: where to start, one region per decode worker.
        window_s: how long a signature counts.
        interval_s: seconds between refits.
        max_vectors: newest signatures used at most; a refit's time grows with their cube.
    """

    def __init__(
        self,
        regions: FittedRegions,
        *,
        window_s: float = 5.0,
        interval_s: float = 1.0,
        max_vectors: int = 512,
    ) -> None:
        if not 0 < interval_s <= window_s:
            raise ValueError(f"{interval_s=} must be > 0 and <= {window_s=}")
        if max_vectors < 1:
            raise ValueError(f"{max_vectors=} must be >= 1")
        self.regions = regions
        self.window_s = window_s
        self.interval_s = interval_s
        self._base_version = regions.version
        self._num_refits = 0
        self._window: deque[tuple[float, np.ndarray]] = deque(maxlen=max_vectors)
        self._next_s: float | None = None

    def placed(self, placed: Placed, now_s: float) -> None:
        """Takes the signature of a decode placement."""
        if placed.phase is Phase.DECODE and placed.signature is not None:
            self.observe(placed.signature.vector, now_s)

    def observe(self, vector: np.ndarray, now_s: float) -> None:
        """Takes one signature, float32 [M], at monotonic `now_s`."""
        if self._next_s is None:
            self._next_s = now_s + self.interval_s
        self._window.append((now_s, vector))

    def due(self, now_s: float) -> RefitJob | None:
        """The refit to run now, if its time has come and the window is not empty."""
        while self._window and self._window[0][0] <= now_s - self.window_s:
            self._window.popleft()
        if self._next_s is None or now_s < self._next_s:
            return None
        self._next_s = now_s + self.interval_s
        if not self._window:
            return None
        vectors = np.stack([vector for _, vector in self._window])
        return RefitJob(vectors=vectors, regions=self.regions)

    def adopt(self, job: RefitJob, centroids: np.ndarray) -> FittedRegions:
        """Puts a finished refit in force.

        A job that began under regions no longer in force (the fleet changed) is dropped.

        Returns:
            The regions in force; hand them to `Router.set_regions`.
        """
        if job.regions is self.regions:
            self._num_refits += 1
            self.regions = dataclasses.replace(
                self.regions,
                version=f"{self._base_version}+{self._num_refits}",
                centroids=centroids,
                _rows={},
            )
        return self.regions

    def rebind(self, regions: FittedRegions) -> None:
        """Starts over from other regions, because decode workers joined or left."""
        self.regions = regions
        self._base_version = regions.version
        self._num_refits = 0
