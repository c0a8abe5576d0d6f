"""Every figure of the cost model comes out of the formulas, in that figure's own convention.

Printed figures of three significant digits or more agree within 1%, shorter ones (270 has two)
after rounding to as many digits. KB is 1,024 bytes in the table and the occupancy sweep, 1,000
bytes where a figure says 655 MB, 328 MB, 5.2 GB or 68 us.
"""

from pathlib import Path

import pytest

from bucket_planner.hardware import load_hardware_dir
from serving.core.errors import ConfigError
from serving.cost import formulas
from serving.cost.catalogue import load_catalogue
from serving.cost.cells import build_cell
from serving.cost.table import cost_table

CONFIGS = Path(__file__).parents[3] / "configs"
KIB, KB = 1024, 1000
B = 64
CTX = 2048


def agrees(value: float, printed: str) -> bool:
    """Whether a value is what was printed."""
    digits = printed.split("e")[0].lstrip("0.")
    digits = digits.replace(".", "") if "." in printed else digits.rstrip("0")
    if len(digits) >= 3:
        return value == pytest.approx(float(printed), rel=0.01)
    rounded = f"{value:.{len(digits) - 1}e}"
    return float(rounded) == pytest.approx(float(printed), rel=1e-9)


@pytest.fixture(scope="module")
def hardware():
    return load_hardware_dir(CONFIGS / "hardware")


@pytest.fixture(scope="module")
def catalogue():
    return load_catalogue(CONFIGS / "serving" / "variants.yaml", CONFIGS / "hardware")


@pytest.fixture(scope="module")
def cells(catalogue):
    """(variant, hardware) -> cell."""
    built = [build_cell(catalogue, offer)[0] for offer in catalogue.offers]
    return {(c.variant.id, c.hardware.id): c for c in built if c is not None}


def test_the_rounding_rule_itself():
    assert agrees(3.53, "3.5")
    assert not agrees(3.56, "3.5")
    assert agrees(0.1386, ".139")
    assert not agrees(0.1419, ".139")
    assert agrees(6.31e-5, "6.3e-5")
    assert agrees(268, "270")
    assert not agrees(264, "270")
    assert not agrees(15_900, "16100")


TABLE = [
    ("70b_bf16", "v6e", 8, ".139", "1.34", "21.5"),
    ("70b_bf16", "tpu7x", 2, ".184", ".995", "19.1"),
    ("70b_bf16", "h100", 8, ".189", ".949", "11.4"),
    ("70b_bf16", "b200", 2, ".173", ".827", "19.1"),
    ("70b_8bit", "v6e", 4, ".069", ".671", "21.5"),
    ("70b_8bit", "tpu7x", 1, ".092", ".498", "19.1"),
    ("70b_8bit", "h100", 2, ".094", ".474", "22.8"),
    ("70b_8bit", "b200", 1, ".086", ".413", "19.1"),
    ("8b_8bit", "v6e", 1, ".0079", ".122", "15.6"),
    ("8b_8bit", "tpu7x", 1, ".0105", ".090", "3.5"),
    ("8b_8bit", "h100", 1, ".011", ".086", "8.3"),
    ("8b_8bit", "b200", 1, ".0198", ".075", "3.5"),
]


@pytest.mark.parametrize(("variant", "chip", "chips", "prefill", "decode", "tpot"), TABLE)
def test_the_table(catalogue, variant, chip, chips, prefill, decode, tpot):
    rows = {(r["variant"], r["hardware"]): r for r in cost_table(catalogue)["cells"]}
    row = rows[variant, chip]
    assert row["chips"] == chips
    assert agrees(row["prefill_usd_per_mtok"], prefill)
    assert agrees(row["decode_usd_per_mtok"], decode)
    assert agrees(row["tpot_ms"], tpot)


def test_the_odd_cell_is_priced_by_precision_not_by_another_formula(catalogue, cells):
    odd = cells["8b_8bit", "b200"]
    assert (odd.format.precision, odd.prefill_precision) == ("fp8", "bf16")
    assert [o.prefill_precision for o in catalogue.offers if o.prefill_precision] == ["bf16"]
    by_rule = formulas.usd_per_mtok(
        formulas.prefill_usd_per_token(
            num_active_params=8e9,
            num_chips=1,
            peak_flops=odd.hardware.peak_flops["fp8"],
            mfu=odd.hardware.prefill_mfu,
            usd_per_chip_s=odd.hardware.usd_per_chip_s(),
        )
    )
    assert agrees(by_rule, ".0099")
    assert agrees(1e3 * CTX * odd.prefill_s_per_token(), "29")


def test_8b_on_two_v5e(cells):
    cell = cells["8b_8bit", "v5e"]
    step_s = cell.decode_step_s(B, CTX)
    assert cell.num_chips == 2
    assert agrees(1e3 * step_s, "15.6")
    assert agrees(B / step_s, "4100")
    assert agrees(formulas.usd_per_mtok(step_s / B * cell.usd_per_s()), ".108")


@pytest.mark.parametrize(
    ("batch", "tpot", "usd"),
    [(16, "15.7", "1.64"), (64, "19.1", ".498"), (256, "32.6", ".213")],
)
def test_occupancy(cells, batch, tpot, usd):
    cell = cells["70b_8bit", "tpu7x"]
    step_s = cell.decode_step_s(batch, CTX)
    assert agrees(1e3 * step_s, tpot)
    assert agrees(formulas.usd_per_mtok(step_s / batch * cell.usd_per_s()), usd)


def test_8b_at_batch_512(cells):
    cell = cells["8b_8bit", "tpu7x"]
    step_s = cell.decode_step_s(512, CTX)
    assert agrees(formulas.usd_per_mtok(step_s / 512 * cell.usd_per_s()), ".052")


def test_marginal_step_and_floor(cells):
    cell = cells["70b_8bit", "tpu7x"]
    chip = cell.hardware
    marginal_s = formulas.marginal_hbm_s(
        context_tokens=CTX,
        kv_bytes_per_token=160 * KB,
        num_chips=1,
        hbm_bytes_per_s=chip.hbm_bytes_per_s,
        utilization=chip.decode_bandwidth_utilization,
    )
    assert agrees(1e6 * marginal_s, "68")
    assert agrees(1e6 * cell.compute_step_s(1), "55")
    floor = formulas.usd_per_mtok(marginal_s * cell.usd_per_s())
    assert f"{floor:.0e}" == f"{0.11:.0e}"  # printed "about $.11": one significant digit


@pytest.mark.parametrize(("batch", "ms"), [(64, "3.5"), (256, "14.1")])
def test_compute_check(cells, batch, ms):
    assert agrees(1e3 * cells["70b_8bit", "tpu7x"].compute_step_s(batch), ms)


def test_levers(cells):
    iron = cells["70b_8bit", "tpu7x"]

    def usd(cell, batch):
        return cell.decode_step_s(batch, CTX) / batch * cell.usd_per_s()

    assert agrees(usd(iron, 16) / usd(iron, 256), "8")
    big, small = cells["70b_8bit", "b200"], cells["8b_8bit", "b200"]
    request = [
        CTX * c.prefill_s_per_token() * c.usd_per_s() + 300 * usd(c, B) for c in (big, small)
    ]
    assert agrees(request[0] / request[1], "5")
    assert agrees(usd(cells["70b_8bit", "v6e"], B) / usd(big, B), "1.6")


@pytest.fixture(scope="module")
def cascade(cells):
    """Dollars of the cascade on B200: all-big, all-small, attempt."""

    def usd(cell, output_tokens):
        step_s = cell.decode_step_s(B, CTX)
        prefill_s = CTX * cell.prefill_s_per_token()
        return (prefill_s + output_tokens * step_s / B) * cell.usd_per_s()

    big, small = cells["70b_8bit", "b200"], cells["8b_8bit", "b200"]
    return {
        "big_usd": usd(big, 300),
        "small_usd": usd(small, 300),
        "attempt_usd": usd(small, 32),
    }


def test_cascade(cascade):
    assert agrees(cascade["big_usd"], "3.0e-4")
    assert agrees(cascade["small_usd"], "6.3e-5")
    assert agrees(cascade["big_usd"] / cascade["small_usd"], "4.8")
    mixed = formulas.cascade_usd(**cascade, escalated=0.25)
    assert agrees(mixed, "1.3e-4")
    assert agrees(cascade["big_usd"] / mixed, "2.3")


def test_cascade_break_even(cascade):
    even = formulas.cascade_break_even(**cascade)
    assert agrees(100 * even, "84.7")
    assert formulas.cascade_usd(**cascade, escalated=even) == pytest.approx(cascade["big_usd"])


@pytest.mark.parametrize(("misrouted", "percent"), [(0.117, "65"), (0.126, "70")])
def test_cascade_against_upfront_routing(cascade, misrouted, percent):
    even = formulas.cascade_break_even_against_routing(**cascade, misrouted=misrouted)
    assert agrees(100 * even, percent)
    upfront = misrouted * (cascade["big_usd"] - cascade["small_usd"])
    assert even * cascade["attempt_usd"] == pytest.approx(upfront)


def test_escalated_ttft(cells):
    big, small = cells["70b_8bit", "b200"], cells["8b_8bit", "b200"]
    seconds = formulas.escalation_ttft_s(
        small_prefill_s=CTX * small.prefill_s_per_token(),
        assessment_tokens=32,
        small_tpot_s=small.decode_step_s(B, CTX),
        big_prefill_s=CTX * big.prefill_s_per_token(),
    )
    assert agrees(1e3 * seconds, "270")


def test_prefix_break_even(cells):
    cell = cells["70b_8bit", "b200"]
    rate = cell.prefill_tokens_per_s()
    lost_s = formulas.prefix_seconds(4096, prefill_tokens_per_s=rate)
    assert agrees(rate, "16100")
    assert agrees(1e3 * lost_s, "254")
    assert agrees(lost_s * cell.usd_per_s(), "3.5e-4")
    assert agrees(formulas.kv_bytes(4096, kv_bytes_per_token=160 * KB) / 1e6, "655")


@pytest.mark.parametrize(
    ("chip", "link", "tokens", "ms"),
    [
        ("h100", "effective_bytes_per_s", 2048, ".9"),
        ("tpu7x", "effective_bytes_per_s", 2048, "1.6"),
        ("tpu7x", "dcn_effective_bytes_per_s", 2048, "22"),
        ("tpu7x", "dcn_effective_bytes_per_s", 32768, "350"),
    ],
)
def test_kv_transfer(hardware, chip, link, tokens, ms):
    num_bytes = formulas.kv_bytes(tokens, kv_bytes_per_token=160 * KB)
    rate = getattr(hardware[chip].interconnect, link)
    assert agrees(1e3 * formulas.transfer_s(num_bytes, bytes_per_s=rate), ms)


def test_kv_sizes_and_the_class_a_ban(hardware):
    assert agrees(formulas.kv_bytes(2048, kv_bytes_per_token=160 * KB) / 1e6, "328")
    assert agrees(formulas.kv_bytes(2048, kv_bytes_per_token=160 * KB) / 1e9, ".3")
    assert agrees(formulas.kv_bytes(32768, kv_bytes_per_token=160 * KB) / 1e9, "5.2")
    assert agrees(B * formulas.kv_bytes(2048, kv_bytes_per_token=160 * KIB) / 1e9, "21.5")
    longest = formulas.longest_transfer_tokens(
        limit_s=0.2 * 0.5,
        bytes_per_s=hardware["tpu7x"].interconnect.dcn_effective_bytes_per_s,
        kv_bytes_per_token=160 * KB,
    )
    assert agrees(longest / 1e3, "9.4")


def test_worked_example(cells):
    """Class B, 2,048 tokens, 1,600 cached on Ironwood: wait for the cache or run cold on B200?"""
    iron, b200 = cells["70b_8bit", "tpu7x"], cells["70b_8bit", "b200"]
    warm_s = (2048 - 1600) * iron.prefill_s_per_token()
    cold_s = 2048 * b200.prefill_s_per_token()
    assert agrees(1e3 * warm_s, "25")
    assert agrees(1e3 * (0.120 + warm_s), "145")
    assert agrees(warm_s * iron.usd_per_s(), "4.1e-5")
    assert agrees(1e3 * cold_s, "127")
    assert agrees(1e3 * (0.020 + cold_s), "147")
    assert agrees(cold_s * b200.usd_per_s(), "1.76e-4")
    assert agrees(cold_s * b200.usd_per_s() / (warm_s * iron.usd_per_s()), "4.3")
    assert warm_s * iron.usd_per_s() < cold_s * b200.usd_per_s()


def test_prefill_price_does_not_depend_on_width(hardware):
    chip = hardware["h100"]
    prices = {
        formulas.prefill_usd_per_token(
            num_active_params=70e9,
            num_chips=chips,
            peak_flops=chip.peak_flops["fp8"],
            mfu=chip.prefill_mfu,
            usd_per_chip_s=chip.usd_per_chip_s(),
        )
        for chips in (1, 2, 8)
    }
    assert max(prices) == pytest.approx(min(prices))


def test_largest_batch_is_the_last_one_under_the_target(cells):
    cell = cells["70b_8bit", "tpu7x"]
    terms = {
        "weight_bytes": cell.format.weight_bytes,
        "context_tokens": CTX,
        "kv_bytes_per_token": cell.format.kv_bytes_per_token,
        "num_chips": cell.num_chips,
        "hbm_bytes_per_s": cell.hardware.hbm_bytes_per_s,
        "utilization": cell.hardware.decode_bandwidth_utilization,
    }
    batch = formulas.largest_batch(tpot_s=0.030, **terms)
    assert formulas.decode_step_s(num_requests=batch, **terms) <= 0.030
    assert formulas.decode_step_s(num_requests=batch + 1, **terms) > 0.030
    assert formulas.largest_batch(tpot_s=0.001, **terms) == 0


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_inputs_are_named(bad):
    with pytest.raises(ConfigError, match="peak_flops"):
        formulas.prefill_tokens_per_s(num_active_params=1e9, num_chips=1, peak_flops=bad, mfu=0.5)
    with pytest.raises(ConfigError, match="escalated"):
        formulas.cascade_usd(small_usd=1, attempt_usd=1, big_usd=1, escalated=bad or 2.0)
