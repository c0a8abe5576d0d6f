"""The ledger against a model that recounts everything: nothing leaks, nothing goes negative."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from serving.core.errors import LeaseError
from serving.core.lease import Reservation
from serving.core.worker import Phase
from serving.fleet.ledger import Ledger

SLOTS = 3
ROWS = np.arange(64)
IDS = st.sampled_from([f"r{i}" for i in range(5)])
PHASES = st.sampled_from(list(Phase))


def reservation(request_id="r", phase=Phase.DECODE, slot=0, *, now_s=0.0, **changes):
    given = {
        "lease_id": f"{request_id}/{phase.value}/{now_s}",
        "request_id": request_id,
        "phase": phase,
        "worker_id": f"w{slot}",
        "reserved_at_s": now_s,
        "expires_at_s": now_s + 10.0,
        "kv_blocks": 7,
        "kv_tokens": 100.0,
        "prefill_tokens": 0 if phase is Phase.DECODE else 64,
        "decode_tokens": 20.0 if phase is Phase.DECODE else 0.0,
        "tokens_per_s": 10.0,
        "lambda_usd_per_s": 1e-3,
    }
    return Reservation(**(given | changes))


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.ledger = Ledger(capacity=2)
        self.ledger.grow(SLOTS)
        self.open = {}
        self.now_s = 0.0
        self.reports = [0] * SLOTS

    @rule(request_id=IDS, phase=PHASES, slot=st.integers(0, SLOTS - 1), blocks=st.integers(0, 9))
    def reserve(self, request_id, phase, slot, blocks):
        limit = 0.01 * (blocks + 1)
        asked = reservation(
            request_id, phase, slot, now_s=self.now_s, kv_blocks=blocks, tpot_limit_s=limit
        )
        known = self.open.get((request_id, phase))
        if known is not None and known["slot"] != slot:
            with pytest.raises(LeaseError, match="already holds"):
                self.ledger.reserve(asked, slot)
            return
        lease, is_new = self.ledger.reserve(asked, slot)
        assert is_new == (known is None)
        if known is not None:
            assert lease.lease_id == known["lease_id"]
            return
        prefill = self.open.get((request_id, Phase.PREFILL))
        if phase is Phase.DECODE and prefill is not None and prefill["slot"] == slot:
            prefill["counted"] = False
        self.open[request_id, phase] = {
            "slot": slot,
            "lease_id": lease.lease_id,
            "expires_at_s": lease.expires_at_s,
            "blocks": blocks,
            "limit": limit,
            "counted": True,
            "report": self.reports[slot],
            "at": self.now_s,
        }

    @rule(request_id=IDS, phase=PHASES)
    def release(self, request_id, phase):
        gone = self.ledger.release(request_id, phase)
        assert (gone is not None) == (self.open.pop((request_id, phase), None) is not None)

    @rule(request_id=IDS, phase=PHASES, by=st.floats(0.0, 30.0))
    def renew(self, request_id, phase, by):
        known = self.open.get((request_id, phase))
        if known is None:
            with pytest.raises(LeaseError):
                self.ledger.renew("nothing", self.now_s + by)
            return
        lease = self.ledger.renew(known["lease_id"], self.now_s + by)
        known["expires_at_s"] = max(known["expires_at_s"], self.now_s + by)
        assert lease.expires_at_s == known["expires_at_s"]

    @rule(seconds=st.floats(0.0, 8.0))
    def let_time_pass(self, seconds):
        self.now_s += seconds
        due = {(lease.request_id, lease.phase) for lease in self.ledger.expired(self.now_s)}
        assert due == {k for k, v in self.open.items() if v["expires_at_s"] <= self.now_s}
        for request_id, phase in due:
            assert self.ledger.release(request_id, phase) is not None
            del self.open[request_id, phase]

    @rule(slot=st.integers(0, SLOTS - 1))
    def report(self, slot):
        self.ledger.acknowledge(slot)
        self.reports[slot] += 1

    @invariant()
    def sums_are_what_is_open(self):
        ledger = self.ledger
        assert len(ledger) == len(self.open)
        for slot in range(SLOTS):
            here = [(key, v) for key, v in self.open.items() if v["slot"] == slot]
            counted = [v for _, v in here if v["counted"]]
            fresh = [v for v in counted if v["report"] == self.reports[slot]]
            decoding = [v for (_, phase), v in here if phase is Phase.DECODE]
            prefills = [v for (_, phase), v in here if phase is Phase.PREFILL]
            sums = ledger.sums[:, slot]
            assert sums[Ledger.INFLIGHT] == len(counted)
            assert sums[Ledger.KV_BLOCKS] == sum(v["blocks"] for v in counted)
            assert sums[Ledger.UNACKED] == len(fresh)
            assert sums[Ledger.UNACKED_KV] == sum(v["blocks"] for v in fresh)
            assert sums[Ledger.DECODING] == len(decoding)
            assert sums[Ledger.QUEUED_TOKENS] == 64 * len(prefills)
            assert sums[Ledger.KV_TOKENS] == 100.0 * len(counted)
            assert sums[Ledger.TPOT_LIMIT] == min((v["limit"] for v in decoding), default=np.inf)
            assert len(ledger.open_on(slot)) == len(here)
        slots, remaining, price = ledger.member_rows(self.now_s, ROWS)
        assert sorted(slots.tolist()) == sorted(
            v["slot"] for (_, phase), v in self.open.items() if phase is Phase.DECODE
        )
        assert (remaining >= 1).all()
        assert (price == 1e-3).all()


def test_any_order_of_events_keeps_the_sums():
    run_state_machine_as_test(
        LedgerMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


def test_remaining_output_shrinks_from_the_first_token_and_never_ends():
    ledger = Ledger()
    ledger.reserve(reservation(now_s=0.0), 0)
    assert ledger.member_rows(1.0, ROWS)[1].tolist() == [10.0]
    ledger.started("r", 1.5)
    assert ledger.member_rows(2.0, ROWS)[1].tolist() == [15.0]
    assert ledger.member_rows(99.0, ROWS)[1].tolist() == [1.0]
    ledger.started("unknown", 1.0)


def test_growing_keeps_what_is_there():
    ledger = Ledger(capacity=1)
    ledger.reserve(reservation(slot=0), 0)
    ledger.grow(4)
    ledger.reserve(reservation("b", slot=3), 3)
    assert ledger.sums[Ledger.INFLIGHT].tolist() == [1, 0, 0, 1]
    assert ledger.lease_of("b", Phase.DECODE).worker_id == "w3"
    assert ledger.find("b", Phase.PREFILL) is None
