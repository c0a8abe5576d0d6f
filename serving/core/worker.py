"""What the router knows about its workers when it decides: frozen, aged, in arrays.

`WorkerInfo` is what a worker IS (changes on join, restart, re-config); `FleetView` is how
it STANDS (changes with every request), one row per worker so that scoring all of them is
array arithmetic. A view is taken once per decision and never written afterwards.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Role(enum.Enum):
    """Which phase a worker runs; BOTH is an aggregated (not disaggregated) worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    def serves(self, phase: Phase) -> bool:
        """Whether a worker of this role may run `phase`."""
        return self is Role.BOTH or self.value == phase.value


class Phase(enum.Enum):
    """The two halves of a request's work."""

    PREFILL = "prefill"
    DECODE = "decode"

    # Members key the decision's dictionaries; Enum's own hash is a Python call each time.
    __hash__ = object.__hash__


class WorkerState(enum.Enum):
    """Life of a worker as the router sees it; only READY takes new work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    PARKED = "parked"
    LOST = "lost"


class KvOrder(enum.Enum):
    """When an engine's hand-over protocol fixes the decode worker (FACTS section 5)."""

    AFTER_PREFILL = "after_prefill"
    BEFORE_PREFILL = "before_prefill"


class Padding(enum.Enum):
    """What an engine's compiled buckets pad (FACTS section 4).

    STEP: the tokens of a step, over all requests in it (tpu-inference, sgl-jax, embedded).
    PROMPT: each prompt by itself (JetStream, MaxText).
    """

    STEP = "step"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine was compiled and configured for.

    Attributes:
        block_size_tokens: tokens per KV block, as the prefix cache hashes them.
        page_size_tokens: tokens per KV page moved between workers; P and D must agree.
        buckets_tokens: compiled token buckets, ascending; () for no padding (GPU).
        pads: what the buckets pad.
        max_num_seqs: requests one decode step may hold.
        max_context_tokens: prompt plus output limit of one request.
        num_kv_blocks: KV capacity in blocks.
        tensor_parallel: chips (TPU: devices) one replica spans; P and D must agree on TPU.
        hash_algorithm: name of the block hash the engine publishes ("" for none).
        kv_connector: hand-over protocol name ("" when the worker cannot hand over).
        kv_order: when that protocol fixes the decode worker.
        emits_signature: whether prefill responses carry `eldr_sig`.
    """

    block_size_tokens: int
    page_size_tokens: int
    max_num_seqs: int
    max_context_tokens: int
    num_kv_blocks: int
    buckets_tokens: tuple[int, ...] = ()
    pads: Padding = Padding.STEP
    tensor_parallel: int = 1
    hash_algorithm: str = ""
    kv_connector: str = ""
    kv_order: KvOrder = KvOrder.AFTER_PREFILL
    emits_signature: bool = False

    def __post_init__(self) -> None:
        for name in (
            "block_size_tokens",
            "page_size_tokens",
            "max_num_seqs",
            "max_context_tokens",
            "num_kv_blocks",
            "tensor_parallel",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")
        buckets = self.buckets_tokens
        if any(b < 1 for b in buckets) or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets_tokens={buckets!r} must be positive, ascending, distinct")

    def bucket_for(self, num_tokens: int) -> int:
        """Smallest compiled bucket holding `num_tokens`; `num_tokens` itself when unbucketed.

        Raises:
            ValueError: the tokens exceed the largest bucket.
        """
        if not self.buckets_tokens:
            return num_tokens
        for bucket in self.buckets_tokens:
            if bucket >= num_tokens:
                return bucket
        raise ValueError(f"{num_tokens=} exceeds the largest bucket {self.buckets_tokens[-1]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker is.

    Attributes:
        worker_id: unique in the fleet.
        address: "host:port" of its engine door.
        role, state: see the enums.
        pool: the pool (same variant, hardware and config) it belongs to.
        model: model variant id it serves.
        hardware: id of a configs/hardware/*.yaml file.
        num_chips: chips billed for this worker.
        ici_domain: slice (TPU) or NVLink domain (GPU); equal strings share fast links.
        host: machine name; workers of one process or host share cheaper links still.
        capabilities: see `Capabilities`.
        slice_id: the TPU slice it belongs to: its workers fail, drain and are maintained as one
            unit; "" stands alone.
        epoch: changes when the worker restarts, so that its old KV is never credited.
        labels: discovery labels passed through (topology strings among them).
    """

    worker_id: str
    address: str
    role: Role
    pool: str
    model: str
    hardware: str
    capabilities: Capabilities
    num_chips: int = 1
    ici_domain: str = ""
    host: str = ""
    slice_id: str = ""
    state: WorkerState = WorkerState.READY
    epoch: int = 0
    labels: tuple[tuple[str, str], ...] = ()


class Members(NamedTuple):
    """The decode requests reserved on the workers of a view, one row per request.

    Attributes:
        worker_row: int64 [N], the view's row of each request's worker.
        remaining_tokens: float64 [N], expected output tokens still to come, >= 1.
        lambda_usd_per_s: float64 [N], price of each request's delay.
        num_of_worker: float64 [W], how many of them each worker has.
    """

    worker_row: np.ndarray
    remaining_tokens: np.ndarray
    lambda_usd_per_s: np.ndarray
    num_of_worker: np.ndarray


class ExpertRows(NamedTuple):
    """What the workers of a decode view are expected to touch; the expert term's state.

    These arrays are the fleet's own and change with the next reservation: read them while
    deciding, copy the rows a record needs.

    Attributes:
        survival: float32 [W, M], product over a worker's requests of (1 - q) per masked
            (layer, expert); the term is linear in it (DESIGN "Placement").
        survival_sum: float64 [W], row sums of `survival`.
        num_modelled: float64 [W], requests behind `survival`.
        survival_prior: float32 [W, M] or None; `survival` times (1 - P)^m of the worker's
            region.
        survival_prior_sum: float64 [W] or None, row sums of `survival_prior`.
        layer_scale: float64 [W]; distinct experts over all layers per one over masked ones.
        total_experts: float64 [W]; `layer_scale` times M.
    """

    survival: np.ndarray
    survival_sum: np.ndarray
    num_modelled: np.ndarray
    layer_scale: np.ndarray
    total_experts: np.ndarray
    survival_prior: np.ndarray | None = None
    survival_prior_sum: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> ExpertRows:
        """A copy of some rows, int64 [R], in that order."""
        prior, prior_sum = self.survival_prior, self.survival_prior_sum
        return ExpertRows(
            survival=self.survival.take(rows, axis=0),
            survival_sum=self.survival_sum.take(rows),
            num_modelled=self.num_modelled.take(rows),
            layer_scale=self.layer_scale.take(rows),
            total_experts=self.total_experts.take(rows),
            survival_prior=None if prior is None else prior.take(rows, axis=0),
            survival_prior_sum=None if prior_sum is None else prior_sum.take(rows),
        )


class FleetView(NamedTuple):
    """The candidate workers of one phase at one instant; row i of every array is workers[i].

    Columns are float64, counts included: whole numbers are exact, and arithmetic on them needs
    no conversion.

    Attributes:
        workers: W workers of the phase, in registration order. The tuple object stays the
            same while nobody joins, leaves or changes state, so that what follows from it
            alone can be kept (core/costs.py).
        taken_at_s: monotonic seconds of the snapshot.
        age_s: [W], seconds since each worker's last telemetry; stale is a state.
        accepts: bool [W], READY and not stale beyond the limit.
        num_running: [W], requests running as last reported.
        num_waiting: [W], requests queued as last reported.
        num_inflight: [W], this router's own open reservations plus what other routers
            reported; the load count baselines use.
        queued_prefill_tokens: [W], uncached prompt tokens reserved but not done.
        kv_tokens: [W], context tokens of this router's reservations, averaged over their life.
        kv_blocks_free: [W], KV blocks neither used nor reserved.
        speed_factor: [W], measured step time over the model's (1.0 = as modelled).
        tpot_limit_s: [W], strictest time per output token among a worker's own reservations,
            seconds; inf when there is none.
        started_prefill_tokens: [W], of the queued ones those a step took up already (counted
            whole, though a step takes a chunk at most); None when not known: none.
        decoding_usd_per_s: [W], summed price of delay of the requests decoding on a worker,
            which a prefill step there would hold up; None when not known: nobody decodes.
        slice_whole: bool [W], every worker of its slice is up; None where nothing is in a slice.
        members: the open decode reservations, or None (prefill).
        experts: expected experts per worker, or None without an expert model.
        num_unreported: [W], this router's own placements that the worker's last report did not
            hold yet; None where no other router shares the workers.
        num_replicas: routers that share the workers.
    """

    workers: tuple[WorkerInfo, ...]
    taken_at_s: float
    age_s: np.ndarray
    accepts: np.ndarray
    num_running: np.ndarray
    num_waiting: np.ndarray
    num_inflight: np.ndarray
    queued_prefill_tokens: np.ndarray
    kv_tokens: np.ndarray
    kv_blocks_free: np.ndarray
    speed_factor: np.ndarray
    tpot_limit_s: np.ndarray
    started_prefill_tokens: np.ndarray | None = None
    decoding_usd_per_s: np.ndarray | None = None
    slice_whole: np.ndarray | None = None
    members: Members | None = None
    experts: ExpertRows | None = None
    num_unreported: np.ndarray | None = None
    num_replicas: int = 1

    def check(self) -> FleetView:
        """Itself, when every column has one number per worker; for who builds views by hand.

        Raises:
            ValueError: naming the column that has not.
        """
        shape = (len(self.workers),)
        for name in _COLUMNS:
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, must be {shape}")
        return self

    @property
    def remaining_decode_tokens(self) -> np.ndarray:
        """Expected output tokens still to come per worker, float64 [W]."""
        if self.members is None:
            return np.zeros(len(self.workers))
        return np.bincount(
            self.members.worker_row, self.members.remaining_tokens, len(self.workers)
        )

    def take(self, rows: np.ndarray) -> FleetView:
        """The rows int64 [R] alone, copied, in that order."""
        members = self.members
        if members is not None:
            new_row = np.full(len(self.workers), -1, np.int64)
            new_row[rows] = np.arange(len(rows))
            moved = new_row.take(members.worker_row)
            stays = (moved >= 0).nonzero()[0]
            members = Members(
                worker_row=moved.take(stays),
                remaining_tokens=members.remaining_tokens.take(stays),
                lambda_usd_per_s=members.lambda_usd_per_s.take(stays),
                num_of_worker=members.num_of_worker.take(rows),
            )
        started, decoding = self.started_prefill_tokens, self.decoding_usd_per_s
        whole, unreported = self.slice_whole, self.num_unreported
        return FleetView(
            workers=tuple(self.workers[row] for row in rows.tolist()),
            taken_at_s=self.taken_at_s,
            started_prefill_tokens=None if started is None else started.take(rows),
            decoding_usd_per_s=None if decoding is None else decoding.take(rows),
            slice_whole=None if whole is None else whole.take(rows),
            members=members,
            experts=None if self.experts is None else self.experts.take(rows),
            num_unreported=None if unreported is None else unreported.take(rows),
            num_replicas=self.num_replicas,
            **{name: getattr(self, name).take(rows) for name in _COLUMNS},
        )

    def index_of(self, worker_id: str) -> int:
        """Row of `worker_id`; KeyError when it is not in the view."""
        for row, worker in enumerate(self.workers):
            if worker.worker_id == worker_id:
                return row
        raise KeyError(worker_id)


_COLUMNS = (
    "age_s",
    "accepts",
    "num_running",
    "num_waiting",
    "num_inflight",
    "queued_prefill_tokens",
    "kv_tokens",
    "kv_blocks_free",
    "speed_factor",
    "tpot_limit_s",
)
