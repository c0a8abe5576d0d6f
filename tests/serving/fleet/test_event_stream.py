import numpy as np
import pytest

from serving.fleet.event_stream import EventStream, StreamState
from serving.fleet.kv_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch


def batch(seq, *, at=0.0, epoch=None, clears=False):
    return EventBatch(
        worker_id="w",
        seq=seq,
        sent_at_s=at,
        epoch=epoch,
        events=(CacheCleared(),) if clears else (),
    )


def stream(epoch=None, max_waiting=8):
    return EventStream(epoch=epoch, max_waiting=max_waiting)


def offer(s, *batches):
    """Offers batches; returns (reset, applied seqs) of each."""
    return [(d.reset, [b.seq for b in d.batches]) for d in (s.offer(b, now_s=1.0) for b in batches)]


def test_in_order():
    s = stream()
    assert s.state is StreamState.SILENT
    assert offer(s, batch(0), batch(1)) == [(False, [0]), (False, [1])]
    assert s.state is StreamState.EXACT


def test_reordered_and_repeated_messages_apply_once_in_order():
    s = stream()
    steps = offer(s, batch(0), batch(2), batch(2), batch(0), batch(1), batch(1))
    assert steps == [
        (False, [0]),
        (False, []),
        (False, []),
        (False, []),
        (False, [1, 2]),
        (False, []),
    ]
    assert s.state is StreamState.EXACT
    assert (s.counters.duplicates, s.counters.gaps, s.counters.batches) == (3, 1, 3)


def test_gap_is_reported_until_filled():
    s = stream()
    offer(s, batch(0), batch(5))
    assert s.state is StreamState.UNCERTAIN
    assert s.missing == (1, 4)
    assert s.missing_since_s == 1.0
    offer(s, batch(3), batch(1))
    assert s.missing == (2, 2)
    offer(s, batch(2), batch(4))
    assert (s.state, s.missing, s.next_seq) == (StreamState.EXACT, None, 6)


def test_joining_late_is_a_gap():
    s = stream()
    assert offer(s, batch(40)) == [(False, [])]
    assert s.missing == (0, 39)


def test_giving_up_forgets_and_keeps_only_what_follows_the_last_gap():
    s = stream()
    offer(s, batch(0), batch(2), batch(4), batch(5))
    delivery = s.give_up()
    assert delivery.reset
    assert [b.seq for b in delivery.batches] == [4, 5]
    assert (s.state, s.next_seq) == (StreamState.PARTIAL, 6)
    assert offer(s, batch(6), batch(1)) == [(False, [6]), (False, [])]
    assert s.state is StreamState.PARTIAL
    assert not s.give_up().reset


def test_too_many_waiting_gives_up():
    s = stream(max_waiting=3)
    assert offer(s, *(batch(n) for n in (2, 3, 4, 5)))[-1] == (True, [2, 3, 4, 5])
    assert s.counters.given_up == 1


def test_clearing_makes_a_view_exact_whatever_was_lost():
    s = stream()
    offer(s, batch(3))
    s.give_up()
    assert s.state is StreamState.PARTIAL
    offer(s, batch(4, clears=True))
    assert s.state is StreamState.EXACT
    assert offer(s, batch(9), batch(8, clears=True)) == [(False, []), (True, [8, 9])]
    assert (s.state, s.missing) == (StreamState.EXACT, None)


@pytest.mark.parametrize("first", [0, 3])
def test_newer_epoch_is_a_restart(first):
    s = stream(epoch=1)
    offer(s, batch(0, epoch=1), batch(1, epoch=1))
    (step,) = offer(s, batch(first, epoch=2))
    assert step[0]
    assert s.counters.restarts == 1
    assert s.missing == (None if first == 0 else (0, 2))
    assert offer(s, batch(2, epoch=1)) == [(False, [])]
    assert s.counters.stale_epoch == 1


def test_without_epochs_a_newer_low_seq_is_a_restart_and_an_older_one_a_duplicate():
    s = stream()
    offer(s, batch(0, at=10.0), batch(1, at=11.0))
    assert offer(s, batch(0, at=10.0), batch(1, at=11.0)) == [(False, []), (False, [])]
    assert offer(s, batch(0, at=12.0)) == [(True, [0])]
    assert (s.next_seq, s.counters.restarts, s.counters.duplicates) == (1, 1, 2)


def test_known_epoch_never_takes_a_duplicate_for_a_restart():
    s = stream(epoch=4)
    offer(s, batch(0, epoch=4, at=1.0), batch(1, epoch=4, at=2.0))
    assert offer(s, batch(0, epoch=4, at=99.0)) == [(False, [])]


def test_resync_continues_with_what_waits():
    s = stream()
    offer(s, batch(5), batch(7))
    assert [b.seq for b in s.resync(5).batches] == [5]
    assert s.missing == (6, 6)
    s.resync(8)
    assert (s.state, s.next_seq) == (StreamState.EXACT, 8)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: EventBatch(worker_id="w", seq=-1, events=()), "seq=-1 must be >= 0"),
        (lambda: EventBatch(worker_id="w", seq=0, dp_rank=-2, events=()), "dp_rank=-2"),
        (lambda: BlocksStored(hashes=np.array([1, 1], np.uint64)), "must be distinct"),
        (lambda: BlocksStored(hashes=np.array([1], np.int64)), "must be uint64"),
        (lambda: BlocksStored(hashes=np.empty(0, np.uint64)), "n >= 1"),
        (lambda: BlocksStored(hashes=np.array([1], np.uint64), parent=1), "descendants"),
        (lambda: BlocksStored(hashes=np.array([1], np.uint64), parent=-1), "unsigned"),
        (lambda: BlocksRemoved(hashes=np.array([[1]], np.uint64)), "must be uint64"),
    ],
)
def test_malformed_events_name_the_rule(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()
