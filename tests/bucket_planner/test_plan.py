"""The report's own numbers agree with each other, and hold their bars on the real traces."""

from pathlib import Path

import numpy as np
import pytest

from bucket_planner.buckets import padding_tokens, powers_of_two
from bucket_planner.compile_budget import CompileBudget
from bucket_planner.cost_curve import CompileCost, MeasuredCost, total_cost
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import Trace, histogram, read_trace
from bucket_planner.packer import PackerConfig
from bucket_planner.plan import PlanConfig, build_plan

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
AZURE_CODE = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_code.csv"
AZURE_CONV = TRACES / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = TRACES / "mooncake_fast25" / "conversation_trace.jsonl"


def real(path: Path) -> Trace:
    if not path.exists():
        pytest.skip(f"the real trace {path.name} is not beside this checkout")
    return read_trace(path)


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(2)
    num = 2000
    return Trace(
        name="synthetic",
        prompt_tokens=np.clip(rng.lognormal(6, 0.8, num), 1, 4000).astype(np.int64),
        arrival_s=np.sort(rng.uniform(0, 600, num)),
        output_tokens=rng.integers(1, 200, num),
    )


def test_per_prompt_report_adds_up(trace):
    report = build_plan(trace, PlanConfig(semantics="prompt", max_buckets=8))
    lengths = histogram(trace.prompt_tokens)
    assert report["limit_tokens"] == 4096
    assert report["default"]["buckets"] == list(powers_of_two(4096))
    for part in (report, report["default"]):
        assert part["waste_tokens"] == padding_tokens(
            part["buckets"], lengths.tokens, lengths.counts
        )
    assert report["waste_tokens"] == report["optimal_waste_tokens"]
    assert report["exact"]
    held = report["heldout"]
    assert held["num_fitted"] + held["num_scored"] == len(trace)
    second = histogram(trace.prompt_tokens[held["num_fitted"] :])
    assert held["waste_tokens"] == padding_tokens(held["buckets"], second.tokens, second.counts)
    assert held["cut_pct"] == pytest.approx(
        100 * (1 - held["waste_tokens"] / held["default_waste_tokens"])
    )
    assert held["points_from_hindsight"] >= 0


def test_milliseconds_instead_of_tokens(trace):
    curve = MeasuredCost(tokens=(512, 1024, 4096), ms=(5.0, 5.1, 80.0))
    config = PlanConfig(semantics="prompt", max_buckets=4, curve=curve, cost_source="test")
    report = build_plan(trace, config)
    lengths = histogram(trace.prompt_tokens)
    assert report["total_cost"] == pytest.approx(total_cost(report["buckets"], lengths, curve))
    assert report["total_cost"] <= report["default"]["total_cost"]
    assert report["waste_tokens"] > report["optimal_waste_tokens"]
    assert report["cost"] == {"unit": "ms", "source": "test"}


def test_a_budget_shows_in_the_report(trace):
    cost = CompileCost(tokens=(128, 4096), compile_s=(8.0, 60.0), program_bytes=None)
    budget = CompileBudget(compile_s=120.0, cost=cost)
    report = build_plan(trace, PlanConfig(semantics="prompt", max_buckets=8, budget=budget))
    assert report["compile_s"] <= 120.0
    assert report["waste_tokens"] > report["optimal_waste_tokens"]
    assert report["total_cost_lower_bound"] <= report["total_cost"]


@pytest.mark.parametrize("role", ["mixed", "prefill"])
def test_per_step_report(trace, role):
    packer = PackerConfig(max_num_batched_tokens=1024, role=role)
    report = build_plan(trace, PlanConfig(semantics="step", max_buckets=12, packer=packer))
    decoded = int((trace.output_tokens - 1).sum()) if role == "mixed" else 0
    assert report["total_tokens"] == int(trace.prompt_tokens.sum()) + decoded
    assert report["limit_tokens"] == 1024
    assert report["num_workers"] >= 1
    assert report["waste_tokens"] == report["optimal_waste_tokens"]
    assert report["waste_tokens"] < report["default"]["waste_tokens"]
    assert set(report["engine_flags"]) == {"tpu_inference", "sgl_jax"}


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"max_buckets": 0}, "max_buckets"), ({"limit_tokens": -1}, "limit_tokens")],
)
def test_bad_settings_are_named(settings, match):
    with pytest.raises(PlannerConfigError, match=match):
        PlanConfig(**{"semantics": "prompt", "max_buckets": 2, **settings})


def test_a_limit_below_the_longest_prompt(trace):
    config = PlanConfig(semantics="prompt", max_buckets=2, limit_tokens=1024)
    with pytest.raises(PlannerConfigError, match="are longer"):
        build_plan(trace, config)


def test_one_request_cannot_be_held_out(trace):
    with pytest.raises(PlannerConfigError, match="at least two"):
        build_plan(trace.slice(0, 1), PlanConfig(semantics="prompt", max_buckets=2))


@pytest.mark.parametrize(
    ("path", "max_buckets", "bar_pct"),
    [
        (AZURE_CODE, 8, 45),
        (AZURE_CODE, 16, 72),
        (AZURE_CONV, 8, 48),
        (AZURE_CONV, 16, 77),
        (MOONCAKE, 8, 22),
        (MOONCAKE, 16, 62),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
def test_real_traces_hold_their_bars(path, max_buckets, bar_pct):
    """Fitted on the first half, scored on the second, against powers of two, per prompt."""
    report = build_plan(real(path), PlanConfig(semantics="prompt", max_buckets=max_buckets))
    held = report["heldout"]
    assert held["cut_pct"] >= bar_pct
    assert held["points_from_hindsight"] <= 4
    assert held["fitted_waste_tokens"] == held["fitted_optimal_waste_tokens"]
    assert held["buckets"][-1] == report["limit_tokens"]
