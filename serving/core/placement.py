"""The contract between the pipeline and a placement policy: values in, a ranking out.

A policy is a pure function of its context and a random generator. It sees every candidate
as a row; scores stay arrays. `CostTerm` objects (serving/core/decision.py) are made from
`TermMatrix` rows later, for the few recorded candidates only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from serving.core.costs import WorkerCosts
from serving.core.decision import TermKind
from serving.core.experts import ExpertProfiles
from serving.core.request import Request, SloTarget
from serving.core.signature import Signature
from serving.core.worker import FleetView, Phase


class Regions(Protocol):
    """Fitted expert regions, one per decode worker (serving/signatures/regions.py)."""

    @property
    def version(self) -> str:
        """Version written into every decision record."""
        ...

    def similarity(self, vector: np.ndarray, worker_ids: tuple[str, ...]) -> np.ndarray:
        """Cosine of float32 [M] `vector` with each worker's centroid, float32 [W].

        A worker without a region gets -1.
        """
        ...


class DecodeAhead(Protocol):
    """Decode as a prefill choice sees it (serving/core/ahead.py)."""

    def pack(self, share: float | None) -> None:
        """Partners are compared as packing compares them (`DecodePrices.packed`); None by J."""
        ...

    def usd(self, rows: np.ndarray) -> np.ndarray:
        """J of decoding on each prefill row's best partner, hand-over included.

        Args:
            rows: int64 [R], rows of the prefill view.

        Returns:
            float64 [R]; inf where nobody could decode.
        """
        ...

    def breaks_target(self, rows: np.ndarray) -> np.ndarray:
        """Whose best partner would break the class's targets, bool [R]."""
        ...

    def matrix(self, rows: np.ndarray) -> TermMatrix:
        """The terms of the best partners of `rows`, one row each."""
        ...


class PlacementContext(NamedTuple):
    """Everything a policy may look at for one choice.

    Attributes:
        request: the request.
        phase: which worker is chosen.
        target: the request's SLO class targets.
        view: the candidate workers (W rows).
        feasible: bool [W]; live, right model and pool, KV and bucket fit. At least one True.
        cached_tokens: int32 [W]; prompt tokens each worker already holds (prefix cache).
        transfer_s: float64 [W]; seconds to move the KV to each worker (0 in prefill).
        sequence: how many choices of this phase this router has made before; gives
            round-robin its turn without hidden state.
        signature: the request's signature, or None.
        regions: fitted regions, or None (kill switch, or nothing fitted).
        domain: oracle label for the `domain` baseline, "" in production.
        costs: coefficients and limits per row, or None in a test that prices nothing.
        experts: decode profiles, or None without an expert model.
        keep: float32 [M], 1 - q of the request per masked (layer, expert), or None.
        cluster: the calibration cluster nearest to the signature, -1 without either.
        links: int8 [W], which link KV would come over (core/transfer.py LINKS); None where
            nothing moves.
        ahead: prefill only: what decode would cost from each worker; None where nobody looks.
    """

    request: Request
    phase: Phase
    target: SloTarget
    view: FleetView
    feasible: np.ndarray
    cached_tokens: np.ndarray
    transfer_s: np.ndarray
    sequence: int
    signature: Signature | None = None
    regions: Regions | None = None
    domain: str = ""
    costs: WorkerCosts | None = None
    experts: ExpertProfiles | None = None
    keep: np.ndarray | None = None
    cluster: int = -1
    links: np.ndarray | None = None
    ahead: DecodeAhead | None = None

    def worker_ids(self) -> tuple[str, ...]:
        """Ids of the view's rows (the same tuple object while the fleet does not change)."""
        if self.costs is not None:
            return self.costs.worker_ids
        return tuple(worker.worker_id for worker in self.view.workers)

    def decode_tokens_per_s(self, row: int) -> float:
        """Decode speed a request would see on a row, by the mean number of experts.

        0.0 when nothing is priced.
        """
        costs, view = self.costs, self.view
        if costs is None:
            return 0.0
        num = float(view.num_inflight[row]) + 1.0
        experts = float(costs.total_experts[row]) * (1.0 - float(costs.miss[row]) ** num)
        step_s = float(costs.step_base_s[row]) + float(costs.expert_s[row]) * experts
        step_s += float(costs.request_s[row]) * num
        step_s += float(costs.attention_s[row]) * float(view.kv_tokens[row])
        step_s *= float(view.speed_factor[row])
        return 1.0 / step_s if step_s > 0 else 0.0

    def take(self, rows: np.ndarray) -> PlacementContext:
        """The same choice over the rows int64 [R] only, in that order."""
        return self._replace(
            view=self.view.take(rows),
            feasible=self.feasible.take(rows),
            cached_tokens=self.cached_tokens.take(rows),
            transfer_s=self.transfer_s.take(rows),
            links=None if self.links is None else self.links.take(rows),
            ahead=None,
            costs=None if self.costs is None else self.costs.take(rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermMatrix:
    """The objective, spelled out: one row per worker, one column per term.

    Attributes:
        names: T term names, in printing order.
        seconds: float64 [W, T]; the physical quantity behind the term.
        usd: float64 [W, T]; the same in dollars. J of a worker is its row's sum over the
            COST terms.
        kinds: what each term adds up to; () when all are COST.
        facts: named float64 [W] arrays behind the terms (step time before and after ...), so
            that a row can be checked by hand.
        labels: named words per row, each a sequence of W.
    """

    names: tuple[str, ...]
    seconds: np.ndarray
    usd: np.ndarray
    kinds: tuple[TermKind, ...] = ()
    facts: tuple[tuple[str, np.ndarray], ...] = ()
    labels: tuple[tuple[str, Sequence[str]], ...] = ()

    def total_usd(self) -> np.ndarray:
        """J per worker, float64 [W]."""
        return self._sum(TermKind.COST)

    def score_usd(self) -> np.ndarray:
        """J plus what enters the score only, float64 [W]."""
        if TermKind.SCORE not in self.kinds:
            return self.total_usd()
        return self.total_usd() + self._sum(TermKind.SCORE)

    def matrix(self) -> TermMatrix:
        """Itself (see `TermSource`)."""
        return self

    def _sum(self, kind: TermKind) -> np.ndarray:
        if not self.kinds:
            return self.usd.sum(axis=1)
        return self.usd @ np.array([float(k is kind) for k in self.kinds])


class TermSource(Protocol):
    """Something that can spell the objective out; asked after the choice, for the record."""

    def matrix(self) -> TermMatrix:
        """The terms."""
        ...


class Ranking(NamedTuple):
    """A policy's answer.

    Attributes:
        chosen: row of the winner; feasible.
        runner_up: row of the next best feasible candidate, -1 when there is none.
        score: float64 [W]; the policy's own key, LOWER is better, +inf where infeasible.
        unit: unit of `score` ("usd", "requests", "cosine_distance", "draw" ...).
        fallback: why a simpler rule decided ("" when the policy itself did).
        terms: the objective behind the score when the policy priced the workers, else None.
        term_rows: int64 [R], rows the terms hold for (a policy may price a sample); None when
            they hold for all.
        excluded: reason -> bool [W], feasible rows the policy set aside (their score is
            +inf): not sampled, breaks the class's targets ...
        aside: the reason of the other feasible rows without a score; "" when there are none.
    """

    chosen: int
    runner_up: int
    score: np.ndarray
    unit: str
    fallback: str = ""
    terms: TermSource | None = None
    term_rows: np.ndarray | None = None
    excluded: tuple[tuple[str, np.ndarray], ...] = ()
    aside: str = ""

    def delta(self) -> float:
        """Runner-up's score minus the winner's, in `unit`; 0.0 without a runner-up."""
        if self.runner_up < 0:
            return 0.0
        return float(self.score[self.runner_up] - self.score[self.chosen])


class Policy(Protocol):
    """A placement rule. One file each in serving/policies, one registry."""

    @property
    def name(self) -> str:
        """Registry name, written into the record."""
        ...

    def rank(self, context: PlacementContext, rng: np.random.Generator) -> Ranking:
        """Chooses among the feasible rows; ties by a seeded draw from `rng`.

        Raises:
            Rejected: no row is feasible.
            ValueError: a NaN entered a score (never silently the winner).
        """
        ...


def looks_ahead(policy: Policy) -> bool:
    """Whether a rule prices decode with prefill, and so wants `PlacementContext.ahead`."""
    return bool(getattr(policy, "looks_ahead", False))
