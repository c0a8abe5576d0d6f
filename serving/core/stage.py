"""One stage's choice: a cell and a snapshot in, a ranking and its evidence out.

Steps 3 to 6 of the pipeline for one cell: static rows, prefix credit, hand-over times,
feasibility, expert chances, then the policy. Caches hold only what follows from the fleet's
identity (the view's `workers` tuple); everything else is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serving.core.ahead import Ahead, DecodeRows, DecodeSide
from serving.core.block_hash import BlockHasher
from serving.core.costs import CostBook, WorkerCosts
from serving.core.experts import ExpertProfiles
from serving.core.feasibility import (
    CellRows,
    Feasibility,
    FitQuestion,
    cell_rows,
    feasibility,
    hand_over_ok,
    raise_infeasible,
)
from serving.core.guard import SignatureGuard
from serving.core.lease import Reservation
from serving.core.objective import DecodePrices
from serving.core.placement import PlacementContext, Policy, Ranking, Regions, looks_ahead
from serving.core.ports import PrefixIndex
from serving.core.request import Request
from serving.core.router_config import RouterConfig
from serving.core.routing_table import TableCell
from serving.core.signature import Signature
from serving.core.transfer import LinkSpeeds, TransferTimes
from serving.core.worker import Capabilities, FleetView, Phase, WorkerInfo

NO_HASHES = np.empty(0, np.uint64)
_NO_HASHES_BY_SIZE: dict[int, np.ndarray] = {}
CellKeys = tuple[tuple[str, str], ...]


@dataclass(slots=True, kw_only=True)
class Learned:
    """Parts that change live and can be switched off; a switched-off part is None here.

    Attributes:
        experts: decode profiles.
        regions: fitted regions.
        prefix_index: who holds which prefix.
        signature_weight: trust in signatures, in [0, 1].
    """

    experts: ExpertProfiles | None = None
    regions: Regions | None = None
    prefix_index: PrefixIndex | None = None
    signature_weight: float = 1.0


class StageInput(NamedTuple):
    """What one choice is about.

    Attributes:
        request, phase: what is placed.
        cells: where the global layer sends it; several are compared.
        view: the snapshot.
        signature: the request's, or None.
        source: prefill worker whose KV moves, or None.
        exclude: workers that lost this request before.
        sequence: number of the decision.
        turn: number of the decision within its phase.
        decode_view: prefill only: the snapshot of decode workers, for who looks ahead.
    """

    request: Request
    phase: Phase
    cells: tuple[TableCell, ...]
    view: FleetView
    signature: Signature | None
    source: WorkerInfo | None
    exclude: frozenset[str]
    sequence: int
    turn: int
    decode_view: Callable[[], FleetView] | None = None


class StageChoice(NamedTuple):
    """What came out.

    Attributes:
        context: what the policy saw.
        ranking: its answer.
        found: who was feasible.
        block_hashes: uint64 [n] of the prompt's full blocks, empty when not needed.
    """

    context: PlacementContext
    ranking: Ranking
    found: Feasibility
    block_hashes: np.ndarray


class StageChooser:
    """Makes choices over snapshots."""

    def __init__(self, costs: CostBook, config: RouterConfig) -> None:
        self._costs = costs
        self._config = config
        self._transfer = TransferTimes(config.links)
        self._decode_rows: DecodeRows | None = None
        self._hashers: dict[int, BlockHasher] = {}
        self._takers_of: WorkerCosts | None = None
        self._takers: dict[str, tuple[WorkerInfo, np.ndarray]] = {}
        self._takers_like: dict[Capabilities, np.ndarray] = {}
        self._rows: dict[Phase, tuple[WorkerCosts, dict[CellKeys, CellRows]]] = {}

    def set_links(self, links: LinkSpeeds) -> None:
        """Bandwidths from the next decision on."""
        self._transfer = TransferTimes(links)

    def choose(
        self, given: StageInput, policy: Policy, learned: Learned, rng: np.random.Generator
    ) -> StageChoice:
        """Ranks the workers of one cell.

        Raises:
            InvalidRequest: the request would not fit an empty fleet.
            Rejected: nobody in the cell is alive or has room.
        """
        request, phase, view = given.request, given.phase, given.view
        costs, cell = self._static(view, phase, given.cells)
        target = self._config.targets[request.slo]
        moves = phase is Phase.DECODE and given.source is not None
        transfer_s, links, takers = cell.no_transfer_s, None, None
        if moves and given.source is not None:
            transfer_s = self._transfer_s(request, given.source, view, costs)
            links = self._transfer.kinds(given.source, view.workers)
            takers = self._hand_over(given.source, costs)
        found = feasibility(
            FitQuestion(
                request=request,
                phase=phase,
                view=view,
                costs=costs,
                cell=cell,
                rules=self._config.fit,
                target=target,
                transfer_s=transfer_s if moves else None,
                hand_over_ok=takers,
                exclude=given.exclude,
            )
        )
        if not np.count_nonzero(found.mask):
            raise_infeasible(found, given.cells)
        hashes, cached = _NO_HASHES_BY_SIZE, cell.no_cached_tokens
        if phase is Phase.PREFILL and learned.prefix_index is not None:
            hashes, cached = self._cached(given, found, costs, learned.prefix_index)
        keep, cluster = None, -1
        if phase is Phase.DECODE:
            keep, cluster = _keep(given.signature, view, learned)
        context = PlacementContext(
            request=request,
            phase=phase,
            target=target,
            view=view,
            feasible=found.mask,
            cached_tokens=cached,
            transfer_s=transfer_s,
            sequence=given.turn,
            signature=given.signature,
            regions=learned.regions,
            # The oracle label of the `domain` baseline; other policies do not look.
            domain=request.product,
            costs=costs,
            experts=learned.experts,
            keep=keep,
            cluster=cluster,
            links=links,
            ahead=self._ahead(given, learned) if looks_ahead(policy) else None,
        )
        ranking = policy.rank(context, rng)
        own = NO_HASHES
        if hashes:
            own = hashes.get(int(costs.block_size_tokens[ranking.chosen]), NO_HASHES)
        return StageChoice(context=context, ranking=ranking, found=found, block_hashes=own)

    def _static(
        self, view: FleetView, phase: Phase, cells: tuple[TableCell, ...]
    ) -> tuple[WorkerCosts, CellRows]:
        """Rows that hold while the fleet does not change."""
        # A pushed table brings new estimates, not new places.
        keys = (cells[0].key,) if len(cells) == 1 else tuple(cell.key for cell in cells)
        cached = self._rows.get(phase)
        if cached is None or cached[0].workers is not view.workers:
            cached = self._rows[phase] = self._costs.rows(view.workers), {}
        costs, known = cached
        rows = known.get(keys)
        if rows is None:
            rows = known[keys] = cell_rows(cells, costs, self._config.fit)
        return costs, rows

    def _ahead(self, given: StageInput, learned: Learned) -> Ahead | None:
        """Decode as the prefill choice sees it, worked out when the policy asks."""
        if given.phase is not Phase.PREFILL or given.decode_view is None:
            return None
        look = given.decode_view
        return Ahead(given.view.workers, lambda: self._decode_side(given, look(), learned))

    def _decode_side(self, given: StageInput, view: FleetView, learned: Learned) -> DecodeSide:
        request, config = given.request, self._config
        costs, cell = self._static(view, Phase.DECODE, given.cells)
        target = config.targets[request.slo]
        found = feasibility(
            FitQuestion(
                request=request,
                phase=Phase.DECODE,
                view=view,
                costs=costs,
                cell=cell,
                rules=config.fit,
                target=target,
                exclude=given.exclude,
            )
        )
        keep, cluster = _keep(given.signature, view, learned)
        num = len(view.workers)
        if self._decode_rows is None or self._decode_rows.workers is not view.workers:
            self._decode_rows = DecodeRows(view.workers)
        return DecodeSide(
            rows=self._decode_rows,
            context=PlacementContext(
                request=request,
                phase=Phase.DECODE,
                target=target,
                view=view,
                feasible=found.mask,
                cached_tokens=np.zeros(num, np.int32),
                transfer_s=np.zeros(num),
                sequence=given.turn,
                signature=given.signature,
                regions=learned.regions,
                costs=costs,
                experts=learned.experts,
                keep=keep,
                cluster=cluster,
            ),
            feasible=found.mask,
            hand_over_ok=lambda source: self._hand_over(source, costs),
            transfer_s=lambda source: self._transfer_s(request, source, view, costs),
            links=lambda source: self._transfer.kinds(source, view.workers),
            max_transfer_s=config.fit.max_transfer_share * target.ttft_p99_s,
        )

    def _hand_over(self, source: WorkerInfo, costs: WorkerCosts) -> np.ndarray:
        """Who can take the source's KV; worked out once per kind of source and fleet."""
        if self._takers_of is not costs:
            self._takers_of, self._takers, self._takers_like = costs, {}, {}
        known = self._takers.get(source.worker_id)
        if known is not None and known[0] is source:
            return known[1]
        takers = self._takers_like.get(source.capabilities)
        if takers is None:
            takers = self._takers_like[source.capabilities] = hand_over_ok(source, costs)
        row = costs.row_of.get(source.worker_id, -1)
        if row >= 0 and not takers[row]:
            # A worker keeps its own KV whatever its pages.
            takers = takers.copy()
            takers[row] = True
        self._takers[source.worker_id] = source, takers
        return takers

    def _transfer_s(
        self, request: Request, source: WorkerInfo, view: FleetView, costs: WorkerCosts
    ) -> np.ndarray:
        """Hand-over seconds; on TPUs whole pages, and the rest computed again by decode."""
        cost, num_tokens, rest = self._costs.get(source), request.num_prompt_tokens, 0
        if cost is not None and cost.needs_equal_tensor_parallel:
            rest = num_tokens % source.capabilities.page_size_tokens
        per_token = 0.0 if cost is None else cost.kv_bytes_per_token
        seconds = self._transfer.seconds(per_token * (num_tokens - rest), source, view.workers)
        if rest:
            again_s = rest * costs.prefill_token_s * view.speed_factor
            row = costs.row_of.get(source.worker_id)
            if row is not None:
                again_s[row] = 0.0
            seconds += again_s
        return seconds

    def _cached(
        self,
        given: StageInput,
        found: Feasibility,
        costs: WorkerCosts,
        index: PrefixIndex,
    ) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Hashes by block size, and prompt tokens each worker holds (int32 [W])."""
        workers, request, sizes = given.view.workers, given.request, costs.block_size
        if isinstance(sizes, int):
            hashes = self._hashes(request, sizes)
            return {sizes: hashes}, index.cached_blocks(hashes, workers) * np.int32(sizes)
        cached, by_size = np.zeros(len(workers), np.int32), {}
        for size in np.unique(sizes[found.mask]).tolist():
            hashes = by_size[size] = self._hashes(request, size)
            cached += index.cached_blocks(hashes, workers) * (sizes == size) * np.int32(size)
        return by_size, cached

    def _hashes(self, request: Request, block: int) -> np.ndarray:
        hasher = self._hashers.get(block)
        if hasher is None:
            hasher = BlockHasher(block, seed=self._config.hash_seed)
            self._hashers[block] = hasher
        return hasher.hashes(request.token_ids, salt=request.cache_salt)


def _keep(
    signature: Signature | None, view: FleetView, learned: Learned
) -> tuple[np.ndarray | None, int]:
    """1 - q of the request, and its calibration cluster."""
    experts = learned.experts
    if experts is None or view.experts is None:
        return None, -1
    if signature is None or experts.signature_version not in ("", signature.version):
        return experts.keep(None), -1
    cluster = experts.nearest(signature.vector)
    keep = experts.keep(signature, weight=learned.signature_weight, cluster=cluster)
    return keep, cluster


def reservation(given: StageInput, choice: StageChoice, config: RouterConfig) -> Reservation:
    """What the request is counted as on the chosen worker."""
    request, phase, context = given.request, given.phase, choice.context
    row = choice.ranking.chosen
    now_s = given.view.taken_at_s
    decodes = phase is Phase.DECODE
    uncached = request.num_prompt_tokens - int(context.cached_tokens[row])
    length = request.length.mean_tokens
    experts = context.experts
    return Reservation(
        lease_id=f"{config.router_id}/{given.sequence}",
        request_id=request.request_id,
        phase=phase,
        worker_id=given.view.workers[row].worker_id,
        reserved_at_s=now_s,
        expires_at_s=now_s + config.lease_s,
        prefill_tokens=0 if decodes else max(1, uncached),
        kv_blocks=choice.found.blocks_on(row),
        kv_tokens=request.num_prompt_tokens + (0.5 * length if decodes else 0.0),
        decode_tokens=length if decodes else 0.0,
        tokens_per_s=_decode_tokens_per_s(choice) if decodes else 0.0,
        lambda_usd_per_s=context.target.lambda_usd_per_s,
        tpot_limit_s=context.target.tpot_p99_s,
        keep=context.keep,
        layer_scale=0.0 if experts is None else experts.scale_of(context.cluster),
    )


def _decode_tokens_per_s(choice: StageChoice) -> float:
    """Decode speed the request is expected to see; 0.0 when nothing is priced."""
    row, terms = choice.ranking.chosen, choice.ranking.terms
    if not isinstance(terms, DecodePrices):
        return choice.context.decode_tokens_per_s(row)
    step_s = float(terms.step_with_s[row])
    return 1.0 / step_s if step_s > 0.0 else 0.0


def expect_step(guard: SignatureGuard, given: StageInput, choice: StageChoice) -> None:
    """Leaves the guard both predictions of a decode step, where there are two."""
    row, terms = choice.ranking.chosen, choice.ranking.terms
    mean_tokens_per_s = choice.context.decode_tokens_per_s(row)
    if given.signature is not None and isinstance(terms, DecodePrices) and mean_tokens_per_s > 0:
        guard.expect(
            given.request.request_id,
            by_signature_s=float(terms.step_with_s[row]),
            by_mean_s=1.0 / mean_tokens_per_s,
        )
