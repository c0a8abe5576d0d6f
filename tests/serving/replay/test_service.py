from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.core.errors import ConfigError
from serving.replay.service import (
    cell_cost,
    decode_times,
    load_latency,
    moe_layer_s,
    prefill_times,
)

QWEN = Path(__file__).parents[3] / "configs/replay/latency/qwen3_30b_rtxpro6000.yaml"


def test_the_line_holds_inside_its_range():
    table = moe_layer_s(load_latency(QWEN), 300, 128)
    for tokens, experts in ((16, 8), (64, 100), (256, 128)):
        expected = 18.4 + 6.272 * experts + 0.2 * tokens
        assert table[tokens, experts] * 1e6 == pytest.approx(expected)


def test_outside_it_the_measured_points_come_back():
    latency = load_latency(QWEN)
    table = moe_layer_s(latency, 2048, 128)
    for tokens, experts, us in latency.moe_table:
        if not 16 <= tokens <= 256:
            assert table[int(tokens), int(experts)] * 1e6 == pytest.approx(us)
    # Between them it rises with experts and lies between its neighbours in tokens.
    assert (np.diff(table[3, 8:]) > 0).all()
    low, high = sorted((table[2, 16], table[4, 16]))
    assert low <= table[3, 16] <= high
    assert (table[0] == 0).all()
    assert (table[:, 0] == 0).all()


def test_the_fit_is_within_three_percent_of_what_was_measured():
    latency = load_latency(QWEN)
    table = moe_layer_s(latency, 256, 128)
    measured = [(t, a, us) for t, a, us in latency.moe_table if t in (16, 256) and a >= 64]
    for tokens, experts, us in measured:
        assert table[int(tokens), int(experts)] * 1e6 == pytest.approx(us, rel=0.03)


def test_a_bank_of_other_layers_is_refused(make_bank):
    latency = load_latency(QWEN)
    given = make_bank()
    with pytest.raises(ConfigError, match="num_layers"):
        decode_times(latency, given.header, given.rows, max_num_seqs=4, block_tokens=16)


def test_the_routers_coefficients_describe_the_same_machine(tmp_path, make_bank, latency_text):
    (tmp_path / "l.yaml").write_text(latency_text)
    latency, given = load_latency(tmp_path / "l.yaml"), make_bank()
    prefill = prefill_times(latency, given.header, 64)
    cost = cell_cost(latency, given.header, prefill)
    times = decode_times(latency, given.header, given.rows, max_num_seqs=8, block_tokens=16)
    for num, experts in ((1, 2), (5, 9), (8, 16)):
        real_s = times.rest_s[num] + 3 * times.moe_s[num, experts] + 100 * times.context_s[0]
        told_s = cost.step.step_s(num_requests=num, distinct_experts=3 * experts, kv_tokens=100)
        assert told_s == pytest.approx(real_s)
    whole_s = cost.prefill.chunk_s + 64 * cost.prefill.token_s
    assert whole_s == pytest.approx(prefill.step_s(64, 64 * 32.0))


def test_a_wrong_latency_file_names_the_field(tmp_path, latency_text):
    file = tmp_path / "l.yaml"
    file.write_text(latency_text.replace("c2_us", "c2us"))
    with pytest.raises(ConfigError, match="c2us"):
        load_latency(file)
    file.write_text(latency_text.replace("schema_version: 1", "schema_version: 9"))
    with pytest.raises(ConfigError, match="schema_version"):
        load_latency(file)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("c2_us: 50.0", "c2_us: .nan", "c2_us"),
        ("c2_us: 50.0", "c2_us: -1.0", "c2_us"),
        ("prefill_token_us: 10.0", "prefill_token_us: .inf", "prefill_token_us"),
        ("step_us: 100.0", "step_us: .nan", "step_us"),
        ("num_layers: 3", "num_layers: 0", "num_layers"),
        ("step_us: 100.0", "moe_table: [[1, 2, .nan]]\nstep_us: 100.0", r"moe_table\[0\]"),
    ],
)
def test_times_that_are_no_times_are_refused(tmp_path, latency_text, old, new, field):
    (tmp_path / "l.yaml").write_text(latency_text.replace(old, new))
    with pytest.raises(ConfigError, match=field):
        load_latency(tmp_path / "l.yaml")


def test_every_latency_file_reads():
    folder = QWEN.parent
    for file in sorted(folder.glob("*.yaml")):
        assert msgspec.structs.asdict(load_latency(file))["source"]
