import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.fleet.key_table import KeyTable

# Few distinct low bits, so that homes clash, runs form and runs wrap around the end.
KEYS = st.builds(
    lambda high, low: high << 32 | low,
    st.integers(0, 30),
    st.sampled_from([0, 1, 2, 5, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFF0]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.booleans(), st.lists(KEYS, min_size=1, max_size=25)), max_size=25),
)
def test_matches_a_dict(capacity, steps):
    table, model = KeyTable(capacity), {}
    for insert, keys in steps:
        keys = list(dict.fromkeys(keys))
        if insert:
            new = [key for key in keys if key not in model][: capacity - len(model)]
            ids = table.insert(np.array(new, np.uint64))
            model.update(zip(new, ids.tolist(), strict=True))
        else:
            old = [key for key in keys if key in model]
            table.delete(np.array([model.pop(key) for key in old], np.int32))
        asked = [*model, *keys, 17 << 40]
        expected = [model.get(key, 0) for key in asked]
        assert table.find(np.array(asked, np.uint64)).tolist() == expected
        assert [table.find_one(key) for key in asked] == expected
        assert len(table) == len(model) == len(set(model.values()))
        assert all(table.keys[held] == key for key, held in model.items())
        assert table.high_water <= capacity


def test_a_key_of_zero_is_a_key():
    table = KeyTable(4)
    assert table.find_one(0) == 0
    (held,) = table.insert(np.zeros(1, np.uint64)).tolist()
    assert held
    assert table.find_one(0) == held
    assert table.find(np.zeros(1, np.uint64)).tolist() == [held]
    table.delete(np.array([held], np.int32))
    assert table.find_one(0) == 0


def test_full_table_refuses():
    table = KeyTable(3)
    table.insert(np.arange(1, 4, dtype=np.uint64))
    with pytest.raises(ValueError, match=r"1 keys must be <= the room=0 left"):
        table.insert(np.array([9], np.uint64))


def test_years_of_churn_leave_no_residue():
    """Deleting leaves no tombstones: an emptied table is as empty as a new one."""
    table, rng = KeyTable(256), np.random.default_rng(0)
    for _ in range(200):
        ids = table.insert(rng.integers(1, 1 << 63, 256, dtype=np.uint64))
        table.delete(rng.permutation(ids))
    assert len(table) == 0
    assert not table.cells.any()


@pytest.mark.parametrize("capacity", [0, -1, 1 << 30])
def test_capacity_is_checked(capacity):
    with pytest.raises(ValueError, match="capacity"):
        KeyTable(capacity)
