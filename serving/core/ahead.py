"""Decode as seen from a prefill choice: which partner each prefill worker would hand over to.

    J(p, d) = J_prefill(p) + lambda * transfer(p, d) + J_decode(d)

The two halves are priced apart; only the hand-over couples them, and it depends on where the
prefill worker is, not on which of a place's workers it is. So the best partner is worked out
once per place that the policy asks about: an exact pass over all decode workers for each. In a
large fleet only a sample is priced: the workers whose regions are nearest to the request's
calibration cluster, the least loaded, and the least loaded of each asked place's own domain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from serving.core import objective
from serving.core.decision import TermKind
from serving.core.placement import PlacementContext, Regions, TermMatrix
from serving.core.transfer import LINKS
from serving.core.worker import Role, WorkerInfo

SAMPLE_ABOVE = 128
NUM_NEAR = NUM_LIGHT = 24
NUM_OF_DOMAIN = 4


class DecodeRows:
    """Rows of a decode view that follow from the fleet alone; kept until it changes.

    Attributes:
        of_pool: rows int64 of each (model, pool).
    """

    def __init__(self, workers: tuple[WorkerInfo, ...]) -> None:
        self.workers = workers
        self.of_pool = _grouped((worker.model, worker.pool) for worker in workers)
        self._of_domain = _grouped(worker.ici_domain for worker in workers)
        self._ids = tuple(worker.worker_id for worker in workers)
        self._orders: dict[int, np.ndarray] = {}
        self._regions: Regions | None = None

    def sample(self, context: PlacementContext, domains: set[str]) -> np.ndarray:
        """Rows to price, int64 [R] ascending.

        Args:
            context: the decode choice; its feasible rows count.
            domains: of the prefill workers asked about.
        """
        feasible, load = context.feasible, context.view.num_inflight
        chosen = np.zeros(len(feasible), bool)
        rows = feasible.nonzero()[0]
        chosen[_lightest(rows, load, NUM_LIGHT)] = True
        near = self._nearest(context)
        if near is not None:
            chosen[near] = True
        for domain in domains:
            own = self._of_domain.get(domain)
            if own is not None:
                chosen[_lightest(own[feasible[own]], load, NUM_OF_DOMAIN)] = True
        return chosen.nonzero()[0]

    def _nearest(self, context: PlacementContext) -> np.ndarray | None:
        """Rows of the nearest regions; the order is a memo of (regions, cluster)."""
        regions, experts, cluster = context.regions, context.experts, context.cluster
        if regions is None or experts is None or experts.centroids is None or cluster < 0:
            return None
        if self._regions is not regions:
            self._regions, self._orders = regions, {}
        order = self._orders.get(cluster)
        if order is None:
            cosine = regions.similarity(experts.centroids[cluster], self._ids)
            order = self._orders[cluster] = (-cosine).argsort(kind="stable")
        return order[context.feasible[order]][:NUM_NEAR]


def _grouped(keys: Iterable[Hashable]) -> dict[Hashable, np.ndarray]:
    found: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        found.setdefault(key, []).append(row)
    return {key: np.array(rows, np.int64) for key, rows in found.items()}


def _lightest(rows: np.ndarray, load: np.ndarray, num: int) -> np.ndarray:
    if len(rows) <= num:
        return rows
    return rows[load.take(rows).argpartition(num)[:num]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeSide:
    """Everything about decode that does not depend on the prefill worker.

    Attributes:
        context: the choice over W decode workers, with nothing to move.
        rows: what follows from the fleet.
        feasible: bool [W]; None of it need be True.
        hand_over_ok: who can take KV of a worker like the given one, bool [W].
        transfer_s: hand-over seconds from a worker to each decode worker, float64 [W].
        links: which link that is, int8 [W].
        max_transfer_s: a longer hand-over is banned, unless all are.
    """

    context: PlacementContext
    rows: DecodeRows
    feasible: np.ndarray
    hand_over_ok: Callable[[WorkerInfo], np.ndarray]
    transfer_s: Callable[[WorkerInfo], np.ndarray]
    links: Callable[[WorkerInfo], np.ndarray]
    max_transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Partner:
    """Best decode row of a place, -1 for none; J including the hand-over.

    `breaks`: it would break a promise of the class, as every other partner would.
    """

    row: int
    usd: float
    breaks: bool
    transfer_s: float
    link: int


class Ahead:
    """Best partners of prefill workers (a `placement.DecodeAhead`)."""

    def __init__(
        self, workers: tuple[WorkerInfo, ...], decode_side: Callable[[], DecodeSide]
    ) -> None:
        """Args: workers of the prefill view; what gives the decode side, asked at most once."""
        self._workers = workers
        self._decode_side = decode_side
        self._side: DecodeSide | None = None
        self._partners: dict[object, _Partner] = {}
        self._pack_share: float | None = None
        self._asked: set[str] = set()

    def pack(self, share: float | None) -> None:
        """See `placement.DecodeAhead`."""
        if share != self._pack_share:
            self._pack_share, self._side = share, None
            self._partners.clear()

    def usd(self, rows: np.ndarray) -> np.ndarray:
        """See `placement.DecodeAhead`."""
        if self._side is None:
            self._asked = {self._workers[row].ici_domain for row in rows.tolist()}
        return np.array([self.partner(row).usd for row in rows.tolist()])

    def breaks_target(self, rows: np.ndarray) -> np.ndarray:
        """See `placement.DecodeAhead`."""
        return np.array([self.partner(row).breaks for row in rows.tolist()], bool)

    def partner(self, row: int) -> _Partner:
        """Best partner of one prefill row."""
        worker = self._workers[row]
        key: object = worker.worker_id
        if worker.role is not Role.BOTH:
            limits = worker.capabilities
            key = (worker.host, worker.ici_domain, worker.pool, worker.hardware, worker.model)
            key += (limits.page_size_tokens, limits.tensor_parallel, limits.kv_connector)
        found = self._partners.get(key)
        if found is None:
            found = self._partners[key] = self._best(worker)
        return found

    def matrix(self, rows: np.ndarray) -> TermMatrix:
        """See `placement.DecodeAhead`; rows without a partner have no terms (all 0)."""
        side, prices = self._priced()
        partners = [self.partner(row) for row in rows.tolist()]
        at = np.array([max(0, partner.row) for partner in partners], np.int64)
        here = np.array([partner.row >= 0 for partner in partners], bool)
        decode = prices.matrix()
        seconds = decode.seconds.take(at, axis=0) * here[:, None]
        usd = decode.usd.take(at, axis=0) * here[:, None]
        transfer = decode.names.index("transfer")
        moved_s = np.array([partner.transfer_s for partner in partners]) * here
        seconds[:, transfer] = moved_s
        usd[:, transfer] = moved_s * side.context.target.lambda_usd_per_s
        workers = side.context.view.workers
        return TermMatrix(
            names=decode.names,
            kinds=decode.kinds or (TermKind.COST,) * len(decode.names),
            seconds=seconds,
            usd=usd,
            facts=tuple((name, values.take(at)) for name, values in decode.facts),
            labels=(
                (
                    "decode_worker",
                    [workers[p.row].worker_id if p.row >= 0 else "" for p in partners],
                ),
                ("link", [LINKS[p.link] if p.row >= 0 else "" for p in partners]),
            ),
        )

    def _priced(self) -> tuple[DecodeSide, objective.DecodePrices]:
        if self._side is None:
            self._side = side = self._decode_side()
            context, sampled = side.context, None
            if self._pack_share is None and np.count_nonzero(side.feasible) > SAMPLE_ABOVE:
                sampled = side.rows.sample(context, self._asked)
            prices = objective.price(context, rows=sampled)
            assert isinstance(prices, objective.DecodePrices)
            self._prices = prices
            self._score, self._breaks = prices.score_usd, prices.breaks_target()
            if self._pack_share is not None:
                self._score, inside = prices.packed(self._pack_share)
                self._breaks = self._breaks | ~inside
            self._allowed = side.feasible
            if sampled is not None:
                self._allowed = np.zeros(len(side.feasible), bool)
                self._allowed[sampled] = True
        return self._side, self._prices

    def _best(self, source: WorkerInfo) -> _Partner:
        """An exact pass over the decode workers of the source's cell."""
        side, _ = self._priced()
        nobody = _Partner(row=-1, usd=np.inf, breaks=True, transfer_s=0.0, link=0)
        rows = side.rows.of_pool.get((source.model, source.pool))
        if rows is None:
            return nobody
        workers = side.context.view.workers
        if source.role is Role.BOTH:
            rows = np.array([r for r in rows.tolist() if workers[r].worker_id == source.worker_id])
            if not len(rows) or not side.feasible[rows[0]]:
                return nobody
            row = int(rows[0])
            return _Partner(
                row=row,
                usd=float(self._score[row]),
                breaks=bool(self._breaks[row]),
                transfer_s=0.0,
                link=len(LINKS) - 1,
            )
        allowed = self._allowed.take(rows) & side.hand_over_ok(source).take(rows)
        if not np.count_nonzero(allowed):
            return nobody
        keeps = allowed & ~self._breaks.take(rows)
        if np.count_nonzero(keeps):
            allowed = keeps
        moved_s = side.transfer_s(source).take(rows)
        near = allowed & (moved_s <= side.max_transfer_s)
        if np.count_nonzero(near):
            allowed = near
        usd = self._score.take(rows) + moved_s * side.context.target.lambda_usd_per_s
        place = int(np.where(allowed, usd, np.inf).argmin())
        return _Partner(
            row=int(rows[place]),
            usd=float(usd[place]),
            breaks=bool(self._breaks[rows[place]]),
            transfer_s=float(moved_s[place]),
            link=int(side.links(source)[rows[place]]),
        )
