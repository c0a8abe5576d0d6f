import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serving.core.errors import ConfigError
from serving.decision_bench import Config, Result, run

ROOT = Path(__file__).parents[2]


def test_every_fleet_size_is_measured_at_every_stage():
    said = []
    config = Config(workers=(2, 3), num_tokens=64, num_decisions=20, num_inflight=2)
    results = run(config, said.append)
    assert [(r.num_workers, r.stage) for r in results] == [
        (num, stage) for num in (2, 3) for stage in ("prefill", "decode", "both")
    ]
    for result in results:
        assert 0 < result.min_us <= result.p50_us <= result.p99_us
    assert len(said) == 2 + len(results)


@pytest.mark.parametrize("policy", ["jsq", "eldr_online", "kv_aware"])
def test_other_rules_can_be_timed(policy):
    config = Config(
        workers=(2,), policy=policy, prefill_policy="kv_aware", num_tokens=64, num_decisions=5
    )
    results = run(config, lambda line: None)
    assert results[1].policy == policy


def command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "serving.bench_main", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_command_writes_what_it_prints(tmp_path):
    out = tmp_path / "bench.json"
    done = command("--workers=2", "--decisions=5", "--tokens=64", f"--out={out}")
    assert (done.returncode, done.stderr) == (0, "")
    results = msgspec.json.decode(out.read_bytes(), type=list[Result])
    assert f"{results[0].p50_us:.1f} us" in done.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers=0"], "--workers"),
        (["--workers=two"], "comma-separated numbers"),
        (["--policy=nonsense", "--workers=1"], "must be one of"),
        (["--tokens=0"], "--tokens"),
        (["--wrokers=1"], "wrokers"),
    ],
)
def test_wrong_flags_exit_2(flags, told):
    done = command(*flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_rules():
    with pytest.raises(ConfigError, match="--decisions"):
        Config(num_decisions=0)
