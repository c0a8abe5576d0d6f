"""A request's decisions as a person reads them: plain text, aligned, every sum shown.

Pure formatting of log lines; the command and the Explain rpc print the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from serving.core.decision import (
    Candidate,
    DecisionRecord,
    LogLine,
    OutcomeRecord,
    StageDecision,
    TermKind,
)


def explain_text(lines: Sequence[LogLine]) -> str:
    """All lines of one request.

    Args:
        lines: its decision and outcome lines, oldest first; at least one.
    """
    parts = [f"request {lines[0].request_id}"]
    for line in lines:
        parts.append(_decision(line) if isinstance(line, DecisionRecord) else _outcome(line))
    if not any(isinstance(line, OutcomeRecord) for line in lines):
        parts.append("outcome   none recorded: the request is still running, or the log ends here")
    return "\n\n".join(parts) + "\n"


def nearest_ids(request_id: str, known: Iterable[str], *, num: int = 5) -> list[str]:
    """Known ids that look like an unknown one, likeliest first."""
    distinct = list(dict.fromkeys(known))
    inside = [other for other in distinct if request_id and request_id in other]
    close = difflib.get_close_matches(request_id, distinct, n=num, cutoff=0.5)
    return list(dict.fromkeys(inside[:num] + close))[:num]


def _decision(line: DecisionRecord) -> str:
    stage = line.stage
    winner = _by_id(stage, stage.winner)
    header = [
        f"{stage.phase} by {stage.policy}: {stage.winner}"
        + (f" (fell back: {stage.fallback})" if stage.fallback else ""),
        _runner_up(stage),
        f"decision  #{line.sequence} of {line.router_id} at unix {line.decided_at_s:.6f} s, "
        f"{stage.decide_us:.0f} us of CPU; {stage.num_feasible} of {stage.num_candidates} "
        "workers feasible",
        f"request   class {line.slo}, tenant {line.tenant or '-'}, product {line.product or '-'}; "
        f"variant {line.variant}, pool {line.pool} (table {line.table_version})",
        f"inputs    {_pairs(line.inputs)}",
        f"versions  {_pairs(line.versions)}",
    ]
    for candidate in (winner, _by_id(stage, stage.runner_up)):
        header += _first_token(candidate)
    if line.switches:
        header.append(f"off       {', '.join(line.switches)}")
    parts = ["\n".join(header), _scores(stage)]
    if winner is not None and winner.terms:
        parts.append(_terms(winner, _by_id(stage, stage.runner_up)))
    return "\n\n".join(parts)


def _first_token(candidate: Candidate | None) -> list[str]:
    """What a prefill candidate's prompt costs to compute and when its first token comes."""
    terms = {term.name: term for term in candidate.terms} if candidate is not None else {}
    if candidate is None or not {"prefill_compute", "ttft"} <= terms.keys():
        return []
    compute, ttft = terms["prefill_compute"], terms["ttft"]
    return [
        f"prefill   {candidate.worker_id}: compute ${_number(compute.usd)}, "
        f"TTFT {ttft.seconds * 1e3:.1f} ms"
    ]


def _runner_up(stage: StageDecision) -> str:
    if not stage.runner_up:
        return "runner-up none: no other worker was feasible"
    text = f"runner-up {stage.runner_up}, worse by {_number(stage.delta)} {stage.unit}"
    if stage.unit != "usd":
        text += f", by ${_number(stage.delta_usd)} in J"
        if stage.delta_usd < 0:
            text += " (the policy did not follow J)"
    return text


def _scores(stage: StageDecision) -> str:
    """One row per candidate: score, J, terms in dollars, inputs, the words behind them."""
    names = _term_names(stage.candidates)
    facts = _fact_names(stage.candidates)
    head = ["", "worker", f"score ({stage.unit})", "J $"]
    words = list(dict.fromkeys(name for c in stage.candidates for name in c.labels))
    head += [f"{name} $" for name in names] + facts + words + ["why not"]
    rows = []
    for candidate in stage.candidates:
        mark = {stage.winner: "*", stage.runner_up: "+"}.get(candidate.worker_id, "")
        usd = {term.name: term.usd for term in candidate.terms}
        score = "-" if candidate.score is None else _number(candidate.score)
        total = _number(candidate.total_usd) if candidate.terms else "-"
        rows.append(
            [mark, candidate.worker_id, score, total]
            + [_number(usd[name]) if name in usd else "-" for name in names]
            + [_number(candidate.inputs[n]) if n in candidate.inputs else "-" for n in facts]
            + [candidate.labels.get(name, "-") for name in words]
            + [candidate.why_not]
        )
    return "candidates (* winner, + runner-up)\n" + _table(head, rows)


def _terms(winner: Candidate, runner_up: Candidate | None) -> str:
    """The winner's terms beside the runner-up's: seconds, price, dollars."""
    beside = {term.name: term for term in runner_up.terms} if runner_up else {}
    head = ["term", "seconds", "$/s", "$", "runner-up s", "runner-up $", "difference $", "in"]
    rows = []
    for term in winner.terms:
        other = beside.get(term.name)
        price = term.usd / term.seconds if term.seconds else None
        rows.append(
            [
                term.name,
                _number(term.seconds),
                "-" if price is None else _number(price),
                _number(term.usd),
                "-" if other is None else _number(other.seconds),
                "-" if other is None else _number(other.usd),
                "-" if other is None else _number(other.usd - term.usd),
                {TermKind.COST: "J", TermKind.SCORE: "score only", TermKind.INFO: "no sum"}[
                    term.kind
                ],
            ]
        )
    total = ["J", "", "", _number(winner.total_usd)]
    if runner_up is not None and runner_up.terms:
        difference = runner_up.total_usd - winner.total_usd
        total += ["", _number(runner_up.total_usd), _number(difference), ""]
    else:
        total += ["", "-", "-", ""]
    return f"terms of {winner.worker_id}\n" + _table(head, [*rows, total])


def _outcome(line: OutcomeRecord) -> str:
    facts = [f"{line.num_output_tokens} output tokens"]
    if line.ttft_s is not None:
        facts.append(f"TTFT {line.ttft_s * 1e3:.1f} ms")
    if line.tpot_s is not None:
        facts.append(f"TPOT {line.tpot_s * 1e3:.2f} ms")
    if line.usd is not None:
        facts.append(f"${_number(line.usd)}")
    if line.retries:
        facts.append(f"{line.retries} retries")
    if line.error:
        facts.append(f"error {line.error}")
    return f"outcome   {line.status.value} at unix {line.ended_at_s:.6f} s: " + ", ".join(facts)


def _by_id(stage: StageDecision, worker_id: str) -> Candidate | None:
    return next((c for c in stage.candidates if c.worker_id == worker_id), None)


def _term_names(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(term.name for c in candidates for term in c.terms))


def _fact_names(candidates: Sequence[Candidate]) -> list[str]:
    """Inputs worth a column: those that are not 0 everywhere."""
    names = dict.fromkeys(name for c in candidates for name in c.inputs)
    return [name for name in names if any(c.inputs.get(name, 0.0) != 0.0 for c in candidates)]


def _pairs(values: dict[str, float | str] | dict[str, str]) -> str:
    if not values:
        return "-"
    shown = (
        f"{name}={value if isinstance(value, str) else _number(value)}"
        for name, value in values.items()
    )
    return ", ".join(shown)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Aligned columns: the first that hold words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    words = {
        i
        for i in range(len(head))
        if any(row[i] and not _is_number(row[i]) for row in rows) or all(not row[i] for row in rows)
    }

    def line(row: list[str]) -> str:
        cells = (
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  " + "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in [head, *rows])


def _is_number(cell: str) -> bool:
    if cell == "-":
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return True
