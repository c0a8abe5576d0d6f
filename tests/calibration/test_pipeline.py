from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from calibration.capture_checks import CaptureError
from calibration.captures import read_capture
from calibration.evaluate import EvaluationConfig, evaluate, render_card
from calibration.fit.pipeline import FitConfig, fit_capture
from serving.signatures.artefact import load_artefact

CONFIG = FitConfig(
    num_pairs=800, num_clusters=4, num_regions=(4,), union_batches=(8,), union_draws=20
)


@pytest.fixture(scope="module")
def artefact_dir(tmp_path_factory, topic_capture) -> Path:
    path = tmp_path_factory.mktemp("artefact")
    fit_capture(topic_capture, path, CONFIG)
    return path


def test_the_noisy_layer_is_masked_and_topics_become_regions(artefact_dir, topic_capture):
    artefact = load_artefact(artefact_dir)
    assert 1 not in artefact.model.layers.tolist()
    vectors = artefact.model.vectors(artefact.model.mask(topic_capture.prefill))
    regions = artefact.regions_for(["a", "b", "c", "d"])
    best = np.array([regions.similarity(v, ("a", "b", "c", "d")).argmax() for v in vectors])
    topics = np.array(topic_capture.domains)
    for topic in set(topics):
        values, sizes = np.unique(best[topics == topic], return_counts=True)
        assert sizes.max() >= 11, (topic, values, sizes)


def test_the_same_capture_gives_the_same_artefact(artefact_dir, topic_capture, tmp_path):
    again = fit_capture(topic_capture, tmp_path, CONFIG)
    assert again == load_artefact(artefact_dir).manifest


def test_metrics_and_provenance_are_recorded(artefact_dir, topic_capture):
    manifest = load_artefact(artefact_dir).manifest
    curve = [manifest.metrics[f"mask_spearman_{n:02d}"] for n in (1, 2, 3, 4)]
    assert int(np.argmax(curve)) + 1 == manifest.metrics["num_masked_layers"]
    assert 0.5 < manifest.metrics["spearman"] <= 1
    assert manifest.metrics["union_reduction_task_8"] > 0.1
    assert "union_reduction_task_64" not in manifest.metrics
    assert manifest.provenance == {"capture": topic_capture.digest, "prompts": "drawn"}


def test_a_capture_without_prefill_ids_gives_no_token_table(topic_capture, tmp_path):
    fit_capture(dataclasses.replace(topic_capture, prefill_experts=None), tmp_path, CONFIG)
    assert load_artefact(tmp_path).token_table is None


def test_prompts_that_never_decoded_do_not_count(topic_capture, tmp_path):
    keep = np.arange(48) < 3
    starts = topic_capture.decode_starts()
    few = dataclasses.replace(
        topic_capture,
        num_decode_tokens=np.where(keep, topic_capture.num_decode_tokens, 0),
        decode=np.where(keep[:, None, None], topic_capture.decode, 0),
        decode_experts=topic_capture.decode_experts[: starts[3]],
    )
    with pytest.raises(CaptureError, match="at least 4 prompts"):
        fit_capture(few, tmp_path, CONFIG)


def test_held_out_prompts_confirm_the_fit(artefact_dir, held_out_capture_dir):
    artefact = load_artefact(artefact_dir)
    capture = read_capture(held_out_capture_dir)
    config = EvaluationConfig(num_pairs=800, union_batches=(8,), union_draws=20)
    report = evaluate(artefact, capture, config)
    assert report.num_prompts == 48
    assert report.num_prompts_by_domain == dict.fromkeys(("code", "lang/de", "lang/ja", "math"), 12)
    metrics = report.metrics
    assert metrics["spearman"] > 0.5
    assert metrics["union_reduction_region_4_8"] > 0.1
    assert metrics["token_table_cosine"] > 0.8
    assert metrics["decode_rmse_shrunk"] < metrics["decode_rmse_prefill_only"]
    assert metrics["decode_rmse_shrunk"] < metrics["decode_rmse_mean_profile"]
    card = render_card(artefact, report, "sh rebuild.sh")
    assert artefact.version in card
    assert "sh rebuild.sh" in card
    assert f"| spearman | {artefact.manifest.metrics['spearman']:.4g} | " in card


def test_an_artefact_of_another_geometry_is_refused(artefact_dir, topic_capture):
    other = dataclasses.replace(
        topic_capture,
        geometry=topic_capture.geometry.__class__(num_layers=4, num_experts=16, top_k=3),
    )
    with pytest.raises(CaptureError, match="geometry"):
        evaluate(load_artefact(artefact_dir), other, EvaluationConfig())
