import pytest

from serving.core.decision import OutcomeRecord, OutcomeStatus
from serving.core.ring import LineRing


def line(request_id, num=0):
    return OutcomeRecord(
        request_id=request_id, ended_at_s=0.0, status=OutcomeStatus.OK, num_output_tokens=num
    )


def test_the_request_untouched_longest_goes_first():
    ring = LineRing(2)
    for request_id in ("a", "b", "a", "c"):
        ring.add(line(request_id))
    assert ring.request_ids() == ["a", "c"]
    assert ring.lines("b") == []
    assert len(ring.lines("a")) == 2


def test_lines_keep_their_order():
    ring = LineRing(1)
    ring.add(line("a", 1))
    ring.add(line("a", 2))
    assert [entry.num_output_tokens for entry in ring.lines("a")] == [1, 2]


def test_an_empty_ring_makes_no_sense():
    with pytest.raises(ValueError, match="max_requests=0"):
        LineRing(0)
