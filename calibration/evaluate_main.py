"""Measures a signature artefact on held-out prompts: JSON report and, if asked, its card."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from absl import app, flags

from calibration.captures import read_capture
from calibration.evaluate import EvaluationConfig, EvaluationReport, evaluate, render_card
from serving.core.errors import ArtefactError, ConfigError
from serving.signatures.artefact import load_artefact

_ARTEFACT = flags.DEFINE_string(
    "artefact", "configs/artefacts/signature_model", "Folder written by calibration.fit_main."
)
_CAPTURE = flags.DEFINE_string(
    "capture", None, "Folder of a capture of held-out prompts.", required=True
)
_OUT = flags.DEFINE_string("out", None, "File for the JSON report.", required=True)
_CARD = flags.DEFINE_string("card", None, "File for the artefact's README.md.")
_COMMANDS = flags.DEFINE_string(
    "card_commands", None, "File with the rebuild commands that the card prints."
)
_PAIRS = flags.DEFINE_integer("num_pairs", 30_000, "Prompt pairs behind the rank correlation.")
_BATCHES = flags.DEFINE_list("batches", ["8", "16", "32", "64"], "Decode batch sizes.")
_DRAWS = flags.DEFINE_integer("draws", 50, "Batches drawn per domain and size.")
_SEED = flags.DEFINE_integer("seed", 0, "Of every draw.")


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


def _main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        config = EvaluationConfig(
            num_pairs=_PAIRS.value,
            union_batches=_batches(_BATCHES.value),
            union_draws=_DRAWS.value,
            seed=_SEED.value,
        )
        report = run(
            _ARTEFACT.value,
            _CAPTURE.value,
            _OUT.value,
            config,
            card=_CARD.value,
            card_commands=_COMMANDS.value,
        )
    except (ArtefactError, ConfigError, OSError) as error:
        print(f"evaluate_main: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"artefact {report.artefact} on {report.num_prompts} held-out prompts: {_OUT.value}")
    for name, value in report.metrics.items():
        print(f"  {name:36s} {value:.4g}")


if __name__ == "__main__":
    app.run(_main)
