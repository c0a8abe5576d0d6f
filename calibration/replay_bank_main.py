"""Turns a capture into a routing bank: what the replay needs to realise decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags

from calibration.banks import bank_of, bank_part
from calibration.captures import read_chunks, read_manifest
from calibration.progress import progress
from eldr_jax.command_line import run_binary
from serving.core.errors import ArtefactError, ConfigError
from serving.replay.bank import RoutingBank, write_bank


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string(
        "capture",
        None,
        "Folder of calibration.capture_main or profile_main, serving side.",
        required=True,
    )
    flags.DEFINE_string("out", None, "File for the bank (.npz).", required=True)
    flags.DEFINE_integer("rows_per_prompt", 32, "Decode tokens kept per prompt, at most.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBankConfig:
    """What to convert; see the flags of the same names.

    Raises:
        ConfigError: a field breaks its rule.
    """

    capture: str
    out: str
    rows_per_prompt: int = 32

    def __post_init__(self) -> None:
        if self.rows_per_prompt < 1:
            raise ConfigError("rows_per_prompt", self.rows_per_prompt, "must be >= 1")


def run(config: ReplayBankConfig) -> RoutingBank:
    """Converts and writes.

    Args:
        config: what to convert.

    Returns:
        The bank written.

    Raises:
        ArtefactError: the capture cannot be used, or no prompt of it decoded.
    """
    folder = Path(config.capture)
    manifest = read_manifest(folder)
    parts: list[dict[str, np.ndarray]] = []
    with progress("bank", manifest.num_prompts) as advance:
        for file, arrays in read_chunks(folder, manifest):
            if not (arrays["num_decode_tokens"] > 0).any():
                raise ArtefactError(file, "no prompt of this chunk decoded")
            parts.append(bank_part(arrays, manifest.geometry, config.rows_per_prompt))
            advance(len(arrays["num_prompt_tokens"]))
    if not parts:
        raise ArtefactError(folder, "must hold at least one prompt")
    bank = bank_of(
        parts,
        manifest.geometry,
        manifest.provenance
        | {
            "capture": ",".join(chunk.sha256[:12] for chunk in manifest.chunks),
            "rows": f"at most {config.rows_per_prompt} decode tokens per prompt, evenly spaced",
        },
    )
    write_bank(config.out, bank)
    return bank


def main() -> None:
    """Reads the flags, converts, says where."""
    values = flags.FLAGS
    bank = run(
        ReplayBankConfig(
            capture=values.capture, out=values.out, rows_per_prompt=values.rows_per_prompt
        )
    )
    print(f"bank of {bank.num_prompts} prompts and {len(bank.rows)} rows in {values.out}")


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ArtefactError, ConfigError))


if __name__ == "__main__":
    cli()
