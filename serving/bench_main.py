"""How long a decision takes: thread CPU time from token ids to a reserved worker.

    python -m serving.bench_main --workers=8,64,1024 --policy=expert_cost

A prefill decision is hashing the prompt's blocks, the prefix look-up, feasibility, the rule
and the reservation; a decode decision is the signature (counts to unit vector), feasibility,
the rule over the survival rows and the reservation. Records are made in between, off the
clock, as the server does. Steady state: every worker holds --inflight requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from absl import app, flags

from serving.core.errors import ConfigError, EldrError
from serving.decision_bench import Config, run

_WORKERS = flags.DEFINE_list("workers", ["8", "64", "1024"], "Workers per phase, one run each.")
_POLICY = flags.DEFINE_string("policy", "expert_cost", "Decode policy.")
_PREFILL_POLICY = flags.DEFINE_string("prefill_policy", "p2c_work", "Prefill policy.")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "Prompt length.")
_DECISIONS = flags.DEFINE_integer("decisions", 2000, "Requests measured per run.")
_INFLIGHT = flags.DEFINE_integer("inflight", 8, "Requests each decode worker holds.")
_MASKED = flags.DEFINE_integer("masked", 12, "Layers of 48 that signatures cover.")
_COMPILED = flags.DEFINE_boolean("compiled", True, "Compiled loops, where numba is installed.")
_SEED = flags.DEFINE_integer("seed", 0, "Of prompts, counts and centroids.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the results; none when absent.")


def main(argv: Sequence[str]) -> None:
    """Flags -> config -> run."""
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "takes flags only")
        if not all(item.isdecimal() for item in _WORKERS.value):
            raise ConfigError("--workers", _WORKERS.value, "must be comma-separated numbers")
        config = Config(
            workers=tuple(int(item) for item in _WORKERS.value),
            policy=_POLICY.value,
            prefill_policy=_PREFILL_POLICY.value,
            num_tokens=_TOKENS.value,
            num_decisions=_DECISIONS.value,
            num_inflight=_INFLIGHT.value,
            num_masked=_MASKED.value,
            compiled=_COMPILED.value,
            seed=_SEED.value,
        )
        results = run(config)
        if _OUT.value:
            Path(_OUT.value).write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    except (EldrError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
