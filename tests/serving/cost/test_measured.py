"""Measured cells replace the model while fresh, are bounded by physics, and flag divergence."""

import math
from pathlib import Path

import pytest

from serving.core.errors import ConfigError
from serving.cost.catalogue import load_catalogue
from serving.cost.cells import build_cell
from serving.cost.measured import CellBook

CONFIGS = Path(__file__).parents[3] / "configs"
KEY = ("70b_8bit", "tpu7x", 1)
POINT = {"num_requests": 64, "context_tokens": 2048}


@pytest.fixture
def book():
    catalogue = load_catalogue(CONFIGS / "serving" / "variants.yaml", CONFIGS / "hardware")
    cells = (build_cell(catalogue, offer)[0] for offer in catalogue.offers)
    return CellBook((cell for cell in cells if cell is not None), fresh_s=100.0)


def observe(book: CellBook, factor: float, now_s: float) -> None:
    modelled = book.cells[KEY].decode_step_s(64, 2048)
    book.observe_decode(KEY, seconds=factor * modelled, now_s=now_s, **POINT)


def test_without_measurements_the_prior_is_quoted(book):
    quote = book.quote(KEY, now_s=0.0, **POINT)
    assert quote.decode_step_s.source == quote.prefill_s_per_token.source == "prior"
    assert math.isinf(quote.decode_step_s.age_s)
    assert not quote.flagged
    assert quote.decode_usd_per_mtok == pytest.approx(0.4973, rel=1e-3)


def test_a_fresh_measurement_is_used_and_ages(book):
    observe(book, 1.10, now_s=10.0)
    fresh = book.quote(KEY, now_s=60.0, **POINT)
    assert fresh.decode_step_s.source == "measured"
    assert fresh.decode_step_s.age_s == 50.0
    assert fresh.decode_step_s.divergence_pct == pytest.approx(10.0)
    assert not fresh.flagged
    prior = book.quote(KEY, now_s=0.0, **POINT).decode_step_s.prior
    assert fresh.decode_step_s.value == pytest.approx(1.1 * prior)
    stale = book.quote(KEY, now_s=110.5, **POINT)
    assert stale.decode_step_s.source == "prior"
    assert stale.decode_step_s.value == pytest.approx(prior)
    assert stale.decode_step_s.measured == pytest.approx(1.1 * prior)


@pytest.mark.parametrize(("factor", "flagged"), [(1.14, False), (1.16, True), (0.84, True)])
def test_divergence_above_the_limit_is_flagged(book, factor, flagged):
    observe(book, factor, now_s=0.0)
    assert book.quote(KEY, now_s=1.0, **POINT).flagged is flagged


def test_the_model_bounds_a_measurement_that_beats_the_chip(book):
    observe(book, 0.1, now_s=0.0)
    estimate = book.quote(KEY, now_s=1.0, **POINT).decode_step_s
    utilization = book.cells[KEY].hardware.decode_bandwidth_utilization
    assert estimate.value == pytest.approx(utilization * estimate.prior)
    assert estimate.measured == pytest.approx(0.1 * estimate.prior)
    assert estimate.flagged


def test_measurements_are_smoothed_and_start_anew_after_a_gap(book):
    observe(book, 1.0, now_s=0.0)
    observe(book, 2.0, now_s=1.0)
    assert book.quote(KEY, now_s=1.0, **POINT).decode_step_s.divergence_pct == pytest.approx(20.0)
    observe(book, 1.5, now_s=500.0)
    assert book.quote(KEY, now_s=500.0, **POINT).decode_step_s.divergence_pct == pytest.approx(50)


def test_one_operating_point_carries_over_to_another(book):
    observe(book, 1.2, now_s=0.0)
    at = {"num_requests": 16, "context_tokens": 512}
    estimate = book.quote(KEY, now_s=1.0, **at).decode_step_s
    assert estimate.value == pytest.approx(1.2 * book.cells[KEY].decode_step_s(16, 512))


def test_prefill_is_measured_apart_from_decode(book):
    prior = book.cells[KEY].prefill_s_per_token()
    book.observe_prefill(KEY, num_tokens=4096, seconds=4096 * prior * 1.3, now_s=0.0)
    quote = book.quote(KEY, now_s=1.0, **POINT)
    assert quote.prefill_s_per_token.value == pytest.approx(1.3 * prior)
    assert quote.decode_step_s.source == "prior"
    assert quote.flagged
    assert quote.prefill_usd_per_mtok == pytest.approx(1.3 * prior * 6 / 3600 * 1e6)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_measurements_are_refused(book, seconds):
    with pytest.raises(ConfigError, match="seconds"):
        book.observe_prefill(KEY, num_tokens=1, seconds=seconds, now_s=0.0)


def test_unknown_cells_and_settings_are_named(book):
    with pytest.raises(ConfigError, match="h200"):
        book.quote(("70b_8bit", "h200", 9), now_s=0.0, **POINT)
    with pytest.raises(ConfigError, match="fresh_s"):
        CellBook((), fresh_s=0.0)
