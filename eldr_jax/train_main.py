"""Trains the reference model: `python -m eldr_jax.train_main --recipe=FILE --corpora=DIR`.

Stop it and start it again with the same flags: it goes on from the last saved state. What it
would do at a step depends on the recipe and the step alone, so the weights come out the same.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
from absl import flags
from tokenizers import Tokenizer

from eldr_jax.checkpoint import TOKENIZER_FILE, save_model_dir
from eldr_jax.command_line import run_binary
from eldr_jax.config import ConfigError, load_model_config
from eldr_jax.model import Params
from eldr_jax.training.data import CorpusError, encode_documents, read_training_documents
from eldr_jax.training.loop import batch_schedule, make_step, train
from eldr_jax.training.recipe import load_recipe
from eldr_jax.training.tokenizer import tokenizer_config, train_tokenizer


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string(
        "recipe", "configs/artefacts/reference_model/recipe.yaml", "Training settings (YAML)."
    )
    flags.DEFINE_string("corpora", None, "Folder of the corpora (JSON lines).", required=True)
    flags.DEFINE_string(
        "run_dir", "out/train", "Folder of the run: saved states, log.jsonl and the model folder."
    )
    flags.DEFINE_string(
        "tokenizer", None, "tokenizer.json to use; without it one is fitted to the training texts."
    )
    flags.DEFINE_integer("stop_after", None, "Save and stop after this step.", lower_bound=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What the flags say.

    Attributes:
      recipe: path of the settings.
      corpora: folder of the corpora.
      run_dir: folder of the run.
      tokenizer: path of a tokenizer, or None to train one.
      stop_after: step at which to stop, or None.
    """

    recipe: Path
    corpora: Path
    run_dir: Path
    tokenizer: Path | None
    stop_after: int | None


def run(job: TrainJob, console: rich.console.Console) -> None:
    """Trains, or goes on training, and writes the model folder after every saved state.

    Args:
      job: what to do.
      console: where progress goes.

    Raises:
      ConfigError: a wrong recipe or model file.
      CorpusError: an unusable corpus.
      OSError: a file cannot be read or written.
    """
    recipe = load_recipe(job.recipe)
    config = load_model_config(recipe.model)
    documents = read_training_documents(job.corpora)
    if job.tokenizer is None:
        tokenizer = train_tokenizer((document.text for document in documents), config.vocab_size)
    else:
        tokenizer = Tokenizer.from_file(str(job.tokenizer))
        if tokenizer.get_vocab_size() != config.vocab_size:
            raise ConfigError(
                f"{job.tokenizer}: has {tokenizer.get_vocab_size()} tokens, "
                f"vocab_size={config.vocab_size}"
            )
    encoded = encode_documents(tokenizer, documents)
    console.print(
        f"{len(documents)} training texts, {sum(map(len, encoded))} tokens, "
        f"{config.num_params} weights, {recipe.num_steps} steps",
        highlight=False,
    )
    model_dir = job.run_dir / "model"

    def export(step: int, params: Params) -> None:
        save_model_dir(model_dir, config, params, tokenizer.to_str(pretty=True))
        settings = json.dumps(tokenizer_config(config.max_position_embeddings), indent=2)
        (model_dir / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")

    with _Progress(console, recipe.num_steps) as progress:
        schedule = batch_schedule(recipe, documents, encoded)
        train(
            config,
            recipe,
            schedule,
            make_step(config, recipe, schedule.domains),
            run_dir=job.run_dir,
            cpu_clock=time.process_time,
            report=progress.report,
            on_checkpoint=export,
            stop_after=job.stop_after,
        )
    console.print(f"model in {model_dir} ({TOKENIZER_FILE}, config and weights)", highlight=False)


class _Progress:
    """A bar on a terminal, one plain line per record elsewhere."""

    def __init__(self, console: rich.console.Console, num_steps: int) -> None:
        self._console = console
        self._bar = rich.progress.Progress(
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=num_steps)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def report(self, record: dict[str, Any]) -> None:
        text = (
            f"loss {record['cross_entropy']:.3f}  balance {record['balance_loss']:.3f}  "
            f"dropped {record['dropped_share']:.3f}  load {record['min_load']:.2f}"
            f"..{record['max_load']:.2f}  cpu {record['cpu_s']:.0f} s"
        )
        if self._console.is_terminal:
            self._bar.update(self._task, completed=record["step"], description=text)
        else:
            self._console.print(f"step {record['step']}  {text}", highlight=False, soft_wrap=True)


def main() -> None:
    """Flags to job to `run`."""
    values = flags.FLAGS
    job = TrainJob(
        recipe=Path(values.recipe),
        corpora=Path(values.corpora),
        run_dir=Path(values.run_dir),
        tokenizer=Path(values.tokenizer) if values.tokenizer else None,
        stop_after=values.stop_after,
    )
    run(job, rich.console.Console())


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ConfigError, CorpusError))


if __name__ == "__main__":
    cli()
