"""What passes between a worker's state (engine.py) and its step loop (step_loop.py).

Plain values, complete when they are made: the step loop needs no lock to read them.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from serving.core.errors import EldrError, InvalidRequest
from serving.engines.embedded.sampling import TokenLogprobs
from serving.engines.embedded.scheduler import PlannedChunk
from serving.engines.embedded.sequence import Sequence


class StepFailed(EldrError):
    """The model step that the request took part in raised; the worker goes on."""

    reason = "STEP_FAILED"
    retryable = False

    def __init__(self, worker_id: str, error: BaseException) -> None:
        self.worker_id = worker_id
        self.problem = f"{type(error).__name__}: {error}"
        super().__init__(f"a step of worker {worker_id!r} failed: {self.problem}")

    def facts(self) -> dict[str, str]:
        """The worker and what was raised."""
        return {"worker_id": self.worker_id, "problem": self.problem}


class DuplicateRequest(InvalidRequest):
    """A request of that id is running."""

    reason = "DUPLICATE_REQUEST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes the engine needs of a runner.

    Attributes:
        num_blocks, block_size: of the KV pool.
        num_layers, num_experts: of the model's MoE layers.
        max_step_tokens: tokens of one step.
    """

    num_blocks: int
    block_size: int
    num_layers: int
    num_experts: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvBlocks:
    """Content of some blocks.

    Attributes:
        keys, values: float32 [n, L, B, Hkv, Dh].
        counts: uint16 [n, L, E].
    """

    keys: np.ndarray
    values: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landing:
    """Pulled KV to write into `block_ids` (int32 [n]) of `sequence`."""

    sequence: Sequence
    block_ids: np.ndarray
    blocks: KvBlocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """Blocks under a lease to read; the answer goes to `answer`."""

    block_ids: np.ndarray
    answer: Future[KvBlocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the step loop does next, in this order."""

    landings: tuple[Landing, ...]
    readings: tuple[Reading, ...]
    chunks: tuple[PlannedChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutcome:
    """What a step gave, per chunk where a tuple.

    Attributes:
        counts: unsigned [num_touched_blocks, L, E] each.
        tokens: the token drawn, None inside a prompt.
        logprobs: of those tokens, where asked for.
        started_s, duration_s: on the busy clock.
        num_tokens, bucket_tokens, distinct_experts: as in `StepRecord`.
    """

    counts: tuple[np.ndarray, ...]
    tokens: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    started_s: float
    duration_s: float
    num_tokens: int
    bucket_tokens: int
    distinct_experts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where the blocks are, and how many requests there are.

    Attributes:
        blocks_total: size of the pool.
        blocks_in_use: held by requests or leases.
        blocks_cached: unheld, kept for prefix hits.
        leases_open: hand-overs that wait for their pull.
        num_running: requests with a place.
        num_waiting: the others.
        num_uncached_waiting_tokens: prompt tokens this worker still has to compute.
        num_prompt_tokens: of the requests that ended.
        num_cached_prompt_tokens: of those, found in the local cache.
    """

    blocks_total: int
    blocks_in_use: int
    blocks_cached: int
    leases_open: int
    num_running: int
    num_waiting: int
    num_uncached_waiting_tokens: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int

    @property
    def idle(self) -> bool:
        """No request and no lease."""
        return not (self.num_running or self.num_waiting or self.leases_open)
