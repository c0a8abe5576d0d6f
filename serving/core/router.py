"""The router: a request's way from arrival to a recorded decision, without I/O.

The public surface first; see `Router`. One event loop owns a router: nothing here locks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.core.lease import Lease
from serving.core.placement import Ranking
from serving.core.worker import FleetView, Phase, WorkerInfo


@dataclass(slots=True, kw_only=True, eq=False)
class Placed:
    """One stage placed: enough to dispatch now, and to write the record later.

    Attributes:
        request_id, phase: which stage of which request.
        variant, pool: the global layer's choice.
        worker: where it goes.
        lease: its reservation.
        ranking: the policy's answer over the whole view (arrays).
        view: the snapshot the ranking indexes.
        runner_up: next best worker, None when there was no other feasible one.
        score_delta: runner-up's score minus the winner's, in `unit`; 0.0 without runner-up.
        unit: unit of the score.
        block_hashes: uint64 [n], hashes of the prompt's full blocks at the pool's block size.
        recorded: whether its decision line was written.
    """

    request_id: str
    phase: Phase
    variant: str
    pool: str
    worker: WorkerInfo
    lease: Lease
    ranking: Ranking
    view: FleetView
    runner_up: WorkerInfo | None
    score_delta: float
    unit: str
    block_hashes: np.ndarray
    recorded: bool = field(default=False)
