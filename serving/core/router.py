"""The router: a request's way from arrival to a recorded decision, without I/O.

    1. arrive             the request was frozen at the door
    2. admit              limits (core/admission.py)
    3. variant, pool      the routing table's cells, cheapest first; holes are stepped over
    4. prefill worker     place_prefill
    5. prefill runs       prefill_done
    6. decode worker      place_decode
    7. decode runs        first_token, then done or failed; after a loss place_decode again
    8. record             a line per stage once the answer is sent, an outcome line at the end

Clock, draws and snapshot are values handed in, so the server and the replay run this same
code. One event loop owns a router: nothing here locks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from serving.core.admission import check_limits
from serving.core.clock import Clock
from serving.core.costs import CostBook
from serving.core.decision import LogLine, OutcomeRecord, OutcomeStatus
from serving.core.draws import KeyedDraws
from serving.core.errors import InvalidRequest, LeaseError, Rejected, RejectReason
from serving.core.experts import ExpertProfiles
from serving.core.guard import SignatureGuard
from serving.core.lease import Lease
from serving.core.live import LiveControls, LiveParts
from serving.core.placed import OpenRequest, Placed, PlacementObserver
from serving.core.placement import Policy, Regions
from serving.core.placing import placed_of
from serving.core.ports import DecisionSink, FleetPort, PrefixIndex
from serving.core.recorder import Recorder
from serving.core.recording import gather
from serving.core.request import Request
from serving.core.router_config import RouterConfig
from serving.core.routing_table import RoutingTable
from serving.core.signature import Signature
from serving.core.stage import (
    Learned,
    StageChoice,
    StageChooser,
    StageInput,
    expect_step,
    reservation,
)
from serving.core.transfer import LinkSpeeds
from serving.core.worker import FleetView, Phase, WorkerInfo


class Router(LiveControls):
    """Places requests on workers and remembers what it decided.

    Args:
        fleet: workers and reservations.
        costs: coefficients per cell.
        prefill_policy, decode_policy: placement rules.
        config: see `RouterConfig`.
        clock: where time comes from.
        sink: takes decision and outcome lines; None keeps them in the ring only.
        prefix_index: who holds which prefix; None credits nobody.
        experts: decode profiles; None scores experts by their mean number.
        regions: fitted regions for ELDR's rules; None makes those fall back.
        table: routing table; None is the static fallback over the fleet.
        fallback_policy: decides while the "policy" switch is off; None keeps the policies.
        guard: lowers trust in signatures when steps disagree with them; None trusts them.
        observers: told of each recorded placement.
        cpu_s: reads CPU seconds for `decide_us`; None records 0.
    """

    def __init__(
        self,
        fleet: FleetPort,
        *,
        costs: CostBook,
        prefill_policy: Policy,
        decode_policy: Policy,
        config: RouterConfig,
        clock: Clock,
        sink: DecisionSink | None = None,
        prefix_index: PrefixIndex | None = None,
        experts: ExpertProfiles | None = None,
        regions: Regions | None = None,
        table: RoutingTable | None = None,
        fallback_policy: Policy | None = None,
        guard: SignatureGuard | None = None,
        observers: tuple[PlacementObserver, ...] = (),
        cpu_s: Callable[[], float] | None = None,
    ) -> None:
        self.fleet = fleet
        self.config = config
        self._clock = clock
        self._live = LiveParts(
            policies={Phase.PREFILL: prefill_policy, Phase.DECODE: decode_policy},
            fallback_policy=fallback_policy,
            parts=Learned(
                experts=experts,
                regions=regions,
                prefix_index=prefix_index,
                signature_weight=config.signature_weight,
            ),
            table=table,
            guard=guard,
        )
        self._chooser = StageChooser(costs, config)
        self._draws = KeyedDraws(config.seed)
        self._sequence = 0
        self._turns = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self._open: dict[str, OpenRequest] = {}
        self._recorder = Recorder(config, sink, observers)
        self._guard = guard
        self._cpu_s = cpu_s

    @property
    def num_open(self) -> int:
        """Requests placed and not ended."""
        return len(self._open)

    # The request's way.

    def place_prefill(
        self,
        request: Request,
        *,
        signature: Signature | None = None,
        exclude: frozenset[str] = frozenset(),
    ) -> Placed:
        """Chooses variant, pool and prefill worker, and reserves it.

        Idempotent: the same request_id with the same prompt gets the same answer while its
        reservation is open. A prompt that continues the open one (a re-run from the tokens
        so far) is placed anew.

        Args:
            request: what to place.
            signature: the predicted one, for policies that look ahead to decode.
            exclude: workers that lost this request or refused it; a reservation on one of
                them is given back first and counts as a retry.

        Raises:
            InvalidRequest: a limit is broken, or the id is open with another prompt.
            UnknownModel: nobody serves the model.
            Rejected: nobody alive, or no room.
        """
        known = self._known(request)
        placed = self._still_placed(known, Phase.PREFILL, exclude)
        if placed is not None:
            return placed
        return self._place(
            request,
            Phase.PREFILL,
            known,
            signature=None if "signature" in self._live.off else signature,
            exclude=exclude,
        )

    def place_decode(
        self,
        request: Request,
        *,
        signature: Signature | None,
        prefill_worker_id: str | None,
        exclude: frozenset[str] = frozenset(),
        only: str | None = None,
    ) -> Placed:
        """Chooses the decode worker in the request's cell, and reserves it.

        Idempotent like `place_prefill`.

        Args:
            request: the same request.
            signature: from prefill, cached blocks or the token table; None without one.
            prefill_worker_id: whose KV moves; None when not known (yet).
            exclude: as in `place_prefill`.
            only: the one worker to consider: an aggregated worker decodes what it prefilled.

        Raises:
            InvalidRequest, UnknownModel, Rejected: as in `place_prefill`.
        """
        known = self._known(request)
        placed = self._still_placed(known, Phase.DECODE, exclude)
        if placed is not None:
            return placed
        if only is not None:
            exclude |= {w.worker_id for w in self.fleet.workers if w.worker_id != only}
        source = None if prefill_worker_id is None else self.fleet.find(prefill_worker_id)
        return self._place(
            request,
            Phase.DECODE,
            known,
            signature=None if "signature" in self._live.off else signature,
            source=source,
            exclude=exclude,
        )

    def prefill_done(self, request_id: str) -> None:
        """Prefill answered: its work no longer waits on that worker."""
        if self.fleet.release(request_id, Phase.PREFILL) and request_id in self._open:
            # Nothing is reserved until decode is placed; the request itself still times out.
            self._open[request_id].expires_at_s = self._clock.monotonic_s() + self.config.lease_s

    def first_token(self, request_id: str) -> None:
        """The client saw its first token: decode is under way."""
        self.fleet.release(request_id, Phase.PREFILL)
        self.fleet.started(request_id, self._clock.monotonic_s())

    def done(
        self,
        request_id: str,
        num_output_tokens: int,
        ttft_s: float | None,
        tpot_s: float | None,
        *,
        usd: float | None = None,
    ) -> None:
        """The request ended well: reservations go back, the outcome line is written."""
        self._end(
            request_id,
            OutcomeStatus.OK,
            num_output_tokens=num_output_tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            usd=usd,
        )

    def failed(
        self,
        request_id: str,
        status: OutcomeStatus,
        error: str,
        *,
        num_output_tokens: int = 0,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
    ) -> None:
        """The request ended otherwise; a REJECTED one need not have been placed.

        `error` is the reason name of the error tree; the rest is what the client got before.
        """
        self._end(
            request_id,
            status,
            error=error,
            num_output_tokens=num_output_tokens,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )

    # Leases.

    def renew(self, lease_id: str, extend_s: float) -> Lease:
        """Extends a lease to `extend_s` seconds from now (never shortens it).

        Raises:
            LeaseError: unknown, released or expired, or `extend_s` is not positive.
        """
        if not 0 < extend_s < float("inf"):
            raise LeaseError(lease_id, f"{extend_s=} must be finite and > 0")
        lease = self.fleet.renew(lease_id, self._clock.monotonic_s() + extend_s)
        known = self._open.get(lease.request_id)
        if known is not None:
            known.expires_at_s = max(known.expires_at_s, lease.expires_at_s)
            if lease.phase in known.placed:
                known.placed[lease.phase].lease = lease
        return lease

    def expire(self, now_s: float) -> list[Lease]:
        """Takes back leases whose time is up and ends requests that hold none any more.

        Call it every second or so, with monotonic seconds.

        Returns:
            The leases taken back.
        """
        leases = self.fleet.expire(now_s)
        for request_id in [r for r, known in self._open.items() if known.expires_at_s <= now_s]:
            if all(self.fleet.lease_of(request_id, phase) is None for phase in Phase):
                self._end(request_id, OutcomeStatus.LEASE_EXPIRED, error="LEASE_EXPIRED")
        return leases

    # Records.

    def record(self, placed: Placed) -> None:
        """Writes a placed stage's decision line; doing it again is harmless."""
        self._recorder.record(placed)

    def explain(self, request_id: str) -> list[LogLine]:
        """Decision and outcome lines of a recent request, oldest first; [] when unknown."""
        return self._recorder.lines(request_id)

    def recent_ids(self) -> list[str]:
        """Request ids that `explain` still knows, longest untouched first."""
        return self._recorder.request_ids()

    # The fleet.

    def view(self, phase: Phase) -> FleetView:
        """The fleet as the next decision would see it."""
        return self.fleet.view(phase, self._clock.monotonic_s())

    def set_links(self, links: LinkSpeeds) -> None:
        """Hand-over bandwidths, priors and measured ones, from the next decision on."""
        self._chooser.set_links(links)

    # Inside.

    def _place(
        self,
        request: Request,
        phase: Phase,
        known: OpenRequest | None,
        *,
        signature: Signature | None = None,
        source: WorkerInfo | None = None,
        exclude: frozenset[str] = frozenset(),
    ) -> Placed:
        began_s = self._cpu_s() if self._cpu_s is not None else 0.0
        now_s = self._clock.monotonic_s()
        live = self._live
        table = live.table(self.fleet.workers)
        if known is None:
            check_limits(request, self.config.limits, num_open=len(self._open), now_s=now_s)
            choices = table.choices(request)
        else:
            choices = ((known.cell,),) if known.placed else table.choices(request)
        view = self.fleet.view(phase, now_s)
        prefill = phase is Phase.PREFILL
        refused: Rejected | None = None
        for cells in choices:
            given = StageInput(
                request=request,
                phase=phase,
                cells=cells,
                view=view,
                signature=signature,
                source=source,
                exclude=exclude,
                sequence=self._sequence,
                turn=self._turns[phase],
                decode_view=(lambda: self.fleet.view(Phase.DECODE, now_s)) if prefill else None,
            )
            try:
                choice = self._chooser.choose(
                    given, live.policy(phase), live.learned, self._draws.at(self._sequence)
                )
            except Rejected as error:
                refused = refused or error
                continue
            return self._accept(given, choice, known, table.version, began_s)
        if refused is None:
            raise Rejected(RejectReason.NO_LIVE_WORKER, f"table {table.version!r} names no cell")
        raise refused

    def _accept(
        self,
        given: StageInput,
        choice: StageChoice,
        known: OpenRequest | None,
        table_version: str,
        began_s: float,
    ) -> Placed:
        """Reserves the chosen worker and keeps what the record will need."""
        request, phase, ranking = given.request, given.phase, choice.ranking
        worker = given.view.workers[ranking.chosen]
        cell = given.cells[0]
        if len(given.cells) > 1:
            cell = next(c for c in given.cells if c.key == (worker.model, worker.pool))
        evidence = gather(
            choice.context,
            ranking,
            choice.found,
            everyone=self._recorder.everyone(given.sequence),
            decide_us=0.0 if self._cpu_s is None else (self._cpu_s() - began_s) * 1e6,
        )
        lease = self.fleet.reserve(reservation(given, choice, self.config))
        self._sequence += 1
        self._turns[phase] += 1
        placed = placed_of(
            given,
            choice,
            cell,
            lease=lease,
            policy=self._live.policy(phase).name,
            table_version=table_version,
            decided_at_s=self._clock.wall_s(),
            switches=self._live.off,
            evidence=evidence,
        )
        if self._guard is not None:
            expect_step(self._guard, given, choice)
        if known is None:
            known = self._open[request.request_id] = OpenRequest(request, cell, lease.expires_at_s)
        known.cell = cell
        known.placed[phase] = placed
        known.unrecorded.append(placed)
        if lease.expires_at_s > known.expires_at_s:
            known.expires_at_s = lease.expires_at_s
        self._recorder.add(placed)
        return placed

    def _known(self, request: Request) -> OpenRequest | None:
        """The open request of this id, moved on to a continuation of its prompt if it is one."""
        known = self._open.get(request.request_id)
        if known is None or known.request is request:
            return known
        had = known.request.token_ids
        if not np.array_equal(had, request.token_ids[: had.size]):
            raise InvalidRequest(
                "request_id", request.request_id, "is open with another prompt; ids are unique"
            )
        if request.token_ids.size > had.size:
            for phase in tuple(known.placed):
                self._give_up(known, phase)
            known.retries += 1
        known.request = request
        return known

    def _still_placed(
        self, known: OpenRequest | None, phase: Phase, exclude: frozenset[str]
    ) -> Placed | None:
        """A stage's open placement; one that failed is freed, to be placed anew."""
        placed = None if known is None else known.placed.get(phase)
        if known is None or placed is None:
            return None
        lease = self.fleet.lease_of(known.request.request_id, phase)
        if lease is not None and lease.worker_id not in exclude:
            return placed
        self._give_up(known, phase)
        known.retries += 1
        return None

    def _give_up(self, known: OpenRequest, phase: Phase) -> None:
        self.record(known.placed.pop(phase))
        self.fleet.release(known.request.request_id, phase)

    def _end(
        self,
        request_id: str,
        status: OutcomeStatus,
        *,
        error: str = "",
        num_output_tokens: int = 0,
        ttft_s: float | None = None,
        tpot_s: float | None = None,
        usd: float | None = None,
    ) -> None:
        known = self._open.pop(request_id, None)
        if known is None and status is not OutcomeStatus.REJECTED:
            return
        retries = 0
        if self._guard is not None:
            self._guard.realise(request_id, tpot_s if status is OutcomeStatus.OK else None)
            self._live.refresh()
        if known is not None:
            retries = known.retries
            for phase in Phase:
                self.fleet.release(request_id, phase)
            for placed in known.unrecorded:
                self.record(placed)
        self._recorder.write(
            OutcomeRecord(
                request_id=request_id,
                ended_at_s=self._clock.wall_s(),
                status=status,
                num_output_tokens=num_output_tokens,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                usd=usd,
                error=error,
                retries=retries,
            )
        )
