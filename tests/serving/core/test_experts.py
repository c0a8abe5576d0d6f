import dataclasses

import numpy as np
import pytest

from serving.core.experts import MIN_KEEP, uniform_profiles
from tests.serving import decision_parts as parts


def test_counts_are_shrunk_towards_the_nearest_cluster():
    profiles, sign = parts.profiles(), parts.signature(seed=4)
    cluster = int((profiles.centroids @ sign.vector).argmax())
    touched = (sign.counts.reshape(-1) + 512 * profiles.profiles[cluster]) / (100 + 512)
    np.testing.assert_allclose(
        profiles.keep(sign), np.maximum(1 - touched, MIN_KEEP), rtol=1e-5, atol=1e-6
    )


def test_the_weight_mixes_with_the_mean_profile():
    profiles, sign = parts.profiles(), parts.signature(seed=4)
    mixed = 0.5 * profiles.keep(sign) + 0.5 * (1 - profiles.mean_profile)
    np.testing.assert_allclose(profiles.keep(sign, weight=0.5), mixed, rtol=1e-5)


def test_a_predicted_token_is_worth_its_confidence_beside_the_cluster():
    profiles, sign = parts.profiles(), parts.signature(seed=4)
    cluster = int((profiles.centroids @ sign.vector).argmax())
    doubted = dataclasses.replace(sign, confidence=0.25)
    touched = (0.25 * sign.counts.reshape(-1) + 512 * profiles.profiles[cluster]) / (25 + 512)
    np.testing.assert_allclose(
        profiles.keep(doubted), np.maximum(1 - touched, MIN_KEEP), rtol=1e-5, atol=1e-6
    )


def test_without_a_trusted_signature_it_is_the_mean_profile():
    profiles = parts.profiles()
    for keep in (profiles.keep(None), profiles.keep(parts.signature(), weight=0.0)):
        np.testing.assert_allclose(keep, 1 - profiles.mean_profile, rtol=1e-6)


def test_no_expert_is_certain():
    counts = np.zeros((parts.MASKED, parts.EXPERTS), np.uint32)
    counts[:, :2] = 10**6
    sign = parts.signature(counts, num_tokens=10**6)
    keep = parts.profiles().keep(sign)
    assert keep.min() == np.float32(MIN_KEEP)
    assert keep.dtype == np.float32


def test_the_uniform_profile_is_k_of_e():
    profiles = uniform_profiles(num_layers=4, num_masked_layers=2, num_experts=8, top_k=2)
    np.testing.assert_allclose(profiles.keep(None), 0.75)
    assert profiles.nearest(parts.signature().vector) == -1


def test_counts_of_another_size_are_refused():
    with pytest.raises(ValueError, match="must be 16"):
        parts.profiles().keep(parts.signature(np.ones((1, 8), np.uint32)))


def test_half_a_clustering_is_refused():
    with pytest.raises(ValueError, match="together"):
        dataclasses.replace(parts.profiles(), profiles=None)


def test_layer_scales_belong_to_the_clusters():
    profiles = dataclasses.replace(parts.profiles(), layer_scale=np.array([1, 2, 3], np.float32))
    assert [profiles.scale_of(cluster) for cluster in (-1, 0, 2)] == [0.0, 1.0, 3.0]
    assert parts.profiles().scale_of(1) == 0.0
    for wrong in ([1.0, 2.0], [1.0, 0.0, 2.0]):
        with pytest.raises(ValueError, match="layer_scale"):
            dataclasses.replace(parts.profiles(), layer_scale=np.array(wrong, np.float32))
