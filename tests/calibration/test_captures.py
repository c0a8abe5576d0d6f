from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from calibration.capture_checks import CaptureError, Geometry, check_chunk
from calibration.captures import (
    MANIFEST,
    CaptureWriter,
    PromptCapture,
    read_capture,
    read_chunks,
    read_manifest,
)

GEOMETRY = Geometry(num_layers=3, num_experts=8, top_k=2)


def experts_of(num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    shape = (num_tokens, GEOMETRY.num_layers, GEOMETRY.num_experts)
    return rng.random(shape).argsort(axis=2)[..., : GEOMETRY.top_k].astype(np.uint8)


def counts_of(experts: np.ndarray) -> np.ndarray:
    counts = np.zeros((GEOMETRY.num_layers, GEOMETRY.num_experts), np.uint32)
    for token in experts:
        for layer, ids in enumerate(token):
            counts[layer, ids] += 1
    return counts


def prompt(index: int, *, with_prefill: bool = True) -> PromptCapture:
    rng = np.random.default_rng(index)
    prefill_experts = experts_of(3 + index % 5, rng)
    decode_experts = experts_of(index % 4, rng)
    return PromptCapture(
        prompt_id=f"Prompt {index} é",
        domain="code" if index % 2 else "lang/ja",
        token_ids=rng.integers(0, 99, len(prefill_experts)).astype(np.int32),
        prefill=counts_of(prefill_experts),
        decode=counts_of(decode_experts),
        decode_experts=decode_experts,
        prefill_experts=prefill_experts if with_prefill else None,
    )


def write(path: Path, num_prompts: int = 7, **options) -> list[PromptCapture]:
    prompts = [prompt(index, **options) for index in range(num_prompts)]
    writer = CaptureWriter(
        path, geometry=GEOMETRY, model_name="tiny", provenance={"a": "b"}, chunk_prompts=3
    )
    for one in prompts:
        writer.add(one)
    writer.close()
    return prompts


def test_a_capture_comes_back_as_it_was(tmp_path):
    prompts = write(tmp_path / "c")
    got = read_capture(tmp_path / "c")
    assert got.prompt_ids == tuple(one.prompt_id for one in prompts)
    assert got.domains == tuple(one.domain for one in prompts)
    starts = got.decode_starts()
    assert got.prefill_experts is not None
    for index, one in enumerate(prompts):
        assert np.array_equal(got.prefill[index], one.prefill)
        assert np.array_equal(got.decode[index], one.decode)
        rows = slice(starts[index], starts[index + 1])
        assert np.array_equal(got.decode_experts[rows], one.decode_experts)
    assert np.array_equal(got.token_ids, np.concatenate([one.token_ids for one in prompts]))
    assert (got.geometry, got.model_name, got.provenance) == (GEOMETRY, "tiny", {"a": "b"})
    assert read_capture(tmp_path / "c", with_prefill_experts=False).prefill_experts is None


def test_prefill_experts_are_optional(tmp_path):
    write(tmp_path / "c", with_prefill=False)
    assert read_capture(tmp_path / "c").prefill_experts is None


def test_the_digest_names_the_content(tmp_path):
    for name, num_prompts in (("a", 7), ("b", 7), ("c", 6)):
        write(tmp_path / name, num_prompts)
    a, b, c = (read_capture(tmp_path / name).digest for name in "abc")
    assert a == b != c


def test_chunks_can_be_read_one_by_one(tmp_path):
    write(tmp_path)
    sizes = [len(arrays["domain"]) for _, arrays in read_chunks(tmp_path, read_manifest(tmp_path))]
    assert sizes == [3, 3, 1]


def test_a_folder_in_use_is_not_overwritten(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CaptureError, match="must be an empty folder"):
        CaptureWriter(tmp_path, geometry=GEOMETRY, model_name="m", provenance={})


def add_one(array, index, by=1):
    changed = array.copy()
    changed[index] += by
    return changed


@pytest.mark.parametrize(
    ("change", "row", "field", "rule"),
    [
        (lambda a: {"prefill": add_one(a["prefill"], (1, 2, 3))}, 1, "prefill", "layer 2 sums to"),
        (lambda a: {"decode": add_one(a["decode"], (2, 0, 0))}, 2, "decode", "layer 0 sums to"),
        (
            lambda a: {"num_prompt_tokens": add_one(a["num_prompt_tokens"], 0)},
            0,
            "prefill",
            "tokens * k",
        ),
        (lambda a: {"num_prompt_tokens": a["num_prompt_tokens"] * 0}, 0, "num_prompt_tokens", ">="),
        (lambda a: {"decode_experts": a["decode_experts"] + 8}, None, "decode_experts", "< 8"),
        (
            lambda a: {"decode_experts": a["decode_experts"] * 0},
            1,
            "decode_experts",
            "add up to the counts",
        ),
        (lambda a: {"decode_experts": a["decode_experts"][1:]}, None, "decode_experts", "shape"),
        (lambda a: {"prefill": a["prefill"][:, :2]}, None, "prefill", "shape"),
        (lambda a: {"prefill": a["prefill"].astype(float)}, None, "prefill", "unsigned"),
        (lambda a: {"token_ids": a["token_ids"][1:]}, None, "token_ids", "shape"),
        (lambda a: {"domain": a["domain"][1:]}, None, "domain", "shape"),
        (lambda a: {"decode": None}, None, "decode", "missing"),
    ],
)
def test_what_does_not_add_up_is_named(tmp_path, change, row, field, rule):
    write(tmp_path, 3)
    file, arrays = next(iter(read_chunks(tmp_path, read_manifest(tmp_path))))
    arrays |= change(arrays)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(CaptureError) as caught:
        check_chunk(arrays, GEOMETRY, file)
    assert (caught.value.row, caught.value.field) == (row, field)
    assert rule in caught.value.rule
    assert "chunk-00000.npz" in str(caught.value)


def test_one_expert_may_not_take_more_than_every_token(tmp_path):
    write(tmp_path, 3)
    file, arrays = next(iter(read_chunks(tmp_path, read_manifest(tmp_path))))
    prefill = arrays["prefill"].copy()
    prefill[0, 0] = 0
    prefill[0, 0, 5] = 2 * arrays["num_prompt_tokens"][0]
    with pytest.raises(CaptureError, match="row 0, prefill: a count must be <="):
        check_chunk(arrays | {"prefill": prefill}, GEOMETRY, file)


def test_an_expert_twice_in_one_token_is_refused(tmp_path):
    write(tmp_path, 3)
    file, arrays = next(iter(read_chunks(tmp_path, read_manifest(tmp_path))))
    experts = arrays["decode_experts"].copy()
    # The counts still add up, and no count exceeds the prompt's two tokens.
    experts[2, 0] = next(x for x in range(8) if x not in experts[1, 0])
    counts = arrays["decode"].copy()
    counts[2, 0] = 0
    np.add.at(counts[2, 0], experts[1:3, 0].ravel(), 1)
    with pytest.raises(CaptureError, match="row 2, decode_experts: a token's experts"):
        check_chunk(arrays | {"decode_experts": experts, "decode": counts}, GEOMETRY, file)


def test_damaged_files_are_refused(tmp_path):
    write(tmp_path)
    file = tmp_path / "chunk-00001.npz"
    raw = bytearray(file.read_bytes())
    raw[50] ^= 255
    file.write_bytes(raw)
    with pytest.raises(CaptureError, match=r"chunk-00001\.npz: sha256"):
        read_capture(tmp_path)
    file.write_bytes(raw[:10])
    with pytest.raises(CaptureError, match="has 10 bytes"):
        read_capture(tmp_path)
    file.unlink()
    with pytest.raises(CaptureError, match="must be readable"):
        read_capture(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 9}, "schema_version: 9 must be 1"),
        ({"kind": "x"}, "kind: must be 'expert_capture'"),
        ({"extra": 1}, "unknown field"),
        ({"chunks": []}, "at least one prompt"),
        ({"geometry": {"num_layers": 3, "num_experts": 8, "top_k": 9}}, "top_k <= num_experts"),
        ({"geometry": {"num_layers": 3, "num_experts": 8, "top_k": 3}}, r"tokens \* k"),
        (
            {"chunks": [{"file": "../x", "num_prompts": 1, "num_bytes": 1, "sha256": ""}]},
            "plain name",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, change, message):
    write(tmp_path)
    file = tmp_path / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CaptureError, match=message):
        read_capture(tmp_path)
