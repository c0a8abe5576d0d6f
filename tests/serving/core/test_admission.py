import pytest

from serving.core.admission import Limits, check_limits
from serving.core.errors import InvalidRequest, Rejected, RejectReason
from tests.serving import decision_parts as parts

LIMITS = Limits(max_prompt_tokens=100, max_output_tokens=40, max_open_requests=2)


def check(request, num_open=0, now_s=0.0):
    check_limits(request, LIMITS, num_open=num_open, now_s=now_s)


def test_at_the_limits():
    check(parts.request(), num_open=1, now_s=1e9)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (parts.request(num_tokens=101), "token_ids"),
        (parts.request(max_tokens=41), "max_tokens"),
    ],
)
def test_what_no_fleet_could_take(request_, field):
    with pytest.raises(InvalidRequest) as caught:
        check(request_)
    assert caught.value.field == field


def test_too_many_open_and_too_late():
    with pytest.raises(Rejected) as caught:
        check(parts.request(), num_open=2)
    assert caught.value.why is RejectReason.QUEUE_FULL
    with pytest.raises(Rejected) as caught:
        check(parts.request(deadline_s=5.0), now_s=5.5)
    assert caught.value.why is RejectReason.DEADLINE_UNREACHABLE
    assert "0.500 s ago" in caught.value.detail


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_open_requests=0"):
        Limits(max_open_requests=0)
