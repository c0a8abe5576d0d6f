"""Fleets of catalogue hardware for tests of the cost surface in the decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from serving.core.block_hash import BlockHasher
from serving.core.clock import ManualClock
from serving.core.costs import CostBook
from serving.core.decision import Candidate, DecisionRecord, LogLine, TermKind
from serving.core.lease import Reservation
from serving.core.request import SloClass
from serving.core.router import Router
from serving.core.router_config import DEFAULT_TARGETS, RouterConfig
from serving.core.transfer import LinkSpeeds
from serving.core.worker import Phase, WorkerInfo
from serving.cost.catalogue import Catalogue, load_catalogue
from serving.cost.surface import CostSurface
from serving.fleet.fleet import Fleet
from serving.fleet.prefix_index import PrefixIndex
from serving.policies.registry import make_policy
from tests.serving import decision_parts as parts

CONFIGS = Path(__file__).parents[2] / "configs"
TARGETS = DEFAULT_TARGETS
BLOCK = 16


def catalogue() -> Catalogue:
    return load_catalogue(CONFIGS / "serving" / "variants.yaml", CONFIGS / "hardware")


class SurfaceRig:
    """A router over workers priced by the catalogue.

    Attributes:
        lines: what was recorded.
    """

    def __init__(self, workers: list[WorkerInfo], **changes: Any) -> None:
        survival = changes.pop("survival", None)
        self.clock = ManualClock(1000.0, wall_offset_s=1e9)
        self.fleet = Fleet(survival=survival)
        self.index = PrefixIndex()
        self.surface = CostSurface(catalogue())
        for worker in workers:
            self.fleet.add(worker, self.clock.now_s)
            self.index.add_worker(worker)
        self.lines: list[LogLine] = []
        costs = self.surface.coefficients(workers)
        links = self.surface.links(LinkSpeeds(latency_s=0.0), now_s=self.clock.now_s)
        given = {
            "costs": CostBook(changes.pop("cells", costs)),
            "prefill_policy": make_policy("cost_p2c"),
            "decode_policy": make_policy("expert_cost"),
            "config": RouterConfig(record_everyone=1.0, links=changes.pop("links", links)),
            "clock": self.clock,
            "sink": self,
            "prefix_index": self.index,
            "table": self.surface.table(workers, TARGETS, now_s=self.clock.now_s),
        }
        self.router = Router(self.fleet, **(given | changes))
        self._count = 0

    def write(self, line: LogLine) -> None:
        self.lines.append(line)

    def token_s(self, worker_id: str) -> float:
        """Prefill seconds per token of a worker."""
        view = self.router.view(Phase.PREFILL)
        cost = CostBook(self.surface.coefficients(view.workers)).get(
            view.workers[view.index_of(worker_id)]
        )
        assert cost is not None
        return cost.prefill.token_s

    def queue(self, worker_id: str, *prompts: int) -> None:
        """Puts prompts into a worker's queue; the first one is under way."""
        for tokens in prompts:
            self._reserve(worker_id, Phase.PREFILL, prefill_tokens=tokens)

    def decode(self, worker_id: str, num: int, *, context: float = 2048.0, **changes: Any) -> None:
        """Requests that decode on a worker, half done."""
        for _ in range(num):
            given = {"kv_tokens": context, "decode_tokens": 150.0, "kv_blocks": 16}
            self._reserve(worker_id, Phase.DECODE, **(given | changes))

    def hold(self, worker_id: str, token_ids: np.ndarray) -> None:
        """The worker holds a prompt's blocks."""
        hashes = BlockHasher(BLOCK).hashes(token_ids)
        self.index.route(worker_id, hashes, self.clock.now_s)

    def ask(self, num_tokens: int = 2048, **changes: Any):
        """A class B request that arrives now."""
        self._count += 1
        given = {
            "arrival_s": self.clock.now_s,
            "token_ids": np.arange(7, 7 + num_tokens, dtype=np.int32),
            "max_tokens": 600,
            "length": parts.LengthBand(mean_tokens=300.0, p95_tokens=600.0, source="test"),
            "slo": SloClass.B,
        }
        return parts.request(f"ask-{self._count}", **(given | changes))

    def prefill(self, asked, **changes: Any) -> DecisionRecord:
        """The record of placing a prompt."""
        placed = self.router.place_prefill(asked, **changes)
        self.router.record(placed)
        line = self.router.explain(asked.request_id)[-1]
        assert isinstance(line, DecisionRecord)
        return line

    def _reserve(self, worker_id: str, phase: Phase, **changes: Any) -> None:
        self._count += 1
        self.fleet.reserve(
            Reservation(
                lease_id=f"other-{self._count}",
                request_id=f"other-{self._count}",
                phase=phase,
                worker_id=worker_id,
                reserved_at_s=self.clock.now_s,
                expires_at_s=self.clock.now_s + 100.0,
                lambda_usd_per_s=TARGETS[SloClass.B].lambda_usd_per_s,
                **changes,
            )
        )


def term(candidate: Candidate, name: str):
    return next(term for term in candidate.terms if term.name == name)


def by_worker(record: DecisionRecord) -> dict[str, Candidate]:
    return {candidate.worker_id: candidate for candidate in record.stage.candidates}


def winner_without(record: DecisionRecord, *names: str) -> str:
    """Who would win if these terms did not exist; an INFO term is taken back."""

    def total(candidate: Candidate) -> float:
        out = candidate.total_usd
        for one in candidate.terms:
            if one.name in names:
                out += one.usd if one.kind is TermKind.INFO else -one.usd
        return out

    feasible = [c for c in record.stage.candidates if c.score is not None]
    return min(feasible, key=total).worker_id
