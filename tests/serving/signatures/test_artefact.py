from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from serving.assembly import expert_profiles
from serving.core.errors import ArtefactError
from serving.core.signature import SignatureSource
from serving.signatures import manifest as files
from serving.signatures.artefact import CalibrationSet, load_artefact, write_artefact
from serving.signatures.profiles import DecodeProfiles
from serving.signatures.regions import fit_regions
from serving.signatures.token_table import TokenTable

REPOSITORY = Path(__file__).resolve().parents[3]
NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_PROMPTS = 3, 6, 2, 12
LAYERS = np.array([0, 2], np.int32)


def random_counts(num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    picks = rng.random((num_tokens, len(LAYERS), NUM_EXPERTS)).argsort(axis=2)[..., :TOP_K]
    hot = np.zeros((num_tokens, len(LAYERS), NUM_EXPERTS), np.uint32)
    np.put_along_axis(hot, picks, 1, axis=2)
    return hot.sum(axis=0)


def write(path: Path, **change):
    rng = np.random.default_rng(0)
    prefill = np.stack([random_counts(20, rng) for _ in range(NUM_PROMPTS)])
    decode = np.stack([random_counts(9, rng) for _ in range(NUM_PROMPTS)])
    size = prefill[0].size
    fields = {
        "model_name": "tiny",
        "layers": LAYERS,
        "idf": rng.random((len(LAYERS), NUM_EXPERTS)).astype(np.float32),
        "num_layers": NUM_LAYERS,
        "top_k": TOP_K,
        "profiles": DecodeProfiles(
            centroids=np.eye(2, size, dtype=np.float32),
            profiles=np.full((2, size), TOP_K / NUM_EXPERTS, np.float32),
            sizes=np.array([6, 6], np.int32),
            layer_scale=np.array([1.5, 1.5], np.float32),
            shrink_tokens=64.0,
        ),
        "calibration": CalibrationSet(
            prefill=prefill, decode=decode, num_decode_tokens=np.full(NUM_PROMPTS, 9, np.int32)
        ),
        "token_table": TokenTable(
            token_ids=np.array([1], np.int32),
            num_seen=np.array([1], np.int32),
            starts=np.array([0, 4], np.int64),
            entries=np.array([0, 1, 6, 7], np.uint32),
            counts=np.ones(4, np.uint32),
            mean=np.full(size, TOP_K / NUM_EXPERTS, np.float32),
            prior_tokens=2.0,
            confidence=0.5,
        ),
        "prefitted": {},
        "regions_seed": 7,
        "step_time": None,
        "metrics": {"spearman": 0.5},
        "provenance": {"capture": "none"},
    }
    return write_artefact(path, **fields | change)


def test_what_was_written_comes_back(tmp_path):
    manifest = write(tmp_path / "a")
    got = load_artefact(tmp_path / "a")
    assert got.version == manifest.version == got.model.version
    assert got.model.layers.tolist() == LAYERS.tolist()
    assert got.profiles.shrink_tokens == 64.0
    assert got.token_table is not None
    assert got.token_table.confidence == 0.5
    assert got.calibration.prefill.dtype == np.uint32
    assert (got.calibration.prefill.sum(axis=2) == 20 * TOP_K).all()


@pytest.mark.parametrize(("dtype", "order"), [("f4", "F"), (">f4", "C"), ("f8", "C")])
def test_a_decision_takes_floats_however_they_were_stored(tmp_path, dtype, order):
    size = len(LAYERS) * NUM_EXPERTS
    stored = DecodeProfiles(
        centroids=np.eye(2, size).astype(dtype, order),
        profiles=np.full((2, size), TOP_K / NUM_EXPERTS).astype(dtype, order),
        sizes=np.array([6, 6], np.int32),
        layer_scale=np.array([1.5, 1.5], np.float32),
        shrink_tokens=64.0,
    )
    write(tmp_path, profiles=stored)
    artefact = load_artefact(tmp_path)
    counts = random_counts(20, np.random.default_rng(1))
    signature = artefact.model.signature(counts, 20, source=SignatureSource.LIVE)
    keep = expert_profiles(artefact).keep(signature)
    assert keep.dtype == np.float32
    assert 0.0 < keep.min() < keep.max() < 1.0


def test_the_version_is_the_contents_and_nothing_elses(tmp_path):
    first = write(tmp_path / "a")
    again = write(tmp_path / "b", provenance={"capture": "other words"})
    other = write(tmp_path / "c", layers=np.array([0, 1], np.int32))
    assert first.version == again.version
    assert first.mask_version == again.mask_version
    assert other.version != first.version
    assert other.mask_version != first.mask_version


def test_an_artefact_may_have_no_token_table(tmp_path):
    write(tmp_path, token_table=None)
    assert load_artefact(tmp_path).token_table is None


def test_regions_are_the_same_prefitted_or_fitted_on_demand(tmp_path):
    write(tmp_path / "plain")
    plain = load_artefact(tmp_path / "plain")
    vectors = plain.model.vectors(plain.calibration.prefill)
    ready = fit_regions(vectors, 3, np.random.default_rng([7, 3]))
    write(tmp_path / "ready", prefitted={3: ready})
    prefitted = load_artefact(tmp_path / "ready")
    workers = ("w0", "w1", "w2")
    on_demand = plain.regions_for(workers)
    assert np.array_equal(on_demand.centroids, prefitted.regions_for(workers).centroids)
    assert on_demand.profiles is not None
    np.testing.assert_allclose(
        on_demand.profiles.reshape(3, len(LAYERS), -1).sum(axis=2), TOP_K, rtol=1e-5
    )


@pytest.mark.parametrize("num_workers", [1, NUM_PROMPTS, NUM_PROMPTS + 5])
def test_every_fleet_size_gets_regions(tmp_path, num_workers):
    write(tmp_path)
    regions = load_artefact(tmp_path).regions_for([f"w{i}" for i in range(num_workers)])
    assert regions.profiles is not None
    assert regions.layer_scale is not None
    assert len(regions.centroids) == len(regions.profiles) == num_workers
    assert np.isfinite(regions.profiles).all()
    np.testing.assert_allclose(regions.layer_scale, 1.5)


def damage_manifest(path: Path, **change) -> None:
    file = path / files.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version=2 must be 1"),
        ({"kind": "checkpoint"}, "kind must be 'signature_model'"),
        ({"surprise": 1}, "unknown field"),
        ({"num_layers": "three"}, "num_layers"),
        ({"version": "sig-0"}, "the content's"),
        ({"mask_version": "mask-0"}, "mask_version"),
        ({"num_layers": 2}, "num_layers"),
        ({"fitted_regions": [5]}, "centroids_5"),
        ({"shrink_tokens": 0.0}, "shrink_tokens"),
        ({"files": {"../x.npz": {"num_bytes": 1, "sha256": ""}}}, "plain .npz name"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, change, message):
    write(tmp_path)
    damage_manifest(tmp_path, **change)
    with pytest.raises(ArtefactError, match=message):
        load_artefact(tmp_path)


def test_damaged_and_missing_files_are_named(tmp_path):
    write(tmp_path)
    file = tmp_path / "profiles.npz"
    raw = bytearray(file.read_bytes())
    raw[40] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ArtefactError, match=r"profiles\.npz: sha256"):
        load_artefact(tmp_path)
    file.write_bytes(raw[:-1])
    with pytest.raises(ArtefactError, match=r"profiles\.npz: has \d+ bytes"):
        load_artefact(tmp_path)
    file.unlink()
    with pytest.raises(ArtefactError, match=r"profiles\.npz: cannot be read"):
        load_artefact(tmp_path)
    (tmp_path / files.MANIFEST).write_text("{")
    with pytest.raises(ArtefactError, match="must be JSON"):
        load_artefact(tmp_path)
    with pytest.raises(ArtefactError, match="cannot be read"):
        load_artefact(tmp_path / "nowhere")


def test_a_pickle_in_place_of_arrays_is_not_run(tmp_path):
    write(tmp_path)
    file = tmp_path / "profiles.npz"
    np.savez(file, centroids=np.array([{"a": 1}], object))
    raw = file.read_bytes()
    entry = files.FileEntry(num_bytes=len(raw), sha256=files.hashlib.sha256(raw).hexdigest())
    with pytest.raises(ArtefactError, match="plain arrays"):
        files.read_arrays(file, entry)


def test_the_shipped_artefact_loads():
    shipped = load_artefact(REPOSITORY / "configs/artefacts/signature_model")
    regions = shipped.regions_for(["a", "b", "c", "d"])
    assert regions.centroids.shape == (4, shipped.model.size)
    assert shipped.token_table is not None
    probability = shipped.profiles.expert_probability(None)
    per_layer = probability.reshape(shipped.model.num_masked_layers, -1).sum(axis=1)
    np.testing.assert_allclose(per_layer, shipped.model.top_k, rtol=1e-4)
