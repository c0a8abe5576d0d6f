"""A router replica of the replay: the server's Router and Fleet, on a virtual clock.

Everything that decides is the server's own code; this file only puts it together and hands it
what the simulated workers report.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from serving.core.clock import ManualClock
from serving.core.costs import CellCost, CostBook
from serving.core.decision import LogLine
from serving.core.guard import SignatureGuard
from serving.core.placed import Placed, PlacementObserver
from serving.core.router import Router
from serving.core.router_config import RouterConfig
from serving.core.transfer import LinkSpeeds
from serving.core.worker import Capabilities, Phase, Role, WorkerInfo
from serving.fleet.fleet import Fleet
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.survival import SurvivalRows
from serving.policies.online_regions import OnlineRegions
from serving.policies.registry import make_policy
from serving.replay.config import PolicySection, Scenario
from serving.replay.learned import Learned, bind_regions

MODEL, HARDWARE, POOL = "replay-model", "replay-machine", "replay"
_LEASE_S = 1e9  # nobody's answer gets lost here, so nothing has to expire
_REFIT_POLICIES = ("eldr_online",)


class SampleSink:
    """Keeps decision and outcome lines in memory."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def write(self, line: LogLine) -> None:
        """Takes one line."""
        self.lines.append(line)


class PrefixCredits:
    """Credits a prompt's blocks to the prefill worker it went to."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def placed(self, placed: Placed, now_s: float) -> None:
        """Takes one placement."""
        if placed.phase is Phase.PREFILL:
            with contextlib.suppress(KeyError):  # the worker left in the meantime
                self._index.route(placed.worker.worker_id, placed.block_hashes, now_s)


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One router and what belongs to it.

    Attributes:
        router, fleet: the server's.
        index: prefix index, None without.
        online: regions that follow the traffic, None without.
        guard: watches signatures, None without.
    """

    router: Router
    fleet: Fleet
    index: PrefixIndex | None
    online: OnlineRegions | None
    guard: SignatureGuard | None

    def refit(self, now_s: float) -> None:
        """Refits the regions if their time has come."""
        if self.online is None:
            return
        job = self.online.due(now_s)
        if job is not None:
            self.router.set_regions(self.online.adopt(job, job.run()))

    def add(self, worker: WorkerInfo, now_s: float) -> None:
        """A worker joins, or comes back under another epoch."""
        self.fleet.add(worker, now_s)
        if self.index is not None and worker.role is Role.PREFILL:
            self.index.add_worker(worker)


def workers_of(scenario: Scenario) -> tuple[list[WorkerInfo], list[WorkerInfo]]:
    """Prefill workers p0.. and decode workers d0.., spare ones included."""
    fleet = scenario.fleet

    def worker(name: str, role: Role) -> WorkerInfo:
        buckets = fleet.buckets_tokens if role is Role.PREFILL else ()
        return WorkerInfo(
            worker_id=name,
            address=f"{name}:0",
            role=role,
            pool=POOL,
            model=MODEL,
            hardware=HARDWARE,
            capabilities=Capabilities(
                block_size_tokens=fleet.block_tokens,
                page_size_tokens=fleet.block_tokens,
                max_num_seqs=fleet.max_num_seqs,
                max_context_tokens=fleet.max_context_tokens,
                # Prefill keeps prompts only until they are handed over.
                num_kv_blocks=fleet.kv_blocks if role is Role.DECODE else 1 << 30,
                buckets_tokens=buckets,
            ),
        )

    prefill = [worker(f"p{i}", Role.PREFILL) for i in range(fleet.num_prefill)]
    total = fleet.num_decode + fleet.num_spare
    return prefill, [worker(f"d{i}", Role.DECODE) for i in range(total)]


def build_replica(
    number: int,
    scenario: Scenario,
    policy: PolicySection,
    *,
    seed: int,
    cost: CellCost,
    clock: ManualClock,
    workers: list[WorkerInfo],
    learned: Learned | None,
    domains: tuple[str, ...],
    sink: SampleSink | None,
    record_share: float,
) -> Replica:
    """Puts a replica together.

    Args:
        number: which of the scenario's routers.
        scenario: the cell.
        policy: decode policy.
        seed: of the run.
        cost: calibrated coefficients.
        clock: the run's.
        workers: who is there at the start.
        learned: fitted signatures, or None.
        domains: labels for the oracle.
        sink: takes lines, or None.
        record_share: share of decisions with a line.

    Raises:
        ConfigError: unknown policy or option.
    """
    survival = None
    if learned is not None:
        model = learned.artefact.model
        survival = SurvivalRows(
            model.size,
            layer_scale=model.num_layers / model.num_masked_layers,
            pseudo_members=policy.pseudo_members,
            drift_rate=policy.drift_rate,
        )
    routers = scenario.routers
    fleet = Fleet(
        stale_after_s=max(10.0, 5.0 * (routers.telemetry_interval_s + routers.telemetry_delay_s)),
        num_replicas=routers.num,
        survival=survival,
    )
    observers: list[PlacementObserver] = []
    index = None
    if routers.prefix_index and scenario.fleet.cache_blocks > 0:
        index = PrefixIndex()
        observers.append(PrefixCredits(index))
    decoders = tuple(w.worker_id for w in workers if w.role is Role.DECODE)
    regions = None if learned is None else learned.regions(policy.regions, decoders)
    online = None
    if regions is not None and (policy.refit or policy.name in _REFIT_POLICIES):
        online = OnlineRegions(regions)
        observers.append(online)
    options = dict(policy.options)
    if policy.name == "domain":
        options.setdefault("labels", domains)
    links = LinkSpeeds(
        latency_s=scenario.fleet.link_latency_s,
        network_bytes_per_s=scenario.fleet.link_bytes_per_s,
    )
    guard = SignatureGuard() if policy.guard else None
    router = Router(
        fleet,
        costs=CostBook({(MODEL, HARDWARE): cost}),
        prefill_policy=make_policy(routers.prefill_policy),
        decode_policy=make_policy(policy.name, **options),
        config=RouterConfig(
            router_id=f"router-{number}",
            seed=seed * 1009 + number,
            lease_s=_LEASE_S,
            links=links,
            record_share=record_share,
            explain_requests=1,
            # Recorded at once: observers see each placement when it is made.
            max_unrecorded=1,
        ),
        clock=clock,
        sink=sink,
        prefix_index=index,
        experts=None if learned is None else learned.experts,
        regions=regions,
        guard=guard,
        observers=tuple(observers),
    )
    replica = Replica(router=router, fleet=fleet, index=index, online=online, guard=guard)
    for worker in workers:
        replica.add(worker, clock.now_s)
    bind_regions(fleet, regions)
    return replica
