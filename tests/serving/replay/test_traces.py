from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.replay.traces import TraceError, bursty, poisson, read_azure, read_mooncake

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_azure_rows_become_seconds_from_the_first(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(
        HEADER
        + "2023-11-16 18:17:04.5000000,300,7\n"
        + "2023-11-16 18:17:03.9799600,4808,10\n"
        + "2023-11-16 18:18:03,1,1\n"
    )
    found = read_azure(file)
    np.testing.assert_allclose(found.arrival_s, [0.0, 0.52004, 59.02004], atol=1e-6)
    assert found.prompt_tokens.tolist() == [4808, 300, 1]
    assert found.output_tokens.tolist() == [10, 7, 1]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("2023-11-16 25:17:03,1,1", "TIMESTAMP"),
        ("yesterday,1,1", "TIMESTAMP"),
        ("2023-11-16 18:17:03,-4,1", "ContextTokens"),
        ("2023-11-16 18:17:03,1,", "GeneratedTokens"),
        ("2023-11-16 18:17:03,1,nan", "GeneratedTokens"),
        ("2023-11-16 18:17:03,1", ""),
    ],
)
def test_a_malformed_azure_row_is_named(tmp_path, row, field):
    file = tmp_path / "a.csv"
    file.write_text(HEADER + "2023-11-16 18:17:03,5,5\n" + row + "\n")
    with pytest.raises(TraceError, match=r"a\.csv: line 3") as caught:
        read_azure(file)
    assert (caught.value.line, caught.value.field) == (3, field)


def test_azure_columns_are_checked(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("time,in,out\n")
    with pytest.raises(TraceError, match="columns must be TIMESTAMP"):
        read_azure(file)


def test_an_empty_trace_is_an_error(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(HEADER)
    with pytest.raises(TraceError, match="at least one request"):
        read_azure(file)


def mooncake(tmp_path: Path, *rows: str) -> Path:
    file = tmp_path / "m.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def test_mooncake_rows_are_spread_inside_their_tick(tmp_path):
    row = '{{"timestamp": {}, "input_length": 600, "output_length": 5, "hash_ids": [0, {}]}}'
    file = mooncake(tmp_path, *[row.format(3000 * (i // 50), i) for i in range(200)])
    found = read_mooncake(file, rng=rng())
    assert (np.diff(found.arrival_s) >= 0).all()
    first = found.arrival_s[:50]
    assert first.max() < 3.0
    assert np.ptp(first) > 2.0
    assert found.hash_ids[found.hash_starts[7] : found.hash_starts[8]][0] == 0
    again = read_mooncake(file, rng=rng())
    np.testing.assert_array_equal(found.arrival_s, again.arrival_s)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "timestamp"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [0]}', "output_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}', "hash_ids"),
        ("[1, 2]", ""),
        ("{", ""),
    ],
)
def test_a_malformed_mooncake_row_is_named(tmp_path, row, field):
    good = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}'
    with pytest.raises(TraceError, match="line 2") as caught:
        read_mooncake(mooncake(tmp_path, good, row), rng=rng())
    assert (caught.value.line, caught.value.field) == (2, field)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=80))
def test_readers_refuse_garbage_in_their_own_words(tmp_path, text):
    file = tmp_path / "garbage"
    file.write_text(text, encoding="utf-8")
    for read in (read_azure, lambda path: read_mooncake(path, rng=rng())):
        with pytest.raises(TraceError):
            read(file)


def test_drawn_arrivals_keep_their_mean_rate():
    for found in (poisson(20_000, 10.0, rng()), bursty(20_000, 10.0, rng())):
        assert found.arrival_s[0] == 0.0
        assert (np.diff(found.arrival_s) >= 0).all()
        assert 20_000 / found.arrival_s[-1] == pytest.approx(10.0, rel=0.1)


def test_bursts_are_burstier_than_poisson():
    def dispersion(found):
        counts = np.bincount((found.arrival_s / 2.0).astype(int))
        return counts.var() / counts.mean()

    assert dispersion(poisson(5000, 10.0, rng())) < 2.0
    assert dispersion(bursty(5000, 10.0, rng())) > 4.0


@pytest.mark.skipif(not DATA.is_dir(), reason="the published traces are not beside the repository")
def test_the_published_traces_read_whole():
    conversation = read_mooncake(DATA / "mooncake_fast25" / "conversation_trace.jsonl", rng=rng())
    assert len(conversation) == 12_031
    assert int(conversation.output_tokens.sum()) == 4_122_048
    code = read_azure(DATA / "azure_llm_2023" / "AzureLLMInferenceTrace_code.csv")
    assert len(code) == 8_819
