"""The router server.

    python -m serving.server_main --config=configs/serving/embedded.yaml

Prints what it started and where it listens, serves until SIGTERM or SIGINT, then drains:
new work is refused with UNAVAILABLE (reason DRAINING), running requests get the config's
grace. A second signal kills the process. Exit status: 0 after a drain, 1 when a part of the
server died, 2 when the config or a flag is wrong.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from absl import app, flags

from serving.app import App
from serving.config import ServerConfig, load_config
from serving.core.errors import ArtefactError, ConfigError
from serving.stop_signals import abandon, ended_first, stop_wanted


def define_flags() -> None:
    """Declares the flags; done when run, so that importing this module declares none."""
    flags.DEFINE_string("config", None, "Config file, see configs/README.md.")
    flags.DEFINE_integer(
        "port",
        None,
        "Overrides server.port; 0 takes a free one.",
        lower_bound=0,
        upper_bound=65535,
    )
    flags.DEFINE_enum(
        "log_level", "WARNING", ["DEBUG", "INFO", "WARNING", "ERROR"], "What is logged to stderr."
    )


async def run(config: ServerConfig) -> int:
    """Serves until told to stop; the exit status.

    Raises:
        ConfigError, ArtefactError: the server could not start.
    """
    wanted = stop_wanted()
    server = App(config, progress=_progress)
    starting = asyncio.ensure_future(server.start())
    if not await ended_first(starting, wanted):
        print("stopped before it was ready", flush=True)
        await abandon(starting)
        return 0
    await starting
    # Start-up leaves its garbage and its long-lived objects behind: never scan those again.
    gc.collect()
    gc.freeze()
    for line in server.summary():
        print(line, flush=True)
    print("ready", flush=True)
    failed = asyncio.ensure_future(server.until_failure())
    status = 0
    if await ended_first(failed, wanted):
        print(f"a part of the server died: {failed.exception()}", file=sys.stderr, flush=True)
        status = 1
    failed.cancel()
    grace_s = 0.0 if status else config.server.drain_grace_s
    print(f"draining for at most {grace_s:g} s", flush=True)
    await server.stop(grace_s)
    print("stopped", flush=True)
    return status


def _progress(what: str, done: int, total: int) -> None:
    print(f"{what} {done}/{total}", flush=True)


def _load(config_path: str | None, port: int | None) -> ServerConfig:
    if not config_path:
        raise ConfigError(
            "config", config_path, "must name a file; try configs/serving/embedded.yaml"
        )
    config = load_config(config_path)
    if port is not None:
        server = msgspec.structs.replace(config.server, port=port)
        config = msgspec.structs.replace(config, server=server)
    return config


def main(argv: Sequence[str]) -> None:
    """Flags to config to `run`."""
    logging.basicConfig(
        level=flags.FLAGS.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "is unexpected: everything is a --flag")
        config = _load(flags.FLAGS.config, flags.FLAGS.port)
        status = _loop_runner()(run(config))
    except (ConfigError, ArtefactError) as error:
        _refuse(error)
    else:
        sys.exit(status)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _refuse(error)
        raise


def _refuse(error: Exception) -> None:
    print(f"server_main: {error}", file=sys.stderr)
    sys.exit(2)


def _loop_runner() -> Any:
    """The faster uvloop where it runs (not on Windows), else asyncio's own loop."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run
    return uvloop.run


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=_parse_flags)
