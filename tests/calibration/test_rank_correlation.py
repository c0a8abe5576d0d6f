from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from calibration.fit.rank_correlation import ranks, spearman

VALUES = st.lists(st.integers(-5, 5) | st.floats(-1e6, 1e6), min_size=2, max_size=40)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_ranks_are_scipys(values):
    array = np.array(values, np.float64)
    assert np.array_equal(ranks(array), stats.rankdata(array))


@given(VALUES, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_spearman_is_scipys(values, seed):
    first = np.array(values, np.float64)
    rng = np.random.default_rng(seed)
    second = np.round(first * rng.normal(1, 0.5, len(first)) + rng.integers(0, 3, len(first)), 1)
    if len(set(first)) < 2 or len(set(second)) < 2:
        assert spearman(first, second) == 0.0
        return
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second)[0], abs=1e-9)
