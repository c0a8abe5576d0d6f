"""The cost surface of a fleet: what every (variant, hardware, chips) cell costs now, and to whom.

It joins the catalogue's priors with what the fleet measures, and gives the router what it
decides with:

    coefficients    priors of the cells the workers are, for `CostBook`
    links           hand-over priors by hardware, and fresh measured bandwidths
    table           per (model, class) the pools in order of J of a mean request

A pool's estimate is taken at the decode batch that serves the class cheapest while keeping its
TPOT, not at today's occupancy: an empty pool must not look dear for being empty.

    J = rate_p / prefill tok/s * prompt + rate_d * step(B) / B * output
        + lambda * (prompt / prefill tok/s + output * step(B))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serving.core.costs import CellCost, CostKey
from serving.core.errors import ConfigError
from serving.core.request import SloClass, SloTarget
from serving.core.routing_table import RoutingTable, TableCell, TableEntry
from serving.core.transfer import HardwareLinks, LinkSpeeds
from serving.core.worker import Phase, WorkerInfo, WorkerState
from serving.cost.catalogue import Catalogue, Offer
from serving.cost.cells import Cell, CellKey, build_cell
from serving.cost.coefficients import modelled_cost
from serving.cost.feasibility import max_kv_tokens
from serving.cost.measured import FRESH_S, CellBook
from serving.cost.transfer import (
    CellPair,
    Link,
    LinkDomain,
    TransferMatrix,
    prior_link,
)

MAX_BATCH = 1024
_LIVE = (WorkerState.READY, WorkerState.PARKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRequest:
    """What estimates are made for.

    Attributes:
        prompt_tokens, output_tokens: means of the traffic.
    """

    prompt_tokens: float = 2048.0
    output_tokens: float = 300.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if not 1.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(name, getattr(self, name), "must be finite and >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEstimate:
    """What the mean request of a class costs in a pool.

    Attributes:
        variant, pool: the cell of the routing table.
        usd: J.
        batch: decode requests per step it is taken at.
        tpot_s, ttft_s: what the class would see, without queueing.
        keeps_target: both lie within the class's targets.
        measured: a fresh measurement stands behind it.
        flagged: model and measurement differ by more than the limit.
    """

    variant: str
    pool: str
    usd: float
    batch: int
    tpot_s: float
    ttft_s: float
    keeps_target: bool
    measured: bool
    flagged: bool


class CostSurface:
    """Priors, measurements and estimates; time comes from the caller."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        mean_request: MeanRequest | None = None,
        fresh_s: float = FRESH_S,
        num_compared: int = 3,
    ) -> None:
        """Args: the catalogue; the traffic; how old measurements may be; cells compared live."""
        if num_compared < 1:
            raise ConfigError("num_compared", num_compared, "must be >= 1")
        self.catalogue = catalogue
        self.mean_request = mean_request or MeanRequest()
        self._fresh_s = fresh_s
        self._num_compared = num_compared
        self._offers = {(o.variant, o.hardware, o.num_chips): o for o in catalogue.offers}
        self._cells: dict[CellKey, Cell] = {}
        self._holes: dict[CellKey, str] = {}
        self._book = CellBook((), fresh_s=fresh_s)
        self._matrix = TransferMatrix({}, fresh_s=fresh_s)
        self._pools: dict[str, WorkerInfo] = {}
        self._version = 0

    @property
    def book(self) -> CellBook:
        """Measurements by cell."""
        return self._book

    @property
    def holes(self) -> Mapping[CellKey, str]:
        """Cells of known workers that cannot exist, with the rule they break."""
        return self._holes

    def learn(self, workers: Iterable[WorkerInfo]) -> None:
        """Takes in the cells and pools of workers; what is known stays, measurements too.

        Raises:
            ConfigError: a worker's variant or hardware is not in the catalogue.
        """
        fresh_cells, fresh_pairs = {}, {}
        for worker in workers:
            key = _key(worker)
            if key not in self._cells and key not in self._holes:
                offer = self._offers.get(key) or Offer(
                    variant=worker.model, hardware=worker.hardware, num_chips=worker.num_chips
                )
                cell, verdict = build_cell(self.catalogue, offer)
                if cell is None:
                    self._holes[key] = f"{verdict.rule}: {verdict.detail}"
                else:
                    self._cells[key] = fresh_cells[key] = cell
            self._pools.setdefault(worker.pool, worker)
        for one in self._pools.values():
            for other in self._pools.values():
                fresh_pairs[one.pool, other.pool] = self._pool_link(one, other)
        self._book.add(fresh_cells.values())
        self._matrix.add(fresh_pairs)

    def coefficients(self, workers: Iterable[WorkerInfo]) -> dict[CostKey, CellCost]:
        """Roofline coefficients of the workers' cells; holes have none.

        Raises:
            ConfigError: see `learn`.
        """
        workers = tuple(workers)
        self.learn(workers)
        out: dict[CostKey, CellCost] = {}
        for worker in workers:
            cell = self._cells.get(_key(worker))
            if cell is not None:
                out[_key(worker)] = modelled_cost(cell)
        return out

    def links(self, base: LinkSpeeds, *, now_s: float) -> LinkSpeeds:
        """Hand-over bandwidths: `base`, priors by hardware, and what was measured lately."""
        by_hardware = {
            name: HardwareLinks(
                domain=hardware.interconnect.domain,
                domain_bytes_per_s=hardware.interconnect.effective_bytes_per_s,
                network_bytes_per_s=hardware.interconnect.dcn_effective_bytes_per_s,
            )
            for name, hardware in self.catalogue.hardware.items()
        }
        measured = self._matrix.measured_bytes_per_s(now_s=now_s)
        return LinkSpeeds(
            latency_s=base.latency_s,
            host_bytes_per_s=base.host_bytes_per_s,
            domain_bytes_per_s=base.domain_bytes_per_s,
            network_bytes_per_s=base.network_bytes_per_s,
            by_hardware=by_hardware | dict(base.by_hardware),
            measured_bytes_per_s=dict(base.measured_bytes_per_s) | measured,
        )

    def observe_speed(self, worker: WorkerInfo, factor: float, *, now_s: float) -> None:
        """A worker's measured step time over the model's; workers of holes are passed over."""
        if _key(worker) in self._cells:
            self._book.observe_factor(_key(worker), factor, now_s=now_s)

    def observe_hand_over(
        self, pair: CellPair, *, num_blocks: int, num_bytes: float, seconds: float, now_s: float
    ) -> None:
        """One measured hand-over between two pools; unknown pools are passed over.

        Raises:
            ConfigError: seconds that are not positive and finite.
        """
        if all(pool in self._pools for pool in pair):
            self._matrix.observe_moved(
                pair, num_blocks=num_blocks, num_bytes=num_bytes, seconds=seconds, now_s=now_s
            )

    def estimates(
        self, workers: Iterable[WorkerInfo], slo: SloClass, target: SloTarget, *, now_s: float
    ) -> list[PoolEstimate]:
        """Every pool with a live worker for both phases, cheapest first.

        Pools that break the class's targets come last.
        """
        sides: dict[tuple[str, str], dict[Phase, WorkerInfo]] = {}
        for worker in workers:
            if worker.state in _LIVE and _key(worker) in self._cells:
                side = sides.setdefault((worker.model, worker.pool), {})
                for phase in Phase:
                    if worker.role.serves(phase):
                        side.setdefault(phase, worker)
        found = [
            self._estimate(variant, pool, side, slo, target, now_s)
            for (variant, pool), side in sides.items()
            if len(side) == len(Phase)
        ]
        return sorted(found, key=lambda item: (not item.keeps_target, item.usd))

    def table(
        self,
        workers: Iterable[WorkerInfo],
        targets: Mapping[SloClass, SloTarget],
        *,
        now_s: float,
    ) -> RoutingTable | None:
        """The routing table of a fleet; None where no pool can be priced (static fallback).

        Pools of one variant are compared live, `num_compared` of those that keep the class's
        targets; the others, and other variants for requests that name none, come after them.
        """
        workers = tuple(workers)
        self.learn(workers)
        entries: list[TableEntry] = []
        for slo, target in targets.items():
            found = self.estimates(workers, slo, target, now_s=now_s)
            by_model: dict[str, list[PoolEstimate]] = {}
            for item in found:
                by_model.setdefault(item.variant, []).append(item)
            for model, items in by_model.items():
                entries.append(self._entry(model, items, slo))
            if found and "" not in by_model:
                first = found[0].variant
                order = by_model[first] + [item for item in found if item.variant != first]
                entries.append(self._entry("", order, slo))
        if not entries:
            return None
        self._version += 1
        return RoutingTable(f"surface-{self._version}", entries)

    def _entry(self, model: str, items: list[PoolEstimate], slo: SloClass) -> TableEntry:
        first = items[0]
        alike = [
            i for i in items if (i.variant, i.keeps_target) == (first.variant, first.keeps_target)
        ]
        return TableEntry(
            model=model,
            slo=slo,
            num_compared=min(self._num_compared, len(alike)),
            cells=tuple(
                TableCell(
                    variant=item.variant,
                    pool=item.pool,
                    usd_per_request=item.usd,
                    source="measured" if item.measured else "prior",
                )
                for item in items
            ),
        )

    def _estimate(
        self,
        variant: str,
        pool: str,
        side: Mapping[Phase, WorkerInfo],
        slo: SloClass,
        target: SloTarget,
        now_s: float,
    ) -> PoolEstimate:
        """The cheapest decode batch that keeps the class's TPOT (batch 1 where none does)."""
        mean, price = self.mean_request, target.lambda_usd_per_s
        keys = {phase: _key(side[phase]) for phase in Phase}
        context = mean.prompt_tokens + 0.5 * mean.output_tokens
        best: PoolEstimate | None = None
        for batch in self._batches(side[Phase.DECODE], context):
            quotes = {
                phase: self._book.quote(
                    keys[phase],
                    num_requests=batch,
                    context_tokens=context,
                    now_s=now_s,
                    slo_class=slo.value,
                )
                for phase in Phase
            }
            prefill, decode = quotes[Phase.PREFILL], quotes[Phase.DECODE]
            ttft_s = mean.prompt_tokens * prefill.prefill_s_per_token.value
            tpot_s = decode.decode_step_s.value
            usd = mean.prompt_tokens * prefill.prefill_usd_per_mtok / 1e6
            usd += mean.output_tokens * decode.decode_usd_per_mtok / 1e6
            usd += price * (ttft_s + mean.output_tokens * tpot_s)
            found = PoolEstimate(
                variant=variant,
                pool=pool,
                usd=usd,
                batch=batch,
                tpot_s=tpot_s,
                ttft_s=ttft_s,
                keeps_target=tpot_s <= target.tpot_p99_s and ttft_s <= target.ttft_p99_s,
                measured="measured"
                in (prefill.prefill_s_per_token.source, decode.decode_step_s.source),
                flagged=prefill.flagged or decode.flagged,
            )
            if best is None or (not found.keeps_target, found.usd) < (
                not best.keeps_target,
                best.usd,
            ):
                best = found
        assert best is not None
        return best

    def _batches(self, worker: WorkerInfo, context_tokens: float) -> list[int]:
        """Powers of two that the worker's slots and KV allow, 1 at least."""
        cell = self._cells[_key(worker)]
        room = max_kv_tokens(cell.format, cell.hardware, cell.num_chips) / context_tokens
        most = max(1, min(MAX_BATCH, worker.capabilities.max_num_seqs, int(room)))
        return [1 << bits for bits in range(most.bit_length()) if 1 << bits <= most]

    def _pool_link(self, one: WorkerInfo, other: WorkerInfo) -> Link:
        """Prior of a pool pair: the data-centre network of the slower side."""
        hardware = [self.catalogue.hardware_of(worker.hardware) for worker in (one, other)]
        rated = [h for h in hardware if h.interconnect.dcn_effective_bytes_per_s is not None]
        if not rated:
            return prior_link(LinkDomain.SAME_PROCESS, hardware[0])
        return min(
            (prior_link(LinkDomain.DCN, h) for h in rated), key=lambda link: link.bytes_per_s
        )


def _key(worker: WorkerInfo) -> CellKey:
    return worker.model, worker.hardware, worker.num_chips
