from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from serving.core.errors import ArtefactError
from serving.replay.bank import pack_rows, read_bank, write_bank


def test_a_bank_reads_back_as_written(tmp_path, make_bank):
    bank = make_bank()
    write_bank(tmp_path / "deep" / "bank.npz", bank)
    again = read_bank(tmp_path / "deep" / "bank.npz")
    assert again.header == bank.header
    for name in ("domain_of", "token_starts", "token_ids", "prefill", "row_starts", "rows"):
        np.testing.assert_array_equal(getattr(again, name), getattr(bank, name))


def test_rows_hold_the_bit_of_every_expert():
    experts = np.array([[[0, 63], [64, 127]], [[1, 70], [2, 3]]])
    rows = pack_rows(experts, 128)
    assert rows.shape == (2, 2, 2)
    for r in range(2):
        for layer in range(2):
            found = {e for e in range(128) if int(rows[r, layer, e // 64]) >> (e % 64) & 1}
            assert found == set(experts[r, layer].tolist())


@pytest.mark.parametrize(
    ("field", "change", "rule"),
    [
        ("prefill", lambda a: a + 1, "sum to tokens"),
        ("rows", lambda a: a | np.uint64(0xFFFF), "every row must name 2 experts"),
        ("row_starts", lambda a: a[:-1], "row_starts must run from 0"),
        ("token_starts", lambda a: np.where(a == a[1], 0, a), "at least one entry"),
        ("domain_of", lambda a: a + 7, "domain_of must lie"),
        ("rows", lambda a: a[:, :2], "rows are"),
        ("prefill", lambda a: a[:, :2], "prefill has shape"),
    ],
)
def test_what_does_not_add_up_is_refused(make_bank, field, change, rule):
    bank = make_bank()
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(bank, **{field: change(getattr(bank, field))})


def test_files_that_are_no_bank_are_refused(tmp_path, make_bank):
    file = tmp_path / "bank.npz"
    with pytest.raises(ArtefactError, match="plain arrays"):
        read_bank(file)
    file.write_bytes(b"PK nonsense")
    with pytest.raises(ArtefactError, match="plain arrays"):
        read_bank(file)
    np.savez(file, header=np.frombuffer(b"{}", np.uint8))
    with pytest.raises(ArtefactError, match="JSON header"):
        read_bank(file)
    with file.open("wb") as stream:
        np.savez(stream, things=np.array([{"a": 1}], object))
    with pytest.raises(ArtefactError, match="plain arrays"):
        read_bank(file)
    write_bank(file, make_bank())
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ArtefactError, match="plain arrays"):
        read_bank(file)
