"""How long a rule needs to gain again after the mix of domains has shifted.

A run's TPOT is kept as a series over stretches of requests. A rule's gain in a stretch is one
minus its mean TPOT over that of a baseline in the same stretch, both averaged over seeds. It has
recovered when the gain, averaged over three stretches, reaches a share of the gain it settles at
(the mean of the last third after the shift). Requests live for many steps, so a stretch sees
what happens up to a request's life after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SMOOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a shift did to one rule.

    Attributes:
        before_pct: gain before the shift, percent of the baseline's TPOT.
        first_pct: gain in the first stretches after it.
        settled_pct: gain it settles at.
        recover_s: seconds from the shift until `share` of the settled gain; nan when it never
            settles at a gain.
    """

    before_pct: float
    first_pct: float
    settled_pct: float
    recover_s: float


def recovery(
    policy: Sequence[Sequence[float | None]],
    baseline: Sequence[Sequence[float | None]],
    *,
    shift_at: float,
    stretch_s: float,
    share: float = 0.9,
) -> Recovery:
    """Measures a recovery.

    Args:
        policy: mean TPOT per seed and stretch, [S, N]; None where nobody ended.
        baseline: the same of the baseline, seeds in the same order.
        shift_at: stretch in which the mix shifts, a fraction allowed.
        stretch_s: seconds a stretch of arrivals takes.
        share: of the settled gain that counts as recovered.

    Raises:
        ValueError: unequal series, or no stretch on one side of the shift.
    """
    mine, other = np.asarray(policy, np.float64), np.asarray(baseline, np.float64)
    if mine.shape != other.shape or mine.ndim != 2:
        raise ValueError(f"series are {mine.shape} and {other.shape}, must be equal and [S, N]")
    gain = 100.0 * (1.0 - np.nanmean(mine, axis=0) / np.nanmean(other, axis=0))
    first, num = int(np.ceil(shift_at)), mine.shape[1]
    after = num - first
    if first < 1 or after < _SMOOTH:
        raise ValueError(f"{shift_at=} must leave stretches on both sides of {num}")
    settled = float(gain[num - max(1, after // 3) :].mean())
    smooth = np.convolve(gain[first:], np.ones(_SMOOTH) / _SMOOTH, mode="valid")
    reached = np.flatnonzero(smooth >= share * settled)
    recover_s = float("nan")
    if settled > 0 and len(reached):
        recover_s = (first - shift_at + float(reached[0])) * stretch_s
    return Recovery(
        before_pct=float(gain[: int(shift_at)].mean()),
        first_pct=float(smooth[0]),
        settled_pct=settled,
        recover_s=recover_s,
    )
