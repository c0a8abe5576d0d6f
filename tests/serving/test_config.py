"""The config's rules: every mistake names file, dotted path, value and rule."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.config import ServerConfig, check, load_config
from serving.core.errors import ConfigError
from serving.core.request import SloClass

REPO = Path(__file__).parents[2]
SHIPPED = REPO / "configs" / "serving" / "embedded.yaml"


@pytest.fixture
def plain() -> dict[str, Any]:
    return yaml.safe_load(SHIPPED.read_text())


def _write(tmp_path: Path, plain: dict[str, Any]) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def _set(plain: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    node: Any = plain
    for step in path:
        node = node[int(step) if isinstance(node, list) else step]
    node[int(last) if isinstance(node, list) else last] = value


def test_shipped_config_loads() -> None:
    config = load_config(SHIPPED)
    assert config.server.host == "127.0.0.1"
    assert config.targets()[SloClass.A].tpot_p99_s == 0.03
    ratio = config.slo[SloClass.A].lambda_usd_per_s / config.slo[SloClass.B].lambda_usd_per_s
    assert ratio == pytest.approx(10)
    # The brief's break-even: a lost 4,096-token prefix costs $3.5e-4 or 0.254 s.
    assert config.slo[SloClass.B].lambda_usd_per_s == pytest.approx(3.5e-4 / 0.254, rel=1e-3)


def test_input_paths_start_at_the_files_folder() -> None:
    config = load_config(SHIPPED)
    assert config.input_path(config.costs.hardware_dir).resolve() == REPO / "configs" / "hardware"


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        ("router.lease", 3, ["router.lease", "unknown key", "'lease_s'"]),
        ("sever", {}, ["sever", "unknown key", "'server'"]),
        ("embedded.num_decod", 3, ["embedded.num_decod", "'num_decode'"]),
        ("server.port", 70000, ["server.port", "70000", "<= 65535"]),
        ("server.port", "50051", ["server.port", "'50051'", "int"]),
        ("router.lease_s", 0, ["router.lease_s", "0", "> 0"]),
        ("router.record_all_share", 1.5, ["router.record_all_share", "1.5", "<= 1"]),
        ("router.default_slo", "D", ["router.default_slo", "'D'", "Invalid enum"]),
        ("router.lease_s", math.inf, ["router.lease_s", "inf"]),
        ("router.lease_s", math.nan, ["router.lease_s", "nan"]),
        ("slo.A.lambda_usd_per_s", -1.0, ["lambda_usd_per_s", "> 0"]),
        ("schema_version", 2, ["schema_version", "2", "must be 1"]),
        ("embedded.token_buckets", [32, 16], ["embedded.token_buckets", "ascending"]),
        ("embedded.num_decode", 0, ["workers", "no worker serves decode"]),
        ("embedded.hardware", "v6e", ["embedded.hardware", "'v6e'", "costs.cells has none"]),
        ("telemetry.poll_interval_s", 60.0, ["telemetry.poll_interval_s", "stale_after_s"]),
        ("router.decode_wait_s", 60.0, ["router.decode_wait_s", "router.lease_s"]),
        ("model.name", "", ["model.name", "length >= 1"]),
        ("costs.cells", [], ["costs.cells has none"]),
        ("costs.cells.0.step.c9_s", 1.0, ["step.c9_s", "unknown key"]),
        ("folder", "/", ["folder", "set by the loader"]),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, plain: dict[str, Any], dotted: str, value: Any, expected: list[str]
) -> None:
    _set(plain, dotted, value)
    path = _write(tmp_path, plain)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    for fact in [str(path), *expected]:
        assert fact in str(caught.value)


@pytest.mark.parametrize("dotted", ["model", "slo", "costs", "schema_version"])
def test_required_sections(tmp_path: Path, plain: dict[str, Any], dotted: str) -> None:
    del plain[dotted]
    with pytest.raises(ConfigError, match=rf"{dotted}.*required and missing"):
        load_config(_write(tmp_path, plain))


def test_every_class_needs_its_section(tmp_path: Path, plain: dict[str, Any]) -> None:
    del plain["slo"]["C"]
    with pytest.raises(ConfigError, match=r"slo=\['C'\]"):
        load_config(_write(tmp_path, plain))


def _worker(**changes: Any) -> dict[str, Any]:
    return {
        "worker_id": "w0",
        "address": "10.0.0.1:50052",
        "role": "both",
        "hardware": "cpu_embedded",
        **changes,
    }


def test_static_workers_replace_the_embedded_fleet(tmp_path: Path, plain: dict[str, Any]) -> None:
    del plain["embedded"]
    plain["workers"] = [_worker()]
    config = load_config(_write(tmp_path, plain))
    assert config.embedded is None
    assert config.workers[0].capabilities.block_size_tokens == 0


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (_worker(address="10.0.0.2:1"), r"workers\[1\]\.worker_id='w0': must be unique"),
        (_worker(worker_id="w1"), r"workers\[1\]\.address.*must be unique"),
        (_worker(worker_id="w1", address="nowhere"), r"workers\[1\]\.address"),
        (_worker(worker_id="w1", address="a:1", hardware="h100"), r"workers\[1\]\.hardware"),
    ],
)
def test_workers_are_distinct_and_priced(
    tmp_path: Path, plain: dict[str, Any], second: dict[str, Any], expected: str
) -> None:
    plain["workers"] = [_worker(), second]
    with pytest.raises(ConfigError, match=expected):
        load_config(_write(tmp_path, plain))


def test_a_cell_is_given_once(tmp_path: Path, plain: dict[str, Any]) -> None:
    plain["costs"]["cells"].append(copy.deepcopy(plain["costs"]["cells"][0]))
    with pytest.raises(ConfigError, match="must be given once"):
        load_config(_write(tmp_path, plain))


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "\x00"])
def test_garbage_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"server\.yaml"):
        load_config(path)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.yaml")


def test_links_keep_the_priors_of_what_is_left_out() -> None:
    config = load_config(SHIPPED)
    speeds = config.costs.links.speeds()
    assert speeds.host_bytes_per_s == 1.0e9
    assert speeds.network_bytes_per_s == 12.5e9


def test_check_needs_no_file() -> None:
    config = load_config(SHIPPED)
    assert isinstance(config, ServerConfig)
    check(config)
