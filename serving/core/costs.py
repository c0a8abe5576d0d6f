"""Time and price of work per worker: the coefficients of the objective, as rows.

Coefficients are data per (model variant, hardware): calibration fits them, config carries
them (`CellCost`). `CostBook.rows` lays them out for the workers of a view, so the objective is
array arithmetic. Only what a worker IS enters here; how it stands is the view's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.core.padding import BucketGroup, BucketTable, PrefillCharge, bucket_table, charge
from serving.core.request import SloClass
from serving.core.worker import Padding, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Decode step time of one replica, seconds (DESIGN "Placement").

        t(S) = f * [base + sum over MoE layers (c0 + c2 * A_l + c3 * n) + attention * kv]

    with A_l distinct experts at layer l, n requests in the step, kv context tokens, and
    t(empty) = 0 by definition: an idle worker runs no step.

    Attributes:
        base_s: per step.
        c0_s: per step and MoE layer.
        c2_s: per distinct expert (and layer).
        c3_s: per request (and layer).
        attention_s: per context token in the step, over all layers.
        num_moe_layers, num_experts, top_k: the model's geometry.
    """

    base_s: float
    c0_s: float
    c2_s: float
    c3_s: float
    attention_s: float
    num_moe_layers: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("base_s", "c0_s", "c2_s", "c3_s", "attention_s"):
            _require_finite(name, getattr(self, name), "finite and >= 0")
        if self.num_moe_layers < 0 or self.num_experts < 1:
            raise ValueError(f"{self.num_moe_layers=} must be >= 0 and {self.num_experts=} >= 1")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k=} must lie in [1, {self.num_experts=}]")

    def mean_experts(self, num_requests: float) -> float:
        """Distinct experts of a step over all layers when requests choose independently.

        L * E * (1 - (1 - k / E)^n): what is expected without any signature.
        """
        miss = 1.0 - self.top_k / self.num_experts
        return self.num_moe_layers * self.num_experts * (1.0 - miss**num_requests)

    def step_s(
        self,
        *,
        num_requests: float,
        distinct_experts: float,
        kv_tokens: float,
        speed_factor: float = 1.0,
    ) -> float:
        """t(S), seconds.

        Args:
            num_requests: n; 0 gives 0.0.
            distinct_experts: summed over MoE layers.
            kv_tokens: context tokens of all requests.
            speed_factor: f, measured over modelled.
        """
        if num_requests == 0:
            return 0.0
        layers = self.num_moe_layers * (self.c0_s + self.c3_s * num_requests)
        modelled = self.base_s + layers + self.c2_s * distinct_experts
        return speed_factor * (modelled + self.attention_s * kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimeModel:
    """Prefill time of one replica: seconds per chunk plus seconds per token it runs.

    Attributes:
        chunk_s: per forward pass.
        token_s: per token, padding included; 1 / token_s is the live prefill tok/s.
    """

    chunk_s: float
    token_s: float

    def __post_init__(self) -> None:
        _require_finite("chunk_s", self.chunk_s, "finite and >= 0")
        _require_finite("token_s", self.token_s, "finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCost:
    """What one (model variant, hardware) cell costs.

    Attributes:
        usd_per_chip_hour: price of one chip.
        class_usd_per_chip_hour: opportunity rate of classes that pay another one: owned,
            depreciated chips are cheap for those who need nothing better.
        prefill, step: time models.
        kv_bytes_per_token: bytes of KV a hand-over moves per prompt token.
        needs_equal_tensor_parallel: prefill and decode must span equally many chips (TPU).
        version: where the coefficients come from, for the record.
    """

    usd_per_chip_hour: float
    prefill: PrefillTimeModel
    step: StepTimeModel
    kv_bytes_per_token: float = 0.0
    needs_equal_tensor_parallel: bool = False
    version: str = "unversioned"
    class_usd_per_chip_hour: Mapping[SloClass, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_finite("usd_per_chip_hour", self.usd_per_chip_hour, "finite and >= 0")
        _require_finite("kv_bytes_per_token", self.kv_bytes_per_token, "finite and >= 0")
        for slo, usd in self.class_usd_per_chip_hour.items():
            _require_finite(f"class_usd_per_chip_hour[{slo.value}]", usd, "finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerCosts:
    """Coefficients and limits of W workers, one row each; all arrays read-only.

    Attributes:
        workers: the tuple the rows belong to.
        worker_ids: their ids.
        row_of: worker id -> row.
        known: bool [W], a `CellCost` exists; the other columns are 0 where not.
        rate_usd_per_s: float64 [W], chips times price per chip-second.
        class_rate_usd_per_s: the same for classes with an opportunity rate somewhere.
        prefill_chunk_s, prefill_token_s: float64 [W].
        step_base_s: float64 [W], base + L * c0.
        expert_s: float64 [W], c2 (per distinct expert over all layers).
        request_s: float64 [W], L * c3 (per request in the step).
        attention_s: float64 [W], per context token.
        total_experts: float64 [W], L * E.
        miss: float64 [W], 1 - k / E.
        kv_bytes_per_token: float64 [W].
        bucket_groups: triples of rows int64 [G], what n tokens run as (`BucketTable`), and
            whether a step is padded as a whole.
        tables: what n tokens run as on each worker.
        pool_rows: rows int64 of each (model, pool).
        compiled: bool [W], has compiled buckets: a TPU cell, whose step times are tight.
        max_num_seqs, max_context_tokens, block_size_tokens, num_kv_blocks, page_size_tokens,
            tensor_parallel: int64 [W], from `Capabilities`.
        any_tp: bool [W], hand-over does not need equal tensor parallelism.
        shortest_context: least of `max_context_tokens`.
        block_size: the block size all share, or `block_size_tokens` when they differ.
        versions: distinct `CellCost.version`s.
        columns: float64 [10, W], the float columns together, rows named below.
    """

    workers: tuple[WorkerInfo, ...]
    worker_ids: tuple[str, ...]
    row_of: Mapping[str, int]
    known: np.ndarray
    rate_usd_per_s: np.ndarray
    prefill_chunk_s: np.ndarray
    prefill_token_s: np.ndarray
    step_base_s: np.ndarray
    expert_s: np.ndarray
    request_s: np.ndarray
    attention_s: np.ndarray
    total_experts: np.ndarray
    miss: np.ndarray
    kv_bytes_per_token: np.ndarray
    class_rate_usd_per_s: Mapping[SloClass, np.ndarray]
    bucket_groups: tuple[BucketGroup, ...]
    tables: tuple[BucketTable, ...]
    pool_rows: tuple[np.ndarray, ...]
    compiled: np.ndarray
    max_num_seqs: np.ndarray
    max_context_tokens: np.ndarray
    block_size_tokens: np.ndarray
    num_kv_blocks: np.ndarray
    page_size_tokens: np.ndarray
    tensor_parallel: np.ndarray
    any_tp: np.ndarray
    shortest_context: int
    block_size: int | np.ndarray
    versions: tuple[str, ...]
    columns: np.ndarray

    def take(self, rows: np.ndarray) -> WorkerCosts:
        """The rows int64 [R], in that order."""
        return _rows(
            tuple(self.workers[row] for row in rows.tolist()),
            self.known.take(rows),
            {name: getattr(self, name).take(rows) for name in _COLUMNS},
            {slo: rate.take(rows) for slo, rate in self.class_rate_usd_per_s.items()},
            self.versions,
        )

    def rate_for(self, slo: SloClass) -> np.ndarray:
        """What a class pays for each worker, float64 [W] in $/s."""
        return self.class_rate_usd_per_s.get(slo, self.rate_usd_per_s)

    def charge(
        self, tokens: np.ndarray, queued: np.ndarray, started: np.ndarray | None
    ) -> PrefillCharge:
        """What a prompt adds to each worker's prefill steps, given what is queued there.

        Where steps are padded, the request pays for the bucket it pushes the waiting tokens
        into, and slack that is there anyway is free. The step under way cannot be joined.

        Args:
            tokens: int64 [W], uncached prompt tokens, >= 1.
            queued: float64 [W], whole prompt tokens reserved and not done.
            started: float64 [W], of these those a step took up already; None for none.
        """
        if len(self.bucket_groups) == 1:
            return charge(self.bucket_groups[0], tokens, queued, started)
        out = PrefillCharge(*(np.empty(tokens.shape) for _ in range(4)))
        for group in self.bucket_groups:
            rows = group[0]
            part = charge(
                group,
                tokens.take(rows),
                queued.take(rows),
                None if started is None else started.take(rows),
            )
            for whole, some in zip(out, part, strict=True):
                whole[rows] = some
        return out

    def padded(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a prefill of `tokens` runs as: full chunks of the largest bucket, then the rest.

        Args:
            tokens: integer [W], >= 0.

        Returns:
            int64 [W] tokens including padding, and int64 [W] chunks.
        """
        if len(self.bucket_groups) == 1:
            return self.bucket_groups[0][1].padded(tokens)
        padded, chunks = np.empty(tokens.shape, np.int64), np.empty(tokens.shape, np.int64)
        for rows, table, _ in self.bucket_groups:
            padded[rows], chunks[rows] = table.padded(tokens[rows])
        return padded, chunks

    def padded_on(self, row: int, tokens: int) -> tuple[int, int]:
        """`padded` of one worker: tokens including padding, and chunks."""
        return self.tables[row].padded_one(tokens)


class CostBook:
    """Cell costs by (model variant, hardware), or by these and the chips of a worker."""

    def __init__(self, cells: Mapping[CostKey, CellCost]) -> None:
        self._cells: dict[CostKey, CellCost] = dict(cells)

    def get(self, worker: WorkerInfo) -> CellCost | None:
        """The cost of a worker's cell, None when nobody calibrated it."""
        found = self._cells.get((worker.model, worker.hardware, worker.num_chips))
        return self._cells.get((worker.model, worker.hardware)) if found is None else found

    def rows(self, workers: tuple[WorkerInfo, ...]) -> WorkerCosts:
        """Coefficients of some workers; a worker of an unknown cell is marked, not fatal."""
        cells = [self.get(worker) for worker in workers]
        columns = {name: np.zeros(len(workers)) for name in _COLUMNS}
        for row, (worker, cell) in enumerate(zip(workers, cells, strict=True)):
            if cell is not None:
                for name, value in _cell_columns(worker, cell).items():
                    columns[name][row] = value
        known = np.array([cell is not None for cell in cells], bool)
        versions = tuple(sorted({cell.version for cell in cells if cell is not None}))
        rates: dict[SloClass, np.ndarray] = {}
        for row, (worker, cell) in enumerate(zip(workers, cells, strict=True)):
            for slo, usd in () if cell is None else cell.class_usd_per_chip_hour.items():
                of_class = rates.setdefault(slo, columns["rate_usd_per_s"].copy())
                of_class[row] = worker.num_chips * usd / 3600.0
        return _rows(workers, known, columns, rates, versions)


CostKey = tuple[str, str] | tuple[str, str, int]


_COLUMNS = (
    "rate_usd_per_s",
    "prefill_chunk_s",
    "prefill_token_s",
    "step_base_s",
    "expert_s",
    "request_s",
    "attention_s",
    "total_experts",
    "miss",
    "kv_bytes_per_token",
    "any_tp",
)
STEP_BASE_S, EXPERT_S, REQUEST_S, ATTENTION_S, MISS = (
    _COLUMNS.index(name) for name in ("step_base_s", "expert_s", "request_s", "attention_s", "miss")
)
"""Rows of `WorkerCosts.columns`."""


def _cell_columns(worker: WorkerInfo, cell: CellCost) -> dict[str, float]:
    step = cell.step
    return {
        "rate_usd_per_s": worker.num_chips * cell.usd_per_chip_hour / 3600.0,
        "prefill_chunk_s": cell.prefill.chunk_s,
        "prefill_token_s": cell.prefill.token_s,
        "step_base_s": step.base_s + step.num_moe_layers * step.c0_s,
        "expert_s": step.c2_s,
        "request_s": step.num_moe_layers * step.c3_s,
        "attention_s": step.attention_s,
        "total_experts": float(step.num_moe_layers * step.num_experts),
        "miss": 1.0 - step.top_k / step.num_experts,
        "kv_bytes_per_token": cell.kv_bytes_per_token,
        "any_tp": float(not cell.needs_equal_tensor_parallel),
    }


def _rows(
    workers: tuple[WorkerInfo, ...],
    known: np.ndarray,
    columns: Mapping[str, np.ndarray],
    rates: Mapping[SloClass, np.ndarray],
    versions: tuple[str, ...],
) -> WorkerCosts:
    groups: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    pools: dict[tuple[str, str], list[int]] = {}
    for row, worker in enumerate(workers):
        pools.setdefault((worker.model, worker.pool), []).append(row)
        limits = worker.capabilities
        key = limits.buckets_tokens, limits.pads is Padding.STEP
        groups.setdefault(key, []).append(row)

    def limit(name: str) -> np.ndarray:
        return np.array([getattr(w.capabilities, name) for w in workers], np.int64)

    names = _COLUMNS[:-1]
    matrix = np.array([columns[name] for name in names], np.float64)
    floats = dict(zip(names, matrix, strict=True))
    contexts, block_sizes = limit("max_context_tokens"), limit("block_size_tokens")
    shared = len(set(block_sizes.tolist())) == 1
    return WorkerCosts(
        workers=workers,
        worker_ids=tuple(worker.worker_id for worker in workers),
        row_of={worker.worker_id: row for row, worker in enumerate(workers)},
        known=known,
        bucket_groups=tuple(
            (np.array(rows, np.int64), bucket_table(buckets), is_step)
            for (buckets, is_step), rows in groups.items()
        ),
        tables=tuple(bucket_table(w.capabilities.buckets_tokens) for w in workers),
        class_rate_usd_per_s=dict(rates),
        pool_rows=tuple(np.array(rows, np.int64) for rows in pools.values()),
        compiled=np.array([bool(w.capabilities.buckets_tokens) for w in workers], bool),
        max_num_seqs=limit("max_num_seqs"),
        max_context_tokens=contexts,
        shortest_context=int(contexts.min(initial=np.iinfo(np.int64).max)),
        block_size_tokens=block_sizes,
        block_size=int(block_sizes[0]) if shared else block_sizes,
        num_kv_blocks=limit("num_kv_blocks"),
        page_size_tokens=limit("page_size_tokens"),
        tensor_parallel=limit("tensor_parallel"),
        any_tp=columns["any_tp"] > 0,
        versions=versions,
        columns=matrix,
        **floats,
    )


def _require_finite(name: str, value: float, rule: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r} must be {rule}")
