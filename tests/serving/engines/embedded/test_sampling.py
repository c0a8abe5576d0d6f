from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare

from serving.engines.embedded.sampling import Sampling, choose, logprobs

logits_of = st.integers(0, 2**31).map(
    lambda seed: np.random.default_rng(seed).normal(0, 3, 24).astype(np.float32)
)


def draws(logits: np.ndarray, sampling: Sampling, count: int) -> np.ndarray:
    return np.array([choose(logits, sampling, position) for position in range(count)])


def kept_by_hand(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """An independent reading of min_p, top_k, top_p."""
    shares = softmax(logits.astype(np.float64) / sampling.temperature)
    kept = [
        i for i in range(len(shares)) if shares[i] >= sampling.min_p * shares.max() * (1 - 1e-9)
    ]
    kept.sort(key=lambda i: (-shares[i], i))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, out = sum(shares[i] for i in kept), set()
    mass = 0.0
    for i in kept:
        if mass / total >= sampling.top_p and out:
            break
        out.add(i)
        mass += shares[i]
    return out


@given(logits_of)
@settings(max_examples=25, deadline=None)
def test_greedy_is_the_argmax_and_bans_hold(logits):
    best = int(logits.argmax())
    assert choose(logits, Sampling(), 5) == best
    second = choose(logits, Sampling(), 5, frozenset({best}))
    assert second == int(np.argsort(-logits, kind="stable")[1])


@given(
    logits_of,
    st.integers(0, 6),
    st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([0.3, 1.0, 2.5]),
)
@settings(max_examples=60, deadline=None)
def test_filters_keep_exactly_what_they_promise(logits, top_k, top_p, min_p, temperature):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
    allowed = kept_by_hand(logits, sampling)
    seen = set(draws(logits, sampling, 60).tolist())
    assert seen <= allowed
    if len(allowed) == 1:
        assert seen == allowed


def test_draws_follow_the_softmax():
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    sampling = Sampling(temperature=0.7, seed=11)
    counts = np.bincount(draws(logits, sampling, 6000), minlength=5)
    expected = softmax(logits.astype(np.float64) / 0.7) * 6000
    # Seeded: the p-value is a constant of this code, far from the 1e-3 that would accuse it.
    assert chisquare(counts, expected).pvalue > 1e-3


def test_noise_depends_on_seed_and_position_alone():
    logits = np.zeros(64, np.float32)
    one = draws(logits, Sampling(temperature=1.0, seed=5), 40)
    assert np.array_equal(one, draws(logits, Sampling(temperature=1.0, seed=5), 40))
    assert not np.array_equal(one, draws(logits, Sampling(temperature=1.0, seed=6), 40))
    assert len(set(one.tolist())) > 10
    assert choose(logits, Sampling(temperature=1.0, seed=-5), 3) >= 0


@given(logits_of, st.integers(0, 24))
@settings(max_examples=25, deadline=None)
def test_logprobs_are_the_models_own(logits, num_top):
    report = logprobs(logits, 7, num_top)
    wanted = log_softmax(logits.astype(np.float64))
    assert report.chosen == pytest.approx(wanted[7])
    assert len(report.top_ids) == num_top
    assert list(report.top_values) == sorted(wanted.tolist(), reverse=True)[
        :num_top
    ] or np.allclose(report.top_values, np.sort(wanted)[::-1][:num_top])
