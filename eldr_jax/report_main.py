"""Measures a model folder on held-out texts: `python -m eldr_jax.report_main --corpora=DIR`.

Writes `report.json`; the model card is rendered from it (`--card`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
from absl import flags
from tokenizers import Tokenizer

from eldr_jax.checkpoint import TOKENIZER_FILE, CheckpointError, load_model_dir
from eldr_jax.command_line import run_binary
from eldr_jax.config import ConfigError
from eldr_jax.training.card import render_card
from eldr_jax.training.data import CorpusError, Document, read_corpus
from eldr_jax.training.reading import RoutedText, loss_by_position, read_texts
from eldr_jax.training.recipe import load_recipe
from eldr_jax.training.report import expert_shares, load_table, summarise

# Group -> corpus of its texts, decode steps of a batch. The steps are what the group's short
# texts allow: a problem of MGSM is some 60 tokens.
_GROUPS = {
    "task": ("task_prompts", 48),
    "language": ("language_debian_handbook", 48),
    "language_mgsm": ("language_mgsm", 24),
}
_MAX_TOKENS = 256
_BATCHES = (8, 16)
# A batch is of different texts, so a domain needs as many as the largest batch has places.
_MIN_TEXTS = max(_BATCHES)
# Pages in file order: one language after the other, so a sequence is nearly always one language.
_LONG_CORPUS = "language_debian_handbook.jsonl"
_LONG_TOKENS = 1024
_LONG_BUCKET = 128


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("model", "configs/artefacts/reference_model", "Model folder.")
    flags.DEFINE_string("corpora", None, "Folder of the corpora (JSON lines).", required=True)
    flags.DEFINE_string("out", "out/report", "Folder for report.json.")
    flags.DEFINE_string("card", None, "Where to write the model card; without it none is written.")
    flags.DEFINE_string("run_dir", "out/train", "Folder of the run whose log the card quotes.")
    flags.DEFINE_string(
        "recipe", "configs/artefacts/reference_model/recipe.yaml", "Settings of that run."
    )
    flags.DEFINE_integer(
        "max_texts", 60, "Texts per domain at most, the first by id.", lower_bound=_MIN_TEXTS
    )
    flags.DEFINE_integer("num_draws", 720, "Batches of each kind and size.", lower_bound=10)
    flags.DEFINE_integer("seed", 0, "Of the draws.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportJob:
    """What the flags say.

    Attributes:
      model: model folder.
      corpora: folder of the corpora.
      out: folder for `report.json`.
      card: path of the card, or None.
      run_dir: folder of the training run.
      recipe: path of its settings.
      max_texts: texts per domain at most.
      num_draws: batches of each kind and size.
      seed: of the draws.
    """

    model: Path
    corpora: Path
    out: Path
    card: Path | None
    run_dir: Path
    recipe: Path
    max_texts: int
    num_draws: int
    seed: int


def held_out_texts(
    documents: Sequence[Document], max_texts: int, tokenizer: Tokenizer, min_tokens: int
) -> dict[str, list[Document]]:
    """Held-out texts by domain: the first `max_texts` by id that have `min_tokens` tokens.

    Args:
      documents: rows of a corpus.
      max_texts: per domain.
      tokenizer: the model's.
      min_tokens: shorter texts are left out.

    Returns:
      Domain -> texts; domains with fewer such texts than the largest batch are left out.
    """
    by_domain: dict[str, list[Document]] = {}
    for document in sorted(documents, key=lambda d: (d.domain, d.id)):
        if document.split == "heldout":
            members = by_domain.setdefault(document.domain, [])
            if len(members) < max_texts and len(tokenizer.encode(document.text).ids) >= min_tokens:
                members.append(document)
    return {domain: members for domain, members in by_domain.items() if len(members) >= _MIN_TEXTS}


def run(job: ReportJob, console: rich.console.Console) -> dict[str, Any]:
    """Measures, writes `report.json` and the card.

    Args:
      job: what to do.
      console: where progress goes.

    Returns:
      What `report.json` holds.

    Raises:
      CheckpointError: an unusable model folder.
      ConfigError: a model that is not computed here.
      CorpusError: an unusable corpus.
      OSError: a file cannot be read or written.
    """
    config, params = load_model_dir(job.model)
    tokenizer = Tokenizer.from_file(str(job.model / TOKENIZER_FILE))
    groups: dict[str, dict[str, list[RoutedText]]] = {}
    for group, (corpus, steps) in _GROUPS.items():
        documents = read_corpus(job.corpora / f"{corpus}.jsonl")
        chosen = held_out_texts(documents, job.max_texts, tokenizer, steps)
        flat = [document for members in chosen.values() for document in members]
        with console.status(group) as status:
            read = read_texts(
                config,
                params,
                tokenizer,
                flat,
                max_tokens=_MAX_TOKENS,
                progress=lambda done, total, group=group: status.update(
                    f"{group}: {done} of {total} texts"
                ),
            )
        console.print(f"{group}: {len(flat)} texts of {len(chosen)} domains", highlight=False)
        routed = iter(read)
        groups[group] = {domain: [next(routed) for _ in chosen[domain]] for domain in chosen}
    # Half tasks, half languages: the mixture that training balanced.
    mixture = [expert_shares(groups[group], config.num_experts) for group in ("task", "language")]
    summary = {
        "schema_version": 1,
        "mixture_load": load_table(np.mean(mixture, axis=0)),
        "loss_by_position": loss_by_position(
            config,
            params,
            tokenizer,
            [d for d in read_corpus(job.corpora / _LONG_CORPUS) if d.split == "heldout"],
            length=_LONG_TOKENS,
            bucket=_LONG_BUCKET,
            max_windows=job.max_texts,
        ),
        "max_tokens": _MAX_TOKENS,
        "max_texts": job.max_texts,
        "num_draws": job.num_draws,
        "seed": job.seed,
        "groups": summarise(
            groups,
            config.num_experts,
            batches=_BATCHES,
            num_draws=job.num_draws,
            steps={group: steps for group, (_, steps) in _GROUPS.items()},
            seed=job.seed,
        ),
    }
    job.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary, indent=1) + "\n"
    (job.out / "report.json").write_text(text, encoding="utf-8")
    for group, figures in summary["groups"].items():
        for row in figures["reduction"]:
            console.print(
                f"{group} batch {row['batch']}: {100 * row['mean']:.1f}% fewer distinct experts "
                f"({100 * row['ci_low']:.1f}..{100 * row['ci_high']:.1f})",
                highlight=False,
            )
    if job.card is not None:
        log = (job.run_dir / "log.jsonl").read_text(encoding="utf-8")
        records = [json.loads(line) for line in log.splitlines()]
        card = render_card(config, load_recipe(job.recipe), summary, records)
        job.card.write_text(card, encoding="utf-8")
    return summary


def main() -> None:
    """Flags to job to `run`."""
    values = flags.FLAGS
    job = ReportJob(
        model=Path(values.model),
        corpora=Path(values.corpora),
        out=Path(values.out),
        card=Path(values.card) if values.card else None,
        run_dir=Path(values.run_dir),
        recipe=Path(values.recipe),
        max_texts=values.max_texts,
        num_draws=values.num_draws,
        seed=values.seed,
    )
    run(job, rich.console.Console())


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (CheckpointError, ConfigError, CorpusError))


if __name__ == "__main__":
    cli()
