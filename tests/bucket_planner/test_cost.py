"""Cost curves and cost files: analytic, measured, MaxText, and the compiler as a cross-check."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.cost_curve import (
    CompileCost,
    MeasuredCost,
    RooflineCost,
    TokenCost,
    flops_divergence_pct,
    roofline_on,
)
from bucket_planner.cost_file import load_compiler_report, load_cost_file
from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import load_hardware

CONFIGS = Path(__file__).parents[2] / "configs"


def find_hardware(hardware_id):
    return load_hardware(CONFIGS / "hardware" / f"{hardware_id}.yaml")


def tokens(*values):
    return np.array(values, np.int64)


def written(tmp_path, content) -> Path:
    path = tmp_path / "cost.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_roofline_by_hand():
    curve = RooflineCost(
        flops_per_token=2e9,
        dense_bytes=1e9,
        expert_bytes=8e9,
        num_experts=8,
        top_k=1,
        flops_per_s=1e12,
        bytes_per_s=1e12,
        overhead_s=1e-3,
    )
    # One token touches one of eight experts: 2 GB at 1 TB/s; 10,000 tokens are bound by FLOPs.
    assert curve.cost(tokens(1, 10_000)).tolist() == pytest.approx([1 + 2.0, 1 + 20_000.0])


def test_attention_grows_with_the_square():
    curve = RooflineCost(
        flops_per_token=1.0,
        attention_flops_per_pair=2.0,
        dense_bytes=0.0,
        flops_per_s=1e3,
        bytes_per_s=1.0,
    )
    assert curve.cost(tokens(10)).tolist() == pytest.approx([10.0 + 100.0])


def test_roofline_on_hardware_needs_a_native_precision():
    chip = find_hardware("v6e")
    model = {"num_active_params": 1e9, "dense_bytes": 1e9}
    curve = roofline_on(chip, num_chips=2, precision="int8", **model)
    assert curve.flops_per_s == pytest.approx(2 * 1836e12 * 0.55)
    with pytest.raises(PlannerConfigError, match=r"fp8.*not native on v6e"):
        roofline_on(chip, num_chips=2, precision="fp8", **model)


def test_measured_points_and_beyond():
    curve = MeasuredCost(tokens=(100, 200), ms=(10.0, 30.0))
    assert curve.cost(tokens(1, 100, 150, 200, 300)).tolist() == pytest.approx([10, 10, 20, 30, 50])
    one = MeasuredCost(tokens=(100,), ms=(10.0,))
    assert one.cost(tokens(50, 200)).tolist() == pytest.approx([10, 20])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.01, 1e4), min_size=1, max_size=8),
    st.lists(st.integers(1, 5000), min_size=2, max_size=20),
)
def test_every_curve_is_nondecreasing(ms, sizes):
    at = np.sort(np.array(sizes, np.int64))
    measured = MeasuredCost(tokens=tuple(64 * (i + 1) for i in range(len(ms))), ms=tuple(ms))
    roofline = RooflineCost(
        flops_per_token=2e9,
        dense_bytes=1e8,
        expert_bytes=1e10,
        num_experts=64,
        top_k=4,
        flops_per_s=1e13,
        bytes_per_s=1e12,
    )
    for curve in (TokenCost(), measured, roofline):
        assert (np.diff(curve.cost(at)) >= -1e-9).all()


def test_our_measured_file(tmp_path):
    buckets = [
        {"tokens": 128, "ms": 5.0, "compile_s": 8, "program_bytes": 1e6},
        {"tokens": 512, "ms": 9.0, "compile_s": 17, "program_bytes": 2e6},
    ]
    content = {"schema_version": 1, "kind": "measured", "source": "run 7", "buckets": buckets}
    cost = load_cost_file(written(tmp_path, content), find_hardware)
    assert cost.curve == MeasuredCost(tokens=(128, 512), ms=(5.0, 9.0))
    assert cost.compile_cost == CompileCost(
        tokens=(128, 512), compile_s=(8.0, 17.0), program_bytes=(1e6, 2e6)
    )
    assert cost.source == "run 7"


def test_maxtext_and_bare_maps(tmp_path):
    maxtext = {
        "Prefill": {
            "512": {"prefill_time_in_ms": 29.1, "prefill_total_tflops": 1},
            "64": {"prefill_time_in_ms": 9.2, "prefill_total_tflops": 1},
        },
        "AutoRegressive": {"ar_step_in_ms_per_seq": 0.3},
    }
    expected = MeasuredCost(tokens=(64, 512), ms=(9.2, 29.1))
    assert load_cost_file(written(tmp_path, maxtext), find_hardware).curve == expected
    bare = {"512": 29.1, "64": 9.2}
    assert load_cost_file(written(tmp_path, bare), find_hardware).curve == expected


def test_shipped_cost_files_load():
    paths = list((CONFIGS / "buckets").glob("*.json"))
    assert paths
    for path in paths:
        cost = load_cost_file(path, find_hardware)
        assert cost.curve.unit == "ms"
        assert cost.compile_cost is not None
        assert cost.compile_cost.seconds(tokens(128)).tolist() == [8.0]


def test_compiler_report_is_a_cross_check(tmp_path):
    report = {
        "target": "v6e:2x2",
        "buckets": [
            {"tokens": 512, "flops": 2.2e12, "compile_s": 17, "temp_bytes": 5},
            {"tokens": 128, "flops": 0.5e12, "compile_s": 8},
        ],
    }
    found = load_compiler_report(written(tmp_path, report))
    assert found.flops == {128: 0.5e12, 512: 2.2e12}
    assert found.compile_cost.tokens == (128, 512)
    curve = RooflineCost(flops_per_token=4e9, dense_bytes=1, flops_per_s=1, bytes_per_s=1)
    divergence = flops_divergence_pct(curve, found.flops)
    assert divergence[128] == pytest.approx(100 * (0.5e12 / (128 * 4e9) - 1))


def roofline_spec(**changes):
    spec = {
        "schema_version": 1,
        "kind": "roofline",
        "source": "s",
        "hardware": "v6e",
        "chips": 4,
        "precision": "bf16",
        "num_active_params": 1e9,
        "dense_bytes": 1e9,
    }
    return {**spec, **changes}


def measured_spec(*buckets):
    return {"schema_version": 1, "kind": "measured", "source": "s", "buckets": list(buckets)}


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ("{", ("readable JSON",)),
        ("[]", ("JSON object",)),
        ({"64": "fast"}, ("64", "milliseconds")),
        ({"small": 3.0}, ("small", "token counts")),
        ({"64": -3.0}, ("bucket_ms[64]", "> 0")),
        ({}, ("bucket_ms", "at least one")),
        ({"Prefill": {"64": {"time": 3}}}, ("Prefill.64.prefill_time_in_ms", "required")),
        (measured_spec({"tokens": 64}), ("buckets[64].ms", "required")),
        (measured_spec({"tokens": 64, "ms": 1, "mss": 1}), ("mss", "'ms'")),
        (
            measured_spec({"tokens": 64, "ms": 1, "compile_s": 2}, {"tokens": 128, "ms": 2}),
            ("buckets[128].compile_s", "all or none"),
        ),
        (
            measured_spec({"tokens": 64, "ms": 1}, {"tokens": 64, "ms": 2}),
            ("bucket_ms", "ascend"),
        ),
        (roofline_spec(precision="fp8"), ("precision", "native")),
        (roofline_spec(chips=0), ("chips", ">= 1")),
        (roofline_spec(hardware="v99"), ("v99", "readable")),
        (roofline_spec(num_active_params=-1), ("flops_per_token", "> 0")),
        (roofline_spec(top_k=3), ("top_k", "1..1")),
        (roofline_spec(schema_version=2), ("schema_version", "must be 1")),
    ],
)
def test_errors_name_file_field_and_rule(tmp_path, content, facts):
    with pytest.raises(PlannerConfigError) as caught:
        load_cost_file(written(tmp_path, content), find_hardware)
    for fact in facts:
        assert fact in str(caught.value)
