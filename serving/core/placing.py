"""From a stage's choice to the placement that is dispatched and later recorded."""

from __future__ import annotations

import numpy as np

from serving.core.lease import Lease
from serving.core.placed import Placed
from serving.core.recording import Evidence
from serving.core.routing_table import TableCell
from serving.core.stage import StageChoice, StageInput
from serving.core.worker import Phase


def placed_of(
    given: StageInput,
    choice: StageChoice,
    cell: TableCell,
    *,
    lease: Lease,
    policy: str,
    table_version: str,
    decided_at_s: float,
    switches: tuple[str, ...],
    evidence: Evidence,
) -> Placed:
    """A placed stage.

    Args:
        given: what was asked.
        choice: what came out.
        cell: the chosen worker's cell.
        lease: its reservation.
        policy: name of the rule that decided.
        table_version: routing table consulted.
        decided_at_s: unix seconds.
        switches: kill switches that were off.
        evidence: the arrays behind the choice.
    """
    ranking, workers = choice.ranking, given.view.workers
    return Placed(
        request_id=given.request.request_id,
        phase=given.phase,
        variant=cell.variant,
        pool=cell.pool,
        worker=workers[ranking.chosen],
        lease=lease,
        runner_up=workers[ranking.runner_up] if ranking.runner_up >= 0 else None,
        score_delta=ranking.delta(),
        unit=ranking.unit,
        fallback=ranking.fallback,
        block_hashes=choice.block_hashes,
        cached_tokens=int(choice.context.cached_tokens[ranking.chosen]),
        sequence=given.sequence,
        policy=policy,
        table_version=table_version,
        decided_at_s=decided_at_s,
        switches=switches,
        signature=given.signature,
        evidence=evidence,
        usd_per_request=cell.usd_per_request,
        table_source=cell.source,
    )


def passed_over(evidence: Evidence) -> tuple[str, int]:
    """A feasible worker that holds more of the prompt than the chosen one, and how much."""
    context, chosen = evidence.context, evidence.ranking.chosen
    if context.phase is not Phase.PREFILL or not np.count_nonzero(context.cached_tokens):
        return "", 0
    held = context.cached_tokens * context.feasible
    best = int(held.argmax())
    if held[best] <= held[chosen]:
        return "", 0
    return context.view.workers[best].worker_id, int(held[best])
