"""Which workers could take a request at all, and which rule each of the others breaks.

The mask is worked out at once; the rules behind it are told apart only when somebody asks
(`why_not`), from the same values. The class's latency targets are not among them: they are
weighed with the prices (`objective.breaks_target`), since they give way when nobody can keep
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from serving.core.costs import WorkerCosts
from serving.core.errors import InvalidRequest, Rejected, RejectReason
from serving.core.native import Kernel
from serving.core.request import Request, SloTarget
from serving.core.routing_table import TableCell
from serving.core.worker import FleetView, Phase, WorkerInfo, WorkerState


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
    """Rows of a view against the cells of a choice; they hold until the fleet changes.

    Attributes:
        model: bool [W], a model variant of the cells.
        pool: bool [W], a pool of the cells.
        ready: bool [W], READY.
        usable: bool [W], all of them and a known cost.
        kv_reserve: float64 [W], KV blocks kept free on a busy worker.
        no_transfer_s: float64 [W] of 0, where nothing moves; read-only.
        no_cached_tokens: int32 [W] of 0, where nothing is cached; read-only.
    """

    model: np.ndarray
    pool: np.ndarray
    ready: np.ndarray
    usable: np.ndarray
    kv_reserve: np.ndarray
    no_transfer_s: np.ndarray
    no_cached_tokens: np.ndarray


def cell_rows(cells: tuple[TableCell, ...], costs: WorkerCosts, rules: FitRules) -> CellRows:
    """The part of feasibility that follows from what workers are."""
    workers = costs.workers
    keys = {cell.key for cell in cells}
    variants, pools = {variant for variant, _ in keys}, {pool for _, pool in keys}
    model = np.array([w.model in variants for w in workers], bool)
    pool = np.array([(w.model, w.pool) in keys for w in workers], bool)
    if len(keys) == 1:
        pool = np.array([w.pool in pools for w in workers], bool)
    ready = np.array([w.state is WorkerState.READY for w in workers], bool)
    return CellRows(
        model=model,
        pool=pool,
        ready=ready,
        usable=model & pool & ready & costs.known,
        kv_reserve=rules.kv_headroom * costs.num_kv_blocks,
        no_transfer_s=_zeros(len(workers), np.float64),
        no_cached_tokens=_zeros(len(workers), np.int32),
    )


def _zeros(num: int, dtype: type[np.generic]) -> np.ndarray:
    zeros = np.zeros(num, dtype)
    zeros.setflags(write=False)
    return zeros


class FitQuestion(NamedTuple):
    """Everything feasibility looks at.

    Attributes:
        request: what is placed.
        phase: which half of it.
        view: the snapshot, W rows.
        costs: the same rows' coefficients and limits.
        cell: the same rows against the cells of the choice.
        rules: margins.
        target: the request's class.
        transfer_s: float64 [W], hand-over seconds; None when nothing moves.
        hand_over_ok: bool [W], KV of the prefill worker can be taken; None when unknown.
        exclude: worker ids that refused this request or lost it before.
    """

    request: Request
    phase: Phase
    view: FleetView
    costs: WorkerCosts
    cell: CellRows
    rules: FitRules
    target: SloTarget
    transfer_s: np.ndarray | None = None
    hand_over_ok: np.ndarray | None = None
    exclude: frozenset[str] = frozenset()

    def kv_blocks(self) -> int | np.ndarray:
        """KV blocks the request would hold on each worker: int64 [W], or one for all.

        Prefill holds the prompt and the first token, decode the p95 length.
        """
        output = self.request.length.p95_tokens if self.phase is Phase.DECODE else 1.0
        num_tokens = math.ceil(self.request.num_prompt_tokens + output)
        return -(-num_tokens // self.costs.block_size)


class Feasibility(NamedTuple):
    """Who may take a request.

    Attributes:
        mask: bool [W], all rules hold.
        kv_blocks: int64 [W], blocks the request would hold; an int where it is one for all.
        question: what was asked.
        transfer_ok: bool [W], the hand-over is not banned; None when the ban does not apply.
    """

    mask: np.ndarray
    kv_blocks: int | np.ndarray
    question: FitQuestion
    transfer_ok: np.ndarray | None

    def blocks_on(self, row: int) -> int:
        """KV blocks the request would hold on one worker."""
        blocks = self.kv_blocks
        return blocks if isinstance(blocks, int) else int(blocks[row])

    def rules(self) -> tuple[tuple[str, np.ndarray], ...]:
        """(rule, bool [W] holds), in the order they are told."""
        asked = self.question
        costs, cell, view = asked.costs, asked.cell, asked.view
        told = [
            ("model", cell.model),
            ("pool", cell.pool),
            ("cost_unknown", costs.known),
            ("state", cell.ready),
            *_slice_rule(view),
            ("stale", view.accepts | ~cell.ready),
            ("context", _context_ok(asked)),
            ("kv_blocks", _kv_ok(asked, self.kv_blocks)),
        ]
        if asked.phase is Phase.DECODE:
            told.append(("slots", view.num_inflight < costs.max_num_seqs))
            if asked.hand_over_ok is not None:
                told.append(("hand_over", asked.hand_over_ok))
        if asked.exclude:
            told.append(("excluded", _not_excluded(asked)))
        if self.transfer_ok is not None:
            told.append(("transfer", self.transfer_ok))
        return tuple(told)

    def why_not(self, rows: Sequence[int]) -> list[str]:
        """For each of `rows` the first rule it breaks, "" when it is feasible."""
        rules = self.rules()
        return [
            "" if self.mask[row] else next(name for name, holds in rules if not holds[row])
            for row in rows
        ]


def hand_over_ok(source: WorkerInfo, costs: WorkerCosts) -> np.ndarray:
    """Who can take KV of a worker like `source`, bool [W].

    It moves only over one connector, between equal pages and, on TPU, between equal tensor
    parallelism.
    """
    mine = source.capabilities
    pages = costs.page_size_tokens == mine.page_size_tokens
    parallel = costs.any_tp | (costs.tensor_parallel == mine.tensor_parallel)
    connector = np.array(
        [w.capabilities.kv_connector == mine.kv_connector for w in costs.workers], bool
    )
    return pages & parallel & connector


def feasibility(asked: FitQuestion) -> Feasibility:
    """Applies every rule to every worker of a view."""
    costs, view, cell = asked.costs, asked.view, asked.cell
    blocks, decodes = asked.kv_blocks(), asked.phase is Phase.DECODE
    takes_kv = asked.hand_over_ok if decodes else None
    one_size = isinstance(blocks, int)
    mask = FITS.run(
        cell.usable,
        view.accepts,
        cell.usable if takes_kv is None else takes_kv,
        view.kv_blocks_free if one_size else view.kv_blocks_free - blocks,
        cell.kv_reserve,
        view.num_inflight,
        costs.max_num_seqs,
        blocks if one_size else 0,
        decodes,
    )
    if asked.request.num_prompt_tokens + asked.request.max_tokens > costs.shortest_context:
        mask &= _context_ok(asked)
    if asked.exclude:
        mask &= _not_excluded(asked)
    transfer_ok = None
    limit_s = asked.rules.max_transfer_share * asked.target.ttft_p99_s
    if asked.transfer_s is not None and asked.transfer_s.max(initial=0.0) > limit_s:
        near = asked.transfer_s <= limit_s
        near_mask = mask & near
        if np.count_nonzero(near_mask):
            mask, transfer_ok = near_mask, near
    return Feasibility(mask=mask, kv_blocks=blocks, question=asked, transfer_ok=transfer_ok)


def _fits_numpy(
    usable: np.ndarray,
    accepts: np.ndarray,
    takes_kv: np.ndarray,
    kv_free: np.ndarray,
    kv_reserve: np.ndarray,
    num: np.ndarray,
    max_num_seqs: np.ndarray,
    blocks: int,
    decodes: bool,
) -> np.ndarray:
    """The rules that every choice looks at, for one number of blocks.

    Args:
        usable: bool [W].
        accepts: bool [W].
        takes_kv: bool [W].
        kv_free: float64 [W], KV blocks.
        kv_reserve: float64 [W], those kept free on busy workers.
        num: float64 [W], requests.
        max_num_seqs: int64 [W], slots.
        blocks: KV blocks the request would hold.
        decodes: whether it takes a slot.

    Returns:
        bool [W].
    """
    mask = usable & accepts
    mask &= takes_kv
    mask &= _kv_fits(kv_free - blocks, kv_reserve, num)
    if decodes:
        mask &= num < max_num_seqs
    return mask


def _fits_loop(
    usable, accepts, takes_kv, kv_free, kv_reserve, num, max_num_seqs, blocks, decodes
):  # fmt: skip
    """`_fits_numpy`, one worker after another."""
    mask = np.empty(usable.shape[0], np.bool_)
    for w in range(mask.shape[0]):
        left = kv_free[w] - blocks
        fits = left >= kv_reserve[w] or (num[w] == 0.0 and left >= 0.0)
        free = not decodes or num[w] < max_num_seqs[w]
        mask[w] = usable[w] and accepts[w] and takes_kv[w] and fits and free
    return mask


FITS = Kernel(
    _fits_numpy,
    _fits_loop,
    "b1[::1](b1[::1],b1[::1],b1[::1],f8[::1],f8[::1],f8[::1],i8[::1],i8,b1)",
)


def raise_infeasible(found: Feasibility, cells: tuple[TableCell, ...]) -> None:
    """Says why nobody can take a request.

    Raises:
        InvalidRequest: it could not even on an empty fleet.
        Rejected: nobody is alive, or nobody has room now.
    """
    asked = found.question
    request, costs = asked.request, asked.costs
    rules = dict(found.rules())
    alive = rules["model"] & rules["pool"] & rules["state"] & rules["stale"]
    alive = alive & rules.get("slice", alive)
    named = " or ".join(f"pool {cell.pool!r} serving {cell.variant!r}" for cell in cells)
    where = f"{asked.phase.value} workers of {named}"
    if not alive.any():
        in_cell = int((rules["model"] & rules["pool"]).sum())
        raise Rejected(RejectReason.NO_LIVE_WORKER, f"none of {in_cell} {where} is ready and fresh")
    long_enough = alive & rules["context"]
    if not long_enough.any():
        raise InvalidRequest(
            "max_tokens",
            request.max_tokens,
            f"prompt ({request.num_prompt_tokens}) plus max_tokens must be <= "
            f"{int(costs.max_context_tokens[alive].max())}",
        )
    if not (long_enough & (found.kv_blocks <= costs.num_kv_blocks)).any():
        raise InvalidRequest(
            "token_ids",
            f"{request.num_prompt_tokens} tokens",
            f"needs {found.blocks_on(int(alive.argmax()))} KV blocks, no worker has more than "
            f"{int(costs.num_kv_blocks[alive].max())}",
        )
    reasons = found.why_not(alive.nonzero()[0].tolist())
    detail = ", ".join(f"{reasons.count(why)} {why}" for why in sorted(set(reasons)))
    raise Rejected(RejectReason.NO_CAPACITY, f"{len(reasons)} live {where}: {detail}")


def _slice_rule(view: FleetView) -> tuple[tuple[str, np.ndarray], ...]:
    return () if view.slice_whole is None else (("slice", view.slice_whole),)


def _context_ok(asked: FitQuestion) -> np.ndarray:
    longest = asked.request.num_prompt_tokens + asked.request.max_tokens
    return asked.costs.max_context_tokens >= longest


def _kv_ok(asked: FitQuestion, blocks: int | np.ndarray) -> np.ndarray:
    view = asked.view
    return _kv_fits(view.kv_blocks_free - blocks, asked.cell.kv_reserve, view.num_inflight)


def _kv_fits(left: np.ndarray, reserve: np.ndarray, num: np.ndarray) -> np.ndarray:
    """Whose KV blocks left over with the request suffice, bool [W]."""
    fits = left >= reserve
    if np.count_nonzero(fits) < len(fits):
        # The reserve is for requests that outgrow their estimate: an idle worker has none.
        fits |= (num == 0) & (left >= 0)
    return fits


def _not_excluded(asked: FitQuestion) -> np.ndarray:
    return np.array([w not in asked.exclude for w in asked.costs.worker_ids], bool)
