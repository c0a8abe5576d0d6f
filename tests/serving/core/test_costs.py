import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.costs import CostBook, PrefillTimeModel
from serving.core.padding import BucketTable
from serving.core.worker import Capabilities
from tests.serving import decision_parts as parts


@settings(max_examples=60, deadline=None)
@given(
    buckets=st.lists(st.integers(1, 5000), max_size=6, unique=True).map(sorted),
    tokens=st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
def test_padding_is_full_chunks_of_the_largest_bucket_then_the_rest(buckets, tokens):
    padded, chunks = BucketTable(tuple(buckets)).padded(np.array(tokens))
    limits = parts.capabilities(buckets_tokens=tuple(buckets))
    for num, ran, steps in zip(tokens, padded.tolist(), chunks.tolist(), strict=True):
        if not buckets:
            assert (ran, steps) == (num, 1)
            continue
        full, rest = divmod(num, buckets[-1])
        tail = Capabilities.bucket_for(limits, rest) if rest else 0
        assert (ran, steps) == (full * buckets[-1] + tail, full + bool(rest))


def test_rows_of_workers_with_different_buckets():
    workers = (
        parts.worker("a"),
        parts.worker("b", capabilities=parts.capabilities(buckets_tokens=())),
        parts.worker("c"),
    )
    padded, chunks = parts.BOOK.rows(workers).padded(np.array([100, 100, 300]))
    assert padded.tolist() == [256, 100, 256 + 64]
    assert chunks.tolist() == [1, 1, 2]
    rows = parts.BOOK.rows(workers)
    assert [rows.padded_on(2, 300), rows.padded_on(1, 100)] == [(320, 2), (100, 1)]


def test_an_unknown_cell_is_marked_not_fatal():
    rows = parts.BOOK.rows((parts.worker("a"), parts.worker("b", hardware="other")))
    assert rows.known.tolist() == [True, False]
    assert rows.rate_usd_per_s.tolist() == pytest.approx([3.6 / 3600, 0.0])
    assert rows.versions == ("cell-1",)
    assert CostBook({}).get(parts.worker("w")) is None


def test_take_keeps_every_column():
    workers = (parts.worker("a"), parts.worker("b", num_chips=4), parts.worker("c"))
    rows, taken = parts.BOOK.rows(workers), parts.BOOK.rows(workers).take(np.array([2, 1]))
    assert taken.worker_ids == ("c", "b")
    for name in ("rate_usd_per_s", "expert_s", "any_tp", "max_num_seqs", "num_kv_blocks"):
        np.testing.assert_array_equal(getattr(taken, name), getattr(rows, name)[[2, 1]])


def test_step_time_by_hand_and_the_empty_step():
    step = parts.STEP.step_s(num_requests=3, distinct_experts=20, kv_tokens=1000, speed_factor=2)
    assert step == pytest.approx(2 * (2e-3 + 4 * (5e-4 + 3 * 2e-5) + 20e-4 + 1e-4))
    assert parts.STEP.step_s(num_requests=0, distinct_experts=0, kv_tokens=0) == 0.0
    assert parts.STEP.mean_experts(1) == pytest.approx(8.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_coefficients_must_be_finite_and_not_negative(value):
    with pytest.raises(ValueError, match="token_s"):
        PrefillTimeModel(chunk_s=0.0, token_s=value)
