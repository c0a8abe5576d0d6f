from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.fit.step_time import fit_step_time
from serving.core.errors import ArtefactError

REPOSITORY = Path(__file__).resolve().parents[2]
MOE_CSV = REPOSITORY.parent / "shared/data/latency/qwen3_30b_a3b_rtxpro6000/moe.csv"


def write(path: Path, rows, header="tokens,activated_experts,time_us") -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def table(noise: float = 0.0):
    rng = np.random.default_rng(0)
    return [
        (t, a, 18 + 6 * a + 0.2 * t + noise * rng.normal())
        for t in (8, 16, 64, 256)
        for a in (8, 32, 128)
    ]


def test_coefficients_come_back_and_the_range_is_respected(tmp_path):
    rows = [*table(), (2048, 128, 1e6)]
    got = fit_step_time(write(tmp_path / "t.csv", rows), min_tokens=16, max_tokens=256)
    assert (got.base_us, got.per_expert_us, got.per_token_us) == pytest.approx((18, 6, 0.2))
    assert got.r_squared == pytest.approx(1.0)
    assert got.num_rows == 9
    assert got.source.startswith("t.csv sha256 ")


def test_noise_shows_in_r_squared(tmp_path):
    got = fit_step_time(write(tmp_path / "t.csv", table(noise=10)), min_tokens=8, max_tokens=256)
    assert 0.9 < got.r_squared < 0.9999


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([(16, 8, 1)], "tokens,experts,time_us", "column 'activated_experts' is missing"),
        ([(16, 8, "fast")], "tokens,activated_experts,time_us", "line 2: must be numbers"),
        ([(16, 8, -1)], "tokens,activated_experts,time_us", "line 2: .* must be finite and > 0"),
        ([(16, 8, "nan")], "tokens,activated_experts,time_us", "line 2"),
        ([(16, 8)], "tokens,activated_experts,time_us", "line 2: must be numbers"),
        ([(16, 8, 9)] * 9, "tokens,activated_experts,time_us", "at least 4 rows"),
        ([], "tokens,activated_experts,time_us", "has 0"),
    ],
)
def test_a_table_that_cannot_be_fitted_is_refused(tmp_path, rows, header, message):
    file = write(tmp_path / "t.csv", rows, header)
    with pytest.raises(ArtefactError, match=message):
        fit_step_time(file, min_tokens=1, max_tokens=256)


def test_an_absent_table_is_named(tmp_path):
    with pytest.raises(ArtefactError, match=r"no\.csv: cannot be read"):
        fit_step_time(tmp_path / "no.csv", min_tokens=1, max_tokens=2)


def test_the_published_coefficients_come_out_of_the_measured_table():
    if not MOE_CSV.exists():
        pytest.skip(f"needs the measured latency table {MOE_CSV.name}")
    got = fit_step_time(MOE_CSV, min_tokens=16, max_tokens=256)
    assert got.base_us == pytest.approx(18.4, abs=0.05)
    assert got.per_expert_us == pytest.approx(6.272, abs=0.0005)
    assert got.per_token_us == pytest.approx(0.200, abs=0.0005)
    assert got.r_squared == pytest.approx(0.9994, abs=0.00005)
