"""Time and price of work per worker: the coefficients of the objective, as rows.

Coefficients are data per (model variant, hardware): calibration fits them, config carries
them (`CellCost`). `CostBook.rows` lays them out for the workers of a view, so the objective is
array arithmetic. Only what a worker IS enters here; how it stands is the view's business.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serving.core.worker import WorkerInfo


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

    def __post_init__(self) -> None:
        _require_finite("usd_per_chip_hour", self.usd_per_chip_hour, "finite and >= 0")
        _require_finite("kv_bytes_per_token", self.kv_bytes_per_token, "finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerCosts:
    """Coefficients and limits of W workers, one row each; all arrays read-only.

    Attributes:
        workers: the tuple the rows belong to.
        worker_ids: their ids.
        row_of: worker id -> row.
        known: bool [W], a `CellCost` exists; the other columns are 0 where not.
        rate_usd_per_s: float64 [W], chips times price per chip-second.
        prefill_chunk_s, prefill_token_s: float64 [W].
        step_base_s: float64 [W], base + L * c0.
        expert_s: float64 [W], c2 (per distinct expert over all layers).
        request_s: float64 [W], L * c3 (per request in the step).
        attention_s: float64 [W], per context token.
        total_experts: float64 [W], L * E.
        miss: float64 [W], 1 - k / E.
        kv_bytes_per_token: float64 [W].
        bucket_groups: pairs of rows int64 [G] and what n tokens run as, `BucketTable`.
        max_num_seqs, max_context_tokens, block_size_tokens, num_kv_blocks, page_size_tokens,
            tensor_parallel: int64 [W], from `Capabilities`.
        any_tp: bool [W], hand-over does not need equal tensor parallelism.
        shortest_context: least of `max_context_tokens`.
        block_size: the block size all share, or `block_size_tokens` when they differ.
        versions: distinct `CellCost.version`s.
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
    bucket_groups: tuple[tuple[np.ndarray, BucketTable], ...]
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

    def take(self, rows: np.ndarray) -> WorkerCosts:
        """The rows int64 [R], in that order."""
        return _rows(
            tuple(self.workers[row] for row in rows.tolist()),
            self.known.take(rows),
            {name: getattr(self, name).take(rows) for name in _COLUMNS},
            self.versions,
        )

    def padded(
        self, tokens: np.ndarray, rows: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a prefill of `tokens` runs as: full chunks of the largest bucket, then the rest.

        Args:
            tokens: integer [W], >= 0; or [R] when `rows` says whose they are.
            rows: int64 [R], or None for all.

        Returns:
            int64 tokens including padding and int64 chunks, shaped like `tokens`.
        """
        if len(self.bucket_groups) == 1:
            return self.bucket_groups[0][1].padded(tokens)
        if rows is not None:
            everybody = np.zeros(len(self.workers), tokens.dtype)
            everybody[rows] = tokens
            padded, chunks = self.padded(everybody)
            return padded[rows], chunks[rows]
        padded, chunks = np.empty(tokens.shape, np.int64), np.empty(tokens.shape, np.int64)
        for rows, table in self.bucket_groups:
            padded[rows], chunks[rows] = table.padded(tokens[rows])
        return padded, chunks


class BucketTable:
    """What n tokens run as under one set of compiled buckets.

    Attributes:
        buckets: ascending; () for no padding.
    """

    def __init__(self, buckets: tuple[int, ...]) -> None:
        self.buckets = buckets
        self._sizes = np.array(buckets, np.int64)
        # A look-up per worker instead of a division and a search.
        self._padded, self._chunks = self._compute(np.arange(_MAX_TABLED_TOKENS))

    def padded(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with padding, and chunks: int64 [n] each for int64 [n] >= 0 tokens."""
        try:
            return self._padded.take(tokens), self._chunks.take(tokens)
        except IndexError:
            return self._compute(tokens)

    def _compute(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.buckets:
            return tokens.copy(), (tokens > 0).astype(np.int64)
        largest = self.buckets[-1]
        full = tokens // largest
        rest = tokens - full * largest
        tail = np.where(rest > 0, self._sizes[self._sizes.searchsorted(rest)], 0)
        return full * largest + tail, full + (rest > 0)


class CostBook:
    """Cell costs by (model variant, hardware)."""

    def __init__(self, cells: Mapping[tuple[str, str], CellCost]) -> None:
        self._cells = dict(cells)

    def get(self, model: str, hardware: str) -> CellCost | None:
        """The cell's cost, None when nobody calibrated it."""
        return self._cells.get((model, hardware))

    def rows(self, workers: tuple[WorkerInfo, ...]) -> WorkerCosts:
        """Coefficients of some workers; a worker of an unknown cell is marked, not fatal."""
        cells = [self._cells.get((w.model, w.hardware)) for w in workers]
        columns = {name: np.zeros(len(workers)) for name in _COLUMNS}
        for row, (worker, cell) in enumerate(zip(workers, cells, strict=True)):
            if cell is not None:
                for name, value in _cell_columns(worker, cell).items():
                    columns[name][row] = value
        known = np.array([cell is not None for cell in cells], bool)
        versions = tuple(sorted({cell.version for cell in cells if cell is not None}))
        return _rows(workers, known, columns, versions)


_MAX_TABLED_TOKENS = 1 << 15

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
    versions: tuple[str, ...],
) -> WorkerCosts:
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, worker in enumerate(workers):
        groups.setdefault(worker.capabilities.buckets_tokens, []).append(row)

    def limit(name: str) -> np.ndarray:
        return np.array([getattr(w.capabilities, name) for w in workers], np.int64)

    floats = {name: column for name, column in columns.items() if name != "any_tp"}
    contexts, block_sizes = limit("max_context_tokens"), limit("block_size_tokens")
    shared = len(set(block_sizes.tolist())) == 1
    return WorkerCosts(
        workers=workers,
        worker_ids=tuple(worker.worker_id for worker in workers),
        row_of={worker.worker_id: row for row, worker in enumerate(workers)},
        known=known,
        bucket_groups=tuple(
            (np.array(rows, np.int64), _bucket_table(buckets)) for buckets, rows in groups.items()
        ),
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
        **floats,
    )


@functools.lru_cache(maxsize=256)
def _bucket_table(buckets: tuple[int, ...]) -> BucketTable:
    return BucketTable(buckets)


def _require_finite(name: str, value: float, rule: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r} must be {rule}")
