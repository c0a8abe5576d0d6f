from __future__ import annotations

import numpy as np
import pytest

from serving.core.signature import Signature, SignatureSource
from serving.signatures.profiles import DecodeProfiles

PROFILES = DecodeProfiles(
    centroids=np.eye(2, 4, dtype=np.float32),
    profiles=np.array([[1.0, 0.5, 0.5, 0.0], [0.0, 0.5, 0.5, 1.0]], np.float32),
    sizes=np.array([3, 1], np.int32),
    layer_scale=np.array([3.0, 2.0], np.float32),
    shrink_tokens=10.0,
)


def signature(counts: list[int], num_tokens: int, confidence: float = 1.0) -> Signature:
    array = np.array([counts], np.uint32)
    norm = np.linalg.norm(array)
    vector = (array.ravel() / norm if norm else array.ravel()).astype(np.float32)
    return Signature(
        counts=array,
        num_tokens=num_tokens,
        vector=vector,
        source=SignatureSource.LIVE,
        version="v",
        confidence=confidence,
    )


def test_counts_are_shrunk_towards_the_nearest_clusters_profile():
    got = PROFILES.expert_probability(signature([30, 20, 10, 0], 30))
    by_hand = (np.array([30, 20, 10, 0]) + 10 * PROFILES.profiles[0]) / (30 + 10)
    np.testing.assert_allclose(got, by_hand, rtol=1e-6)
    assert got.dtype == np.float32
    assert got.sum() == pytest.approx(2.0)


def test_a_long_prompt_speaks_for_itself_and_an_unsure_one_less():
    counts = [0, 0, 50_000, 50_000]
    sure = PROFILES.expert_probability(signature(counts, 50_000))
    np.testing.assert_allclose(sure, [0, 0, 1, 1], atol=1e-3)
    unsure = PROFILES.expert_probability(signature([0, 0, 10, 10], 10, confidence=0.1))
    surer = PROFILES.expert_probability(signature([0, 0, 10, 10], 10))
    assert unsure[3] < surer[3]
    assert unsure.sum() == pytest.approx(2.0)


def test_without_a_signature_the_mean_profile_speaks():
    mean = [0.75, 0.5, 0.5, 0.25]
    np.testing.assert_allclose(PROFILES.expert_probability(None), mean)
    np.testing.assert_allclose(PROFILES.expert_probability(signature([0] * 4, 0)), mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profiles": np.zeros((2, 3), np.float32)}, "equal"),
        ({"sizes": np.array([1])}, "sizes"),
        ({"sizes": np.array([0, 0])}, "at least one"),
        ({"layer_scale": np.ones(3)}, "layer_scale"),
        ({"shrink_tokens": 0.0}, "shrink_tokens"),
    ],
)
def test_profiles_that_cannot_be_are_refused(change, message):
    fields = {name: getattr(PROFILES, name) for name in PROFILES.__slots__}
    with pytest.raises(ValueError, match=message):
        DecodeProfiles(**fields | change)
