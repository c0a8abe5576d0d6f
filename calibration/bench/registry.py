"""Benchmark suites by name. To add one: write its module, add its row."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from calibration.bench.report import BenchOptions, BenchReport
from serving.core.errors import ConfigError

Suite = Callable[[BenchOptions], BenchReport]

SUITES: Mapping[str, str] = {
    "decode_step": "calibration.bench.decode_suite",
    "decision": "calibration.bench.decision_suite",
    "index": "calibration.bench.index_suite",
}
"""Suite name -> module with `run(options) -> BenchReport`.

Modules are imported when their suite runs: what one needs, the others do not pay for.
"""


def load_suite(name: str) -> Suite:
    """The suite's `run`.

    Raises:
        ConfigError: no such suite.
    """
    if name not in SUITES:
        raise ConfigError("suite", name, f"must be one of {sorted(SUITES)}")
    return importlib.import_module(SUITES[name]).run
