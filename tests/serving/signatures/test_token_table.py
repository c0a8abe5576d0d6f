from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.signature import SignatureSource
from serving.signatures import token_table
from serving.signatures.model import SignatureModel
from serving.signatures.token_table import TokenTable

NUM_EXPERTS, TOP_K = 4, 2
MODEL = SignatureModel(
    version="sig-test",
    mask_version="mask-test",
    layers=np.array([0, 1], np.int32),
    num_layers=2,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    idf=np.ones((2, NUM_EXPERTS), np.float32),
)
# Token 3 was seen twice and always went to experts 0 and 1; token 7 once, to 2 and 3.
TABLE = TokenTable(
    token_ids=np.array([3, 7], np.int32),
    num_seen=np.array([2, 1], np.int32),
    starts=np.array([0, 4, 8], np.int64),
    entries=np.array([0, 1, 4, 5, 2, 3, 6, 7], np.uint32),
    counts=np.array([2, 2, 2, 2, 1, 1, 1, 1], np.uint32),
    mean=np.full(8, 0.5, np.float32),
    prior_tokens=2.0,
    confidence=0.8,
)


def test_a_token_speaks_for_itself_as_loudly_as_it_was_heard():
    # (2 * own + 2 * mean) / (2 + 2): half its own routings, half the mean.
    expected = TABLE.expected(np.array([3])).reshape(2, 4)
    np.testing.assert_allclose(expected, np.tile([0.75, 0.75, 0.25, 0.25], (2, 1)))
    np.testing.assert_allclose(TABLE.expected(np.array([99])), np.full(8, 0.5))


def test_expected_counts_add_up_token_by_token():
    tokens = np.array([3, 7, 3, 99, 0])
    one_by_one = sum(TABLE.expected(tokens[i : i + 1]) for i in range(len(tokens)))
    np.testing.assert_allclose(TABLE.expected(tokens), one_by_one)


@given(st.lists(st.sampled_from([0, 3, 7, 99]), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_predictions_obey_the_rules_of_counts(tokens):
    got = TABLE.predict(np.array(tokens), MODEL)
    assert (got.counts.sum(axis=1) == len(tokens) * TOP_K).all()
    assert got.counts.max() <= len(tokens)
    assert np.abs(got.counts.ravel() - TABLE.expected(np.array(tokens))).max() < 1.0 + 1e-9
    assert got.source is SignatureSource.TOKEN_TABLE
    assert (got.confidence, got.num_tokens) == (0.8, len(tokens))


def test_packed_and_unpacked_tables_answer_the_same(monkeypatch):
    monkeypatch.setattr(token_table, "_MAX_UNPACKED_BYTES", 0)
    fields = {name: getattr(TABLE, name) for name in TABLE.__slots__ if name[0] != "_"}
    packed = TokenTable(**fields)
    assert packed._unpacked is None
    assert TABLE._unpacked is not None
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.choice([0, 3, 7, 99], size=rng.integers(1, 50))
        np.testing.assert_allclose(packed.expected(tokens), TABLE.expected(tokens), rtol=1e-6)


def test_an_empty_table_predicts_the_mean():
    empty = TokenTable(
        token_ids=np.zeros(0, np.int32),
        num_seen=np.zeros(0, np.int32),
        starts=np.zeros(1, np.int64),
        entries=np.zeros(0, np.uint32),
        counts=np.zeros(0, np.uint32),
        mean=np.full(8, 0.5, np.float32),
        prior_tokens=1.0,
        confidence=0.1,
    )
    assert empty.predict(np.array([1, 2]), MODEL).counts.tolist() == [[1, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([7, 3])}, "ascend"),
        ({"num_seen": np.array([1])}, "must be"),
        ({"starts": np.array([0, 4, 9])}, "as long as"),
        ({"starts": np.array([0, 9, 8])}, "never fall"),
        ({"entries": np.full(8, 8)}, "entries must be <"),
        ({"prior_tokens": 0.0}, "prior_tokens"),
        ({"confidence": 1.1}, "confidence"),
    ],
)
def test_tables_that_cannot_be_are_refused(change, message):
    fields = {name: getattr(TABLE, name) for name in TABLE.__slots__ if name[0] != "_"}
    with pytest.raises(ValueError, match=message):
        TokenTable(**fields | change)
