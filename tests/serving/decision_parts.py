"""Small fleets, requests and contexts for the tests of the decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from serving import native_kernels
from serving.core.clock import ManualClock
from serving.core.costs import CellCost, CostBook, PrefillTimeModel, StepTimeModel
from serving.core.decision import LogLine
from serving.core.experts import ExpertProfiles
from serving.core.placement import PlacementContext
from serving.core.request import LengthBand, Request, SloTarget
from serving.core.router import Router
from serving.core.router_config import RouterConfig
from serving.core.signature import Signature, SignatureSource
from serving.core.worker import (
    Capabilities,
    ExpertRows,
    FleetView,
    Members,
    Phase,
    Role,
    WorkerInfo,
)
from serving.fleet.fleet import Fleet
from serving.fleet.survival import SurvivalRows
from serving.policies.registry import make_policy
from serving.signatures.regions import FittedRegions, bind


@pytest.fixture(scope="module", autouse=True, params=["numpy", "compiled"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a folder's tests over NumPy and over the compiled loops (serving/native_kernels.py)."""
    if request.param == "compiled" and not native_kernels.load():
        pytest.skip("numba is not installed: only the NumPy definitions run")
    yield
    native_kernels.unload()


LAYERS, MASKED, EXPERTS, TOP_K = 4, 2, 8, 2
SIZE = MASKED * EXPERTS
TARGET = SloTarget(ttft_p99_s=10.0, tpot_p99_s=1.0, deadline_s=float("inf"), lambda_usd_per_s=2e-3)
STEP = StepTimeModel(
    base_s=2e-3,
    c0_s=5e-4,
    c2_s=1e-4,
    c3_s=2e-5,
    attention_s=1e-7,
    num_moe_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
)
CELL = CellCost(
    usd_per_chip_hour=3.6,
    prefill=PrefillTimeModel(chunk_s=1e-3, token_s=1e-4),
    step=STEP,
    kv_bytes_per_token=1e4,
    version="cell-1",
)
BOOK = CostBook({("m", "h"): CELL})


def capabilities(**changes: Any) -> Capabilities:
    given = {
        "block_size_tokens": 16,
        "page_size_tokens": 16,
        "max_num_seqs": 8,
        "max_context_tokens": 4096,
        "num_kv_blocks": 1000,
        "buckets_tokens": (64, 256),
    }
    return Capabilities(**(given | changes))


def worker(worker_id: str, role: Role = Role.DECODE, **changes: Any) -> WorkerInfo:
    limits = changes.pop("capabilities", None) or capabilities()
    given = {"address": f"{worker_id}:1", "pool": "p", "model": "m", "hardware": "h"}
    return WorkerInfo(worker_id=worker_id, role=role, capabilities=limits, **(given | changes))


def request(request_id: str = "r", num_tokens: int = 100, **changes: Any) -> Request:
    given = {
        "token_ids": np.arange(1, num_tokens + 1, dtype=np.int32),
        "max_tokens": 40,
        "arrival_s": 0.0,
        "length": LengthBand(mean_tokens=20.0, p95_tokens=40.0, source="test"),
    }
    return Request(request_id=request_id, **(given | changes))


def signature(counts: np.ndarray | None = None, *, seed: int = 0, **changes: Any) -> Signature:
    if counts is None:
        draw = np.random.default_rng(seed)
        counts = draw.multinomial(100 * TOP_K, draw.dirichlet(np.ones(EXPERTS)), size=MASKED)
    flat = counts.reshape(-1).astype(np.float32)
    norm = float(np.linalg.norm(flat))
    given = {
        "counts": counts.astype(np.uint32),
        "num_tokens": 100,
        "vector": flat / norm if norm else flat,
        "source": SignatureSource.LIVE,
        "version": "sig-1",
    }
    return Signature(**(given | changes))


def profiles(num_clusters: int = 3, seed: int = 0) -> ExpertProfiles:
    draw = np.random.default_rng(seed)
    centroids = draw.random((num_clusters, SIZE)).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    share = draw.dirichlet(np.ones(EXPERTS), (num_clusters, MASKED)).reshape(num_clusters, SIZE)
    rows = np.minimum(TOP_K * share, 0.9).astype(np.float32)
    return ExpertProfiles(
        version="profiles-1",
        signature_version="sig-1",
        num_layers=LAYERS,
        num_masked_layers=MASKED,
        num_experts=EXPERTS,
        top_k=TOP_K,
        mean_profile=rows.mean(axis=0),
        centroids=centroids,
        profiles=rows,
    )


def regions(worker_ids: list[str], seed: int = 1) -> FittedRegions:
    draw = np.random.default_rng(seed)
    rows = draw.random((len(worker_ids), SIZE)).astype(np.float32) ** 3
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return bind(rows, worker_ids, version="regions-1")


def expert_rows(num: int, *, seed: int = 2, prior: bool = True) -> ExpertRows:
    draw = np.random.default_rng(seed)
    survival = draw.random((num, SIZE)).astype(np.float32)
    weaker = survival * draw.random((num, SIZE)).astype(np.float32)
    scale = np.full(num, LAYERS / MASKED)
    return ExpertRows(
        survival=survival,
        survival_sum=survival.sum(axis=1, dtype=np.float64),
        num_modelled=np.full(num, 2.0),
        layer_scale=scale,
        total_experts=scale * SIZE,
        survival_prior=weaker if prior else None,
        survival_prior_sum=weaker.sum(axis=1, dtype=np.float64) if prior else None,
    )


def view(num: int = 4, *, phase: Phase = Phase.DECODE, **columns: Any) -> FleetView:
    role = Role.DECODE if phase is Phase.DECODE else Role.PREFILL
    workers = columns.pop("workers", None) or tuple(worker(f"w{i}", role) for i in range(num))
    given = {
        "taken_at_s": 0.0,
        "age_s": np.zeros(num),
        "accepts": np.ones(num, bool),
        "num_running": np.zeros(num),
        "num_waiting": np.zeros(num),
        "num_inflight": np.zeros(num),
        "queued_prefill_tokens": np.zeros(num),
        "kv_tokens": np.zeros(num),
        "kv_blocks_free": np.full(num, 1000.0),
        "speed_factor": np.ones(num),
        "tpot_limit_s": np.full(num, np.inf),
    }
    for name, value in columns.items():
        array = isinstance(given.get(name), np.ndarray)
        given[name] = np.asarray(value, given[name].dtype) if array else value
    return FleetView(workers=workers, **given).check()


def members(rows: list[int], remaining: list[float], price: float, num: int) -> Members:
    return Members(
        worker_row=np.array(rows, np.int64),
        remaining_tokens=np.array(remaining, np.float64),
        lambda_usd_per_s=np.full(len(rows), price),
        num_of_worker=np.bincount(rows, minlength=num).astype(np.float64),
    )


def context(
    seen: FleetView | None = None, *, phase: Phase = Phase.DECODE, **changes: Any
) -> PlacementContext:
    seen = view(phase=phase) if seen is None else seen
    num = len(seen.workers)
    given = {
        "request": request(),
        "phase": phase,
        "target": TARGET,
        "view": seen,
        "feasible": np.ones(num, bool),
        "cached_tokens": np.zeros(num, np.int32),
        "transfer_s": np.zeros(num),
        "sequence": 0,
        "costs": BOOK.rows(seen.workers),
    }
    return PlacementContext(**(given | changes))


class Rig:
    """A router over a fleet of its own, with a clock that moves when told.

    Attributes:
        lines: what reached the sink.
    """

    def __init__(
        self,
        *,
        num_prefill: int = 2,
        num_decode: int = 3,
        prefill: str = "jsq",
        decode: str = "expert_cost",
        experts: bool = True,
        config: RouterConfig | None = None,
        fleet: Fleet | None = None,
        **router: Any,
    ) -> None:
        self.clock = ManualClock(1000.0, wall_offset_s=1e9)
        survival = SurvivalRows(SIZE, layer_scale=LAYERS / MASKED) if experts else None
        self.fleet = fleet or Fleet(survival=survival)
        for i in range(num_prefill):
            self.fleet.add(worker(f"p{i}", Role.PREFILL), self.clock.now_s)
        for i in range(num_decode):
            self.fleet.add(worker(f"d{i}", Role.DECODE), self.clock.now_s)
        self.lines: list[LogLine] = []
        given = {
            "costs": BOOK,
            "prefill_policy": make_policy(prefill),
            "decode_policy": make_policy(decode),
            "config": config or RouterConfig(record_everyone=0.0),
            "clock": self.clock,
            "sink": self,
            "experts": profiles() if experts else None,
            "regions": regions([f"d{i}" for i in range(num_decode)]),
        }
        self.router = Router(self.fleet, **(given | router))

    def write(self, line: LogLine) -> None:
        self.lines.append(line)

    def serve(self, asked: Request, seed: int = 0, *, end: bool = True):
        """Both stages of a request, and its end when asked."""
        prefill = self.router.place_prefill(asked)
        self.router.prefill_done(asked.request_id)
        decode = self.router.place_decode(
            asked, signature=signature(seed=seed), prefill_worker_id=prefill.worker.worker_id
        )
        if end:
            self.router.first_token(asked.request_id)
            self.router.done(asked.request_id, 20, 0.1, 0.01)
        return prefill, decode

    def reserved(self) -> float:
        """Everything still counted anywhere: 0 when nothing leaks."""
        total = 0.0
        for phase in Phase:
            seen = self.router.view(phase)
            total += float(
                (seen.num_inflight + seen.queued_prefill_tokens + seen.kv_tokens).sum()
                + (1000.0 - seen.kv_blocks_free).sum()
                + seen.remaining_decode_tokens.sum()
            )
            if seen.experts is not None:
                total += float(np.abs(1.0 - seen.experts.survival).sum())
        return total
