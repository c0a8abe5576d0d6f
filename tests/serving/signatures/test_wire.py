from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import InvalidRequest
from serving.core.signature import SignatureSource
from serving.signatures.model import SignatureModel, mask_version_of
from serving.signatures.wire import decode_signature, encode_signature

NUM_EXPERTS, TOP_K = 5, 2
LAYERS = np.array([1, 3, 0], np.int32)
MODEL = SignatureModel(
    version="sig-test",
    mask_version=mask_version_of(LAYERS, num_layers=4, num_experts=NUM_EXPERTS, top_k=TOP_K),
    layers=LAYERS,
    num_layers=4,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    idf=np.ones((3, NUM_EXPERTS), np.float32),
)


def counts_of(num_tokens: int, seed: int) -> np.ndarray:
    """Counts of `num_tokens` tokens, each touching TOP_K distinct experts, [3, E]."""
    rng = np.random.default_rng(seed)
    pairs = np.array([(a, b) for a in range(NUM_EXPERTS) for b in range(a)])
    times = rng.multinomial(num_tokens, np.full(len(pairs), 1 / len(pairs)), size=3)
    counts = np.zeros((3, NUM_EXPERTS), np.int64)
    for column in (0, 1):
        for index, expert in enumerate(pairs[:, column]):
            counts[:, expert] += times[:, index]
    return counts


def wire(**change) -> dict:
    return encode_signature(counts_of(9, 0), 9, MODEL.mask_version) | change


def repacked(counts: np.ndarray, **change) -> dict:
    raw = counts.astype("<u2").tobytes()
    return wire(base64=base64.b64encode(raw).decode(), **change)


@given(st.sampled_from([1, 2, 300, 65_535, 65_536, 200_000]), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_counts_come_back_as_they_were_through_json(num_tokens, seed):
    counts = counts_of(num_tokens, seed)
    sent = json.loads(json.dumps(encode_signature(counts, num_tokens, MODEL.mask_version)))
    assert sent["dtype"] == ("uint16" if num_tokens <= 65_535 else "uint32")
    got = decode_signature(sent, model=MODEL, num_prompt_tokens=num_tokens)
    assert np.array_equal(got.counts, counts)
    assert (got.num_tokens, got.source, got.confidence) == (num_tokens, SignatureSource.LIVE, 1.0)
    assert got.version == MODEL.version


def test_the_bytes_are_little_endian_rows():
    raw = base64.b64decode(wire()["base64"])
    assert np.array_equal(np.frombuffer(raw, "<u2").reshape(3, -1), counts_of(9, 0))


@pytest.mark.parametrize(
    ("obj", "field", "rule"),
    [
        (None, "eldr_sig", "JSON object"),
        ([1], "eldr_sig", "JSON object"),
        ("x", "eldr_sig", "JSON object"),
        ({}, "version", "missing"),
        (wire(version=2), "version", "must be 1"),
        (wire(version=True), "version", "must be 1"),
        (wire(version="1"), "version", "must be 1"),
        (wire(mask_version="mask-other"), "mask_version", MODEL.mask_version),
        (wire(num_tokens=0), "num_tokens", "integer"),
        (wire(num_tokens=-3), "num_tokens", "integer"),
        (wire(num_tokens=9.0), "num_tokens", "integer"),
        (wire(num_tokens=1 << 40), "num_tokens", "integer"),
        (wire(num_tokens=8), "num_tokens", "prompt's length"),
        (wire(dtype="uint32"), "dtype", "uint16"),
        (wire(dtype="object"), "dtype", "uint16"),
        (wire(dtype=["uint16"]), "dtype", "uint16"),
        (wire(shape=[3, 6]), "shape", "[3, 5]"),
        (wire(shape=[15]), "shape", "[3, 5]"),
        (wire(shape=10**9), "shape", "[3, 5]"),
        (wire(shape=[[3], 5]), "shape", "[3, 5]"),
        (wire(base64=7), "base64", "40 characters"),
        (wire(base64=""), "base64", "40 characters"),
        (wire(base64="A" * 10_000_000), "base64", "40 characters"),
        (wire(base64="*" * 40), "base64", "standard base64"),
        (wire(base64="é" * 40), "base64", "standard base64"),
        (wire(base64="A" * 38 + "=="), "base64", "30 bytes"),
        (wire(base64="A" * 40), "base64", "sum to"),
        (repacked(np.full((3, 5), 60_000)), "base64", "a count must be <="),
        (repacked(counts_of(9, 0) + np.eye(3, 5, dtype=int)), "base64", "masked layer 0"),
    ],
)
def test_nothing_the_sender_says_is_believed(obj, field, rule):
    with pytest.raises(InvalidRequest) as caught:
        decode_signature(obj, model=MODEL, num_prompt_tokens=9)
    assert caught.value.field.removeprefix("eldr_sig.") == field
    assert rule in caught.value.rule
    assert len(str(caught.value)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(wire())), JSON)
@settings(max_examples=150, deadline=None)
def test_a_member_replaced_by_anything_is_refused_or_harmless(name, value):
    sent = wire() | {name: value}
    try:
        got = decode_signature(sent, model=MODEL, num_prompt_tokens=9)
    except InvalidRequest:
        return
    assert got.num_tokens == 9
    assert (got.counts.sum(axis=1) == 9 * TOP_K).all()


def test_encoding_refuses_impossible_counts():
    with pytest.raises(ValueError, match="num_tokens"):
        encode_signature(np.zeros((3, 5), int), 0, "m")
    with pytest.raises(ValueError, match="counts must lie"):
        encode_signature(np.full((3, 5), 4), 3, "m")
    with pytest.raises(ValueError, match="shape"):
        encode_signature(np.zeros(5, int), 3, "m")
