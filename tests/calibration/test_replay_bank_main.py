from __future__ import annotations

import numpy as np
import pytest

from calibration.capture_checks import Geometry
from calibration.captures import CaptureWriter, PromptCapture
from calibration.replay_bank_main import ReplayBankConfig, run
from serving.core.errors import ArtefactError, ConfigError
from serving.replay.bank import read_bank

GEOMETRY = Geometry(num_layers=2, num_experts=70, top_k=2)


def prompt(number: int, num_tokens: int, num_decode: int) -> PromptCapture:
    rng = np.random.default_rng(number)

    def routed(count: int) -> np.ndarray:
        rows = [[rng.permutation(70)[:2] for _ in range(2)] for _ in range(count)]
        return np.array(rows, np.int32).reshape(count, 2, 2)

    def counted(experts: np.ndarray) -> np.ndarray:
        out = np.zeros((2, 70), np.uint32)
        for layer in range(2):
            out[layer] = np.bincount(experts[:, layer].ravel(), minlength=70)
        return out

    decode = routed(num_decode)
    return PromptCapture(
        prompt_id=f"p{number}",
        domain=["legal", "code"][number % 2],
        token_ids=np.arange(num_tokens, dtype=np.int32) + 100 * number,
        prefill=counted(routed(num_tokens)),
        decode=counted(decode),
        decode_experts=decode,
    )


def written(folder, prompts: list[PromptCapture]):
    writer = CaptureWriter(
        folder, geometry=GEOMETRY, model_name="m", provenance={"texts": "t"}, chunk_prompts=2
    )
    for item in prompts:
        writer.add(item)
    writer.close()
    return folder


def test_a_bank_holds_the_captures_prompts_and_some_of_their_tokens(tmp_path):
    prompts = [prompt(0, 5, 9), prompt(1, 3, 2), prompt(2, 4, 0), prompt(3, 6, 4)]
    capture = written(tmp_path / "capture", prompts)
    run(ReplayBankConfig(capture=str(capture), out=str(tmp_path / "b.npz"), rows_per_prompt=3))
    bank = read_bank(tmp_path / "b.npz")
    kept = [prompts[0], prompts[1], prompts[3]]
    assert bank.header.domains == ("code", "legal")
    assert [bank.header.domains[d] for d in bank.domain_of] == ["legal", "code", "code"]
    assert np.diff(bank.row_starts).tolist() == [3, 2, 3]
    for number, item in enumerate(kept):
        np.testing.assert_array_equal(bank.tokens(number), item.token_ids)
        np.testing.assert_array_equal(bank.prefill[number], item.prefill)
    taken = kept[0].decode_experts[[0, 3, 6]]
    for row, experts in zip(bank.rows[:3], taken, strict=True):
        for layer in range(2):
            found = {e for e in range(70) if int(row[layer, e // 64]) >> (e % 64) & 1}
            assert found == set(experts[layer].tolist())
    assert bank.header.provenance["texts"] == "t"


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ConfigError, match="rows_per_prompt"):
        ReplayBankConfig(capture="c", out="o", rows_per_prompt=0)
    with pytest.raises(ArtefactError, match="none"):
        run(ReplayBankConfig(capture=str(tmp_path / "none"), out=str(tmp_path / "b.npz")))
    silent = written(tmp_path / "silent", [prompt(0, 5, 0)])
    with pytest.raises(ArtefactError, match="no prompt of this chunk decoded"):
        run(ReplayBankConfig(capture=str(silent), out=str(tmp_path / "b.npz")))
