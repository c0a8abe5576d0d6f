"""What the router decided and why: the record an operator, the replay and an audit read.

One JSON object per line. A "decision" line is written when a stage is placed, an "outcome"
line when the request ends; both carry request_id and schema_version. Readers skip kinds
and fields they do not know.
"""

from __future__ import annotations

import enum

import msgspec

SCHEMA_VERSION = 1


class TermKind(enum.Enum):
    """What a term adds up to.

    COST terms sum to J. SCORE terms join J in a policy's score only (the region prior, tail
    weighting); INFO terms are printed and enter no sum (what the cached prefix saved).
    """

    COST = "cost"
    SCORE = "score"
    INFO = "info"


class CostTerm(msgspec.Struct, frozen=True, kw_only=True):
    """One term of the objective for one candidate; a row an operator can add up by hand.

    Attributes:
        name: term name.
        seconds: the physical quantity.
        usd: its price.
        kind: which sum it belongs to.
    """

    name: str
    seconds: float
    usd: float
    kind: TermKind = TermKind.COST


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that could have been chosen, with everything the choice looked at.

    Attributes:
        score: the policy's key, lower is better; None when infeasible.
        why_not: the rule it breaks when infeasible, else "".
        labels: words behind the terms: the link KV would come over, the decode worker a
            prefill choice counts on.
        terms: the objective, term by term.
        total_usd: J, the sum of the COST terms.
        inputs: the view's row behind the terms (running, free blocks, age, cached tokens ...).
    """

    worker_id: str
    pool: str
    hardware: str
    score: float | None
    terms: tuple[CostTerm, ...] = ()
    total_usd: float = 0.0
    inputs: dict[str, float] = {}
    labels: dict[str, str] = {}
    why_not: str = ""


class StageDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of one worker (prefill or decode).

    Attributes:
        winner, runner_up: worker ids; runner_up "" when there was no other candidate.
        delta: runner-up's score minus the winner's, in `unit`.
        delta_usd: the same difference in J, dollars; negative means the policy did not
            follow J (a baseline), which is worth seeing.
        candidates: winner, runner-up and the eight best; all of them on a sample.
        num_candidates, num_feasible: over the whole view.
        decide_us: CPU microseconds the choice took.
    """

    phase: str
    policy: str
    winner: str
    runner_up: str
    unit: str
    delta: float
    delta_usd: float
    candidates: tuple[Candidate, ...]
    num_candidates: int
    num_feasible: int
    fallback: str = ""
    decide_us: float = 0.0


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, tag="decision", tag_field="kind"):
    """A "decision" line.

    Attributes:
        decided_at_s: unix seconds.
        sequence: the router's own count of decisions (draws are keyed by it).
        router_id: which replica decided.
        variant, pool: the global layer's choice; table_version says from which table
            ("static" is the fallback).
        inputs: request facts (prompt tokens, max tokens, cached tokens, signature source ...).
        versions: artefact name -> version of every learned part consulted.
        switches: kill switches that were off, and fallbacks taken.
    """

    request_id: str
    decided_at_s: float
    sequence: int
    router_id: str
    slo: str
    tenant: str
    product: str
    variant: str
    pool: str
    stage: StageDecision
    table_version: str = "static"
    inputs: dict[str, float | str] = {}
    versions: dict[str, str] = {}
    switches: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


class OutcomeStatus(enum.Enum):
    """How a request ended."""

    OK = "ok"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"
    LEASE_EXPIRED = "lease_expired"


class OutcomeRecord(msgspec.Struct, frozen=True, kw_only=True, tag="outcome", tag_field="kind"):
    """An "outcome" line, joined to its decisions by request_id.

    Attributes:
        ttft_s, tpot_s: as the router measured them at its own door; None when no token came.
        usd: realised cost of the request where it is known.
        error: reason name of the error tree, "" when status is OK.
        retries: other workers tried after a loss.
    """

    request_id: str
    ended_at_s: float
    status: OutcomeStatus
    num_output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    usd: float | None = None
    error: str = ""
    retries: int = 0
    schema_version: int = SCHEMA_VERSION


LogLine = DecisionRecord | OutcomeRecord

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(LogLine)


def encode_line(line: LogLine) -> bytes:
    """One JSONL line, newline included."""
    return _ENCODER.encode(line) + b"\n"


def decode_line(line: bytes | str) -> LogLine:
    """Reads one line back.

    Raises:
        msgspec.ValidationError: the line is not a known kind, or a field has the wrong type.
    """
    return _DECODER.decode(line)
