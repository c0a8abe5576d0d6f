"""The server as a whole: it starts from a config, serves, changes rules live and stops."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from serving.app import App
from serving.config import ServerConfig
from serving.core.errors import ArtefactError, ConfigError
from serving.core.worker import Phase, Role

Scenario = Callable[..., None]
Alone = Callable[[Sequence[int], int], list[int]]


def as_file(config: ServerConfig) -> dict:
    """A config as its file says it: bounds that do not exist are left out."""
    plain = msgspec.to_builtins(config)
    for section in plain["slo"].values():
        for name in [name for name, value in section.items() if value == math.inf]:
            del section[name]
    return plain


def test_a_request_goes_through_prefill_and_decode(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(1, 21)
        answer = await rig.generate(rig.message("r1", prompt, 9))
        assert answer.failure is None
        assert answer.tokens == alone(prompt, 9)
        assert answer.complete.finish_reason == "length"
        assert answer.trailers["eldr-prefill-worker"] in ("p0", "p1")
        assert answer.trailers["eldr-decode-worker"] in ("d0", "d1")
        assert float(answer.trailers["eldr-prefill-busy-arrived-s"]) >= 0
        summary = rig.app.summary()
        assert summary[0] == f"listening on {rig.app.address}"
        assert any("decode policy expert_cost" in line for line in summary)

    scenario(body)


def test_hand_overs_are_measured_and_reach_the_links(scenario: Scenario) -> None:
    async def body(rig) -> None:
        for number in range(4):
            answer = await rig.generate(rig.message(f"r{number}", rig.prompt(number, 21), 3))
            assert int(answer.trailers["eldr-decode-pull-blocks"]) == 6
        pool = rig.app.fleet.workers[0].pool
        told_s, num_bytes = (
            float(answer.trailers[f"eldr-decode-pull-{what}"]) for what in ("s", "bytes")
        )
        assert told_s > 0
        assert num_bytes > 0
        async with asyncio.timeout(20):
            while not (links := rig.app.router._chooser._transfer.links).measured_bytes_per_s:
                await asyncio.sleep(0.02)
        assert list(links.measured_bytes_per_s) == [(pool, pool)]

    scenario(body)


def test_policies_change_between_rounds(scenario: Scenario) -> None:
    async def body(rig) -> None:
        for name in ("rr", "eldr_online", "eldr_static", "expert_cost"):
            rig.app.set_policy(Phase.DECODE, name)
            answer = await rig.generate(rig.message(f"r-{name}", rig.prompt(2, 9), 3))
            assert answer.failure is None
            lines = rig.app.router.explain(f"r-{name}")
            stages = {line.stage.phase: line.stage.policy for line in lines[:-1]}
            assert stages["decode"] == name
        with pytest.raises(ConfigError, match="must be one of"):
            rig.app.set_policy(Phase.DECODE, "nothing")

    scenario(body)


def test_aggregated_workers_run_the_whole_request(scenario: Scenario, alone: Alone) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(3, 17)
        answer = await rig.generate(rig.message("r1", prompt, 5))
        assert answer.failure is None
        assert answer.tokens == alone(prompt, 5)
        assert answer.trailers["eldr-prefill-worker"] == "b0"
        assert "eldr-decode-worker" not in answer.trailers
        lines = rig.app.router.explain("r1")
        assert [line.stage.winner for line in lines[:-1]] == ["b0", "b0"]

    scenario(body, embedded={"num_prefill": 0, "num_decode": 0, "num_both": 1})


def test_remote_workers_are_discovered(
    server_config: Callable[..., ServerConfig], shared_runner: object, alone: Alone
) -> None:
    """A second server drives the first one's workers, asking them what they are."""

    async def main() -> None:
        async with App(server_config(), runner=shared_runner) as first:
            assert first.embedded is not None
            workers = [
                {
                    "worker_id": info.worker_id,
                    "address": info.address,
                    "role": info.role.value,
                    "hardware": "cpu_embedded",
                    "capabilities": {"kv_connector": "eldr_embedded", "emits_signature": True},
                }
                for info in first.embedded.infos()
            ]
            plain = as_file(server_config())
            plain.pop("embedded")
            config = msgspec.convert({**plain, "workers": workers}, ServerConfig)
            async with App(config) as second:
                found = {info.worker_id: info for info in second.fleet.workers}
                assert set(found) == {"p0", "p1", "d0", "d1"}
                assert found["d0"].role is Role.DECODE
                sizes = found["d0"].capabilities
                assert (sizes.block_size_tokens, sizes.num_kv_blocks) == (4, 96)
                assert sizes.max_context_tokens == 96

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sections", "error", "fact"),
    [
        ({"router": {"decode_policy": "best"}}, ConfigError, "policy='best'"),
        ({"router": {"decode_options": {"alpha": 1}}}, ConfigError, "alpha"),
        ({"artefacts": {"signature": "/nowhere"}}, ArtefactError, "/nowhere"),
        ({"model": {"tokenizer": "/nowhere"}}, ArtefactError, "/nowhere"),
        ({"costs": {"hardware_dir": "/nowhere"}}, ConfigError, "costs.hardware_dir"),
        ({"embedded": {"model_dir": "/nowhere"}}, ArtefactError, "/nowhere"),
    ],
)
def test_a_wrong_start_is_named(
    server_config: Callable[..., ServerConfig],
    request: pytest.FixtureRequest,
    sections: dict[str, dict[str, object]],
    error: type[Exception],
    fact: str,
) -> None:
    own_model = "embedded" in sections
    runner = None if own_model else request.getfixturevalue("shared_runner")

    async def main() -> None:
        async with App(server_config(**sections), runner=runner):
            raise AssertionError("started")

    with pytest.raises(error) as caught:
        asyncio.run(main())
    assert fact in str(caught.value)


def test_a_taken_port_is_named(
    server_config: Callable[..., ServerConfig], shared_runner: object
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        async def main() -> None:
            async with App(server_config(server={"port": port}), runner=shared_runner):
                raise AssertionError("started")

        with pytest.raises(ConfigError, match=rf"server\.port='127.0.0.1:{port}': cannot be bound"):
            asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--config=/nowhere.yaml", "--port=0"], ["/nowhere.yaml", "readable"]),
        (["--colour=red"], ["colour"]),
    ],
)
def test_wrong_flags_exit_2(arguments: list[str], facts: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "serving.server_main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    for fact in facts:
        assert fact in done.stderr
    assert "Traceback" not in done.stderr


def test_the_process_serves_and_drains_on_sigterm(
    server_config: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    import yaml

    plain = as_file(server_config(embedded={"token_buckets": [16]}))
    del plain["folder"]
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(plain))
    process = subprocess.Popen(
        [sys.executable, "-m", "serving.server_main", f"--config={path}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "ready":
            line = process.stdout.readline()
            assert line, f"ended early: {lines}"
            lines.append(line.strip())
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert any(line.startswith("listening on 127.0.0.1:") for line in lines)
    assert any(line.startswith("worker p0 prefill at") for line in lines)
    assert rest.splitlines()[-1] == "stopped"
