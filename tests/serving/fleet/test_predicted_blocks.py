import numpy as np
import pytest

from serving.fleet.predicted_blocks import PredictedBlocks


def ids(*values):
    return np.array(values, np.int32)


@pytest.fixture
def predicted():
    table = PredictedBlocks(capacity=10, num_blocks=100)
    table.grow(3)
    table.configure(1, ttl_s=5.0, limit=6)
    table.configure(2, ttl_s=50.0, limit=100)
    return table


def ended(result):
    return {column: sorted(blocks.tolist()) for column, blocks in result if len(blocks)}


def test_ends_exactly_when_its_time_is_up(predicted):
    predicted.add(1, ids(1, 2, 3), now_s=0.0)
    predicted.add(1, ids(1, 2), now_s=4.0)
    assert predicted.next_expiry_s == 5.0
    assert ended(predicted.expire(4.999, max_columns=9)) == {}
    assert ended(predicted.expire(5.0, max_columns=9)) == {1: [3]}
    assert predicted.test(ids(1, 2, 3), 1).tolist() == [True, True, False]
    assert ended(predicted.expire(9.0, max_columns=9)) == {1: [1, 2]}
    assert len(predicted) == 0
    assert predicted.next_expiry_s == float("inf")


def test_expires_column_by_column(predicted):
    predicted.configure(2, ttl_s=5.0, limit=100)
    predicted.add(1, ids(1), now_s=0.0)
    predicted.add(2, ids(1), now_s=0.0)
    assert ended(predicted.expire(7.0, max_columns=1)) == {1: [1]}
    assert predicted.next_expiry_s == 5.0
    assert ended(predicted.expire(7.0, max_columns=1)) == {2: [1]}


def test_over_the_limit_the_deepest_of_the_oldest_goes(predicted):
    predicted.add(1, ids(1, 2, 3), now_s=0.0)
    predicted.add(1, ids(4, 5), now_s=1.0)
    assert ended(predicted.add(1, ids(6, 7), now_s=1.0)) == {1: [3]}
    assert ended(predicted.add(1, ids(1, 8), now_s=2.0)) == {1: [2]}
    assert predicted.num_pairs[1] == 6


def test_path_over_the_limit_is_cut(predicted):
    predicted.add(1, ids(*range(1, 20)), now_s=0.0)
    assert predicted.test(ids(6, 7), 1).tolist() == [True, False]


def test_full_table_takes_from_the_largest_column(predicted):
    predicted.add(2, ids(*range(1, 9)), now_s=0.0)
    given_up = ended(predicted.add(1, ids(50, 51, 52, 53), now_s=1.0))
    assert given_up == {2: [7, 8]}
    assert len(predicted) == 10
    # Everything in the table is the path itself or the other column's.
    assert ended(predicted.add(1, ids(50, 51, 52, 53, 54, 55), now_s=2.0)) == {2: [5, 6]}


def test_same_block_on_several_columns(predicted):
    predicted.add(1, ids(7, 8), now_s=0.0)
    predicted.add(2, ids(7), now_s=0.0)
    predicted.remove(1, ids(7, 9))
    assert predicted.test(ids(7, 8), 1).tolist() == [False, True]
    assert predicted.test(ids(7, 8), 2).tolist() == [True, False]
    predicted.add(1, ids(7), now_s=1.0)
    predicted.remove_blocks(ids(7))
    assert not predicted.any(ids(7)).any()
    assert predicted.num_pairs.tolist() == [0, 1, 0]
    assert predicted.remove_column(1).tolist() == [8]


def test_log_does_not_grow_with_repeats_at_one_instant(predicted):
    for _ in range(10_000):
        predicted.add(1, ids(1, 2, 3), now_s=1.0)
    assert len(predicted._logs[1].pairs) <= 256
    assert ended(predicted.expire(6.0, max_columns=9)) == {1: [1, 2, 3]}
