"""Affinity gives way to load, the copy is noted, serves, and is taken back."""

import numpy as np
import pytest

from serving.core.block_hash import BlockHasher
from serving.core.worker import Phase, Role
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.replicas import PrefixReplicas, ReplicaLimits
from tests.serving import decision_parts as parts


class Rig(parts.Rig):
    """Three prefill workers behind a router that credits and watches prefixes."""

    def __init__(self, **limits):
        self.count = 0
        self.index = PrefixIndex()
        self.replicas = PrefixReplicas(self.index, ReplicaLimits(**limits))
        super().__init__(
            num_prefill=0,
            num_decode=1,
            prefill="expert_cost",
            experts=False,
            regions=None,
            prefix_index=self.index,
            observers=(self.replicas,),
        )
        for i in range(3):
            worker = parts.worker(
                f"p{i}",
                Role.PREFILL,
                capabilities=parts.capabilities(buckets_tokens=(), num_kv_blocks=1 << 16),
            )
            self.fleet.add(worker, self.clock.now_s)
            self.index.add_worker(worker)

    def ask(self, name, num_tokens=1024):
        """A prompt that begins like every other one and ends like none."""
        token_ids = np.arange(1, num_tokens + 1, dtype=np.int32)
        self.count += 1
        token_ids[1024:] += 100_000 * self.count
        asked = parts.request(name, arrival_s=self.clock.now_s, max_tokens=10, token_ids=token_ids)
        placed = self.router.place_prefill(asked)
        self.router.record(placed)
        self.index.route(placed.worker.worker_id, placed.block_hashes, self.clock.now_s)
        return placed

    def held(self, worker_id, num_tokens=1024):
        hashes = BlockHasher(16).hashes(np.arange(1, num_tokens + 1, dtype=np.int32))
        view = self.router.view(Phase.PREFILL)
        return int(self.index.cached_blocks(hashes, view.workers)[view.index_of(worker_id)]) * 16


def test_a_hot_prefix_is_copied_when_its_worker_is_too_busy_and_no_sooner():
    rig = Rig()
    first = rig.ask("a")
    home = first.worker.worker_id
    rig.router.prefill_done("a")
    # Its siblings stick while the queue costs less than the prefix saves.
    placed = [rig.ask(f"s{i}", 1100) for i in range(40)]
    at = next(i for i, p in enumerate(placed) if p.worker.worker_id != home)
    assert at > 2
    copy = placed[at]
    assert (copy.passed_over, copy.passed_over_tokens) == (home, 1024)
    event = rig.replicas.events[0]
    assert (event.kind, event.holder, event.worker_id) == ("made", home, copy.worker.worker_id)
    assert (event.num_tokens, event.request_id) == (1024, copy.request_id)
    record = rig.router.explain(copy.request_id)[0]
    assert record.inputs["passed_over"] == home
    # The copy serves: later siblings hit it there, and nobody is overrun.
    assert any(p.cached_tokens >= 1024 for p in placed if p.worker is copy.worker)
    queued = rig.router.view(Phase.PREFILL).queued_prefill_tokens
    assert queued.max() < 3 * queued.mean()


def test_an_unused_copy_is_taken_back_and_its_holder_keeps_the_prefix():
    rig = Rig(undo_after_s=6.0)
    home = rig.ask("a").worker.worker_id
    for i in range(40):
        rig.ask(f"s{i}", 1100)
    copies = {e.worker_id for e in rig.replicas.events}
    assert copies
    for name in ("a", *(f"s{i}" for i in range(40))):
        rig.router.prefill_done(name)
    rig.clock.advance(4.0)
    rig.index.advance(rig.clock.now_s)
    # One that is used stays.
    assert rig.ask("again", 1100).cached_tokens >= 1024
    rig.clock.advance(3.0)
    before = len(rig.replicas)
    undone = rig.replicas.sweep(rig.clock.now_s)
    assert 0 < undone <= before
    gone = [e for e in rig.replicas.events if e.kind == "undone"]
    assert len(gone) == undone
    for event in gone:
        assert rig.held(event.worker_id) == 0
    assert rig.held(home) == 1024
    assert rig.replicas.sweep(rig.clock.now_s) == 0


def test_what_an_engine_confirmed_is_not_forgotten():
    from serving.fleet.kv_events import BlocksStored, EventBatch

    rig = Rig()
    hashes = BlockHasher(16).hashes(np.arange(1, 129, dtype=np.int32))
    rig.index.route("p0", hashes, rig.clock.now_s)
    stored = BlocksStored(hashes=hashes[:4])
    batch = EventBatch(worker_id="p0", seq=0, events=(stored,), epoch=0)
    rig.index.apply(batch, rig.clock.now_s)
    rig.index.forget("p0", hashes)
    assert rig.held("p0", 128) == 64


def test_copies_watched_are_bounded():
    rig = Rig(max_copies=1, min_tokens=16)
    for number in range(3):
        asked = parts.request(
            f"h{number}",
            arrival_s=rig.clock.now_s,
            token_ids=np.arange(number * 5000, number * 5000 + 1024, dtype=np.int32),
        )
        placed = rig.router.place_prefill(asked)
        rig.router.record(placed)
        placed.passed_over, placed.passed_over_tokens = "p0", 1024
        rig.replicas.placed(placed, rig.clock.now_s)
    assert len(rig.replicas) == 1
    assert [e.kind for e in rig.replicas.events] == ["made", "made", "undone", "made", "undone"]


@pytest.mark.parametrize("field", ["min_tokens", "undo_after_s", "max_copies", "max_events"])
def test_limits_name_their_field(field):
    with pytest.raises(ValueError, match=field):
        ReplicaLimits(**{field: 0})
