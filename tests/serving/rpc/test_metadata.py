"""Call metadata is parsed strictly."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core import metadata as keys
from serving.core.errors import InvalidRequest
from serving.core.request import SloClass
from serving.rpc.metadata import CallMetadata, parse


def test_nothing_given() -> None:
    assert parse((), now_s=5.0) == CallMetadata()
    assert parse((("user-agent", "grpc"), ("authorization", "x")), now_s=5.0) == CallMetadata()


def test_every_key() -> None:
    call = parse(
        (
            (keys.TENANT, "t1"),
            (keys.SLO_CLASS, "A"),
            (keys.PRODUCT, "chat"),
            (keys.DEADLINE_MS, "1500"),
            (keys.SESSION, "s1"),
            (keys.MODEL, "m"),
            (keys.RESTART, "never"),
            ("traceparent", "00-1-2-01"),
        ),
        now_s=10.0,
    )
    assert call == CallMetadata(
        tenant="t1",
        slo=SloClass.A,
        product="chat",
        session="s1",
        model="m",
        deadline_s=11.5,
        allow_restart=False,
        forwarded=(("traceparent", "00-1-2-01"),),
    )


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        (keys.SLO_CLASS, "D", "must be one of A, B, C"),
        (keys.SLO_CLASS, "a", "must be one of A, B, C"),
        (keys.SLO_CLASS, "", "must be text of 1 to 128"),
        (keys.DEADLINE_MS, "0", "whole milliseconds"),
        (keys.DEADLINE_MS, "-5", "whole milliseconds"),
        (keys.DEADLINE_MS, "1.5", "whole milliseconds"),
        (keys.DEADLINE_MS, "1e3", "whole milliseconds"),
        (keys.DEADLINE_MS, "٣", "whole milliseconds"),
        (keys.DEADLINE_MS, "9" * 100, "whole milliseconds"),
        (keys.TENANT, "x" * 129, "1 to 128 characters"),
        (keys.TENANT, b"\xff", "must be text"),
        (keys.RESTART, "yes", "'allow' or 'never'"),
        ("x-eldr-slo", "A", "nearest known key is 'x-eldr-slo-class'"),
        ("x-eldr-deadline", "5", "nearest known key is 'x-eldr-deadline-ms'"),
    ],
)
def test_bad_values_name_field_value_and_rule(key: str, value: str | bytes, rule: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(((key, value),), now_s=0.0)
    assert caught.value.field == key
    assert caught.value.value == value
    assert rule in caught.value.rule


def test_a_key_is_given_once() -> None:
    with pytest.raises(InvalidRequest, match="at most once"):
        parse(((keys.TENANT, "a"), (keys.TENANT, "b")), now_s=0.0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*keys.ALL, "x-eldr-other", "traceparent", "other"]),
            st.one_of(st.text(string.printable, max_size=140), st.binary(max_size=8)),
        ),
        max_size=6,
    )
)
def test_any_metadata_parses_or_is_refused(pairs: list[tuple[str, str | bytes]]) -> None:
    try:
        call = parse(pairs, now_s=1.0)
    except InvalidRequest as error:
        refused = error.field
    else:
        assert call.deadline_s > 1.0
        assert (call.slo is None) == all(key != keys.SLO_CLASS for key, _ in pairs)
        assert math.isinf(call.deadline_s) == all(key != keys.DEADLINE_MS for key, _ in pairs)
        return
    assert refused in [key for key, _ in pairs]
