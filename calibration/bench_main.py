"""Runs one benchmark suite, prints its tables and, if asked, writes them as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from absl import app, flags

from calibration.bench.registry import SUITES, load_suite
from calibration.bench.report import BenchOptions, BenchReport, render
from serving.core.errors import ConfigError

_SUITE = flags.DEFINE_string("suite", None, f"One of {sorted(SUITES)}.", required=True)
_OUT = flags.DEFINE_string("out", None, "File for the JSON report.")
_QUICK = flags.DEFINE_bool("quick", False, "Few repeats: checks the suite, measures little.")
_SEED = flags.DEFINE_integer("seed", 0, "Of every draw.")
_PEER_PYTHON = flags.DEFINE_string(
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


def _main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    options = BenchOptions(
        quick=_QUICK.value,
        seed=_SEED.value,
        peer_python=_PEER_PYTHON.value,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    try:
        report = run(_SUITE.value, options, _OUT.value)
    except (ConfigError, OSError) as error:
        print(f"bench_main: {error}", file=sys.stderr)
        sys.exit(2)
    print(render(report))


if __name__ == "__main__":
    app.run(_main)
