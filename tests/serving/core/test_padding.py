"""The charge of the decision against the pool's padding model, which counts the same steps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.buckets import BucketSet
from serving.core.padding import bucket_table, charge
from serving.core.worker import Padding
from serving.cost.padding import PaddingModel
from tests.serving import decision_parts as parts

BUCKETS = st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True).map(sorted)
TOKENS = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 9000)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(buckets=BUCKETS, tokens=TOKENS, is_step=st.booleans())
def test_charges_are_those_of_the_padding_model(buckets, tokens, is_step):
    own, queued = (np.array(column, np.int64) for column in zip(*tokens, strict=True))
    semantics = "step" if is_step else "prompt"
    model = PaddingModel(BucketSet(id="b", semantics=semantics, sizes_tokens=tuple(buckets)))
    expected = model.charge(own, queued)
    group = np.arange(len(own)), bucket_table(tuple(buckets)), is_step
    found = charge(group, own, queued.astype(np.float64), None)
    np.testing.assert_array_equal(found.computed_tokens, expected.computed_tokens)
    if is_step:
        np.testing.assert_array_equal(found.before_tokens, model.padded(queued))


@settings(max_examples=40, deadline=None)
@given(buckets=BUCKETS, tokens=TOKENS, started=st.integers(0, 9000))
def test_a_step_under_way_cannot_be_joined(buckets, tokens, started):
    own, queued = (np.array(column, np.int64) for column in zip(*tokens, strict=True))
    group = np.arange(len(own)), bucket_table(tuple(buckets)), True
    begun = np.minimum(queued, started).astype(np.float64)
    found = charge(group, own, queued.astype(np.float64), begun)
    for at, (mine, others) in enumerate(zip(own.tolist(), queued.tolist(), strict=True)):
        running = min(int(begun[at]), buckets[-1])
        without = _steps(others - running, buckets)
        with_it = _steps(others - running + mine, buckets)
        assert found.computed_tokens[at] == with_it[0] - without[0]
        assert found.num_chunks[at] == with_it[1] - without[1]
        assert found.before_tokens[at] == without[0] + _steps(running, buckets)[0]


def _steps(tokens: int, buckets: list[int]) -> tuple[int, int]:
    """Tokens computed and steps run, one step after another."""
    computed = steps = 0
    while tokens > 0:
        taken = min(tokens, buckets[-1])
        computed += min(bucket for bucket in buckets if bucket >= taken)
        tokens -= taken
        steps += 1
    return computed, steps


def test_a_mixed_pool_charges_each_worker_by_its_own_buckets():
    workers = (
        parts.worker("step", capabilities=parts.capabilities(buckets_tokens=(64, 256))),
        parts.worker("gpu", capabilities=parts.capabilities(buckets_tokens=())),
        parts.worker(
            "prompt",
            capabilities=parts.capabilities(buckets_tokens=(64, 256), pads=Padding.PROMPT),
        ),
    )
    costs = parts.BOOK.rows(workers)
    found = costs.charge(np.full(3, 50), np.full(3, 200.0), None)
    assert found.computed_tokens.tolist() == [0, 50, 64]
    assert found.before_tokens.tolist() == [256, 200, 200]
    assert costs.compiled.tolist() == [True, False, True]
