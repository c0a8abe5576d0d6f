from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.signatures.regions import FittedRegions, assign, bind, fit_regions, refit_regions


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


def blobs(num_regions: int, sizes: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centers = np.eye(num_regions, 12)
    labels = np.repeat(np.arange(num_regions), sizes)
    return unit(centers[labels] + 0.05 * rng.random((len(labels), 12))), labels


@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_balanced_assignment_is_the_brute_force_optimum(num_vectors, num_regions, seed):
    rng = np.random.default_rng(seed)
    vectors = unit(rng.random((num_vectors, 4)))
    centroids = unit(rng.random((num_regions, 4)))
    cap = -(-num_vectors // num_regions)
    cost = 1.0 - vectors @ centroids.T
    labels = assign(vectors, centroids)
    assert np.bincount(labels, minlength=num_regions).max() <= cap
    best = min(
        sum(cost[i, region] for i, region in enumerate(choice))
        for choice in itertools.product(range(num_regions), repeat=num_vectors)
        if max(choice.count(region) for region in range(num_regions)) <= cap
    )
    assert cost[np.arange(num_vectors), labels].sum() == pytest.approx(best, abs=1e-5)


def test_separate_groups_are_found_and_the_cap_holds():
    vectors, truth = blobs(4, [10, 10, 10, 10])
    centroids = fit_regions(vectors, 4, np.random.default_rng(3))
    labels = assign(vectors, centroids)
    assert np.bincount(labels).tolist() == [10] * 4
    for group in range(4):
        assert len(set(labels[truth == group])) == 1
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, rtol=1e-5)


def test_balance_splits_a_popular_group_where_plain_k_means_does_not():
    vectors, truth = blobs(2, [28, 4])
    balanced = fit_regions(vectors, 2, np.random.default_rng(0))
    plain = fit_regions(vectors, 2, np.random.default_rng(0), balanced=False)
    assert np.bincount(assign(vectors, balanced)).tolist() == [16, 16]
    labels = assign(vectors, plain, balanced=False)
    assert sorted(np.bincount(labels).tolist()) == [4, 28]
    assert len(set(labels[truth == 0])) == 1


def test_the_same_seed_gives_the_same_regions():
    vectors, _ = blobs(3, [9, 5, 7])
    one = fit_regions(vectors, 3, np.random.default_rng(5))
    two = fit_regions(vectors, 3, np.random.default_rng(5))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("num_regions", [1, 2, 5, 9])
def test_more_workers_than_prompts_and_duplicates_are_defined(num_regions):
    vectors = unit(np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0]]))
    centroids = fit_regions(vectors, num_regions, np.random.default_rng(0))
    assert centroids.shape == (num_regions, 3)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1.0, rtol=1e-5)
    assert len(assign(vectors, centroids)) == 3


def test_one_worker_gets_the_mean_and_zero_vectors_pull_nowhere():
    vectors = np.concatenate([unit(np.random.default_rng(0).random((6, 4))), np.zeros((2, 4))])
    centroid = fit_regions(vectors, 1, np.random.default_rng(0))[0]
    mean = vectors.sum(axis=0)
    np.testing.assert_allclose(centroid, mean / np.linalg.norm(mean), rtol=1e-5)
    only_zeros = fit_regions(np.zeros((3, 4), np.float32), 2, np.random.default_rng(0))
    assert only_zeros.shape == (2, 4)
    assert not only_zeros.any()


def test_a_refit_keeps_each_workers_identity():
    vectors, _ = blobs(3, [8, 8, 8])
    fitted = fit_regions(vectors, 3, np.random.default_rng(1))
    order = np.array([2, 0, 1])
    for previous in (fitted, fitted[order]):
        moved = refit_regions(unit(vectors + 0.02), previous)
        similarity = previous @ moved.T
        assert similarity.argmax(axis=1).tolist() == [0, 1, 2]
    assert np.array_equal(refit_regions(vectors[:0], fitted), fitted)


@pytest.mark.parametrize(
    ("vectors", "num_regions", "message"),
    [
        (np.zeros((0, 3)), 2, "vectors have shape"),
        (np.zeros(3), 2, "vectors have shape"),
        (np.zeros((2, 3)), 0, "num_regions"),
        (np.full((2, 3), np.nan), 1, "finite"),
    ],
)
def test_impossible_fits_are_refused(vectors, num_regions, message):
    with pytest.raises(ValueError, match=message):
        fit_regions(vectors, num_regions, np.random.default_rng(0))


def test_similarity_answers_in_the_callers_order():
    centroids = np.eye(3, dtype=np.float32)
    regions = bind(centroids, ["a", "b", "c"], version="sig-1")
    vector = unit(np.array([[3, 2, 1]]))[0]
    got = regions.similarity(vector, ("c", "new", "a"))
    np.testing.assert_allclose(got, [vector[2], -1.0, vector[0]])
    assert regions.similarity(np.zeros(3, np.float32), ("a", "new")).tolist() == [0.0, -1.0]
    assert regions.version == "sig-1"


def test_a_binding_needs_one_worker_per_centroid():
    with pytest.raises(ValueError, match="one each"):
        bind(np.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match="distinct"):
        FittedRegions(version="v", worker_ids=("a", "a"), centroids=np.eye(2))
