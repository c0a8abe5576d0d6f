from __future__ import annotations

import numpy as np
import pytest

from calibration.fit.token_routes import (
    CONFIDENCE_CHOICES,
    DecodedPrompts,
    build_token_table,
    fit_token_table,
    mean_cosine,
)
from serving.signatures.model import SignatureModel

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 5, 2
MODEL = SignatureModel(
    version="sig-test",
    mask_version="mask-test",
    layers=np.array([2, 0], np.int32),
    num_layers=NUM_LAYERS,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    idf=np.ones((2, NUM_EXPERTS), np.float32),
)


def route(token_ids: np.ndarray) -> np.ndarray:
    """Experts that depend on token and layer alone, uint8 [T, L, K]."""
    layer = np.arange(NUM_LAYERS)[None, :, None]
    return ((token_ids[:, None, None] + layer + np.arange(TOP_K)) % NUM_EXPERTS).astype(np.uint8)


def test_the_table_holds_exactly_what_was_counted():
    token_ids = np.array([4, 9, 4, 4], np.int32)
    experts = route(token_ids)
    experts[2, 0] = [0, 1]
    table = build_token_table(token_ids, experts, MODEL, prior_tokens=2.0, confidence=0.5)
    assert table.token_ids.tolist() == [4, 9]
    assert table.num_seen.tolist() == [3, 1]
    for row, token in enumerate(table.token_ids):
        dense = np.zeros((2, NUM_EXPERTS), int)
        span = slice(table.starts[row], table.starts[row + 1])
        np.add.at(dense.reshape(-1), table.entries[span].astype(int), table.counts[span])
        expected = np.zeros_like(dense)
        for at in np.flatnonzero(token_ids == token):
            for place, layer in enumerate(MODEL.layers):
                expected[place, experts[at, layer]] += 1
        assert np.array_equal(dense, expected)
    np.testing.assert_allclose(table.mean.reshape(2, -1).sum(axis=1), TOP_K)


def decoded_like(counts: np.ndarray, num_tokens: np.ndarray) -> DecodedPrompts:
    return DecodedPrompts(
        decode=counts,
        num_tokens=num_tokens,
        num_clusters=2,
        shrink_tokens=16.0,
        rng=np.random.default_rng(1),
    )


def test_context_free_routing_is_predicted_and_the_confidence_says_so():
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 40, 60)
    token_ids = rng.integers(0, 12, lengths.sum()).astype(np.int32)
    experts = route(token_ids)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.zeros((60, NUM_LAYERS, NUM_EXPERTS), np.uint32)
    for row in range(60):
        for layer in range(NUM_LAYERS):
            ids = experts[starts[row] : starts[row + 1], layer].ravel()
            counts[row, layer] = np.bincount(ids, minlength=NUM_EXPERTS)
    vectors = MODEL.vectors(MODEL.mask(counts))
    # Prompts that decode as they were read: the counts say all, the cluster nothing.
    same = decoded_like(counts, lengths)
    table, cosine = fit_token_table(token_ids, lengths, experts, vectors, MODEL, same)
    assert cosine > 0.99
    assert table.confidence == 1.0
    # All prompts decode alike: the cluster says all.
    alike = decoded_like(np.broadcast_to(counts.sum(axis=0), counts.shape), lengths * 0 + 1000)
    doubted, _ = fit_token_table(token_ids, lengths, experts, vectors, MODEL, alike)
    assert doubted.confidence == min(CONFIDENCE_CHOICES)
    prompts = [token_ids[starts[row] : starts[row + 1]] for row in range(60)]
    assert mean_cosine(table, prompts, vectors, MODEL) > 0.99
    # The same table against shuffled prompts is worse: the measure can fail.
    assert mean_cosine(table, prompts[::-1], vectors, MODEL) < cosine - 0.01


def test_a_table_needs_a_positive_prior():
    with pytest.raises(ValueError, match="prior_tokens"):
        build_token_table(np.array([1]), route(np.array([1])), MODEL, prior_tokens=0, confidence=1)
