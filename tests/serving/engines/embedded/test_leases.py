from __future__ import annotations

import numpy as np
import pytest

from serving.core.errors import LeaseError
from serving.engines.embedded.leases import Lease, LeaseTable, check_binding, new_lease_id

TOKENS = np.arange(5, dtype=np.int32)


def table_with(*names: str, expires_at_s: float = 10.0) -> LeaseTable:
    table = LeaseTable()
    for index, name in enumerate(names):
        table.add(
            Lease(
                lease_id=name,
                remote_request_id=f"r-{name}",
                block_ids=(2 * index, 2 * index + 1),
                num_tokens=5,
                expires_at_s=expires_at_s + index,
            )
        )
    return table


def test_a_lease_is_pulled_once():
    table = table_with("a")
    lease = table.begin_pull("a", "r-a", 0.0)
    with pytest.raises(LeaseError, match="being pulled already"):
        table.begin_pull("a", "r-a", 0.0)
    with pytest.raises(LeaseError, match="is being pulled"):
        table.release("a", "r-a", 0.0)
    assert table.end_pull(lease, completed=True) == (0, 1)
    with pytest.raises(LeaseError, match="was pulled already"):
        table.begin_pull("a", "r-a", 0.0)
    assert len(table) == 0


def test_a_broken_pull_leaves_the_lease_open_until_it_expires():
    table = table_with("a")
    lease = table.begin_pull("a", "r-a", 9.0)
    assert table.next_expiry_s() is None
    assert table.expire(11.0) == []
    assert table.end_pull(lease, completed=False) == ()
    assert table.expire(11.0) == [0, 1]
    with pytest.raises(LeaseError, match="has expired"):
        table.begin_pull("a", "r-a", 11.0)


def test_expiry_counts_even_before_anybody_swept():
    with pytest.raises(LeaseError, match="has expired"):
        table_with("a").begin_pull("a", "r-a", 10.0)


def test_each_end_is_told():
    table = table_with("a", "b", "c")
    assert table.next_expiry_s() == 10.0
    assert table.release("a", "r-a", 0.0) == (0, 1)
    assert table.expire(11.0) == [2, 3]
    assert table.void("was lost") == [4, 5]
    for name, end in (("a", "was released"), ("b", "has expired"), ("c", "was lost")):
        with pytest.raises(LeaseError, match=end):
            table.release(name, f"r-{name}", 0.0)
    with pytest.raises(LeaseError, match="is unknown"):
        table.release("x", "r-x", 0.0)


def test_another_requests_name_is_refused():
    table = table_with("a")
    with pytest.raises(LeaseError, match="does not belong to request 'r-b'"):
        table.begin_pull("a", "r-b", 0.0)
    assert len(table) == 1


def test_a_voided_pull_gives_nothing_back_twice():
    table = table_with("a")
    lease = table.begin_pull("a", "r-a", 0.0)
    assert table.void("was lost") == [0, 1]
    assert table.end_pull(lease, completed=True) == ()
    assert table.withdraw(lease) == ()


def test_ids_are_bound_to_prompt_and_salt():
    lease_id = new_lease_id(TOKENS, "s")
    assert lease_id != new_lease_id(TOKENS, "s")
    check_binding(lease_id, TOKENS.copy(), "s")
    for tokens, salt in ((TOKENS[:-1], "s"), (TOKENS + 1, "s"), (TOKENS, "")):
        with pytest.raises(LeaseError, match="another request's prompt"):
            check_binding(lease_id, tokens, salt)


def test_many_ends_are_not_remembered_for_ever():
    table = LeaseTable()
    for index in range(2000):
        table.add(
            Lease(
                lease_id=str(index),
                remote_request_id="r",
                block_ids=(0,),
                num_tokens=1,
                expires_at_s=1.0,
            )
        )
        table.release(str(index), "r", 0.0)
    with pytest.raises(LeaseError, match="is unknown"):
        table.release("0", "r", 0.0)
    with pytest.raises(LeaseError, match="was released"):
        table.release("1999", "r", 0.0)
