"""Which workers could take a request at all, and which rule each of the others breaks.

Rules are masks over the view, in the order they are told: the first one broken is a worker's
`why_not`. The class's latency targets are not among them; they are weighed with the prices
(`objective.breaks_target`), since they give way when nobody can keep them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.costs import WorkerCosts
from serving.core.errors import InvalidRequest, Rejected, RejectReason
from serving.core.request import Request, SloTarget
from serving.core.routing_table import TableCell
from serving.core.worker import FleetView, Phase, WorkerInfo, WorkerState

LIVENESS = ("model", "pool", "state", "stale")
"""Rules that say a cell has nobody; breaking the others means nobody has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRules:
    """What feasibility asks for beyond the worker's own limits.

    Attributes:
        kv_headroom: share of a worker's KV blocks kept free for lengths that were
            under-predicted; an idle worker may use them.
        max_transfer_share: a hand-over above this share of the class's TTFT target is banned,
            unless every candidate is (FACTS section 2).
    """

    kv_headroom: float = 0.1
    max_transfer_share: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.kv_headroom < 1.0:
            raise ValueError(f"{self.kv_headroom=} must lie in [0, 1)")
        if not self.max_transfer_share > 0:
            raise ValueError(f"{self.max_transfer_share=} must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellRows:
    """Rows of one cell in one view; holds until the fleet changes.

    Attributes:
        variant_ok, cell_ok: bool [W], right model; right model, pool and known cost.
        ready: bool [W], READY.
    """

    variant_ok: np.ndarray
    cell_ok: np.ndarray
    ready: np.ndarray


def cell_rows(cell: TableCell, costs: WorkerCosts) -> CellRows:
    """Static part of feasibility for a cell."""
    workers = costs.workers
    variant = np.array([w.model == cell.variant for w in workers], bool)
    pool = np.array([w.pool == cell.pool for w in workers], bool)
    ready = np.array([w.state is WorkerState.READY for w in workers], bool)
    return CellRows(variant_ok=variant, cell_ok=variant & pool, ready=ready)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feasibility:
    """Who may take a request.

    Attributes:
        mask: bool [W], all rules hold.
        rules: (name, bool [W] holds), in the order they are told.
        kv_blocks: int64 [W], blocks the request would hold.
    """

    mask: np.ndarray
    rules: tuple[tuple[str, np.ndarray], ...]
    kv_blocks: np.ndarray

    def why_not(self, row: int) -> str:
        """First rule a row breaks, "" when it is feasible."""
        return next((name for name, holds in self.rules if not holds[row]), "")


def feasibility(
    request: Request,
    phase: Phase,
    view: FleetView,
    costs: WorkerCosts,
    cell: CellRows,
    rules: FitRules,
    target: SloTarget,
    *,
    transfer_s: np.ndarray | None = None,
    source: WorkerInfo | None = None,
    exclude: frozenset[str] = frozenset(),
) -> Feasibility:
    """Applies every rule to every worker of a view.

    Args:
        request: what is placed.
        phase: which half of it.
        view: the snapshot, W rows.
        costs: the same rows' coefficients and limits.
        cell: the same rows against the chosen cell.
        rules: margins.
        target: the request's class.
        transfer_s: float64 [W], hand-over seconds, None when nothing moves.
        source: the prefill worker whose KV moves, None when unknown.
        exclude: worker ids that lost this request before.
    """
    prompt = request.num_prompt_tokens
    output = request.length.p95_tokens if phase is Phase.DECODE else 1.0
    need = -(-int(prompt + output) // costs.block_size_tokens)
    idle = view.num_inflight == 0
    reserve = rules.kv_headroom * costs.num_kv_blocks
    reserve *= ~idle
    told = [
        ("model", cell.variant_ok),
        ("pool", cell.cell_ok),
        ("cost_unknown", costs.known),
        ("state", cell.ready),
        ("stale", view.accepts | ~cell.ready),
        ("context", costs.max_context_tokens >= prompt + request.max_tokens),
        ("kv_blocks", view.kv_blocks_free - need >= reserve),
    ]
    if phase is Phase.DECODE:
        told.append(("slots", view.num_inflight < costs.max_num_seqs))
        if source is not None:
            told.extend(_hand_over_rules(source, costs))
    if exclude:
        excluded = [w.worker_id not in exclude for w in view.workers]
        told.append(("excluded", np.array(excluded, bool)))
    mask = told[0][1]
    for _, holds in told[1:]:
        mask = mask & holds
    limit_s = rules.max_transfer_share * target.ttft_p99_s
    if transfer_s is not None and limit_s < np.inf:
        near = transfer_s <= limit_s
        both = mask & near
        if both.any():
            mask = both
            told.append(("transfer", near))
    return Feasibility(mask=mask, rules=tuple(told), kv_blocks=need)


def raise_infeasible(
    request: Request, phase: Phase, cell: TableCell, found: Feasibility, costs: WorkerCosts
) -> None:
    """Says why nobody can take a request.

    Raises:
        InvalidRequest: it could not even on an empty fleet.
        Rejected: nobody is alive, or nobody has room now.
    """
    rules = dict(found.rules)
    alive = np.ones(len(found.mask), bool)
    for name in LIVENESS:
        alive &= rules[name]
    where = f"{phase.value} workers of pool {cell.pool!r} serving {cell.variant!r}"
    if not alive.any():
        in_cell = int(rules["pool"].sum())
        raise Rejected(RejectReason.NO_LIVE_WORKER, f"none of {in_cell} {where} is ready and fresh")
    blocks_fit = found.kv_blocks <= costs.num_kv_blocks
    if not (alive & rules["context"]).any():
        longest = int(costs.max_context_tokens[alive].max())
        raise InvalidRequest(
            "max_tokens",
            request.max_tokens,
            f"prompt ({request.num_prompt_tokens}) plus max_tokens must be <= {longest}",
        )
    if not (alive & rules["context"] & blocks_fit).any():
        raise InvalidRequest(
            "token_ids",
            f"{request.num_prompt_tokens} tokens",
            f"needs {int(found.kv_blocks[alive].min())} KV blocks, no worker has so many "
            f"({int(costs.num_kv_blocks[alive].max())})",
        )
    counted: dict[str, int] = {}
    for row in alive.nonzero()[0].tolist():
        name = found.why_not(row)
        counted[name] = counted.get(name, 0) + 1
    detail = ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))
    raise Rejected(RejectReason.NO_CAPACITY, f"{int(alive.sum())} live {where}: {detail}")


def _hand_over_rules(
    source: WorkerInfo, costs: WorkerCosts
) -> tuple[tuple[str, np.ndarray], tuple[str, np.ndarray]]:
    """KV moves only between equal pages, and on TPU between equal tensor parallelism."""
    mine = source.capabilities
    pages = costs.page_size_tokens == mine.page_size_tokens
    parallel = ~costs.equal_tp | (costs.tensor_parallel == mine.tensor_parallel)
    return ("page_size", pages), ("tensor_parallel", parallel)
