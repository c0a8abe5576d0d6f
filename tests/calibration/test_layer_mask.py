from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import cosine

from calibration.fit.layer_mask import cosine_distances, random_pairs, select_layers


def data(num_prompts: int = 30, num_layers: int = 4, num_experts: int = 8, seed: int = 0):
    rng = np.random.default_rng(seed)
    weighted = rng.gamma(0.5, size=(num_prompts, num_layers, num_experts)).astype(np.float32)
    decode = rng.integers(0, 20, (num_prompts, num_layers, num_experts)).astype(np.uint16)
    return weighted, decode


def slow_greedy(weighted, decode, pairs):
    """The definition, step by step, with SciPy."""
    num_layers = weighted.shape[1]
    flat = decode.reshape(len(decode), -1).astype(float)
    target = [cosine(flat[i], flat[j]) for i, j in pairs]
    order: list[int] = []
    curve = []
    while len(order) < num_layers:
        scores = {}
        for layer in set(range(num_layers)) - set(order):
            kept = weighted[:, [*order, layer]].reshape(len(weighted), -1).astype(float)
            distance = [cosine(kept[i], kept[j]) for i, j in pairs]
            scores[layer] = stats.spearmanr(distance, target)[0]
        best = max(sorted(scores), key=lambda layer: scores[layer])
        order.append(best)
        curve.append(scores[best])
    return order, curve


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_search_is_the_definition(seed):
    weighted, decode = data(seed=seed)
    # Layer 2 tells of decode, the others are noise.
    weighted[:, 2] = decode[:, 2] + 0.1
    pairs = random_pairs(30, 200, np.random.default_rng(seed))
    order, curve = slow_greedy(weighted, decode, pairs)
    mask = select_layers(weighted, decode, pairs)
    assert mask.order.tolist() == order
    np.testing.assert_allclose(mask.spearman, curve, atol=2e-3)
    peak = int(np.argmax(mask.spearman))
    assert mask.layers.tolist() == sorted(order[: peak + 1])


def test_the_search_is_deterministic_and_pairs_come_from_the_seed():
    weighted, decode = data()
    pairs = random_pairs(30, 500, np.random.default_rng(4))
    assert np.array_equal(pairs, random_pairs(30, 500, np.random.default_rng(4)))
    one, two = select_layers(weighted, decode, pairs), select_layers(weighted, decode, pairs)
    assert one.order.tolist() == two.order.tolist()
    assert np.array_equal(one.spearman, two.spearman)


def test_the_first_of_equal_layers_wins():
    weighted, decode = data()
    weighted[:] = weighted[:, :1]
    mask = select_layers(weighted, decode, random_pairs(30, 300, np.random.default_rng(0)))
    assert mask.order[0] == 0
    assert mask.layers.tolist() == [0]


def test_pairs_are_of_two_different_prompts_and_reach_all():
    pairs = random_pairs(5, 2000, np.random.default_rng(0))
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert len({tuple(pair) for pair in pairs.tolist()}) == 20
    with pytest.raises(ValueError, match="num_prompts"):
        random_pairs(1, 5, np.random.default_rng(0))


def test_distances_are_scipys_by_either_path_and_defined_for_zero_rows():
    rows = np.random.default_rng(0).random((40, 6)).astype(np.float32)
    rows[3] = 0
    for num_pairs in (3, 500):
        pairs = random_pairs(40, num_pairs, np.random.default_rng(1))
        pairs[0] = [3, 7]
        got = cosine_distances(rows, pairs)
        assert got[0] == 1.0
        kept = (pairs != 3).all(axis=1)
        expected = [cosine(rows[i], rows[j]) for i, j in pairs[kept]]
        np.testing.assert_allclose(got[kept], expected, atol=1e-6)
