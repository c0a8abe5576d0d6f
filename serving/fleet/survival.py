"""Expected experts per decode worker, kept as its requests come and go.

A worker's row holds the product of (1 - q) over its open requests: the chance that a step
leaves each masked (layer, expert) untouched. Joining multiplies the row; leaving subtracts in
the log domain (float64, where a million joins and leaves drift by less than float32 shows)
and an emptied worker is reset to exactly 1. Rows stand in the order of the decode view, so the
view uses the matrix as it is.

The region prior (DESIGN "Placement") is a second matrix, the first times (1 - P)^m. Where
several routers share the workers, what the others placed there is known by number only; those
requests count as requests of the worker's region, as the region prior's pseudo-members do: taken
for average traffic they would hide from each router what the workers are for.

How many experts the layers outside the mask add depends on the requests too (Chinese and English
differ by 7% on the published tables), so a worker's `layer_scale` is the mean over its open
requests and the pseudo-members of its region. By its region alone a worker that serves others
than its region's would be priced for what it does not hold, and fill up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.core.experts import MIN_KEEP
from serving.core.worker import ExpertRows


@dataclass(slots=True)
class _Blend:
    """Rows with other replicas' requests among them, as last worked out; arrays over workers.

    Attributes:
        stranger: which workers have no region.
        others: how many of them a row holds, -1 for a row to work out again.
        survival, survival_sum, prior, prior_sum: as `ExpertRows` has them.
    """

    stranger: np.ndarray | None = None
    others: np.ndarray | None = None
    survival: np.ndarray | None = None
    survival_sum: np.ndarray | None = None
    prior: np.ndarray | None = None
    prior_sum: np.ndarray | None = None

    def forget(self, row: int) -> None:
        """The row's own requests have changed."""
        if self.others is not None:
            self.others[row] = -1.0


class SurvivalRows:
    """Survival vectors of the decode workers.

    Args:
        size: M, masked layers times experts.
        layer_scale: distinct experts over all layers per one over the masked layers, for
            workers whose region gives none; layers / masked layers when nothing is fitted.

    Attributes:
        size: M.
        pseudo_members: m, how many requests the region prior weighs as; 0 turns it off.
        drift_rate: share by which a worker's profile moves towards each request placed on it
            (0 keeps the fitted profile).
    """

    def __init__(
        self,
        size: int,
        *,
        layer_scale: float = 1.0,
        pseudo_members: float = 8.0,
        drift_rate: float = 0.0,
    ) -> None:
        if size < 1:
            raise ValueError(f"{size=} must be >= 1")
        if not layer_scale > 0:
            raise ValueError(f"{layer_scale=} must be > 0")
        if pseudo_members < 0:
            raise ValueError(f"{pseudo_members=} must be >= 0")
        if not 0.0 <= drift_rate < 1.0:
            raise ValueError(f"{drift_rate=} must lie in [0, 1)")
        self.size = size
        self.pseudo_members = pseudo_members
        self.drift_rate = drift_rate
        self._default_scale = layer_scale
        self._ones = np.ones(size, np.float32)
        self._joined: dict[int, list[np.ndarray]] = {}
        self._rows: ExpertRows | None = None
        self._worker_ids: tuple[str, ...] = ()
        self._row_of: dict[str, int] = {}
        self._log = np.zeros((0, size), np.float64)
        self._survival = np.ones((0, size), np.float32)
        self._sum = np.zeros(0, np.float64)
        self._num = np.zeros(0, np.float64)
        # Of the region, the sum and number of the members', and the mean of all that.
        self._region_scale = np.ones(0, np.float64)
        self._member_scale = np.zeros(0, np.float64)
        self._num_scaled = np.zeros(0, np.float64)
        self._scale = np.ones(0, np.float64)
        self._total = np.ones(0, np.float64)
        self._profiles: np.ndarray | None = None
        self._prior_log = np.zeros((0, size), np.float64)
        self._prior_survival = np.ones((0, size), np.float32)
        self._prior_sum = np.zeros(0, np.float64)
        self._blend = _Blend()

    def arrange(self, worker_ids: tuple[str, ...]) -> None:
        """Puts rows into the order of a new decode view; unknown workers start empty."""
        if worker_ids == self._worker_ids:
            return
        for row in tuple(self._joined):
            self._take_logs(row)
        self._rows = None
        self._blend = _Blend()
        old = [self._row_of.get(worker_id, -1) for worker_id in worker_ids]
        num, had = len(worker_ids), np.array([row >= 0 for row in old], bool)
        source = np.array([row for row in old if row >= 0], np.int64)

        def moved(array: np.ndarray, fill: float) -> np.ndarray:
            fresh = np.full((num, *array.shape[1:]), fill, array.dtype)
            fresh[had] = array[source]
            return fresh

        self._log = moved(self._log, 0.0)
        self._survival = moved(self._survival, 1.0)
        self._sum = moved(self._sum, float(self.size))
        self._num = moved(self._num, 0)
        self._region_scale = moved(self._region_scale, self._default_scale)
        self._member_scale = moved(self._member_scale, 0.0)
        self._num_scaled = moved(self._num_scaled, 0.0)
        self._scale = moved(self._scale, self._default_scale)
        self._total = self._scale * self.size
        if self._profiles is not None:
            self._profiles = moved(self._profiles, 0.0)
            self._prior_log = moved(self._prior_log, 0.0)
            self._prior_survival = moved(self._prior_survival, 1.0)
            self._prior_sum = moved(self._prior_sum, float(self.size))
        self._worker_ids = worker_ids
        self._row_of = {worker_id: row for row, worker_id in enumerate(worker_ids)}

    def add(self, worker_id: str, keep: np.ndarray, layer_scale: float = 0.0) -> None:
        """A request joins a worker.

        Args:
            worker_id: a worker of the last `arrange`.
            keep: float32 [M], 1 - q, in [MIN_KEEP, 1].
            layer_scale: distinct experts over all layers per one over the masked layers, of
                requests like this one; 0 when not known.
        """
        row = self._row_of[worker_id]
        if layer_scale > 0.0:
            self._rescale(row, layer_scale, 1.0)
        self._joined.setdefault(row, []).append(keep)
        survival = self._survival[row]
        survival *= keep
        self._sum[row] = survival @ self._ones
        self._num[row] += 1
        self._blend.forget(row)
        if self._profiles is not None:
            if self.drift_rate > 0.0:
                profile = self._profiles[row]
                profile += self.drift_rate * ((1.0 - keep) - profile)
                self._refresh_prior(row)
            else:
                prior = self._prior_survival[row]
                prior *= keep
                self._prior_sum[row] = prior @ self._ones

    def remove(self, worker_id: str, keep: np.ndarray, layer_scale: float = 0.0) -> None:
        """A request leaves a worker, as it joined; a worker no longer arranged is ignored."""
        row = self._row_of.get(worker_id)
        if row is None:
            return
        if layer_scale > 0.0:
            self._rescale(row, -layer_scale, -1.0)
        self._take_logs(row)
        self._blend.forget(row)
        self._num[row] -= 1
        if self._num[row] <= 0:
            self._num[row] = 0
            self._log[row] = 0.0
        else:
            self._log[row] -= np.log(keep)
        self._survival[row] = np.exp(self._log[row])
        self._sum[row] = self._survival[row] @ self._ones
        if self._profiles is not None:
            self._refresh_prior(row)

    def set_profiles(
        self,
        profiles: Mapping[str, np.ndarray] | None,
        layer_scale: Mapping[str, float] | None = None,
    ) -> None:
        """Gives workers their region's decode profile.

        Args:
            profiles: worker id -> float32 [M] in [0, 1], chance that one token of the
                region's requests touches each expert; None or empty turns the prior off.
            layer_scale: worker id -> distinct experts over all layers per masked one.

        Raises:
            ValueError: a profile of another length, or outside [0, 1]; a scale that is not finite
                and > 0. Nothing has changed then.
        """
        num = len(self._worker_ids)
        for worker_id, scale in (layer_scale or {}).items():
            if not 0.0 < scale < float("inf"):
                raise ValueError(f"layer_scale of {worker_id!r}={scale!r} must be finite and > 0")
        for worker_id, profile in (profiles or {}).items():
            if profile.shape != (self.size,):
                raise ValueError(f"profile of {worker_id!r} has {profile.shape=}, not {self.size=}")
            if not (profile.min() >= 0.0 and profile.max() <= 1.0):
                raise ValueError(f"profile of {worker_id!r} must lie in [0, 1]")
        self._rows = None
        self._blend = _Blend()
        self._region_scale = np.full(num, self._default_scale)
        for worker_id, scale in (layer_scale or {}).items():
            if worker_id in self._row_of:
                self._region_scale[self._row_of[worker_id]] = scale
        for row in range(num):
            self._rescale(row, 0.0, 0.0)
        if not profiles or self.pseudo_members == 0:
            self._profiles = None
            return
        self._profiles = np.zeros((num, self.size), np.float32)
        self._prior_log = np.zeros((num, self.size), np.float64)
        self._prior_survival = np.ones((num, self.size), np.float32)
        self._prior_sum = np.full(num, float(self.size))
        for worker_id, profile in profiles.items():
            row = self._row_of.get(worker_id)
            if row is not None:
                self._profiles[row] = profile
        for row in range(num):
            self._refresh_prior(row)

    def rows(self, num_inflight: np.ndarray | None = None) -> ExpertRows:
        """The state as a view carries it: these very arrays, which the next join changes.

        Args:
            num_inflight: float64 [W], requests on each worker; those that are not among this
                router's own (other replicas placed them) then count as requests of the
                worker's region, where it has one. None leaves them to the reader.
        """
        if num_inflight is not None and self._profiles is not None:
            others = np.maximum(num_inflight - self._num, 0.0)
            if self._blend.stranger is None:
                self._blend.stranger = np.logical_not(self._profiles.any(axis=1))
            others[self._blend.stranger] = 0.0
            if others.any():
                return self._blended(others)
        if self._rows is None:
            prior = self._profiles is not None
            self._rows = ExpertRows(
                survival=self._survival,
                survival_sum=self._sum,
                num_modelled=self._num,
                layer_scale=self._scale,
                total_experts=self._total,
                survival_prior=self._prior_survival if prior else None,
                survival_prior_sum=self._prior_sum if prior else None,
            )
        return self._rows

    def _blended(self, others: np.ndarray) -> ExpertRows:
        """Rows with `others` requests of each worker's region among them, float64 [W] >= 0."""
        assert self._profiles is not None
        blend = self._blend
        if blend.others is None:
            shape = self._survival.shape
            blend.others = np.full(shape[0], -1.0)
            blend.survival, blend.prior = (np.empty(shape, np.float32) for _ in range(2))
            blend.survival_sum, blend.prior_sum = np.empty(shape[0]), np.empty(shape[0])
        assert blend.survival is not None
        assert blend.prior is not None
        assert blend.survival_sum is not None
        assert blend.prior_sum is not None
        # A report changes all rows, a placement one: only those are worked out again.
        for row in np.flatnonzero(blend.others != others).tolist():
            unused = np.maximum(np.float32(1.0) - self._profiles[row], np.float32(MIN_KEEP))
            company = unused ** np.float32(others[row])
            np.multiply(self._survival[row], company, out=blend.survival[row])
            np.multiply(self._prior_survival[row], company, out=blend.prior[row])
            blend.survival_sum[row] = blend.survival[row] @ self._ones
            blend.prior_sum[row] = blend.prior[row] @ self._ones
        blend.others = others
        return ExpertRows(
            survival=blend.survival,
            survival_sum=blend.survival_sum,
            num_modelled=self._num + others,
            layer_scale=self._scale,
            total_experts=self._total,
            survival_prior=blend.prior,
            survival_prior_sum=blend.prior_sum,
        )

    def _rescale(self, row: int, scale: float, num: float) -> None:
        """Takes `num` members of summed `scale` in (or out), and works the row's mean out."""
        count = float(self._num_scaled[row]) + num
        # Emptied: exactly the region's again.
        total = float(self._member_scale[row]) + scale if count > 0.5 else 0.0
        self._num_scaled[row], self._member_scale[row] = max(0.0, count), total
        weight = max(1.0, self.pseudo_members)
        mean = (weight * float(self._region_scale[row]) + total) / (weight + max(0.0, count))
        self._scale[row] = mean
        self._total[row] = mean * self.size

    def _take_logs(self, row: int) -> None:
        """Moves joins into the log row; put off until somebody leaves, off the decision."""
        for keep in self._joined.pop(row, ()):
            self._log[row] += np.log(keep)

    def _refresh_prior(self, row: int) -> None:
        assert self._profiles is not None
        self._take_logs(row)
        unused = np.maximum(1.0 - self._profiles[row], MIN_KEEP)
        self._prior_log[row] = self.pseudo_members * np.log(unused)
        self._prior_survival[row] = np.exp(self._log[row] + self._prior_log[row])
        self._prior_sum[row] = self._prior_survival[row] @ self._ones
