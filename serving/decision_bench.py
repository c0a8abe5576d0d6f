"""How long a decision takes, measured on a fleet of values; `bench_main` has the flags.

A prefill decision is hashing the prompt's blocks, the prefix look-up, feasibility, the rule
and the reservation; a decode decision is the signature (counts to unit vector), feasibility,
the rule over the survival rows and the reservation. Records are made in between, off the
clock, as the server does. Steady state: every worker holds the same number of requests.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from serving import native_kernels
from serving.core.clock import ManualClock
from serving.core.costs import CellCost, CostBook, PrefillTimeModel, StepTimeModel
from serving.core.errors import ConfigError
from serving.core.experts import ExpertProfiles
from serving.core.request import LengthBand, Request
from serving.core.router import Router
from serving.core.router_config import RouterConfig
from serving.core.signature import Signature, SignatureSource
from serving.core.worker import Capabilities, Role, WorkerInfo
from serving.fleet.fleet import Fleet
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.survival import SurvivalRows
from serving.policies.registry import make_policy
from serving.signatures.model import SignatureModel, mask_version_of
from serving.signatures.regions import bind

# Qwen3-30B-A3B, the geometry the paper measures (FACTS section 1), 12 of its layers masked.
NUM_LAYERS, NUM_MASKED, NUM_EXPERTS, TOP_K = 48, 12, 128, 8
NUM_CLUSTERS = 32
OUTPUT_TOKENS = 300
WARM_UP = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What to measure; see the flags."""

    workers: tuple[int, ...] = (8, 64, 1024)
    policy: str = "expert_cost"
    prefill_policy: str = "p2c_work"
    num_tokens: int = 2048
    num_decisions: int = 2000
    num_inflight: int = 8
    num_masked: int = NUM_MASKED
    compiled: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.workers or any(num < 1 for num in self.workers):
            raise ConfigError("--workers", self.workers, "must be whole numbers >= 1")
        if not 1 <= self.num_tokens <= 1 << 20:
            raise ConfigError("--tokens", self.num_tokens, "must lie in [1, 1048576]")
        if self.num_decisions < 1:
            raise ConfigError("--decisions", self.num_decisions, "must be >= 1")
        if self.num_masked < 1 or NUM_LAYERS % self.num_masked:
            raise ConfigError("--masked", self.num_masked, f"must divide {NUM_LAYERS}")
        if not 0 <= self.num_inflight <= 128:
            raise ConfigError("--inflight", self.num_inflight, "must lie in [0, 128]")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One measured stage; microseconds of thread CPU time."""

    num_workers: int
    stage: str
    policy: str
    num_tokens: int
    num_decisions: int
    p50_us: float
    p99_us: float
    min_us: float


def run(config: Config, say: Callable[[str], None] = print) -> list[Result]:
    """Measures every fleet size.

    Args:
        config: what to measure.
        say: told one line per result, and per fleet as it starts.
    """
    results = []
    if config.compiled and not native_kernels.load():
        say("numba is not installed: NumPy alone")
    for num_workers in config.workers:
        say(f"{num_workers} + {num_workers} workers, {config.num_tokens} tokens ...")
        for result in _measure(config, num_workers):
            say(
                f"  {result.stage:8s} {result.policy:22s} p50 {result.p50_us:7.1f} us   "
                f"p99 {result.p99_us:7.1f} us   min {result.min_us:7.1f} us"
            )
            results.append(result)
    return results


def _measure(config: Config, num_workers: int) -> list[Result]:
    rng = np.random.default_rng(config.seed)
    bench = DecisionBench(config, num_workers, rng)
    total = WARM_UP + config.num_decisions
    bench.fill(num_workers * config.num_inflight)
    times = {"prefill": [], "decode": [], "both": []}
    # What the server does after start-up: nothing it holds is garbage.
    gc.collect()
    gc.freeze()
    try:
        for number in range(total):
            prefill_ns, decode_ns = bench.decide(bench.request(number + (1 << 30)))
            if number >= WARM_UP:
                times["prefill"].append(prefill_ns)
                times["decode"].append(decode_ns)
                times["both"].append(prefill_ns + decode_ns)
    finally:
        gc.unfreeze()
    policies = {
        "prefill": config.prefill_policy,
        "decode": config.policy,
        "both": f"{config.prefill_policy}+{config.policy}",
    }
    return [
        Result(
            num_workers=num_workers,
            stage=stage,
            policy=policies[stage],
            num_tokens=config.num_tokens,
            num_decisions=config.num_decisions,
            p50_us=float(np.percentile(ns, 50)) / 1e3,
            p99_us=float(np.percentile(ns, 99)) / 1e3,
            min_us=float(np.min(ns)) / 1e3,
        )
        for stage, ns in times.items()
    ]


class DecisionBench:
    """A fleet, a router, and requests to feed them."""

    def __init__(self, config: Config, num_workers: int, rng: np.random.Generator) -> None:
        self._config, self._rng = config, rng
        self._clock = ManualClock(1000.0)
        self._model = _signature_model(rng, config.num_masked)
        size = self._model.size
        fleet = Fleet(
            stale_after_s=float("inf"),
            survival=SurvivalRows(size, layer_scale=NUM_LAYERS / config.num_masked),
        )
        self._index = PrefixIndex()
        decode_ids = [f"decode-{n}" for n in range(num_workers)]
        for worker_id in decode_ids:
            fleet.add(_worker(worker_id, Role.DECODE), self._clock.now_s)
        for number in range(num_workers):
            worker = _worker(f"prefill-{number}", Role.PREFILL)
            fleet.add(worker, self._clock.now_s)
            self._index.add_worker(worker)
        clusters = _profiles(rng, NUM_CLUSTERS, config.num_masked)
        assert clusters.profiles is not None
        of_cluster = rng.integers(0, NUM_CLUSTERS, num_workers)
        fleet.set_profiles(
            {
                worker_id: clusters.profiles[cluster]
                for worker_id, cluster in zip(decode_ids, of_cluster.tolist(), strict=True)
            }
        )
        self._router = Router(
            fleet,
            costs=CostBook({("model", "gpu"): _cell()}),
            prefill_policy=make_policy(config.prefill_policy),
            decode_policy=make_policy(config.policy),
            config=RouterConfig(lease_s=1e9),
            clock=self._clock,
            prefix_index=self._index,
            experts=clusters,
            regions=bind(_unit_rows(rng, num_workers, size), decode_ids, version="bench"),
            cpu_s=time.thread_time,
        )
        self._counts = [_counts(rng, config.num_tokens, config.num_masked) for _ in range(64)]
        self._running: deque[str] = deque()
        self._turn = 0
        self._most = num_workers * config.num_inflight

    def request(self, number: int) -> Request:
        """A prompt whose first half some earlier prompt shares."""
        rng, num_tokens = self._rng, self._config.num_tokens
        token_ids = rng.integers(0, 150_000, num_tokens).astype(np.int32)
        shared = np.random.default_rng(number % 32).integers(0, 150_000, num_tokens // 2)
        token_ids[: num_tokens // 2] = shared
        token_ids.setflags(write=False)
        self._clock.advance(0.002)
        return Request(
            request_id=f"request-{number}",
            token_ids=token_ids,
            max_tokens=2 * OUTPUT_TOKENS,
            arrival_s=self._clock.now_s,
            length=LengthBand(mean_tokens=OUTPUT_TOKENS, p95_tokens=2 * OUTPUT_TOKENS),
        )

    def fill(self, num_requests: int) -> None:
        """Puts requests onto the fleet before anything is measured."""
        for number in range(num_requests):
            self.decide(self.request(number))

    def decide(self, request: Request) -> tuple[int, int]:
        """Both decisions of a request; thread nanoseconds of each."""
        router, now = self._router, time.thread_time_ns
        start = now()
        # What is known of its experts before prefill: as good as the signature itself here.
        counts = self._counts[self._turn % len(self._counts)]
        self._turn += 1
        expected = self._signature(counts) if router.looks_ahead else None
        prefill = router.place_prefill(request, signature=expected)
        prefill_ns = now() - start
        self._index.route(prefill.worker.worker_id, prefill.block_hashes, self._clock.now_s)
        router.prefill_done(request.request_id)
        start = now()
        decode = router.place_decode(
            request,
            signature=self._signature(counts),
            prefill_worker_id=prefill.worker.worker_id,
        )
        decode_ns = now() - start
        router.record(prefill)
        router.record(decode)
        router.first_token(request.request_id)
        self._running.append(request.request_id)
        if len(self._running) > self._most:
            router.done(self._running.popleft(), OUTPUT_TOKENS, 0.1, 0.02)
        return prefill_ns, decode_ns

    def _signature(self, counts: np.ndarray) -> Signature:
        return self._model.signature(counts, self._config.num_tokens, source=SignatureSource.LIVE)


def _worker(worker_id: str, role: Role) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        address=f"{worker_id}:50051",
        role=role,
        pool="pool",
        model="model",
        hardware="gpu",
        capabilities=Capabilities(
            block_size_tokens=16,
            page_size_tokens=16,
            max_num_seqs=256,
            max_context_tokens=1 << 21,
            num_kv_blocks=1 << 20,
            buckets_tokens=tuple(1 << bits for bits in range(4, 14)),
        ),
    )


def _cell() -> CellCost:
    """Qwen3-30B-A3B on one GPU: MoE layer 18.4 + 6.272 A + 0.2 T us (FACTS section 1)."""
    return CellCost(
        usd_per_chip_hour=2.4,
        prefill=PrefillTimeModel(chunk_s=0.005, token_s=6e-5),
        step=StepTimeModel(
            base_s=1e-3,
            c0_s=18.4e-6,
            c2_s=6.272e-6,
            c3_s=0.2e-6,
            attention_s=2e-8,
            num_moe_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
        ),
        kv_bytes_per_token=98_304,
        version="bench",
    )


def _signature_model(rng: np.random.Generator, num_masked: int) -> SignatureModel:
    layers = np.arange(0, NUM_LAYERS, NUM_LAYERS // num_masked, dtype=np.int32)
    return SignatureModel(
        version="bench",
        mask_version=mask_version_of(
            layers, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K
        ),
        layers=layers,
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        idf=rng.random((num_masked, NUM_EXPERTS), np.float32),
    )


def _profiles(rng: np.random.Generator, num: int, num_masked: int) -> ExpertProfiles:
    size = num_masked * NUM_EXPERTS
    shares = rng.dirichlet(np.full(NUM_EXPERTS, 0.3), (num, num_masked)).reshape(num, size)
    rows = np.minimum(TOP_K * shares, 0.99).astype(np.float32)
    return ExpertProfiles(
        version="bench",
        signature_version="bench",
        num_layers=NUM_LAYERS,
        num_masked_layers=num_masked,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        mean_profile=rows.mean(axis=0),
        centroids=_unit_rows(rng, num, size),
        profiles=rows,
    )


def _unit_rows(rng: np.random.Generator, num: int, size: int) -> np.ndarray:
    rows = rng.random((num, size), np.float32) ** 3
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _counts(rng: np.random.Generator, num_tokens: int, num_masked: int) -> np.ndarray:
    shares = rng.dirichlet(np.full(NUM_EXPERTS, 0.3), num_masked)
    return rng.multinomial(num_tokens * TOP_K, shares).astype(np.uint32)
