"""One run of a fleet: arrivals, prefill, hand-over, decode, parking, on a virtual clock.

Every decision is the server's own `Router`; parking is its own rule. Workers take what the
catalogue's roofline says, which the router knows too; what it does not know are lengths, and what
a policy has switched off.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from serving.core.block_hash import BlockHasher
from serving.core.clock import ManualClock
from serving.core.costs import CellCost, CostBook, CostKey
from serving.core.errors import Rejected
from serving.core.placed import Placed
from serving.core.request import Request
from serving.core.router import Router
from serving.core.router_config import DEFAULT_TARGETS, RouterConfig
from serving.core.transfer import LinkSpeeds, TransferTimes
from serving.core.worker import Role, WorkerState
from serving.cost.catalogue import Catalogue
from serving.cost.surface import CostSurface, MeanRequest
from serving.fleet.fleet import Fleet
from serving.fleet.parking import ParkingLimits, ParkingRule
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.survival import SurvivalRows
from serving.policies.registry import make_policy
from serving.replay.fleets.config import FleetReplayConfig, PolicySection
from serving.replay.fleets.machines import Machine
from serving.replay.fleets.traffic import Domains, Traffic
from serving.replay.fleets.workers import DecodeSide, Meter, PrefillSide

_FOREVER_S = 1e9
_RETRY_S = 0.02
_TABLE_EVERY_S = 10.0
_FREE_LINKS = LinkSpeeds(
    latency_s=0.0, host_bytes_per_s=1e18, domain_bytes_per_s=1e18, network_bytes_per_s=1e18
)
_UNPADDED = tuple(range(1, 8193))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left behind; arrays over its N requests.

    Attributes:
        ttft_s, tpot_s: float64 [N]; tpot from the first token to the last, nan for one token.
        usd_powered, usd_busy: of all workers in the window.
        num_tokens: output tokens of the window.
        mean_powered: workers switched on, averaged over the window.
        mean_batch: requests per decode step, by tokens.
        cached_share: of prompt tokens.
        padding_share: of prefill tokens computed.
    """

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    usd_powered: float
    usd_busy: float
    num_tokens: int
    mean_powered: float
    mean_batch: float
    cached_share: float
    padding_share: float


class FleetSimulation:
    """One policy, one seed."""

    def __init__(
        self,
        config: FleetReplayConfig,
        policy: PolicySection,
        catalogue: Catalogue,
        machines: list[Machine],
        traffic: Traffic,
        domains: Domains | None,
        *,
        seed: int,
    ) -> None:
        self._config, self._policy, self._traffic = config, policy, traffic
        self._domains = domains
        self._clock = ManualClock()
        self._window = (traffic.section.warmup_s, traffic.section.seconds)
        self._machines = {m.info.worker_id: m for m in machines}
        self._meters = {worker_id: Meter(self._window) for worker_id in self._machines}
        self._prefill = {
            w: PrefillSide(m) for w, m in self._machines.items() if m.info.role is Role.PREFILL
        }
        self._decode = {
            w: DecodeSide(m, None, domains.layer_scale if domains else 1.0)
            for w, m in self._machines.items()
            if m.info.role is Role.DECODE
        }
        self._log_keep = None if domains is None else np.log1p(-domains.touched.astype(np.float64))
        self._surface = CostSurface(
            catalogue,
            mean_request=MeanRequest(
                prompt_tokens=traffic.section.prompt_tokens,
                output_tokens=traffic.section.output_tokens,
            ),
        )
        self._links = TransferTimes(self._surface.links(LinkSpeeds(), now_s=0.0))
        self._hashers = {p.block_tokens: BlockHasher(p.block_tokens) for p in config.pools}
        self._build_router(seed)
        num = len(traffic)
        self._asked: list[Request | None] = [None] * num
        self._source: list[str] = [""] * num
        self._first_s = np.full(num, np.nan)
        self._last_s = np.full(num, np.nan)
        self._num_open = num
        self._num_tokens = self._num_steps = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._order = 0

    def run(self) -> Outcome:
        """Runs until every request has ended."""
        for number, at_s in enumerate(self._traffic.arrival_s.tolist()):
            self._at(at_s, self._arrive, number)
        if self._parking is not None:
            self._at(self._config.parking.check_every_s, self._park)
        if self._policy.table:
            self._at(0.0, self._push_table)
        while self._num_open:
            at_s, _, action, arguments = heapq.heappop(self._events)
            self._clock.now_s = at_s
            action(*arguments)
        return self._outcome()

    # Requests.

    def _arrive(self, number: int) -> None:
        self._asked[number] = self._traffic.request(number)
        self._place_prefill(number)

    def _place_prefill(self, number: int) -> None:
        request = self._request(number)
        try:
            placed = self._router.place_prefill(request, signature=self._signature(number))
        except Rejected:
            self._at(self._clock.now_s + _RETRY_S, self._place_prefill, number)
            return
        worker_id = placed.worker.worker_id
        self._source[number] = worker_id
        if len(placed.block_hashes):
            self._index.route(worker_id, placed.block_hashes, self._clock.now_s)
        side = self._prefill[worker_id]
        side.enqueue(number, request.num_prompt_tokens, self._hashes(request, placed))
        if not side.running:
            self._step_prefill(worker_id)

    def _hashes(self, request: Request, placed: Placed) -> np.ndarray:
        if len(placed.block_hashes):
            return placed.block_hashes
        block = placed.worker.capabilities.block_size_tokens
        return self._hashers[block].hashes(request.token_ids)

    def _step_prefill(self, worker_id: str) -> None:
        seconds = self._prefill[worker_id].start()
        if seconds is not None:
            now_s = self._clock.now_s
            self._meters[worker_id].busy(now_s, now_s + seconds)
            self._at(now_s + seconds, self._end_prefill, worker_id)

    def _end_prefill(self, worker_id: str) -> None:
        for number in self._prefill[worker_id].finish():
            self._first_s[number] = self._clock.now_s
            self._router.prefill_done(str(number))
            self._place_decode(number)
        self._step_prefill(worker_id)

    def _place_decode(self, number: int) -> None:
        request, source = self._request(number), self._source[number]
        left = int(self._traffic.output_tokens[number]) - 1
        if left <= 0:
            self._end(number)
            return
        try:
            placed = self._router.place_decode(
                request, signature=self._signature(number), prefill_worker_id=source
            )
        except Rejected:
            self._at(self._clock.now_s + _RETRY_S, self._place_decode, number)
            return
        machine = self._machines[source]
        num_bytes = machine.cost.kv_bytes_per_token * request.num_prompt_tokens
        seconds = self._links.seconds(num_bytes, machine.info, (placed.worker,))
        arrives_s = self._clock.now_s + float(seconds[0])
        self._at(arrives_s, self._join, number, placed.worker.worker_id, left)

    def _join(self, number: int, worker_id: str, left: int) -> None:
        side = self._decode[worker_id]
        keep = self._log_keep
        row = None if keep is None else keep[int(self._traffic.prompt[number])]
        side.join(number, self._request(number).num_prompt_tokens + 1, left, row)
        if not side.running:
            self._step_decode(worker_id)
        self._router.first_token(str(number))

    def _step_decode(self, worker_id: str) -> None:
        seconds = self._decode[worker_id].start()
        if seconds is not None:
            now_s = self._clock.now_s
            self._meters[worker_id].busy(now_s, now_s + seconds)
            self._at(now_s + seconds, self._end_decode, worker_id)

    def _end_decode(self, worker_id: str) -> None:
        side = self._decode[worker_id]
        if self._window[0] <= self._clock.now_s <= self._window[1]:
            self._num_tokens += side.num_active
            self._num_steps += 1
        for number in side.finish():
            self._end(number)
        self._step_decode(worker_id)

    def _end(self, number: int) -> None:
        self._last_s[number] = self._clock.now_s
        num = int(self._traffic.output_tokens[number])
        self._router.done(str(number), num, None, None)
        self._asked[number] = None
        self._num_open -= 1

    # The fleet.

    def _park(self) -> None:
        assert self._parking is not None
        parking, now_s = self._config.parking, self._clock.now_s
        for worker_id, state in self._parking.decide(self._fleet, now_s):
            if state is WorkerState.PARKED:
                self._fleet.set_state(worker_id, state)
                self._meters[worker_id].switch(on=False, now_s=now_s)
            else:
                # It is paid for while it loads its weights, and takes work afterwards.
                self._fleet.set_state(worker_id, WorkerState.STARTING)
                self._meters[worker_id].switch(on=True, now_s=now_s)
                self._at(now_s + parking.wake_s, self._wake, worker_id)
        self._at(now_s + parking.check_every_s, self._park)

    def _wake(self, worker_id: str) -> None:
        self._fleet.set_state(worker_id, WorkerState.READY)

    def _push_table(self) -> None:
        now_s = self._clock.now_s
        self._router.set_table(
            self._surface.table(self._fleet.workers, DEFAULT_TARGETS, now_s=now_s)
        )
        self._at(now_s + _TABLE_EVERY_S, self._push_table)

    # Small things.

    def _build_router(self, seed: int) -> None:
        policy, off, domains = self._policy, self._policy.without, self._domains
        survival = None
        if domains is not None:
            survival = SurvivalRows(domains.profiles.size, layer_scale=domains.layer_scale)
        self._fleet = Fleet(stale_after_s=_FOREVER_S, survival=survival)
        self._index = PrefixIndex()
        costs: dict[CostKey, CellCost] = {}
        for machine in self._machines.values():
            info = machine.info
            costs[info.model, info.hardware, info.num_chips] = machine.cost
            if "padding" in off and info.capabilities.buckets_tokens:
                # The router believes that every number of tokens is compiled.
                limits = replace(
                    info.capabilities,
                    buckets_tokens=_UNPADDED[: info.capabilities.buckets_tokens[-1]],
                )
                info = replace(info, capabilities=limits)
            self._fleet.add(info, 0.0)
            self._index.add_worker(info)
        limits = self._config.parking
        self._parking = None
        if "parking" not in off:
            self._parking = ParkingRule(
                ParkingLimits(
                    idle_after_s=limits.idle_after_s,
                    min_awake=limits.min_awake,
                    wake_above=limits.wake_above,
                    wake_tokens=limits.wake_tokens,
                    prefill_use_above=limits.prefill_use_above,
                )
            )
        links = self._surface.links(LinkSpeeds(), now_s=0.0)
        options = dict(policy.decode_options)
        if "packing" in off:
            options.pop("share_c", None)
        self._router = Router(
            self._fleet,
            costs=CostBook(costs),
            prefill_policy=make_policy(policy.prefill, **policy.prefill_options),
            decode_policy=make_policy(policy.decode, **options),
            config=RouterConfig(
                seed=seed,
                lease_s=_FOREVER_S,
                links=_FREE_LINKS if "transfer" in off else links,
                record_share=0.0,
                record_everyone=0.0,
                explain_requests=1,
                max_unrecorded=1,
            ),
            clock=self._clock,
            prefix_index=self._index,
            experts=None if domains is None else domains.profiles,
            observers=() if self._parking is None else (self._parking,),
        )
        if "prefix" in off:
            self._router.set_switch("prefix_index", on=False)
        if "experts" in off and domains is not None:
            self._router.set_switch("experts", on=False)

    def _signature(self, number: int):
        domains = self._domains
        return None if domains is None else domains.signatures[int(self._traffic.prompt[number])]

    def _request(self, number: int) -> Request:
        asked = self._asked[number]
        assert asked is not None
        return asked

    def _at(self, at_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at_s, self._order, action, arguments))
        self._order += 1

    def _outcome(self) -> Outcome:
        end_s = max(self._clock.now_s, self._window[1])
        for meter in self._meters.values():
            meter.switch(on=False, now_s=end_s)
        output = self._traffic.output_tokens
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot_s = np.where(output > 1, (self._last_s - self._first_s) / (output - 1), np.nan)
        machines, meters = self._machines, self._meters
        sides = self._prefill.values()
        computed = sum(side.num_computed_tokens for side in sides)
        cached = sum(side.num_cached_tokens for side in sides)
        prompts = sum(side.num_prompt_tokens for side in sides)
        span_s = self._window[1] - self._window[0]
        return Outcome(
            ttft_s=self._first_s - self._traffic.arrival_s,
            tpot_s=tpot_s,
            usd_powered=sum(m.powered_s * machines[w].usd_per_s for w, m in meters.items()),
            usd_busy=sum(m.busy_s * machines[w].usd_per_s for w, m in meters.items()),
            num_tokens=self._num_tokens,
            mean_powered=sum(m.powered_s for m in meters.values()) / span_s,
            mean_batch=self._num_tokens / max(1, self._num_steps),
            cached_share=cached / max(1, prompts),
            padding_share=1.0 - (prompts - cached) / max(1, computed),
        )
