from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.signature import SignatureSource
from serving.signatures.model import SignatureModel, idf_weights, mask_version_of


def make_model(layers=(2, 0), num_layers=4, num_experts=6, top_k=2, idf=None) -> SignatureModel:
    layers = np.array(layers, np.int32)
    if idf is None:
        idf = np.random.default_rng(0).random((len(layers), num_experts)).astype(np.float32)
    return SignatureModel(
        version="sig-test",
        mask_version=mask_version_of(
            layers, num_layers=num_layers, num_experts=num_experts, top_k=top_k
        ),
        layers=layers,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        idf=idf,
    )


def test_an_expert_that_every_prompt_hits_weighs_exactly_zero():
    weights = idf_weights(np.array([0, 1, 500, 999, 1000]), 1000)
    assert weights[-1] == 0.0
    assert weights[0] == pytest.approx(np.log(1001))
    assert (np.diff(weights) < 0).all()


@pytest.mark.parametrize("df", [[-1], [11]])
def test_idf_refuses_impossible_frequencies(df):
    with pytest.raises(ValueError, match="document frequency"):
        idf_weights(np.array(df), 10)


def test_the_vector_is_weighted_concatenated_and_normalised_once():
    model = make_model()
    counts = np.arange(24).reshape(4, 6)
    masked = model.mask(counts)
    assert masked.dtype == np.uint32
    by_hand = np.concatenate([counts[2] * model.idf[0], counts[0] * model.idf[1]])
    np.testing.assert_allclose(model.vector(masked), by_hand / np.linalg.norm(by_hand), rtol=1e-6)


@given(st.integers(1, 1000), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_the_vector_depends_on_direction_only_up_to_rounding(factor, seed):
    model = make_model()
    counts = np.random.default_rng(seed).integers(0, 50, (2, 6))
    np.testing.assert_allclose(model.vector(counts * factor), model.vector(counts), atol=1e-6)


def test_counts_of_zero_or_of_weightless_experts_give_the_zero_vector():
    idf = np.zeros((2, 6), np.float32)
    idf[:, 1] = 1.0
    model = make_model(idf=idf)
    counts = np.zeros((2, 6), np.uint32)
    assert not model.vector(counts).any()
    counts[:, 0] = 7
    signature = model.signature(counts, 7, source=SignatureSource.LIVE)
    assert not signature.vector.any()
    assert np.isfinite(signature.vector).all()


def test_vectors_are_the_rows_of_vector_bit_for_bit():
    model = make_model()
    counts = np.random.default_rng(1).integers(0, 9, (5, 2, 6))
    stacked = model.vectors(counts)
    for row, one in zip(stacked, counts, strict=True):
        assert np.array_equal(row, model.vector(one))
    assert model.vectors(counts[:0]).shape == (0, 12)


def test_mask_versions_tell_masks_apart():
    geometry = {"num_layers": 4, "num_experts": 6, "top_k": 2}
    names = {
        mask_version_of(np.array(layers), **geometry) for layers in ([0, 2], [2, 0], [0], [1, 2])
    }
    assert len(names) == 4
    assert mask_version_of(np.array([0, 2]), **geometry | {"top_k": 3}) not in names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (0, 0)}, "distinct"),
        ({"layers": (0, 4)}, "num_layers"),
        ({"layers": ()}, "distinct"),
        ({"top_k": 7}, "top_k"),
        ({"idf": np.zeros((2, 5), np.float32)}, "idf has shape"),
        ({"idf": np.full((2, 6), np.nan, np.float32)}, "finite"),
        ({"idf": np.full((2, 6), -1, np.float32)}, ">= 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_model(**change)


def test_wrong_shapes_and_confidence_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="must end in"):
        model.mask(np.zeros((3, 6)))
    good = np.zeros((2, 6), np.uint32)
    with pytest.raises(ValueError, match="counts have shape"):
        model.signature(good[:1], 1, source=SignatureSource.LIVE)
    with pytest.raises(ValueError, match="confidence"):
        model.signature(good, 1, source=SignatureSource.LIVE, confidence=0.0)
