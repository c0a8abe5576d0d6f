"""Measured against modelled: a cell's cost as routing uses it.

The model's value is a prior. Routing uses the measured value while it is fresh; the model bounds
it from below (nothing runs faster than the peak of its chips) and flags it when the two differ by
more than 15%, as they do after a compiler release or on a degraded worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serving.core.errors import ConfigError
from serving.cost import formulas
from serving.cost.cells import Cell, CellKey

DIVERGENCE_LIMIT_PCT = 15.0
FRESH_S = 600.0
EWMA_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured over modelled time, smoothed; 1.0 is as modelled, 2.0 half as fast.

    Attributes:
        factor: EWMA of measured / modelled seconds.
        at_s: time of the newest measurement.
        num_samples: measurements behind it.
    """

    factor: float
    at_s: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One quantity of a cell as routing uses it.

    Attributes:
        value: seconds to compute with.
        prior: the model's seconds.
        measured: the measured seconds, None when there are none.
        age_s: age of the measurement, inf when there is none.
        source: `measured` or `prior`.
        divergence_pct: measured against prior, 0 without a measurement.
        flagged: they differ by more than the limit, or the measurement beats the physics.
    """

    value: float
    prior: float
    measured: float | None
    age_s: float
    source: str
    divergence_pct: float
    flagged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What a cell costs now.

    Attributes:
        key: the cell.
        prefill_s_per_token, decode_step_s: the two estimates.
        prefill_usd_per_mtok, decode_usd_per_mtok: dollars per million tokens.
    """

    key: CellKey
    prefill_s_per_token: Estimate
    decode_step_s: Estimate
    prefill_usd_per_mtok: float
    decode_usd_per_mtok: float

    @property
    def flagged(self) -> bool:
        """Whether either estimate is flagged."""
        return self.prefill_s_per_token.flagged or self.decode_step_s.flagged


class CellBook:
    """Cells with their measurements; time comes from the caller."""

    def __init__(
        self,
        cells: Iterable[Cell],
        *,
        fresh_s: float = FRESH_S,
        divergence_limit_pct: float = DIVERGENCE_LIMIT_PCT,
    ) -> None:
        """Args: the cells; how old a measurement may be; from where on it is flagged."""
        for name, value in (("fresh_s", fresh_s), ("divergence_limit_pct", divergence_limit_pct)):
            if not value > 0:
                raise ConfigError(name, value, "must be > 0")
        self._cells = {cell.key: cell for cell in cells}
        self._fresh_s = fresh_s
        self._limit_pct = divergence_limit_pct
        self._prefill: dict[CellKey, Measured] = {}
        self._decode: dict[CellKey, Measured] = {}

    def add(self, cells: Iterable[Cell]) -> None:
        """More cells; known ones keep their measurements."""
        for cell in cells:
            self._cells.setdefault(cell.key, cell)

    @property
    def cells(self) -> Mapping[CellKey, Cell]:
        """Cells by key."""
        return self._cells

    def observe_prefill(
        self, key: CellKey, *, num_tokens: float, seconds: float, now_s: float
    ) -> None:
        """Adds one measured prefill (tokens computed, padding included).

        Raises:
            ConfigError: unknown cell, or not a positive finite measurement.
        """
        modelled = _sample("num_tokens", num_tokens) * self._cell(key).prefill_s_per_token()
        self._add(self._prefill, key, _sample("seconds", seconds) / modelled, now_s)

    def observe_decode(
        self,
        key: CellKey,
        *,
        num_requests: float,
        context_tokens: float,
        seconds: float,
        now_s: float,
        distinct_experts: float | None = None,
    ) -> None:
        """Adds one measured decode step.

        Raises:
            ConfigError: unknown cell, or not a positive finite measurement.
        """
        modelled = self._cell(key).decode_step_s(
            _sample("num_requests", num_requests),
            context_tokens,
            distinct_experts=distinct_experts,
        )
        self._add(self._decode, key, _sample("seconds", seconds) / modelled, now_s)

    def observe_factor(self, key: CellKey, factor: float, *, now_s: float) -> None:
        """Adds a worker's own figure, measured over modelled step time, to both phases.

        Raises:
            ConfigError: unknown cell, or not a positive finite factor.
        """
        self._cell(key)
        for table in (self._prefill, self._decode):
            self._add(table, key, _sample("factor", factor), now_s)

    def quote(
        self,
        key: CellKey,
        *,
        num_requests: float,
        context_tokens: float,
        now_s: float,
        slo_class: str | None = None,
        basis: str = "amortised",
    ) -> Quote:
        """What the cell costs now at an operating point.

        Raises:
            ConfigError: unknown cell or price basis.
        """
        cell = self._cell(key)
        utilization = cell.hardware.decode_bandwidth_utilization
        prefill = self._estimate(
            cell.prefill_s_per_token(), cell.hardware.prefill_mfu, self._prefill.get(key), now_s
        )
        step = self._estimate(
            cell.decode_step_s(num_requests, context_tokens),
            utilization,
            self._decode.get(key),
            now_s,
        )
        usd_per_s = cell.usd_per_s(slo_class=slo_class, basis=basis)
        return Quote(
            key=key,
            prefill_s_per_token=prefill,
            decode_step_s=step,
            prefill_usd_per_mtok=formulas.usd_per_mtok(prefill.value * usd_per_s),
            decode_usd_per_mtok=formulas.usd_per_mtok(step.value / num_requests * usd_per_s),
        )

    def _estimate(
        self, prior: float, best_share: float, measured: Measured | None, now_s: float
    ) -> Estimate:
        """Chooses between prior and measurement; `prior * best_share` is what the peak allows."""
        if measured is None:
            return Estimate(
                value=prior,
                prior=prior,
                measured=None,
                age_s=math.inf,
                source="prior",
                divergence_pct=0.0,
                flagged=False,
            )
        seconds = prior * measured.factor
        age_s = max(0.0, now_s - measured.at_s)
        fresh = age_s <= self._fresh_s
        floor = prior * best_share
        divergence_pct = 100.0 * (measured.factor - 1.0)
        return Estimate(
            value=max(seconds, floor) if fresh else prior,
            prior=prior,
            measured=seconds,
            age_s=age_s,
            source="measured" if fresh else "prior",
            divergence_pct=divergence_pct,
            flagged=abs(divergence_pct) > self._limit_pct,
        )

    def _add(
        self, table: dict[CellKey, Measured], key: CellKey, factor: float, now_s: float
    ) -> None:
        """EWMA of the factor; a measurement older than fresh starts it anew."""
        old = table.get(key)
        if old is None or now_s - old.at_s > self._fresh_s:
            table[key] = Measured(factor=factor, at_s=now_s, num_samples=1)
            return
        table[key] = replace(
            old,
            factor=old.factor + EWMA_WEIGHT * (factor - old.factor),
            at_s=max(old.at_s, now_s),
            num_samples=old.num_samples + 1,
        )

    def _cell(self, key: CellKey) -> Cell:
        if key not in self._cells:
            raise ConfigError("cell", key, f"is unknown; known: {sorted(self._cells)}")
        return self._cells[key]


def _sample(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(name, value, "must be a finite number > 0")
    return value
