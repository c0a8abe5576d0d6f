"""Runs one benchmark suite, prints its tables and, if asked, writes them as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from absl import flags

from calibration.bench.registry import SUITES, load_suite
from calibration.bench.report import BenchOptions, BenchReport, render
from eldr_jax.command_line import run_binary
from serving.core.errors import ConfigError


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("suite", None, f"One of {sorted(SUITES)}.", required=True)
    flags.DEFINE_string("out", None, "File for the JSON report.")
    flags.DEFINE_bool("quick", False, "Few repeats: checks the suite, measures little.")
    flags.DEFINE_integer("seed", 0, "Of every draw.")
    flags.DEFINE_string(
        "peer_python",
        "",
        "Python of an environment that has the peer's package, for suites that run beside one; "
        "this python when empty.",
    )


def run(suite: str, options: BenchOptions, out: str | None) -> BenchReport:
    """Runs a suite.

    Args:
        suite: its name.
        options: see `BenchOptions`.
        out: file for the JSON report, or None.

    Raises:
        ConfigError: no such suite, or an option breaks a rule of it.
    """
    report = load_suite(suite)(options)
    if out is not None:
        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        path.write_bytes(text + b"\n")
    return report


def main() -> None:
    """Reads the flags, runs the suite, prints its tables."""
    values = flags.FLAGS
    options = BenchOptions(
        quick=values.quick,
        seed=values.seed,
        peer_python=values.peer_python,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(render(run(values.suite, options, values.out)))


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ConfigError,))


if __name__ == "__main__":
    cli()
