"""A stage that was placed, and who learns from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serving.core.lease import Lease
from serving.core.recording import Evidence
from serving.core.request import Request
from serving.core.routing_table import TableCell
from serving.core.signature import Signature
from serving.core.worker import Phase, WorkerInfo


@dataclass(slots=True, kw_only=True, eq=False)
class Placed:
    """One stage placed: enough to dispatch now, and to write the record later.

    Attributes:
        request_id, phase: which stage of which request.
        variant, pool: the global layer's choice.
        worker: where it goes.
        lease: its reservation.
        runner_up: next best worker, None when there was no other feasible one.
        score_delta: runner-up's score minus the winner's, in `unit`; 0.0 without runner-up.
        unit: unit of the score.
        fallback: why a simpler rule decided, "" when the policy itself did.
        block_hashes: uint64 [n], hashes of the prompt's full blocks at the worker's block
            size; empty without a prefix index or in decode.
        cached_tokens: prompt tokens the index says the worker holds.
        sequence: the decision's number; its draws are keyed by it.
        policy: name of the rule.
        table_version: routing table consulted.
        passed_over: worker that holds more of the prompt than the chosen one, "" for none;
            told once the stage is recorded.
        passed_over_tokens: what it holds.
        usd_per_request: its estimate for the cell, None when it made none.
        table_source: what that estimate rests on.
        decided_at_s: unix seconds.
        switches: kill switches that were off.
        signature: the signature the choice was given.
        evidence: the arrays behind the choice (context, ranking); None once recorded, so
            that open requests do not hold on to snapshots.
    """

    request_id: str
    phase: Phase
    variant: str
    pool: str
    worker: WorkerInfo
    lease: Lease
    runner_up: WorkerInfo | None
    score_delta: float
    unit: str
    fallback: str
    block_hashes: np.ndarray
    cached_tokens: int
    sequence: int
    policy: str
    table_version: str
    decided_at_s: float
    switches: tuple[str, ...]
    signature: Signature | None
    evidence: Evidence | None
    passed_over: str = ""
    passed_over_tokens: int = 0
    usd_per_request: float | None = None
    table_source: str = ""

    @property
    def recorded(self) -> bool:
        """Whether the decision line was written."""
        return self.evidence is None


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request between its first placement and its end.

    Attributes:
        request: as last asked for; a re-run's prompt grows by the tokens so far.
        cell: where the global layer put it.
        expires_at_s: monotonic seconds after which it ends, unless a lease is open.
        placed: its stages' open placements.
        unrecorded: all its placements; records are made at the latest when it ends.
        retries: times it was placed anew after a loss.
    """

    request: Request
    cell: TableCell
    expires_at_s: float
    placed: dict[Phase, Placed] = field(default_factory=dict)
    unrecorded: list[Placed] = field(default_factory=list)
    retries: int = 0


class PlacementObserver(Protocol):
    """Learns from placements, off the decision path (online regions, drift priors)."""

    def placed(self, placed: Placed, now_s: float) -> None:
        """One stage was placed and recorded; `now_s` is the snapshot's monotonic time."""
        ...
