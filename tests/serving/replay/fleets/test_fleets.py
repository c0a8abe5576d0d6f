"""Fleet replays: workers against sums by hand, a small fleet end to end, configs, figures."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.core.errors import ConfigError
from serving.cost.catalogue import load_catalogue
from serving.replay.fleets.config import FleetReplayConfig, load_fleet_replay
from serving.replay.fleets.machines import machines_of, sustainable_rate
from serving.replay.fleets.report import compare, metrics_of, run_fleets, summary
from serving.replay.fleets.simulation import FleetSimulation
from serving.replay.fleets.traffic import draw_domains, draw_traffic
from serving.replay.fleets.workers import DecodeSide, Meter, PrefillSide

ROOT = Path(__file__).parents[4]
FLEETS = sorted((ROOT / "configs" / "replay" / "fleets").glob("*.yaml"))
CATALOGUE = load_catalogue(
    ROOT / "configs" / "serving" / "variants.yaml", ROOT / "configs" / "hardware"
)


def fleet(**changes) -> FleetReplayConfig:
    """Two Ironwood decoders and a B200 pair, a few seconds of traffic."""
    config = load_fleet_replay(ROOT / "configs" / "replay" / "fleets" / "mixed.yaml")
    iron, blue = config.pools
    small = (
        msgspec.structs.replace(iron, num_domains=1, decode_per_domain=2, max_num_seqs=8),
        msgspec.structs.replace(blue, prefill_per_domain=1, decode_per_domain=1, max_num_seqs=8),
    )
    traffic = msgspec.structs.replace(config.traffic, seconds=4.0, warmup_s=1.0)
    given = {"pools": small, "traffic": traffic, "loads": (0.5,), "seeds": (0, 1)}
    given["policies"] = tuple(p for p in config.policies if p.label in ("ours", "rr"))
    return msgspec.structs.replace(config, **(given | changes))


def run(config, label, seed=0, load=0.5):
    rate = load * sustainable_rate(config, CATALOGUE, config.traffic)
    traffic = draw_traffic(config.traffic, rate, seed)
    moe = CATALOGUE.variant(config.pools[0].variant).moe
    policy = next(p for p in config.policies if p.label == label)
    simulation = FleetSimulation(
        config,
        policy,
        CATALOGUE,
        machines_of(config, CATALOGUE),
        traffic,
        None if moe is None else draw_domains(config.traffic, moe, seed),
        seed=seed,
    )
    return simulation.run(), traffic, simulation


@pytest.mark.parametrize("path", FLEETS, ids=lambda path: path.stem)
def test_every_fleet_file_loads_and_can_exist(path):
    config = load_fleet_replay(path)
    assert machines_of(config, CATALOGUE)
    assert sustainable_rate(config, CATALOGUE, config.traffic) > 0
    assert load_fleet_replay(path, quick=True).traffic.seconds <= config.traffic.seconds


def test_every_request_ends_and_nothing_is_left():
    config = fleet()
    for label in ("ours", "rr"):
        outcome, traffic, simulation = run(config, label)
        assert len(traffic) > 20
        assert (outcome.ttft_s > 0).all()
        assert (outcome.tpot_s[traffic.output_tokens > 1] > 0).all()
        assert len(simulation._fleet.ledger) == 0
        assert 0 < outcome.usd_busy < outcome.usd_powered


def test_a_run_repeats_itself():
    first, second = (run(fleet(), "ours")[0] for _ in range(2))
    np.testing.assert_array_equal(first.ttft_s, second.ttft_s)
    assert first.usd_powered == second.usd_powered


def test_without_parking_everything_is_powered_all_the_time():
    config = fleet()
    policy = msgspec.structs.replace(config.policies[0], without=("parking",))
    outcome, _, _ = run(msgspec.structs.replace(config, policies=(policy,)), "ours")
    machines = machines_of(config, CATALOGUE)
    assert outcome.mean_powered == pytest.approx(len(machines))
    rate = sum(machine.usd_per_s for machine in machines)
    assert outcome.usd_powered == pytest.approx(3.0 * rate)


def test_prefill_steps_pad_and_reuse_what_is_cached():
    machine = machines_of(fleet(), CATALOGUE)[0]
    side = PrefillSide(machine)
    side.enqueue(0, 100, np.array([1], np.uint64))
    side.enqueue(1, 40, np.array([2], np.uint64))
    assert side.start() == pytest.approx(256 * machine.cost.prefill.token_s)
    assert side.finish() == [0, 1]
    side.enqueue(2, 100, np.array([1], np.uint64))
    # 64 of 100 tokens are cached, 36 run in the bucket of 64.
    assert side.start() == pytest.approx(64 * machine.cost.prefill.token_s)
    assert (side.num_cached_tokens, side.num_prompt_tokens) == (64, 240)
    side.finish()
    assert side.start() is None


def test_decode_steps_cost_their_distinct_experts_and_kv():
    machine = machines_of(fleet(), CATALOGUE)[1]
    side = DecodeSide(machine, None, layer_scale=4.0)
    keep = np.log(np.full(6, 0.5))
    side.join(0, 100, 2, keep)
    side.join(1, 200, 1, keep)
    step = machine.cost.step
    # Each of six experts is missed by both with 1/4: 4.5 expected, times the layers' scale.
    expected = step.step_s(num_requests=2, distinct_experts=18.0, kv_tokens=300.0)
    assert side.start() == pytest.approx(expected)
    assert side.finish() == [1]
    assert side.start() == pytest.approx(
        step.step_s(num_requests=1, distinct_experts=12.0, kv_tokens=101.0)
    )
    assert side.finish() == [0]
    assert side.start() is None
    assert side.kv_tokens == 0.0


def test_a_meter_counts_the_window_only():
    meter = Meter(window_s=(10.0, 20.0))
    meter.busy(5.0, 12.0)
    meter.switch(on=False, now_s=15.0)
    meter.switch(on=False, now_s=16.0)
    meter.switch(on=True, now_s=18.0)
    meter.switch(on=False, now_s=30.0)
    assert (meter.busy_s, meter.powered_s) == (2.0, 7.0)


def test_a_report_pairs_seeds_and_keeps_runs(tmp_path):
    config, told = fleet(), []
    report = run_fleets(config, tmp_path, lambda *news: told.append(news))
    assert [run.seed for run in report.runs] == [0, 0, 1, 1]
    assert told[-1][1:] == (4, 4)
    (pair,) = report.comparisons
    assert pair.against == "rr"
    by_key = {(r.policy, r.seed): r.metrics["usd_per_mtok"] for r in report.runs}
    expected = [100 * (by_key["ours", s] / by_key["rr", s] - 1) for s in (0, 1)]
    assert pair.per_seed_pct == pytest.approx(expected)
    assert pair.ci_low_pct <= pair.mean_pct <= pair.ci_high_pct
    assert json.loads((tmp_path / "report.json").read_text())["name"] == "mixed"
    assert any("ours" in line for line in summary(report))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    run_fleets(config, tmp_path, lambda *news: None)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()} == before


def test_a_comparison_at_lower_attainment_does_not_count():
    config = fleet(seeds=(0,))
    outcome, traffic, _ = run(config, "rr")
    metrics = metrics_of(outcome, traffic)
    from serving.replay.fleets.report import Run

    worse = metrics | {"attained_A": metrics["attained_A"] - 0.6}
    runs = [
        Run(policy="ours", load=0.5, seed=0, metrics=worse),
        Run(policy="rr", load=0.5, seed=0, metrics=metrics),
    ]
    assert [pair.counts for pair in compare(config, runs)] == [False]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"reference": "nobody"}, "reference"),
        ({"schema_version": 9}, "schema_version"),
        ({"traffic": {"classes": {"A": 0.5}}}, "traffic.classes"),
        ({"traffic": {"seconds": 5, "warmup_s": 5}}, "traffic.warmup_s"),
        (
            {"policies": [{"label": "x", "prefill": "rr", "decode": "rr", "without": ["air"]}]},
            "air",
        ),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path, change, field):
    import yaml

    plain = yaml.safe_load((ROOT / "configs/replay/fleets/mixed.yaml").read_text())
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({**plain, **change}))
    with pytest.raises(ConfigError, match=field):
        load_fleet_replay(path)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"topology": "4x"}, "topology"),
        ({"topology": ""}, "topology"),
        ({"decode_per_domain": 9}, "chips"),
        ({"variant": "70b_bf16"}, "hbm_capacity"),
        ({"hardware": "tpu9"}, "tpu9"),
    ],
)
def test_a_pool_that_cannot_exist_says_why(change, rule):
    config = fleet()
    pool = msgspec.structs.replace(config.pools[0], **change)
    with pytest.raises(ConfigError, match=rule):
        machines_of(msgspec.structs.replace(config, pools=(pool,)), CATALOGUE)


def test_wrong_flags_exit_2():
    done = subprocess.run(
        [sys.executable, "-m", "serving.fleet_replay_main", "--config=/nowhere", "--out=/tmp/x"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
