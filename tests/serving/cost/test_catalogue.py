"""The catalogue loads, holes say why, and errors name file, field and nearest known name."""

import math
from pathlib import Path

import pytest

from serving.core.errors import ConfigError
from serving.cost.catalogue import load_catalogue
from serving.cost.cells import build_cell
from serving.cost.coefficients import modelled_cost
from serving.cost.feasibility import check_cell, max_kv_tokens
from serving.cost.table import cost_table, table_text

CONFIGS = Path(__file__).parents[3] / "configs"
VARIANTS = CONFIGS / "serving" / "variants.yaml"
LOAD = {"num_requests": 64, "context_tokens": 2048}


@pytest.fixture(scope="module")
def catalogue():
    return load_catalogue(VARIANTS, CONFIGS / "hardware")


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = VARIANTS.read_text()
    assert old in text
    path = tmp_path / "variants.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_offers_are_feasible_and_hold_the_required_variants(catalogue):
    assert {"70b_bf16", "70b_8bit", "8b_8bit"} <= set(catalogue.variants)
    assert {"qwen3_30b_a3b", "qwen3_235b_a22b", "gpt_oss_120b", "gemma_4_26b_a4b"} <= set(
        catalogue.variants
    )
    table = cost_table(catalogue)
    assert table["holes"] == []
    assert len(table["cells"]) == len(catalogue.offers)


def test_expert_weights_add_up(catalogue):
    for variant in catalogue.variants.values():
        for fmt in variant.formats:
            experts = variant.moe.num_layers * variant.moe.num_experts if variant.moe else 0
            assert fmt.dense_bytes + experts * fmt.expert_bytes == pytest.approx(fmt.weight_bytes)


def test_active_parameters_follow_from_the_geometry(catalogue):
    """Active = dense + top_k experts per layer, up to embeddings a token does not multiply by."""
    for variant in catalogue.variants.values():
        if variant.moe is None:
            continue
        moe = variant.moe
        dense = variant.num_params - moe.num_expert_params
        active = dense + moe.num_layers * moe.top_k * moe.params_per_expert
        assert variant.num_active_params == pytest.approx(active, rel=0.2)


def test_fp8_is_replaced_by_int8_with_its_own_quality_id(catalogue):
    big = catalogue.variant("70b_8bit")
    iron = check_cell(big, catalogue.hardware["tpu7x"], 1, **LOAD)
    trillium = check_cell(big, catalogue.hardware["v6e"], 4, **LOAD)
    assert iron.format.quality_id == "70b-fp8"
    assert trillium.format.quality_id == "70b-int8"
    assert trillium.format.stand_in_for == "70b-fp8"


def test_fp8_alone_is_a_hole_below_ironwood(tmp_path):
    stand_in = next(
        line for line in VARIANTS.read_text().splitlines() if "quality_id: 70b-int8" in line
    )
    catalogue = load_catalogue(edited(tmp_path, stand_in + "\n", ""), CONFIGS / "hardware")
    verdict = check_cell(catalogue.variant("70b_8bit"), catalogue.hardware["v6e"], 4, **LOAD)
    assert not verdict.feasible
    assert verdict.rule == "native_precision"
    assert "fp8" in verdict.detail
    table = cost_table(catalogue)
    assert [(h["variant"], h["hardware"]) for h in table["holes"]] == [("70b_8bit", "v6e")]
    assert "hole: 70b_8bit on 4 v6e: native_precision" in table_text(table)


@pytest.mark.parametrize(
    ("variant", "hardware", "chips", "tensor_parallel", "rule"),
    [
        ("70b_bf16", "v6e", 4, None, "hbm_capacity"),
        ("70b_8bit", "tpu7x", 1, 1, "min_tensor_parallel"),
        ("70b_8bit", "tpu7x", 1, 4, "tensor_parallel"),
        ("70b_8bit", "h100", 16, None, "domain_chips"),
        ("qwen3_30b_a3b", "v6e", 1, None, "hbm_capacity"),
        ("70b_bf16", "cpu_embedded", 1, None, "native_precision"),
    ],
)
def test_holes_say_why(catalogue, variant, hardware, chips, tensor_parallel, rule):
    verdict = check_cell(
        catalogue.variant(variant),
        catalogue.hardware_of(hardware),
        chips,
        tensor_parallel=tensor_parallel,
        **LOAD,
    )
    assert (verdict.feasible, verdict.rule) == (False, rule)
    assert verdict.detail


def test_kv_room_is_what_the_weights_leave(catalogue):
    big, chip = catalogue.variant("70b_8bit"), catalogue.hardware["tpu7x"]
    tokens = max_kv_tokens(big.formats[0], chip, 1)
    assert check_cell(big, chip, 1, num_requests=1, context_tokens=tokens).feasible
    assert not check_cell(big, chip, 1, num_requests=1, context_tokens=tokens + 1).feasible
    assert max_kv_tokens(catalogue.variant("70b_bf16").formats[0], chip, 0) == 0


def test_moe_decode_counts_distinct_experts(catalogue):
    offer = next(o for o in catalogue.offers if o.variant == "qwen3_30b_a3b")
    cell, _ = build_cell(catalogue, offer)
    moe = cell.variant.moe
    one = cell.weight_bytes(1)
    expected = cell.format.dense_bytes + moe.num_layers * moe.top_k * cell.format.expert_bytes
    assert one == pytest.approx(expected)
    assert cell.weight_bytes(10_000) == pytest.approx(cell.format.weight_bytes)
    few, many = (cell.decode_step_s(64, 1024, distinct_experts=n) for n in (2000, 4000))
    step = 2000 * cell.format.expert_bytes
    chip = cell.hardware
    rate = cell.num_chips * chip.hbm_bytes_per_s * chip.decode_bandwidth_utilization
    assert many - few == pytest.approx(step / rate)


def test_coefficients_reproduce_the_cell(catalogue):
    """The router's step model, fed with a cell's coefficients, gives the cell's own step time."""
    for offer in catalogue.offers:
        cell, _ = build_cell(catalogue, offer)
        cost = modelled_cost(cell)
        for batch, context in ((8, 512), (64, 2048)):
            experts = cost.step.mean_experts(batch)
            step_s = cost.step.step_s(
                num_requests=batch, distinct_experts=experts, kv_tokens=batch * context
            )
            assert step_s == pytest.approx(cell.decode_step_s(batch, context), rel=1e-9)
        assert cost.prefill.token_s == pytest.approx(1 / cell.prefill_tokens_per_s())
        assert cost.needs_equal_tensor_parallel == (cell.hardware.kind == "tpu")


def test_opportunity_rate_prices_one_class(tmp_path):
    directory = tmp_path / "hardware"
    directory.mkdir()
    for path in (CONFIGS / "hardware").glob("*.yaml"):
        text = path.read_text()
        if path.stem == "tpu7x":
            text = text.replace(
                "peak_flops:", "  opportunity:\n    A: {value: 9.0, source: test}\npeak_flops:", 1
            )
        (directory / path.name).write_text(text)
    catalogue = load_catalogue(VARIANTS, directory)
    offer = next(o for o in catalogue.offers if (o.variant, o.hardware) == ("70b_8bit", "tpu7x"))
    cell, _ = build_cell(catalogue, offer)
    assert cell.usd_per_s(slo_class="A") == pytest.approx(9.0 / 3600)
    assert cell.usd_per_s(slo_class="B") == pytest.approx(6.0 / 3600)
    assert modelled_cost(cell, slo_class="A").usd_per_chip_hour == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("hardware: tpu7x", "hardware: tpu7", ("cells[1].hardware", "'tpu7x'")),
        ("variant: 70b_bf16", "variant: 70b_bf61", ("cells[0].variant", "'70b_bf16'")),
        ("chips: 8}", "chips: 0}", ("cells[0].chips", ">= 1")),
        ("num_params: 70.0e+9", "num_params: .nan", ("70b_bf16.num_params", "finite")),
        ("num_params: 70.0e+9", "num_parms: 70.0e+9", ("num_parms", "'num_params'")),
        ("bytes_per_param: 2", "bytes_per_param: -2", ("bytes_per_param", "finite")),
        ("quality_id: 70b-int8", "quality_id: 70b-fp8", ("formats", "quality_id of its own")),
        ("top_k: 8", "top_k: 129", ("qwen3_30b_a3b.moe.top_k", "<= 128")),
        ("num_active_params: 3.35e+9", "num_active_params: 40e9", ("num_active_params", "<=")),
        ("params_per_expert: 4718592", "params_per_expert: 47185920", ("params_per_expert", "<=")),
        ("batch: 64", "batch: 0", ("reference.batch", ">= 1")),
        ("schema_version: 1", "schema_version: 7", ("schema_version", "must be 1")),
        ("  - id: 70b_8bit", "  - id: 70b_bf16", ("variants[1].id", "unique")),
        ("hardware: tpu7x, chips: 2", "hardware: v6e, chips: 8", ("cells[1]", "unique")),
        ("precision: bf16,", "precision: bf17,", ("precision", "bf17")),
    ],
)
def test_errors_name_file_field_and_rule(tmp_path, old, new, parts):
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        load_catalogue(path, CONFIGS / "hardware")
    for part in ("variants.yaml", *parts):
        assert part in str(caught.value)


def test_a_nan_price_is_an_error(tmp_path):
    for path in (CONFIGS / "hardware").glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text().replace("value: 2.40,", "value: .nan,"))
    with pytest.raises(ConfigError, match=r"h100\.yaml.*usd_per_chip_hour\.amortised"):
        load_catalogue(VARIANTS, tmp_path)


def test_a_prefill_precision_must_be_native(tmp_path):
    path = edited(tmp_path, "prefill_precision: bf16", "prefill_precision: fp32")
    catalogue = load_catalogue(path, CONFIGS / "hardware")
    with pytest.raises(ConfigError, match=r"prefill_precision.*not native on b200"):
        cost_table(catalogue)


def test_list_prices_leave_holes_where_there_are_none(catalogue):
    table = cost_table(catalogue, basis="list")
    assert {hole["rule"] for hole in table["holes"]} == {"price_basis"}
    rows = {(r["variant"], r["hardware"]): r for r in table["cells"]}
    usual = {(r["variant"], r["hardware"]): r for r in cost_table(catalogue)["cells"]}
    key = ("70b_8bit", "tpu7x")
    assert rows[key]["decode_usd_per_mtok"] == pytest.approx(2 * usual[key]["decode_usd_per_mtok"])
    assert all(math.isfinite(row["tpot_ms"]) for row in rows.values())
