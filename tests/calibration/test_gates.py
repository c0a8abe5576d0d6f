from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from calibration import prepare_reference
from calibration.capture_checks import GATE_UNITS, CaptureError, check_chunk
from calibration.captures import (
    CaptureWriter,
    PromptCapture,
    read_capture,
    read_chunks,
    read_manifest,
)
from calibration.fit.pipeline import FitConfig, fit_capture
from calibration.fit.variants import FitVariant
from calibration.gates import GateSums
from calibration.prepare_reference import ReferenceSet
from eldr_jax.config import ModelConfig
from eldr_jax.model import init_params, model_of
from serving.replay.bank import read_bank
from serving.signatures.artefact import load_artefact

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    norm_topk_prob=True,
    tie_word_embeddings=True,
    initializer_range=0.5,
    bos_token_id=0,
    eos_token_id=0,
)
FIT = FitConfig(num_pairs=800, num_clusters=4, num_regions=(4,), union_batches=(8,), union_draws=20)


def test_sums_are_those_of_the_models_own_gates():
    params = init_params(MODEL, jax.random.key(1))
    sums = GateSums(MODEL, params)
    tokens = np.random.default_rng(0).integers(1, 32, 65).astype(np.int32)
    forward = jax.jit(lambda ids: model_of(MODEL, params)(ids))(tokens[None])
    wanted = [np.asarray(jax.nn.softmax(t.logits, axis=-1)).sum(axis=0) for t in forward.routers]
    found = sums.of(tokens) / (2.0 * GATE_UNITS)
    np.testing.assert_allclose(found, np.stack(wanted), atol=0.01)
    with pytest.raises(ValueError, match="at least one token"):
        sums.of(np.zeros(0, np.int32))


def gated(capture, path):
    """The prompts of a capture again, with gates a little softer than its counts."""
    starts, ends = capture.decode_starts(), np.cumsum(capture.num_prompt_tokens)
    writer = CaptureWriter(
        path, geometry=capture.geometry, model_name="topics", provenance={}, chunk_prompts=20
    )
    even = capture.geometry.top_k / capture.geometry.num_experts
    for i, name in enumerate(capture.prompt_ids):
        num = int(capture.num_prompt_tokens[i])
        soft = GATE_UNITS * (0.6 * capture.prefill[i] + 0.4 * num * even)
        writer.add(
            PromptCapture(
                prompt_id=name,
                domain=capture.domains[i],
                token_ids=capture.token_ids[ends[i] - num : ends[i]],
                prefill=capture.prefill[i],
                decode=capture.decode[i],
                decode_experts=capture.decode_experts[starts[i] : starts[i + 1]],
                prefill_experts=capture.prefill_experts[ends[i] - num : ends[i]],
                prefill_gates=np.rint(soft).astype(np.uint32),
            )
        )
    writer.close()
    return path


def test_gates_that_do_not_add_up_are_refused(topic_capture, tmp_path):
    gated(topic_capture, tmp_path / "c")
    file, arrays = next(iter(read_chunks(tmp_path / "c", read_manifest(tmp_path / "c"))))
    for wrong, rule in (
        (arrays["prefill_gates"] * 2, "layer 0 must sum to tokens"),
        (arrays["prefill_gates"][:, :1], "unsigned of shape"),
    ):
        with pytest.raises(CaptureError, match=rule) as caught:
            check_chunk(arrays | {"prefill_gates": wrong}, topic_capture.geometry, file)
        assert caught.value.field == "prefill_gates"


def test_a_fit_from_gates_weighs_them_and_says_so(topic_capture, tmp_path):
    capture = read_capture(gated(topic_capture, tmp_path / "c"))
    fit_capture(capture, tmp_path / "counts", FIT)
    fit_capture(capture, tmp_path / "gates", dataclasses.replace(FIT, evidence="gates"))
    counts, gates = (load_artefact(tmp_path / name) for name in ("counts", "gates"))
    assert (counts.manifest.evidence, gates.manifest.evidence) == ("counts", "gates")
    model = gates.model
    assert capture.prefill_gates is not None
    wanted = model.mask(capture.prefill_gates)
    np.testing.assert_array_equal(gates.calibration.prefill, wanted)
    # Experts are weighed by who counts them: every gate gives every expert something.
    assert model.idf.max() > 0
    assert gates.token_table is None
    assert counts.manifest.metrics["spearman"] != gates.manifest.metrics["spearman"]
    half = capture.of_domains(["code"])
    assert half.prefill_gates is not None
    assert len(half.prefill_gates) == len(half.domains)
    with pytest.raises(CaptureError, match="without gate probabilities"):
        fit_capture(topic_capture, tmp_path / "x", dataclasses.replace(FIT, evidence="gates"))


def test_the_references_inputs_are_made_once(topic_capture, tmp_path, monkeypatch):
    made = []

    def capture(config):
        assert config.gates
        made.append((config.split, config.num_prompts, config.seed))
        return gated(topic_capture, config.out)

    monkeypatch.setattr(prepare_reference.capture_main, "run", capture)
    item = ReferenceSet(
        model="m",
        seeds=(3, 4),
        fits=(FitVariant(), FitVariant(name="gates", evidence="gates")),
        num_serve=9,
        capture_seed=7,
    )
    given = {"model": tmp_path, "corpora": "c", "out": tmp_path / "o", "num_regions": (4,)}
    assert prepare_reference.prepare_reference(item, **given) == 5
    assert made == [("heldout", 9, 7), ("train", 1000, 7)]
    bank = read_bank(tmp_path / "o/reference/bank.npz")
    assert bank.gates is not None
    assert bank.gates.shape == bank.prefill.shape
    assert load_artefact(tmp_path / "o/reference-s4/fit").token_table is not None
    assert load_artefact(tmp_path / "o/reference-s4/fit-gates").manifest.evidence == "gates"
    (tmp_path / "o/reference-s3/fit/manifest.json").unlink()
    assert prepare_reference.prepare_reference(item, **given) == 1
    assert len(made) == 2
