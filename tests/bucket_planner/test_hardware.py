"""The hardware files load, agree with the published figures, and fail with field and rule."""

from pathlib import Path

import pytest

from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import load_hardware, load_hardware_dir

CONFIG_DIR = Path(__file__).parents[2] / "configs" / "hardware"
IDS = {"v5e", "v6e", "tpu7x", "h100", "h200", "b200", "mi300x", "cpu_embedded"}

# $/chip-hour, bf16 and 8-bit TFLOP/s, HBM TB/s, HBM GB, MFU, bandwidth use
PUBLISHED = {
    "v5e": (0.80, 197, 394, 0.82, 16, 0.55, 0.65),
    "v6e": (1.80, 918, 1836, 1.64, 32, 0.55, 0.65),
    "tpu7x": (6.00, 2307, 4614, 7.37, 192, 0.55, 0.65),
    "h100": (2.40, 989, 1979, 3.35, 80, 0.50, 0.60),
    "b200": (5.00, 2250, 4500, 8.0, 192, 0.50, 0.60),
}


@pytest.fixture(scope="module")
def fleet():
    return load_hardware_dir(CONFIG_DIR)


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = (CONFIG_DIR / "v6e.yaml").read_text()
    assert old in text
    path = tmp_path / "v6e.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_every_type_is_there(fleet):
    assert set(fleet) == IDS
    assert all(path.stem in IDS for path in CONFIG_DIR.glob("*.yaml"))


@pytest.mark.parametrize("hardware_id", PUBLISHED)
def test_figures_match_the_published_table(fleet, hardware_id):
    chip = fleet[hardware_id]
    usd, bf16, eight_bit, tb_per_s, gb, mfu, utilization = PUBLISHED[hardware_id]
    assert chip.usd_per_chip_hour["amortised"] == usd
    assert chip.peak_flops["bf16"] == bf16 * 1e12
    assert chip.peak_flops.get("fp8", chip.peak_flops.get("int8")) == eight_bit * 1e12
    assert chip.hbm_bytes_per_s == tb_per_s * 1e12
    assert chip.hbm_bytes == gb * 1e9
    assert (chip.prefill_mfu, chip.decode_bandwidth_utilization) == (mfu, utilization)


def test_fp8_is_not_native_below_ironwood(fleet):
    assert "fp8" not in fleet["v5e"].peak_flops
    assert "fp8" not in fleet["v6e"].peak_flops
    assert "fp8" in fleet["tpu7x"].peak_flops


def test_every_figure_has_a_source_and_our_own_prices_are_assumptions(fleet):
    for chip in fleet.values():
        assert all(chip.sources.values())
        assert chip.sources["usd_per_chip_hour.amortised"].startswith("assumption: ")


def test_tpu7x_is_two_devices_and_tp_two(fleet):
    assert fleet["tpu7x"].jax_devices_per_chip == 2
    assert fleet["tpu7x"].min_tensor_parallel == 2


def test_price_bases_and_opportunity_rates(fleet, tmp_path):
    assert fleet["tpu7x"].usd_per_chip_s(basis="list") == pytest.approx(12 / 3600)
    with pytest.raises(PlannerConfigError, match=r"spot.*amortised"):
        fleet["h100"].usd_per_chip_s(basis="spot")
    path = edited(
        tmp_path,
        "peak_flops:",
        "  opportunity:\n    A: {value: 3.6, source: test}\npeak_flops:",
    )
    chip = load_hardware(path)
    assert chip.usd_per_chip_s(slo_class="A") == pytest.approx(0.001)
    assert chip.usd_per_chip_s(slo_class="B") == pytest.approx(1.8 / 3600)


@pytest.mark.parametrize(
    ("old", "new", "field", "rule"),
    [
        ("value: 1.80", "value: .nan", "usd_per_chip_hour.amortised.value", "finite number > 0"),
        ("value: 1.80", "value: -1", "usd_per_chip_hour.amortised.value", "finite number > 0"),
        ("value: 1.80", "value: .inf", "usd_per_chip_hour.amortised.value", "finite number > 0"),
        ("value: 1.80", "value: cheap", "usd_per_chip_hour.amortised.value", "float"),
        ("prefill_mfu: {value: 0.55", "prefill_mfu: {value: 55", "prefill_mfu.value", "<= 1"),
        ("prefill_mfu:", "prefil_mfu:", "prefil_mfu", "'prefill_mfu'"),
        ("  bf16:", "  bf61:", "peak_flops", "bf61"),
        (
            "  dcn_bytes_per_s:",
            "  dcn_byte_per_s:",
            "interconnect.dcn_byte_per_s",
            "'dcn_bytes_per_s'",
        ),
        ("torus_dims: 2", "torus_dims: 1", "topology.torus_dims", "2 or 3"),
        ("pod_chips: 256", "pod_chips: 0", "topology.pod_chips", ">= 1"),
        ("schema_version: 1", "schema_version: 2", "schema_version", "must be 1"),
        ("[16, 32,", "[32, 16,", "block_sizes_tokens", "ascending"),
        ("kind: tpu", "kind: npu", "kind", "npu"),
        ("id: v6e\n", "id: v6e\nid: v7\n", "yaml", "written twice"),
        ("vendor: Google\n", "", "vendor", "required"),
    ],
)
def test_errors_name_file_field_and_rule(tmp_path, old, new, field, rule):
    with pytest.raises(PlannerConfigError) as caught:
        load_hardware(edited(tmp_path, old, new))
    message = str(caught.value)
    assert "v6e.yaml" in message
    assert field in message
    assert rule in message


def test_yaml_floats_without_a_sign_are_numbers(tmp_path):
    assert load_hardware(edited(tmp_path, "918.0e+12", "918e12")).peak_flops["bf16"] == 918e12


def test_missing_file_and_empty_directory(tmp_path):
    with pytest.raises(PlannerConfigError, match="readable"):
        load_hardware(tmp_path / "none.yaml")
    with pytest.raises(PlannerConfigError, match="at least one"):
        load_hardware_dir(tmp_path)


def test_one_id_in_two_files(tmp_path):
    text = (CONFIG_DIR / "v6e.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(PlannerConfigError, match="unique"):
        load_hardware_dir(tmp_path)
