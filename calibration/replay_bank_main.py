"""Turns a capture into a routing bank: what the replay needs to realise decode steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags

from calibration.captures import read_chunks, read_manifest
from calibration.progress import progress
from eldr_jax.command_line import run_binary
from serving.core.errors import ArtefactError, ConfigError
from serving.replay.bank import (
    KIND,
    SCHEMA_VERSION,
    BankHeader,
    RoutingBank,
    pack_rows,
    write_bank,
)


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
            num_experts = manifest.geometry.num_experts
            parts.append(_chunk(arrays, num_experts, config.rows_per_prompt))
            advance(len(arrays["num_prompt_tokens"]))
    if not parts:
        raise ArtefactError(folder, "must hold at least one prompt")

    def joined(name: str) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])

    names = joined("domain")
    domains = sorted(set(names.tolist()))
    index = {name: number for number, name in enumerate(domains)}
    bank = RoutingBank(
        header=BankHeader(
            schema_version=SCHEMA_VERSION,
            kind=KIND,
            num_layers=manifest.geometry.num_layers,
            num_experts=manifest.geometry.num_experts,
            top_k=manifest.geometry.top_k,
            domains=tuple(domains),
            provenance=manifest.provenance
            | {
                "capture": ",".join(chunk.sha256[:12] for chunk in manifest.chunks),
                "rows": f"at most {config.rows_per_prompt} decode tokens per prompt, evenly spaced",
            },
        ),
        domain_of=np.array([index[name] for name in names.tolist()], np.int32),
        token_starts=_starts(joined("num_tokens")),
        token_ids=joined("token_ids").astype(np.int32),
        prefill=joined("prefill"),
        row_starts=_starts(joined("num_rows")),
        rows=joined("rows"),
    )
    write_bank(config.out, bank)
    return bank


def _chunk(
    arrays: dict[str, np.ndarray], num_experts: int, rows_per_prompt: int
) -> dict[str, np.ndarray]:
    """One chunk's prompts that decoded."""
    prompt_tokens, decode_tokens = arrays["num_prompt_tokens"], arrays["num_decode_tokens"]
    use = np.flatnonzero(decode_tokens > 0)
    token_starts, row_starts = _starts(prompt_tokens), _starts(decode_tokens)
    num_rows = np.minimum(decode_tokens[use], rows_per_prompt)
    rows = [
        row_starts[prompt] + np.arange(count) * decode_tokens[prompt] // count
        for prompt, count in zip(use, num_rows, strict=True)
    ]
    tokens = [arrays["token_ids"][token_starts[p] : token_starts[p + 1]] for p in use]
    return {
        "domain": arrays["domain"][use],
        "num_tokens": prompt_tokens[use],
        "token_ids": np.concatenate(tokens),
        "prefill": arrays["prefill"][use].astype(np.uint32),
        "num_rows": num_rows,
        "rows": pack_rows(arrays["decode_experts"][np.concatenate(rows)], num_experts),
    }


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


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
