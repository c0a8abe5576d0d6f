"""From a placed stage (arrays) to the line an operator reads (objects).

Runs after the answer is on its way. What the live fleet would overwrite in the meantime - the
survival rows of the workers to be recorded - was copied when the choice was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
from serving.core.transfer import LINKS
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


class Evidence(NamedTuple):
    """What a record is made from.

    Attributes:
        context: what the policy saw.
        ranking: what it answered.
        found: who broke which rule.
        everyone: record every candidate.
        priced: (rows int64 [Q], their survival as it was) of the candidates whose terms are
            still to be worked out; None when the ranking carries its terms, or they do not
            depend on survival.
        decide_us: CPU time of the choice.
    """

    context: PlacementContext
    ranking: Ranking
    found: Feasibility
    everyone: bool
    priced: tuple[np.ndarray, ExpertRows] | None
    decide_us: float


def gather(
    context: PlacementContext,
    ranking: Ranking,
    found: Feasibility,
    *,
    everyone: bool,
    decide_us: float = 0.0,
) -> Evidence:
    """Keeps what a record will need and the live fleet would overwrite before it is made."""
    priced = None
    if ranking.terms is None and context.view.experts is not None:
        rows = _best_rows(ranking, everyone=everyone)
        priced = rows, context.view.experts.take(rows)
    return Evidence(
        context=context,
        ranking=ranking,
        found=found,
        everyone=everyone,
        priced=priced,
        decide_us=decide_us,
    )


def _best_rows(ranking: Ranking, *, everyone: bool) -> np.ndarray:
    """Rows whose terms are recorded: winner, runner-up and the eight best, in that order.

    On a sample the best `MAX_PRICED`, infeasible ones last.
    """
    score = ranking.score
    num = MAX_PRICED if everyone else NUM_BEST
    order = np.argpartition(score, num)[:num] if len(score) > num else np.arange(len(score))
    order = order[score[order].argsort(kind="stable")].tolist()
    first = [row for row in (ranking.chosen, ranking.runner_up) if row >= 0]
    rest = [row for row in order if row not in first and (everyone or score[row] < np.inf)]
    return np.array(first + rest, np.int64)


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
    if placed.passed_over:
        inputs["passed_over"] = placed.passed_over
        inputs["passed_over_tokens"] = float(placed.passed_over_tokens)
    if placed.usd_per_request is not None:
        inputs["table_usd_per_request"] = placed.usd_per_request
        inputs["table_source"] = placed.table_source
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
    priced = (
        _best_rows(ranking, everyone=evidence.everyone)
        if evidence.priced is None
        else evidence.priced[0]
    )
    matrix, place = _terms(evidence, priced)
    rows = priced.tolist()
    if evidence.everyone:
        rows += sorted(set(range(len(workers))) - set(rows))
    candidates = tuple(
        _candidate(evidence, row, why_not, matrix, place.get(row))
        for row, why_not in zip(rows, _why_not(evidence, rows), strict=True)
    )
    delta_usd = 0.0
    runner_up = ""
    if ranking.runner_up >= 0:
        runner_up = workers[ranking.runner_up].worker_id
        if matrix is not None:
            total = matrix.total_usd()
            delta_usd = float(total[place[ranking.runner_up]] - total[place[ranking.chosen]])
    return StageDecision(
        phase=context.phase.value,
        policy=policy,
        winner=workers[ranking.chosen].worker_id,
        runner_up=runner_up,
        unit=ranking.unit,
        delta=ranking.delta(),
        delta_usd=delta_usd,
        candidates=candidates,
        num_candidates=len(workers),
        num_feasible=int(evidence.found.mask.sum()),
        fallback=ranking.fallback,
        decide_us=evidence.decide_us,
    )


def _terms(evidence: Evidence, priced: np.ndarray) -> tuple[TermMatrix | None, dict[int, int]]:
    """The objective, and per worker row its row in there."""
    ranking, context = evidence.ranking, evidence.context
    rows = priced.tolist()
    if ranking.terms is not None:
        if ranking.term_rows is not None:
            rows = np.intersect1d(priced, ranking.term_rows).tolist()
        return ranking.terms.matrix(), {row: row for row in rows}
    if context.costs is None:
        return None, {}
    rows = [row for row in rows if context.costs.known[row]]
    few = context._replace(view=context.view._replace(experts=None))
    few = few.take(np.array(rows, np.int64))
    if evidence.priced is not None:
        known = context.costs.known[priced].nonzero()[0]
        view = few.view._replace(experts=evidence.priced[1].take(known))
        few = few._replace(view=view)
    return objective.price(few).matrix(), {row: place for place, row in enumerate(rows)}


def _why_not(evidence: Evidence, rows: list[int]) -> list[str]:
    """Per row the rule it broke, or why the policy set it aside; "" for a candidate."""
    excluded, score = evidence.ranking.excluded, evidence.ranking.score
    return [
        broken
        or next((name for name, out in excluded if out[row]), "")
        or (evidence.ranking.aside if score[row] == np.inf else "")
        for row, broken in zip(rows, evidence.found.why_not(rows), strict=True)
    ]


def _candidate(
    evidence: Evidence, row: int, why_not: str, matrix: TermMatrix | None, place: int | None
) -> Candidate:
    context, ranking = evidence.context, evidence.ranking
    view, worker = context.view, context.view.workers[row]
    inputs = {name: float(getattr(view, name)[row]) for name in _INPUTS}
    if context.phase is Phase.PREFILL:
        inputs["cached_tokens"] = float(context.cached_tokens[row])
    labels: dict[str, str] = {}
    if context.links is not None:
        labels["link"] = LINKS[int(context.links[row])]
    score = float(ranking.score[row])
    terms: tuple[CostTerm, ...] = ()
    total = 0.0
    if matrix is not None and place is not None:
        kinds = matrix.kinds or (TermKind.COST,) * len(matrix.names)
        terms = tuple(
            CostTerm(name=name, seconds=float(seconds), usd=float(usd), kind=kind)
            for name, seconds, usd, kind in zip(
                matrix.names, matrix.seconds[place], matrix.usd[place], kinds, strict=True
            )
        )
        total = sum(term.usd for term in terms if term.kind is TermKind.COST)
        inputs.update((name, float(values[place])) for name, values in matrix.facts)
        labels.update((name, words[place]) for name, words in matrix.labels if words[place])
    return Candidate(
        worker_id=worker.worker_id,
        pool=worker.pool,
        hardware=worker.hardware,
        score=score if score < np.inf else None,
        terms=terms,
        total_usd=total,
        inputs=inputs,
        labels=labels,
        why_not=why_not,
    )
