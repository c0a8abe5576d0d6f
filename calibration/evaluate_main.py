"""Measures a signature artefact on held-out prompts: JSON report and, if asked, its card."""

from __future__ import annotations

from pathlib import Path

import msgspec
from absl import flags

from calibration.captures import read_capture
from calibration.evaluate import EvaluationConfig, EvaluationReport, evaluate, render_card
from eldr_jax.command_line import run_binary
from serving.core.errors import ArtefactError, ConfigError
from serving.signatures.artefact import load_artefact


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string(
        "artefact", "configs/artefacts/signature_model", "Folder written by calibration.fit_main."
    )
    flags.DEFINE_string("capture", None, "Folder of a capture of held-out prompts.", required=True)
    flags.DEFINE_string("out", None, "File for the JSON report.", required=True)
    flags.DEFINE_string("card", None, "File for the artefact's README.md.")
    flags.DEFINE_string(
        "card_commands", None, "File with the rebuild commands that the card prints."
    )
    flags.DEFINE_integer("num_pairs", 30_000, "Prompt pairs behind the rank correlation.")
    flags.DEFINE_list("batches", ["8", "16", "32", "64"], "Decode batch sizes.")
    flags.DEFINE_integer("draws", 50, "Batches drawn per domain and size.")
    flags.DEFINE_integer("seed", 0, "Of every draw.")


def run(
    artefact_dir: str,
    capture_dir: str,
    out: str,
    config: EvaluationConfig,
    *,
    card: str | None = None,
    card_commands: str | None = None,
) -> EvaluationReport:
    """Evaluates and writes the report (and the card).

    Args:
        artefact_dir: the artefact.
        capture_dir: held-out capture.
        out: JSON file.
        config: choices.
        card: file for the artefact's card, or None.
        card_commands: file whose text the card prints as the way to rebuild.

    Raises:
        ArtefactError: artefact or capture cannot be used.
        ConfigError: a card without its commands.
    """
    if card is not None and card_commands is None:
        raise ConfigError("card_commands", None, "is required with --card")
    artefact = load_artefact(artefact_dir)
    capture = read_capture(capture_dir, with_prefill_experts=False)
    report = evaluate(artefact, capture, config)
    text = msgspec.json.format(msgspec.json.encode(report), indent=2)
    Path(out).write_bytes(text + b"\n")
    if card is not None and card_commands is not None:
        commands = Path(card_commands).read_text(encoding="utf-8")
        Path(card).write_text(render_card(artefact, report, commands), encoding="utf-8")
    return report


def _batches(texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(text) for text in texts)
    except ValueError as error:
        raise ConfigError("batches", texts, "must be whole numbers") from error


def main() -> None:
    """Reads the flags, evaluates, prints the metrics."""
    values = flags.FLAGS
    config = EvaluationConfig(
        num_pairs=values.num_pairs,
        union_batches=_batches(values.batches),
        union_draws=values.draws,
        seed=values.seed,
    )
    report = run(
        values.artefact,
        values.capture,
        values.out,
        config,
        card=values.card,
        card_commands=values.card_commands,
    )
    print(f"artefact {report.artefact} on {report.num_prompts} held-out prompts: {values.out}")
    for name, value in report.metrics.items():
        print(f"  {name:36s} {value:.4g}")


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ArtefactError, ConfigError))


if __name__ == "__main__":
    cli()
