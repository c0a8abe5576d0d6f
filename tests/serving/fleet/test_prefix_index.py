"""The index under a lossy channel: what it promises, and what it must never say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.worker import Capabilities, Role, WorkerInfo
from serving.fleet.event_stream import StreamState
from serving.fleet.kv_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch
from serving.fleet.prefix_index import PrefixIndex, PrefixIndexConfig, Tier


def worker(worker_id="w0", *, epoch=0, num_kv_blocks=1000):
    return WorkerInfo(
        worker_id=worker_id,
        address="127.0.0.1:1",
        role=Role.BOTH,
        pool="p",
        model="m",
        hardware="h",
        epoch=epoch,
        capabilities=Capabilities(
            block_size_tokens=16,
            page_size_tokens=16,
            max_num_seqs=8,
            max_context_tokens=4096,
            num_kv_blocks=num_kv_blocks,
        ),
    )


def hashes(*values):
    return np.array(values, np.uint64)


def stored(*values, parent=None, medium="GPU"):
    return BlocksStored(hashes=hashes(*values), parent=parent, medium=medium)


def removed(*values, medium="GPU"):
    return BlocksRemoved(hashes=hashes(*values), medium=medium)


def batch(seq, *events, worker_id="w0", dp_rank=0, epoch=None, at=0.0):
    return EventBatch(
        worker_id=worker_id, dp_rank=dp_rank, seq=seq, events=events, epoch=epoch, sent_at_s=at
    )


@pytest.fixture
def index():
    index = PrefixIndex(PrefixIndexConfig(max_blocks=100, max_predicted=100))
    index.add_worker(worker())
    return index


def cached(index, *values, workers=None):
    return index.cached_blocks(hashes(*values), workers or (worker(),)).tolist()


def test_events_are_credited_and_taken_back(index):
    assert cached(index, 1, 2, 3) == [0]
    index.apply(batch(0, stored(1, 2, 3)), 0.0)
    assert cached(index, 1, 2, 3, 4) == [3]
    assert cached(index, 1, 2, 9) == [2]
    index.apply(batch(1, removed(3)), 0.0)
    assert cached(index, 1, 2, 3, 4) == [2]
    index.apply(batch(2, CacheCleared(), stored(1)), 0.0)
    assert cached(index, 1, 2) == [1]
    assert cached(index) == [0]


def test_answer_follows_the_order_of_the_view(index):
    names = [f"w{n}" for n in range(70)]
    for name in names:
        index.add_worker(worker(name))
        index.apply(batch(0, stored(*range(1, int(name[1:]) + 2)), worker_id=name), 0.0)
    view = tuple(worker(name) for name in reversed(names))
    expected = [int(name[1:]) + 1 for name in reversed(names)]
    prompt = np.arange(1, 100, dtype=np.uint64)
    answer = index.cached_blocks(prompt, view)
    assert (answer.dtype, answer.tolist()) == (np.int32, expected)
    stranger = worker("unknown")
    assert index.cached_blocks(prompt, (view[3], stranger, view[0])).tolist() == [67, 0, 70]


def test_ranks_of_a_worker_are_separate_caches(index):
    index.add_worker(worker("w1"))
    index.apply(batch(0, stored(1, 2)), 0.0)
    index.apply(batch(0, stored(1, 2, 3, 4), dp_rank=3), 0.0)
    index.apply(batch(0, stored(1), worker_id="w1"), 0.0)
    assert index.cached_by_rank(hashes(1, 2, 3, 4), "w0") == {0: 2, 3: 4}
    assert cached(index, 1, 2, 3, 4, workers=(worker("w1"), worker())) == [1, 4]
    index.apply(batch(1, CacheCleared(), dp_rank=3), 0.0)
    assert cached(index, 1, 2, 3, 4, workers=(worker("w1"), worker())) == [1, 2]


def test_slower_tiers_count_at_their_credit(index):
    index.apply(batch(0, stored(1, 2), stored(2, 3, 4, 5, parent=1, medium="cpu")), 0.0)
    index.apply(batch(1, stored(6, parent=5, medium="DISK"), stored(7, parent=6)), 0.0)
    prompt = hashes(1, 2, 3, 4, 5, 6, 7, 8)
    assert index.cached_by_tier(prompt, (worker(),)).tolist() == [[2], [5], [7]]
    # 2 on the device, 3 on the host at one half, 2 behind a disk block at one fifth.
    assert cached(index, *prompt.tolist()) == [3]
    index.apply(batch(2, removed(2)), 0.0)
    assert index.cached_by_tier(prompt, (worker(),)).tolist() == [[1], [5], [7]]
    index.apply(batch(3, removed(2, medium=None)), 0.0)
    assert index.cached_by_tier(prompt, (worker(),)).tolist() == [[1], [1], [1]]


def test_unknown_medium_is_counted_not_credited(index):
    index.apply(batch(0, stored(1, medium="TAPE")), 0.0)
    assert cached(index, 1) == [0]
    assert index.stats().num_unknown_medium == 1


def test_gap_withholds_credit_until_it_is_filled(index):
    index.apply(batch(0, stored(1, 2)), 0.0)
    assert index.apply(batch(2, stored(3, parent=2)), 0.5) is StreamState.UNCERTAIN
    assert cached(index, 1, 2, 3) == [0]
    (report,) = index.streams()
    assert (report.missing, report.state) == ((1, 1), StreamState.UNCERTAIN)
    assert index.apply(batch(1, removed(2)), 0.6) is StreamState.EXACT
    assert cached(index, 1, 2, 3) == [1]


def test_gap_that_stays_open_is_given_up_and_the_rest_is_sound(index):
    index.apply(batch(0, stored(1, 2)), 0.0)
    index.apply(batch(2, stored(7, 8)), 1.0)
    index.advance(2.9)
    assert cached(index, 7, 8) == [0]
    index.advance(3.0)
    (report,) = index.streams()
    assert (report.state, report.missing_for_s) == (StreamState.PARTIAL, 0.0)
    assert cached(index, 1, 2) == [0], "a removal may have been lost"
    assert cached(index, 7, 8) == [2]


def test_resync_sets_the_view(index):
    index.apply(batch(4, removed(1)), 0.0)
    index.resync("w0", next_seq=4, stored=[stored(1, 2), stored(3, parent=2)])
    assert cached(index, 1, 2, 3) == [0], "message 4 waited and was applied on top"
    assert cached(index, 2) == [0]
    assert index.streams()[0].state is StreamState.EXACT


@pytest.mark.parametrize("how", ["registry", "event", "time"])
def test_restart_drops_everything_of_the_worker(index, how):
    index.add_worker(worker("w1"))
    index.apply(batch(0, stored(1, 2), worker_id="w1"), 0.0)
    index.apply(batch(0, stored(1, 2), at=5.0), 0.0)
    index.route("w0", hashes(1, 2, 3), 0.0)
    new = worker(epoch=0 if how == "time" else 1)
    if how == "registry":
        assert cached(index, 1, 2, workers=(new,)) == [0], "the view may know before the index"
        index.add_worker(new)
    elif how == "event":
        index.apply(batch(0, stored(9), epoch=1), 0.0)
        index.add_worker(new)
        assert cached(index, 9, workers=(new,)) == [1], "not dropped a second time"
    else:
        index.apply(batch(0, stored(9), at=6.0), 0.0)
    assert cached(index, 1, 2, workers=(new, worker("w1"))) == [0, 2]


def test_routed_prompt_is_credited_at_once_and_for_a_while(index):
    index.route("w0", hashes(1, 2, 3), 10.0)
    assert cached(index, 1, 2, 3) == [3]
    index.advance(129.9)
    assert cached(index, 1, 2, 3) == [3], "no events: the approximate time to live"
    index.advance(130.0)
    assert cached(index, 1, 2, 3) == [0]
    assert index.stats().num_blocks == 0


def test_prediction_for_a_publishing_worker_is_short_and_ends_with_the_facts(index):
    index.apply(batch(0, stored(50)), 0.0)
    index.route("w0", hashes(1, 2, 3), 0.0)
    index.apply(batch(1, stored(1, 2), removed(2)), 1.0)
    assert cached(index, 1, 2, 3) == [1], "dropped is dropped, predicted or not"
    index.apply(batch(2, stored(2, parent=1)), 1.0)
    assert cached(index, 1, 2, 3) == [3]
    index.advance(10.0)
    assert cached(index, 1, 2, 3) == [2], "3 was never confirmed"


def test_approximate_view_holds_no_more_than_the_worker(index):
    small = worker("small", num_kv_blocks=4)
    index.add_worker(small)
    index.route("small", hashes(1, 2, 3), 0.0)
    index.route("small", hashes(7, 8), 1.0)
    assert cached(index, 1, 2, 3, workers=(small,)) == [2]
    assert cached(index, 7, 8, workers=(small,)) == [2]


def test_removed_worker_is_unknown(index):
    index.apply(batch(0, stored(1)), 0.0)
    index.remove_worker("w0")
    assert cached(index, 1) == [0]
    with pytest.raises(KeyError, match="w0"):
        index.apply(batch(1, stored(2)), 0.0)
    index.add_worker(worker())
    assert cached(index, 1) == [0]


def test_memory_is_bounded_whatever_arrives(index):
    rng = np.random.default_rng(0)
    for seq in range(60):
        values = rng.integers(1, 1 << 63, 30, dtype=np.uint64)
        index.apply(batch(seq, BlocksStored(hashes=values)), float(seq))
        index.route("w0", rng.integers(1, 1 << 63, 30, dtype=np.uint64), float(seq))
        assert index.stats().num_blocks <= 100
        assert index.stats().num_predicted <= 100
    assert index.stats().num_evicted > 0


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"max_blocks": 0}, "max_blocks=0 must be >= 1"),
        ({"approximate_ttl_s": 0.0}, "approximate_ttl_s=0.0 must be > 0"),
        ({"gap_timeout_s": float("nan")}, "gap_timeout_s=nan must be > 0"),
        ({"tiers": ()}, "must be distinct and not empty"),
        ({"tiers": (Tier(name="a", mediums=("X", "X"), credit=1.0),)}, "must be distinct"),
    ],
)
def test_config_names_field_and_rule(fields, rule):
    with pytest.raises(ValueError, match=rule):
        PrefixIndexConfig(**fields)


def test_credit_is_a_fraction():
    with pytest.raises(ValueError, match=r"credit=1.5 of tier 'x' must be in \[0, 1\]"):
        Tier(name="x", mediums=("X",), credit=1.5)


class Engine:
    """A worker's real cache and the messages it sent: the truth the index is held against."""

    def __init__(self):
        self.blocks = set()
        self.history = [set()]
        self.sent = []

    def send(self, *events, epoch):
        for event in events:
            match event:
                case BlocksStored():
                    self.blocks |= set(event.hashes.tolist())
                case BlocksRemoved():
                    self.blocks -= set(event.hashes.tolist())
                case CacheCleared():
                    self.blocks = set()
        message = batch(len(self.sent), *events, epoch=epoch, at=epoch * 1000.0 + len(self.sent))
        self.sent.append(message)
        self.history.append(set(self.blocks))
        return message


def depth_in(blocks, prompt):
    return next((d for d, h in enumerate(prompt) if h not in blocks), len(prompt))


CHAINS = [[1, 2, 3, 4], [1, 2, 13]]
STORED = st.tuples(st.sampled_from(CHAINS), st.sampled_from([0, 0, 0, 1, 2]), st.integers(1, 4))
REMOVED = st.lists(st.sampled_from([1, 2, 3, 13]), min_size=1, max_size=2)
EVENT = st.one_of(STORED, STORED, REMOVED, REMOVED, st.none())


def event_of(drawn):
    match drawn:
        case None:
            return CacheCleared()
        case list():
            return removed(*drawn)
        case (chain, start, length):
            start %= len(chain)
            return stored(
                *chain[start : start + length], parent=chain[start - 1] if start else None
            )


@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    st.lists(st.lists(EVENT, min_size=1, max_size=2), min_size=12, max_size=25),
    st.booleans(),
    st.integers(1, 4),
)
def test_lost_repeated_reordered_messages(data, messages, with_epochs, max_waiting):
    """The promise of `event_stream`, checked after every delivery.

    EXACT equals the engine as of its last applied message, PARTIAL never exceeds it, and
    UNCERTAIN says nothing. Restarts, losses, repeats and any order are drawn.
    """
    index = PrefixIndex(PrefixIndexConfig(max_blocks=60, max_waiting=max_waiting))
    index.add_worker(worker())
    view = (worker(),)
    epoch, engine = 0, Engine()
    engines = {0: engine}
    heard = 0
    wire = []
    for drawn in messages:
        if data.draw(st.integers(0, 11), label="restart") == 1 and engine.sent:
            if not with_epochs:
                # Told apart by time alone, the new process must be heard from its seq 0.
                wire.clear()
            epoch, engine = epoch + 1, Engine()
            engines[epoch] = engine
        message = engine.send(*(event_of(e) for e in drawn), epoch=epoch)
        copies = data.draw(st.sampled_from([1, 1, 1, 0, 2]), label="copies")
        if not with_epochs and message.seq == 0:
            copies = 1
        for _ in range(copies):
            behind = len(wire) if with_epochs else sum(m.seq > 0 for m in wire)
            late = data.draw(st.integers(0, min(3, behind)), label="late")
            wire.insert(len(wire) - late, message)
        while wire and data.draw(st.sampled_from([True, True, False]), label="deliver"):
            delivered = wire.pop(0)
            heard = max(heard, delivered.epoch)
            if not with_epochs:
                delivered = batch(delivered.seq, *delivered.events, at=delivered.sent_at_s)
            index.apply(delivered, 0.0)
            if data.draw(st.integers(0, 4), label="give up") == 4:
                index.give_up("w0")
            check_promise(index, engines[heard], view)


def check_promise(index, engine, view):
    (report,) = index.streams()
    for chain in CHAINS:
        (got,) = index.cached_blocks(hashes(*chain), view).tolist()
        truth = depth_in(engine.history[report.next_seq], chain)
        match report.state:
            case StreamState.EXACT:
                assert got == truth
            case StreamState.PARTIAL:
                assert got <= truth
            case _:
                assert got == 0
