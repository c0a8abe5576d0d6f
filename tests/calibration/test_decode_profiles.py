from __future__ import annotations

import numpy as np
import pytest

from calibration.fit.decode_profiles import SHRINK_CHOICES, choose_shrinkage, fit_profiles

LAYERS = np.array([0, 2], np.int32)
NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 6, 2


def two_kinds(num_prompts: int = 40, num_prompt_tokens: int = 50, seed: int = 0):
    """Even prompts like experts 0-2, odd ones 3-5; decode follows the kind exactly."""
    rng = np.random.default_rng(seed)
    kind = np.arange(num_prompts) // 2 % 2
    prefill = np.zeros((num_prompts, NUM_LAYERS, NUM_EXPERTS), np.uint32)
    decode = np.zeros_like(prefill)
    for row, which in enumerate(kind):
        for counts, num_tokens in ((prefill[row], num_prompt_tokens), (decode[row], 30)):
            for layer in range(NUM_LAYERS):
                for _ in range(num_tokens):
                    counts[layer, 3 * which + rng.permutation(3)[:TOP_K]] += 1
    vectors = prefill[:, LAYERS].reshape(num_prompts, -1).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors, prefill, decode, kind


def fit(vectors, decode, tokens, num_clusters=2, seed=0):
    return fit_profiles(
        vectors,
        decode,
        tokens,
        LAYERS,
        num_clusters=num_clusters,
        shrink_tokens=64.0,
        rng=np.random.default_rng(seed),
    )


def test_each_cluster_holds_its_kinds_decode_frequencies():
    vectors, _, decode, kind = two_kinds()
    profiles = fit(vectors, decode, np.full(40, 30))
    assert sorted(profiles.sizes.tolist()) == [20, 20]
    for which in (0, 1):
        rows = kind == which
        expected = decode[rows][:, LAYERS].reshape(20, -1).sum(axis=0) / (20 * 30)
        got = profiles.profile_of(vectors[rows][0])
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        np.testing.assert_allclose(got.reshape(2, -1).sum(axis=1), TOP_K, rtol=1e-5)


def test_layer_scale_is_all_layers_over_masked_ones():
    vectors, _, decode, _ = two_kinds()
    # Every layer behaves alike: three layers hold 3/2 of what two of them hold.
    np.testing.assert_allclose(fit(vectors, decode, np.full(40, 30)).layer_scale, 1.5, rtol=0.02)


def test_prompts_that_never_decoded_are_left_out_and_clusters_are_at_most_prompts():
    vectors, _, decode, _ = two_kinds(num_prompts=4)
    tokens = np.array([30, 0, 30, 0])
    decode[tokens == 0] = 0
    profiles = fit(vectors, decode, tokens, num_clusters=32)
    assert profiles.sizes.sum() == 2
    with pytest.raises(ValueError, match="must have decoded"):
        fit(vectors, decode * 0, tokens * 0)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "own_way", "more_is_better"), [(2, False, True), (3000, True, False)]
)
def test_shrinkage_is_chosen_by_what_predicts_unseen_prompts(
    num_prompt_tokens, own_way, more_is_better
):
    vectors, prefill, decode, _ = two_kinds(num_prompt_tokens=num_prompt_tokens)
    if own_way:
        # Every prompt has its own favourite expert, in prefill and in decode alike.
        for row in range(len(prefill)):
            prefill[row, :, row % NUM_EXPERTS] += 3000
        decode = (prefill / 100).round().astype(np.uint32)
    choice, errors = choose_shrinkage(
        vectors,
        prefill[:, LAYERS],
        prefill[:, 0].sum(axis=1) // TOP_K,
        decode,
        decode[:, 0].sum(axis=1) // TOP_K,
        LAYERS,
        num_clusters=2,
        rng=np.random.default_rng(0),
    )
    assert set(errors) == set(SHRINK_CHOICES)
    assert errors[choice] == min(errors.values())
    assert (errors[max(SHRINK_CHOICES)] < errors[min(SHRINK_CHOICES)]) == more_is_better
