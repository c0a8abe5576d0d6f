"""Bucket sets: lookup, the engines' ladders, and errors for sets that make no sense."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.buckets import (
    BucketSet,
    load_bucket_set,
    next_power_of_two,
    padding_gap_sizes,
    padding_tokens,
    powers_of_two,
)
from bucket_planner.errors import PlannerConfigError

CONFIG_DIR = Path(__file__).parents[2] / "configs" / "buckets"


def test_the_engines_own_ladders():
    assert powers_of_two(512) == (16, 32, 64, 128, 256, 512)
    assert powers_of_two(513)[-1] == 1024
    worked = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert padding_gap_sizes(512, 64) == worked
    assert padding_gap_sizes(512, 0) == powers_of_two(512)
    assert padding_gap_sizes(100, 24) == (16, 40, 64, 88, 112)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20_000), st.integers(16, 4096))
def test_gap_ladders_cover_the_limit_in_steps_of_the_gap(limit, gap):
    sizes = padding_gap_sizes(limit, gap)
    assert sizes[-1] >= limit
    assert all(
        high == 2 * low if high <= gap else high == low + gap for low, high in pairwise(sizes)
    )
    assert len(sizes) == 1 or sizes[-2] < max(limit, gap)


def test_a_chunk_just_over_a_power_of_two_wastes_almost_half():
    buckets = BucketSet(id="b", semantics="step", sizes_tokens=powers_of_two(32_768))
    assert buckets.bucket_of(16_640) == 32_768


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 2000))
def test_lookup(sizes, tokens):
    buckets = BucketSet(id="b", semantics="prompt", sizes_tokens=tuple(sorted(sizes)))
    padded = buckets.padded_tokens(tokens)
    assert padded >= tokens
    full, rest = divmod(tokens, max(sizes))
    smallest = min((s for s in sizes if s >= rest), default=0) if rest else 0
    assert padded == full * max(sizes) + smallest
    if tokens > max(sizes):
        with pytest.raises(PlannerConfigError, match="num_tokens"):
            buckets.bucket_of(tokens)


def test_padding_tokens():
    tokens, counts = np.array([10, 20, 64]), np.array([2, 1, 5])
    assert padding_tokens((16, 64), tokens, counts) == 2 * 6 + 44
    with pytest.raises(PlannerConfigError, match="64"):
        padding_tokens((16, 32), tokens, counts)


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_two(n, power):
    assert next_power_of_two(n) == power


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ((), "at least one"),
        ((16, 16, 32), "overlap"),
        ((32, 16), "ascend"),
        ((0, 16), ">= 1"),
        ((-4, 16), ">= 1"),
    ],
)
def test_senseless_sets_are_refused(sizes, rule):
    with pytest.raises(PlannerConfigError, match=rule) as caught:
        BucketSet(id="mine", semantics="step", sizes_tokens=sizes)
    assert caught.value.field == "mine.buckets"


def test_gaps_below_the_smallest_bucket_are_refused():
    with pytest.raises(PlannerConfigError, match="padding_gap"):
        padding_gap_sizes(512, 8)


def test_shipped_sets_load():
    sets = {path.stem: load_bucket_set(path) for path in CONFIG_DIR.glob("*.yaml")}
    assert sets["tpu_inference_default"].sizes_tokens == powers_of_two(8192)
    assert sets["sgl_jax_default"].sizes_tokens == powers_of_two(8192, min_tokens=64)
    assert sets["jetstream_default"].sizes_tokens == powers_of_two(32_768)
    assert {s.id for s in sets.values()} == set(sets)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("buckets: [16, 64, 32]", ("ascend", "32")),
        ("buckets: [16, 16]", ("overlap",)),
        ("limit_tokens: 512\npadding_gap: 8", ("padding_gap", "8")),
        ("buckets: [16]\nlimit_tokens: 16", ("exactly one",)),
        ("", ("exactly one",)),
        ("bucket: [16]", ("bucket", "'buckets'")),
        ("buckets: [16.5]", ("buckets[0]", "16.5")),
        ("buckets: [16]\nbuckets: [32]", ("written twice",)),
    ],
)
def test_errors_name_the_file_and_the_rule(tmp_path, text, facts):
    path = tmp_path / "set.yaml"
    head = "schema_version: 1\nid: x\nengine: e\nsemantics: step\nsource: s\n"
    path.write_text(head + text)
    with pytest.raises(PlannerConfigError) as caught:
        load_bucket_set(path)
    for fact in ("set.yaml", *facts):
        assert fact in str(caught.value)
