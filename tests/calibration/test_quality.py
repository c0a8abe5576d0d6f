from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from calibration.quality import (
    distinct_experts,
    domain_groups,
    prefill_decode_correlation,
    union_reduction,
)


def test_distinct_experts_of_one_request_are_its_top_k(topic_capture):
    rows = np.arange(len(topic_capture.prompt_ids))
    rng = np.random.default_rng(0)
    got = distinct_experts(topic_capture, [rows], batch_size=1, num_draws=20, rng=rng)
    assert got.tolist() == [topic_capture.geometry.top_k]
    more = distinct_experts(topic_capture, [rows], batch_size=20, num_draws=20, rng=rng)
    assert 2 < more[0] <= topic_capture.geometry.num_experts


def test_distinct_experts_counts_what_the_tokens_say(topic_capture):
    starts = topic_capture.decode_starts()
    # With one decode token per prompt the batch of all prompts is known.
    kept = starts[:-1]
    one = dataclasses.replace(
        topic_capture,
        num_decode_tokens=np.ones(len(kept), np.int32),
        decode_experts=topic_capture.decode_experts[kept],
    )
    expected = np.mean(
        [len(np.unique(one.decode_experts[:, layer])) for layer in range(one.geometry.num_layers)]
    )
    rng = np.random.default_rng(0)
    rows = np.arange(len(kept))
    got = distinct_experts(one, [rows], batch_size=len(kept), num_draws=1, rng=rng)
    assert got[0] == pytest.approx(expected)


def test_one_topic_batches_save_experts_and_random_labels_save_none(topic_capture):
    labels = np.array(topic_capture.domains)
    options = {"batch_size": 3, "num_draws": 200}
    same = union_reduction(topic_capture, labels, rng=np.random.default_rng(0), **options)
    shuffled = np.random.default_rng(1).permutation(labels)
    none = union_reduction(topic_capture, shuffled, rng=np.random.default_rng(0), **options)
    assert same is not None
    assert none is not None
    assert same > 0.1
    assert abs(none) < 0.03  # 3 of 12 prompts are a little more even than 3 of 48


def test_too_few_prompts_give_no_figure(topic_capture):
    labels = np.array(topic_capture.domains)
    for batch_size, names in ((64, labels), (4, np.full(len(labels), "one"))):
        assert (
            union_reduction(
                topic_capture,
                names,
                batch_size=batch_size,
                num_draws=2,
                rng=np.random.default_rng(0),
            )
            is None
        )


def test_groups_part_tasks_from_languages():
    groups = domain_groups(["code", "lang/de", "math"])
    assert groups["task"].tolist() == ["code", "", "math"]
    assert groups["language"].tolist() == ["", "lang/de", ""]


def test_correlation_of_equal_counts_is_one_and_of_flat_ones_undefined():
    counts = np.random.default_rng(0).integers(0, 9, (5, 2, 4))
    assert prefill_decode_correlation(counts, counts * 3) == pytest.approx((1.0, 1.0))
    assert prefill_decode_correlation(counts, counts * 0) == (0.0, 0.0)
