"""Trace readers: three formats, and a malformed row names file, line, field and rule."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.errors import PlannerConfigError, TraceFormatError
from bucket_planner.lengths import MAX_TOKENS, histogram, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:17:03.9799600,4808,10\n"


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_azure(tmp_path):
    text = AZURE + ROW + "2023-11-16 18:17:04.4799600,3180,8\r\n"
    trace = read_trace(written(tmp_path, "a.csv", text))
    assert trace.prompt_tokens.tolist() == [4808, 3180]
    assert trace.output_tokens.tolist() == [10, 8]
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 0.5])


def test_mooncake(tmp_path):
    rows = [
        {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 3500, "input_length": 12, "output_length": 0, "hash_ids": []},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    trace = read_trace(written(tmp_path, "m.jsonl", text))
    assert trace.prompt_tokens.tolist() == [6758, 12]
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 0.5])


def test_plain_lines(tmp_path):
    trace = read_trace(written(tmp_path, "lengths.txt", "17\n\n 4\n"))
    assert trace.prompt_tokens.tolist() == [17, 4]
    assert trace.arrival_s is None
    assert trace.output_tokens is None


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=40))
def test_any_lengths_round_trip(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("plain") / "lengths"
    path.write_text("\n".join(map(str, values)))
    assert read_trace(path).prompt_tokens.tolist() == values


@pytest.mark.parametrize(
    ("name", "text", "line", "field"),
    [
        ("a.csv", "TIMESTAMP,Context,GeneratedTokens\n" + ROW, 1, "ContextTokens"),
        ("a.csv", AZURE + ROW + "2023-11-16 18:17:04,-3,10\n", 3, "ContextTokens"),
        ("a.csv", AZURE + ROW + "2023-11-16 18:17:04,0,10\n", 3, "ContextTokens"),
        ("a.csv", AZURE + ROW + "2023-11-16 18:17:04,31.5,10\n", 3, "ContextTokens"),
        ("a.csv", AZURE + ROW + "yesterday,3,10\n", 3, "TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:17:04,3\n", 2, "row"),
        ("a.csv", AZURE + "2023-11-16 18:17:04,3,-1\n", 2, "GeneratedTokens"),
        ("m.jsonl", '{"timestamp": 0, "output_length": 1}\n', 1, "input_length"),
        ("m.jsonl", '{"timestamp": 0, "input_length": true, "output_length": 1}', 1, "input"),
        ("m.jsonl", '{"timestamp": -1, "input_length": 1, "output_length": 1}', 1, "timestamp"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{oops', 2, "row"),
        ("m.jsonl", "[1, 2]\n", 1, "row"),
        ("plain", "12\ntwelve\n", 2, "prompt_tokens"),
        ("plain", "12\n\n-4\n", 3, "prompt_tokens"),
        ("plain", f"{MAX_TOKENS + 1}\n", 1, "prompt_tokens"),
    ],
)
def test_malformed_rows(tmp_path, name, text, line, field):
    path = written(tmp_path, name, text)
    with pytest.raises(TraceFormatError) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert f"{path}:{line}" in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_traces(tmp_path, text):
    with pytest.raises(PlannerConfigError, match="at least one request"):
        read_trace(written(tmp_path, "plain", text))
    with pytest.raises(PlannerConfigError, match="readable"):
        read_trace(tmp_path / "missing.csv")


def test_slices_and_histogram(tmp_path):
    trace = read_trace(written(tmp_path, "a.csv", AZURE + ROW * 3))
    half = trace.slice(1, 3)
    assert len(half) == 2
    assert half.arrival_s.size == half.output_tokens.size == 2
    counted = histogram(np.array([5, 3, 5, 5]))
    assert counted.tokens.tolist() == [3, 5]
    assert counted.counts.tolist() == [1, 3]
    assert counted.total_tokens == 18
