"""The replay: one run of one policy over one workload, event by event on a virtual clock.

    arrival         a router places the prompt; the prefill worker queues it
    prefill step    ends: its prompts' first tokens; a router places their decode
    hand-over       ends: the request joins its decode worker
    decode          runs on its own (replay/decode_kernel.py) and is caught up with before
                    anything reads it or adds to it; first and last tokens reach the router then,
                    each at its own time
    telemetry       workers report to every router, late or not at all
    fleet events    slow-down, crash, leave, join

Every decision is made by `serving.core.router.Router`; nothing of it is repeated here.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serving.core.block_hash import BlockHasher
from serving.core.clock import ManualClock
from serving.core.costs import CellCost
from serving.core.decision import OutcomeStatus
from serving.core.errors import ConfigError, InvalidRequest, Rejected
from serving.core.placed import Placed
from serving.core.request import Request, SloClass
from serving.core.worker import WorkerInfo, WorkerState
from serving.fleet.registry import LoadReport
from serving.replay.config import EventSection, PolicySection, Scenario
from serving.replay.decode import DecodeFleet
from serving.replay.decode_kernel import Times
from serving.replay.learned import Learned, SignatureSourceOfPrompts
from serving.replay.outcome import Outcome
from serving.replay.prefill import PrefillWorker
from serving.replay.replica import Replica, SampleSink, build_replica, workers_of
from serving.replay.service import PrefillTimes
from serving.replay.workload import Workload

_LOSS_STREAM = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Service times of a cell's workers, and what a calibrated router knows of them."""

    decode: Times
    prefill: PrefillTimes
    cost: CellCost


class Simulation:
    """One run.

    Args:
        scenario: the cell.
        policy: decode policy.
        workload: the requests; the same object serves every policy.
        machine: service times.
        learned: fitted signatures, or None.
        seed: of the run.
        record_share: share of decisions kept as lines.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: PolicySection,
        workload: Workload,
        machine: Machine,
        learned: Learned | None,
        *,
        seed: int,
        record_share: float = 0.0,
    ) -> None:
        self.scenario = scenario
        self.workload = workload
        self.clock = ManualClock()
        self._sink = SampleSink()
        fleet, routers = scenario.fleet, scenario.routers
        prefill, decode = workers_of(scenario)
        self._prefill_infos, self._decode_infos = prefill, decode
        present = [*prefill, *decode[: fleet.num_decode]]
        self.replicas = [
            build_replica(
                number,
                scenario,
                policy,
                seed=seed,
                cost=machine.cost,
                clock=self.clock,
                workers=present,
                learned=learned,
                domains=workload.bank.header.domains,
                sink=self._sink if record_share > 0 else None,
                record_share=record_share,
            )
            for number in range(routers.num)
        ]
        self._present = {worker.worker_id for worker in present}
        self._decode_row = {worker.worker_id: row for row, worker in enumerate(decode)}
        self._prefill_row = {worker.worker_id: row for row, worker in enumerate(prefill)}
        rows = workload.rows()
        arrival_s = workload.arrivals.arrival_s
        measured = workload.measured
        window = (float(arrival_s[measured.start]), float(arrival_s[measured.stop - 1]))
        self.decode = DecodeFleet(
            len(decode),
            max_num_seqs=fleet.max_num_seqs,
            kv_blocks=fleet.kv_blocks,
            requests=rows,
            times=machine.decode,
            window_s=window,
            recompute_token_s=machine.cost.prefill.token_s,
        )
        self.prefill = [
            PrefillWorker(
                machine.prefill,
                chunk_tokens=fleet.chunk_tokens,
                buckets_tokens=fleet.buckets_tokens,
                block_tokens=fleet.block_tokens,
                cache_blocks=fleet.cache_blocks,
            )
            for _ in prefill
        ]
        source = scenario.signatures.source
        artefact = None if learned is None else learned.artefact
        self._signatures = SignatureSourceOfPrompts(artefact, workload.bank, source)
        self._hasher = BlockHasher(fleet.block_tokens)
        self._kv_bytes = machine.cost.kv_bytes_per_token
        self._link_free_s = np.zeros(len(prefill))
        self._loss = np.random.default_rng([seed, _LOSS_STREAM])
        num = len(workload)
        self._asked: list[Request | None] = [None] * num
        self._placed_prefill = np.full(num, -1, np.int64)
        self._placed_decode = np.full(num, -1, np.int64)
        self._joined = np.zeros(num, bool)
        self._exclude: dict[int, frozenset[str]] = {}
        self._ttft_s = np.full(num, np.nan)
        self._tpot_s = np.full(num, np.nan)
        self._rejected = np.zeros(num, bool)
        self._num_retries = 0
        self._num_open = num
        self._dead: set[str] = set()
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._order = 0
        self._epoch = np.zeros(len(prefill), np.int64)
        self._settled_s = -np.inf

    def run(self, on_progress: Callable[[int], None] | None = None) -> Outcome:
        """Runs until every request has ended.

        Args:
            on_progress: told how many more requests ended, now and then.
        """
        scenario = self.scenario
        for request, at_s in enumerate(self.workload.arrivals.arrival_s.tolist()):
            self._events.append((at_s, request, self._arrive, (request,)))
        self._order = len(self._events)
        for event in scenario.events:
            self._at(event.at_s, self._happen, event)
        self._at(0.0, self._report)
        heapq.heapify(self._events)
        told = self._num_open
        while self._num_open:
            if not self._events:
                # Decode is all that is left; it needs no event to go on.
                self._settle(np.inf)
                continue
            self.clock.now_s, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
            if on_progress is not None and told - self._num_open >= 500:
                on_progress(told - self._num_open)
                told = self._num_open
        if on_progress is not None and told:
            on_progress(told)
        return self._outcome()

    # Requests.

    def _arrive(self, request: int) -> None:
        workload = self.workload
        output = int(workload.output_tokens[request])
        self._asked[request] = Request(
            request_id=str(request),
            token_ids=workload.token_ids(request),
            max_tokens=max(workload.max_tokens, output),
            arrival_s=self.clock.now_s,
            product=workload.domain(request),
            slo=SloClass(self.scenario.requests.slo),
            length=workload.length(request),
        )
        self._place_prefill(request)

    def _place_prefill(self, request: int) -> None:
        asked = self._request(request)
        exclude = self._exclude.get(request, frozenset())
        router = self._replica(request).router
        try:
            placed = router.place_prefill(asked, exclude=exclude)
        except Rejected:
            self._later(request, self._place_prefill)
            return
        except InvalidRequest as error:
            self._reject(request, error.reason)
            return
        row = self._prefill_row[placed.worker.worker_id]
        self._placed_prefill[request] = row
        worker = self.prefill[row]
        worker.enqueue(request, asked.num_prompt_tokens, self._hashes(asked, placed))
        if worker.idle and placed.worker.worker_id not in self._dead:
            self._start_prefill(row)

    def _hashes(self, asked: Request, placed: Placed) -> np.ndarray:
        if len(placed.block_hashes) or not self.scenario.fleet.cache_blocks:
            return placed.block_hashes
        return self._hasher.hashes(asked.token_ids)

    def _start_prefill(self, row: int) -> None:
        seconds = self.prefill[row].start()
        if seconds is not None:
            self._at(self.clock.now_s + seconds, self._end_prefill, row, int(self._epoch[row]))

    def _end_prefill(self, row: int, epoch: int) -> None:
        if epoch != self._epoch[row]:
            return  # the worker died in this step
        for request in self.prefill[row].finish():
            if np.isnan(self._ttft_s[request]):
                self._ttft_s[request] = self.clock.now_s - self._request(request).arrival_s
            self._replica(request).router.prefill_done(str(request))
            self._place_decode(request)
        self._start_prefill(row)

    def _place_decode(self, request: int) -> None:
        self._catch_up()
        asked = self._request(request)
        source = self._prefill_infos[int(self._placed_prefill[request])]
        try:
            placed = self._replica(request).router.place_decode(
                asked,
                signature=self._signatures.of(int(self.workload.signature_of[request])),
                prefill_worker_id=source.worker_id,
                exclude=self._exclude.get(request, frozenset()),
            )
        except Rejected:
            self._later(request, self._place_decode)
            return
        except InvalidRequest as error:
            self._reject(request, error.reason)
            return
        row = self._decode_row[placed.worker.worker_id]
        self._placed_decode[request] = row
        self.decode.requests.context[request] = asked.num_prompt_tokens
        self._at(self._hand_over_s(request), self._join, request, row)

    def _hand_over_s(self, request: int) -> float:
        """When the KV has arrived; a prefill worker's hand-overs leave one after another."""
        row = int(self._placed_prefill[request])
        num_bytes = self._kv_bytes * self._request(request).num_prompt_tokens
        begins_s = max(self.clock.now_s, float(self._link_free_s[row]))
        fleet = self.scenario.fleet
        ends_s = begins_s + num_bytes / fleet.link_bytes_per_s
        self._link_free_s[row] = ends_s
        return ends_s + fleet.link_latency_s

    def _join(self, request: int, row: int) -> None:
        if self._placed_decode[request] != row:
            return  # placed anew since: the worker was lost
        if self._decode_infos[row].worker_id in self._dead:
            return  # nobody knows yet that it is lost
        self._catch_up()
        self._joined[request] = True
        self.decode.join(row, request, self.clock.now_s)

    def _catch_up(self) -> None:
        """Lets decode run up to now."""
        now_s = self.clock.now_s
        if self._settled_s < now_s:
            self._settle(now_s)
            self.clock.now_s = self._settled_s = now_s

    def _settle(self, until_s: float) -> None:
        """Lets decode run up to an event, and tells the routers what came of it."""
        requests = self.decode.requests
        for ending in self.decode.advance(until_s):
            self.clock.now_s = ending.time_s
            request = ending.request
            router = self._replica(request).router
            if not ending.finished:
                router.first_token(str(request))
                continue
            num = int(requests.target[request])
            if num > 1:
                span_s = ending.time_s - float(requests.first_s[request])
                self._tpot_s[request] = span_s / (num - 1)
            tpot_s = float(self._tpot_s[request]) if num > 1 else None
            router.done(str(request), num, float(self._ttft_s[request]), tpot_s)
            self._close(request)

    def _later(self, request: int, place: Callable[[int], None]) -> None:
        """Nobody has room: asks again, or gives up."""
        routers = self.scenario.routers
        waited_s = self.clock.now_s - self._request(request).arrival_s
        if waited_s >= routers.give_up_s:
            self._reject(request, "NO_CAPACITY")
            return
        self._num_retries += 1
        self._at(self.clock.now_s + routers.retry_s, place, request)

    def _reject(self, request: int, error: str) -> None:
        self._rejected[request] = True
        self._replica(request).router.failed(str(request), OutcomeStatus.REJECTED, error)
        self._close(request)

    def _close(self, request: int) -> None:
        self._asked[request] = None
        self._exclude.pop(request, None)
        self._num_open -= 1

    # The fleet.

    def _report(self) -> None:
        """Every worker reports, routers refit and let time pass; again after the interval."""
        self._catch_up()
        routers, now_s = self.scenario.routers, self.clock.now_s
        reports = self._loads()
        for replica in self.replicas:
            heard = reports
            if routers.telemetry_loss > 0:
                kept = self._loss.random(len(reports)) >= routers.telemetry_loss
                heard = [item for item, keep in zip(reports, kept, strict=True) if keep]
            if routers.telemetry_delay_s > 0:
                self._at(now_s + routers.telemetry_delay_s, self._hear, replica, heard)
            else:
                self._hear(replica, heard)
            replica.refit(now_s)
            if replica.index is not None:
                replica.index.advance(now_s)
        self._at(now_s + routers.telemetry_interval_s, self._report)

    def _hear(self, replica: Replica, reports: list[tuple[str, LoadReport]]) -> None:
        for worker_id, report in reports:
            if replica.fleet.find(worker_id) is not None:
                replica.fleet.update(worker_id, report, self.clock.now_s)

    def _loads(self) -> list[tuple[str, LoadReport]]:
        """What every worker that is there says of itself."""
        present, decode = self._present, self.decode
        reports = [
            (worker_id, LoadReport(num_running=num, num_waiting=0, kv_blocks_used=0))
            for worker_id, num in zip(
                self._prefill_row, (worker.num_queued for worker in self.prefill), strict=True
            )
            if worker_id in present
        ]
        told = zip(
            self._decode_row,
            decode.running().tolist(),
            decode.waiting(),
            decode.workers.kv_blocks.tolist(),
            decode.measured_factors(),
            strict=True,
        )
        for worker_id, running, waiting, blocks, factor in told:
            if worker_id in present:
                load = LoadReport(
                    num_running=running,
                    num_waiting=waiting,
                    kv_blocks_used=blocks,
                    speed_factor=factor,
                )
                reports.append((worker_id, load))
        return reports

    def _happen(self, event: EventSection) -> None:
        self._catch_up()
        if event.worker not in (self._decode_row.keys() | self._prefill_row.keys()):
            raise ConfigError("events.worker", event.worker, "no such worker in this fleet")
        if event.kind == "slow":
            if event.worker in self._decode_row:
                self.decode.set_factor(self._decode_row[event.worker], event.factor)
            else:
                self.prefill[self._prefill_row[event.worker]].factor = event.factor
        elif event.kind == "join":
            self._present.add(event.worker)
            info = self._info(event.worker)
            for replica in self.replicas:
                replica.add(info, self.clock.now_s)
        elif event.kind == "leave":
            for replica in self.replicas:
                replica.fleet.set_state(event.worker, WorkerState.DRAINING)
        else:
            self._crash(event.worker)

    def _crash(self, worker_id: str) -> None:
        """The worker dies now; the routers notice later."""
        self._present.discard(worker_id)
        self._dead.add(worker_id)
        if worker_id in self._decode_row:
            row = self._decode_row[worker_id]
            lost = self.decode.lose(row) + self._under_way(row)
        else:
            row = self._prefill_row[worker_id]
            self._epoch[row] += 1
            lost = self.prefill[row].lose()
        self._at(
            self.clock.now_s + self.scenario.routers.lost_after_s, self._notice, worker_id, lost
        )

    def _notice(self, worker_id: str, lost: list[int]) -> None:
        self._catch_up()
        for replica in self.replicas:
            if replica.fleet.find(worker_id) is not None:
                replica.fleet.set_state(worker_id, WorkerState.LOST)
        if worker_id in self._decode_row:
            # Whoever was sent there before anybody noticed is lost as well.
            late = self._under_way(self._decode_row[worker_id])
        else:
            late = self.prefill[self._prefill_row[worker_id]].lose()
        for request in dict.fromkeys([*lost, *late]):
            self._num_retries += 1
            self._exclude[request] = self._exclude.get(request, frozenset()) | {worker_id}
            self._restart(request)

    def _under_way(self, row: int) -> list[int]:
        """Requests whose KV is on its way to a decode worker."""
        sent = np.flatnonzero((self._placed_decode == row) & ~self._joined).tolist()
        return [request for request in sent if self._asked[request] is not None]

    def _restart(self, request: int) -> None:
        """A lost request runs again from its prompt and the tokens so far."""
        asked, rows = self._request(request), self.decode.requests
        produced = int(rows.produced[request])
        have = asked.num_prompt_tokens - self.workload.num_prompt_tokens(request)
        self._placed_decode[request] = -1
        self._joined[request] = False
        if produced > have:
            fresh = np.full(produced - have, request & 0x1FFFF, np.int32)
            left = max(1, int(rows.target[request]) - produced)
            self._asked[request] = dataclasses.replace(
                asked,
                token_ids=np.concatenate([asked.token_ids, fresh]),
                max_tokens=left,
            )
        self._place_prefill(request)

    # Small things.

    def _at(self, at_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at_s, self._order, action, arguments))
        self._order += 1

    def _request(self, request: int) -> Request:
        asked = self._asked[request]
        assert asked is not None
        return asked

    def _replica(self, request: int) -> Replica:
        return self.replicas[request % len(self.replicas)]

    def _info(self, worker_id: str) -> WorkerInfo:
        if worker_id in self._decode_row:
            return self._decode_infos[self._decode_row[worker_id]]
        return self._prefill_infos[self._prefill_row[worker_id]]

    def _outcome(self) -> Outcome:
        for replica in self.replicas:
            replica.router.recent_ids()  # writes the lines that are still pending
        return Outcome(
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            decode_worker=self._placed_decode,
            rejected=self._rejected,
            num_retries=self._num_retries,
            num_preempted=self.decode.num_preempted,
            step_sums=self.decode.tally.sums,
            step_bins=self.decode.tally.bins,
            num_cached_tokens=sum(worker.num_cached_tokens for worker in self.prefill),
            num_prompt_tokens=sum(worker.num_prompt_tokens for worker in self.prefill),
            end_s=self.clock.now_s,
            lines=self._sink.lines,
        )
