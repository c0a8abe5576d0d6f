"""From a placed stage (arrays) to the line an operator reads (objects).

Runs after the answer is on its way. What the live fleet would overwrite in the meantime - the
survival rows of the workers to be recorded - was copied when the choice was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from serving.core import objective
from serving.core.decision import (
    Candidate,
    CostTerm,
    DecisionRecord,
    StageDecision,
    TermKind,
)
from serving.core.feasibility import Feasibility
from serving.core.placement import PlacementContext, Ranking, TermMatrix
from serving.core.worker import ExpertRows, Phase

if TYPE_CHECKING:
    from serving.core.placed import Placed

NUM_BEST = 8
MAX_PRICED = 256
"""Candidates whose terms are recorded on a sampled line, at most."""

_INPUTS = (
    "age_s",
    "num_running",
    "num_waiting",
    "num_inflight",
    "queued_prefill_tokens",
    "remaining_decode_tokens",
    "kv_tokens",
    "kv_blocks_free",
    "speed_factor",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """What a record is made from.

    Attributes:
        context: what the policy saw.
        ranking: what it answered.
        feasibility: who broke which rule.
        rows: int64 [R], recorded candidates, winner first, then by score.
        priced_rows: int64 [Q], those of `rows` whose terms are recorded.
        experts: survival of `priced_rows` as it was, None without an expert model or when
            the ranking carries its terms.
        decide_us: CPU time of the choice.
    """

    context: PlacementContext
    ranking: Ranking
    feasibility: Feasibility
    rows: np.ndarray
    priced_rows: np.ndarray
    experts: ExpertRows | None
    decide_us: float


def gather(
    context: PlacementContext,
    ranking: Ranking,
    found: Feasibility,
    *,
    everyone: bool,
    began_s: float = 0.0,
    cpu_s: Callable[[], float] | None = None,
) -> Evidence:
    """Keeps what a record will need: winner, runner-up and the eight best; all on a sample.

    Args:
        context: what the policy saw.
        ranking: what it answered.
        found: who was feasible.
        everyone: record every candidate.
        began_s: CPU seconds when the choice began.
        cpu_s: reads CPU seconds; None records 0.
    """
    score = ranking.score
    best = np.argpartition(score, NUM_BEST)[:NUM_BEST] if len(score) > NUM_BEST else None
    order = score.argsort() if best is None else best[score[best].argsort()]
    first = [ranking.chosen]
    if ranking.runner_up >= 0:
        first.append(ranking.runner_up)
    priced = first + [row for row in order.tolist() if row not in first and score[row] < np.inf]
    rows = priced
    if everyone:
        rest = [row for row in score.argsort(kind="stable").tolist() if row not in set(priced)]
        rows = priced + rest
        priced = rows[:MAX_PRICED]
    priced_rows = np.array(priced, np.int64)
    experts = None
    if ranking.terms is None and context.view.experts is not None:
        experts = context.view.experts.take(priced_rows)
    return Evidence(
        context=context,
        ranking=ranking,
        feasibility=found,
        rows=np.array(rows, np.int64),
        priced_rows=priced_rows,
        experts=experts,
        decide_us=0.0 if cpu_s is None else (cpu_s() - began_s) * 1e6,
    )


def decision_line(placed: Placed, evidence: Evidence, router_id: str) -> DecisionRecord:
    """The "decision" line of a placed stage."""
    context = evidence.context
    request, signature = context.request, context.signature
    inputs: dict[str, float | str] = {
        "prompt_tokens": float(request.num_prompt_tokens),
        "max_tokens": float(request.max_tokens),
        "mean_tokens": float(request.length.mean_tokens),
        "p95_tokens": float(request.length.p95_tokens),
        "length_source": request.length.source,
        "lambda_usd_per_s": context.target.lambda_usd_per_s,
        "cached_tokens": float(placed.cached_tokens),
        "signature_source": "none" if signature is None else signature.source.value,
        "worker_epoch": float(placed.worker.epoch),
    }
    if signature is not None:
        inputs["signature_confidence"] = signature.confidence
        inputs["signature_tokens"] = float(signature.num_tokens)
    versions = {}
    if signature is not None:
        versions["signature"] = signature.version
    if context.regions is not None:
        versions["regions"] = context.regions.version
    if context.experts is not None:
        versions["experts"] = context.experts.version
    if context.costs is not None:
        versions["costs"] = ",".join(context.costs.versions)
    return DecisionRecord(
        request_id=request.request_id,
        decided_at_s=placed.decided_at_s,
        sequence=placed.sequence,
        router_id=router_id,
        slo=request.slo.value,
        tenant=request.tenant,
        product=request.product,
        variant=placed.variant,
        pool=placed.pool,
        stage=stage_decision(evidence, placed.policy),
        table_version=placed.table_version,
        inputs=inputs,
        versions=versions,
        switches=placed.switches,
    )


def stage_decision(evidence: Evidence, policy: str) -> StageDecision:
    """The record of one stage."""
    ranking, context = evidence.ranking, evidence.context
    workers = context.view.workers
    matrix, at = _terms(evidence)
    candidates = tuple(
        _candidate(evidence, row, matrix, at.get(row)) for row in evidence.rows.tolist()
    )
    delta = delta_usd = 0.0
    runner_up = ""
    if ranking.runner_up >= 0:
        runner_up = workers[ranking.runner_up].worker_id
        delta = float(ranking.score[ranking.runner_up] - ranking.score[ranking.chosen])
        if matrix is not None:
            total = matrix.total_usd()
            delta_usd = float(total[at[ranking.runner_up]] - total[at[ranking.chosen]])
    return StageDecision(
        phase=context.phase.value,
        policy=policy,
        winner=workers[ranking.chosen].worker_id,
        runner_up=runner_up,
        unit=ranking.unit,
        delta=delta,
        delta_usd=delta_usd,
        candidates=candidates,
        num_candidates=len(workers),
        num_feasible=int(evidence.feasibility.mask.sum()),
        fallback=ranking.fallback,
        decide_us=evidence.decide_us,
    )


def _terms(evidence: Evidence) -> tuple[TermMatrix | None, dict[int, int]]:
    """The objective and, per worker row, its row in there."""
    ranking, context = evidence.ranking, evidence.context
    priced = evidence.priced_rows.tolist()
    if ranking.terms is not None:
        return ranking.terms, {row: row for row in priced}
    if context.costs is None or not context.costs.known[evidence.priced_rows].all():
        return None, {}
    view = dataclasses.replace(context.view, experts=None).take(evidence.priced_rows)
    few = dataclasses.replace(
        context,
        view=dataclasses.replace(view, experts=evidence.experts),
        feasible=context.feasible.take(evidence.priced_rows),
        cached_tokens=context.cached_tokens.take(evidence.priced_rows),
        transfer_s=context.transfer_s.take(evidence.priced_rows),
        costs=context.costs.take(evidence.priced_rows),
    )
    return objective.terms(few), {row: place for place, row in enumerate(priced)}


def _candidate(
    evidence: Evidence, row: int, matrix: TermMatrix | None, at: int | None
) -> Candidate:
    context, ranking = evidence.context, evidence.ranking
    view, worker = context.view, context.view.workers[row]
    inputs = {name: float(getattr(view, name)[row]) for name in _INPUTS}
    if context.phase is Phase.PREFILL:
        inputs["cached_tokens"] = float(context.cached_tokens[row])
    else:
        inputs["transfer_s"] = float(context.transfer_s[row])
    score = float(ranking.score[row])
    why_not = evidence.feasibility.why_not(row)
    if not why_not:
        why_not = next((name for name, out in ranking.excluded if out[row]), "")
    priced = matrix is not None and at is not None and not why_not_priced(ranking, row)
    terms: tuple[CostTerm, ...] = ()
    total = 0.0
    if priced and matrix is not None:
        kinds = matrix.kinds or (TermKind.COST,) * len(matrix.names)
        terms = tuple(
            CostTerm(name=name, seconds=float(seconds), usd=float(usd), kind=kind)
            for name, seconds, usd, kind in zip(
                matrix.names, matrix.seconds[at], matrix.usd[at], kinds, strict=True
            )
        )
        total = sum(term.usd for term in terms if term.kind is TermKind.COST)
        inputs.update((name, float(values[at])) for name, values in matrix.facts)
    return Candidate(
        worker_id=worker.worker_id,
        pool=worker.pool,
        hardware=worker.hardware,
        score=score if score < np.inf else None,
        terms=terms,
        total_usd=total,
        inputs=inputs,
        why_not=why_not,
    )


def why_not_priced(ranking: Ranking, row: int) -> bool:
    """Whether a policy that prices a sample left this row out of it."""
    return any(name == "not_sampled" and out[row] for name, out in ranking.excluded) and (
        ranking.terms is not None
    )
