"""Checks and times kernels and prefill on the accelerator of this machine.

    python -m eldr_jax.device_check_main --out=out/device_check.json

On a machine with an NVIDIA GPU or a TPU: the histogram kernel against NumPy, its times beside
plain JAX, torch (on GPUs, where it is installed) and the bandwidth floor; the reference model's
prefill with and without it. Writes JSON, exits 1 if anything disagrees; takes less than five
minutes. Elsewhere it prints one line and exits 0.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import rich.console
from absl import flags

from eldr_jax.checkpoint import CheckpointError, load_model_dir
from eldr_jax.command_line import run_binary
from eldr_jax.config import ConfigError
from eldr_jax.device_check import check_prefill
from kernels.expert_histogram.device_check import check_device

SCHEMA_VERSION = 1
NO_DEVICE = "device check: skipped, JAX sees neither a GPU nor a TPU on this machine"
_BUCKETS = (512, 2048)
_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheckConfig:
    """What to run.

    Attributes:
      model_dir: folder of the model to prefill.
      out: JSON file, or None.
      seed: of ids and tokens.
    """

    model_dir: Path
    out: Path | None
    seed: int


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("model_dir", "configs/artefacts/reference_model", "Model to prefill.")
    flags.DEFINE_string("out", None, "JSON file to write.")
    flags.DEFINE_integer("seed", 0, "Seed of ids and tokens.", lower_bound=0)


def run(config: DeviceCheckConfig, console: rich.console.Console) -> bool:
    """Checks the device, prints and writes the results.

    Returns:
      Whether everything agrees; True without a device.
    """

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    if jax.default_backend() not in ("gpu", "tpu"):
        say(NO_DEVICE)
        return True
    report: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "jax": jax.__version__}
    report |= check_device(config.seed, say)
    model, params = load_model_dir(config.model_dir)
    report["prefill"] = []
    for bucket in _BUCKETS:
        result = check_prefill(model, params, bucket=bucket, rounds=_ROUNDS, seed=config.seed)
        report["prefill"].append(asdict(result))
        say(
            f"prefill {bucket}: {result.with_us:.0f} us with the histogram, "
            f"{result.without_us:.0f} us without, same output={result.same_output}, "
            f"counts agree={result.counts_agree}"
        )
    if config.out is not None:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(json.dumps(report, indent=1) + "\n")
        say(f"wrote {config.out}")
    return all(case["agrees"] for case in report["cases"]) and all(
        row["same_output"] and row["counts_agree"] for row in report["prefill"]
    )


def main() -> None:
    """Flags to config to `run`."""
    values = flags.FLAGS
    config = DeviceCheckConfig(
        model_dir=Path(values.model_dir),
        out=Path(values.out) if values.out else None,
        seed=values.seed,
    )
    if not run(config, rich.console.Console()):
        sys.exit(1)


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ConfigError, CheckpointError))


if __name__ == "__main__":
    cli()
