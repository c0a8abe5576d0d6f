"""Checks and times the histogram on the accelerator of this machine.

    python -m kernels.expert_histogram.device_check_main --out=out/device_check.json

On a machine with an NVIDIA GPU or a TPU: agreement with NumPy, times beside plain JAX,
torch (on GPUs, where it is installed) and the bandwidth floor, into a JSON file; exits 1
if a case disagrees. Elsewhere it prints one line and exits 0.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from absl import app, flags

from kernels.expert_histogram.device_check import NO_DEVICE, check_device

_OUT = flags.DEFINE_string("out", None, "JSON file to write.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the random ids.", lower_bound=0)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheckConfig:
    """What to run.

    Attributes:
        out: JSON file, or None.
        seed: of the random ids.
    """

    out: Path | None
    seed: int


def run(config: DeviceCheckConfig) -> bool:
    """Checks the device, prints and writes the results.

    Returns:
        Whether every case agrees; True without a device.
    """
    if jax.default_backend() not in ("gpu", "tpu"):
        print(NO_DEVICE)
        return True
    results = check_device(config.seed, lambda line: print(line, flush=True))
    report = {"schema_version": SCHEMA_VERSION, "jax": jax.__version__, **results}
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {config.out}")
    return all(case["agrees"] for case in results["cases"])


def main(argv: list[str]) -> None:
    """Flags -> config -> run."""
    if len(argv) > 1:
        print(f"device_check_main: unexpected argument {argv[1]}", file=sys.stderr)
        sys.exit(2)
    out = None if _OUT.value is None else Path(_OUT.value)
    if not run(DeviceCheckConfig(out=out, seed=_SEED.value)):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
