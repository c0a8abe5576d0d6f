"""Captures which experts prompts touch in the reference model, for `calibration.fit_main`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from absl import flags
from tokenizers import Tokenizer

from calibration.capture import blocks_for, capture_prompts
from calibration.captures import CaptureManifest, CaptureWriter, Geometry
from calibration.gates import GateSums
from calibration.progress import progress
from calibration.prompts import Prompt, corpus_prompts, jsonl_prompts
from eldr_jax.checkpoint import CheckpointError, load_model_dir
from eldr_jax.command_line import run_binary
from eldr_jax.config import ConfigError as ModelConfigError
from eldr_jax.runner import PagedRunner
from eldr_jax.training.data import CorpusError
from serving.core.errors import ArtefactError, ConfigError

_BLOCK_SIZE_TOKENS = 16


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string(
        "model", "configs/artefacts/reference_model", "Folder of the model: weights and tokenizer."
    )
    flags.DEFINE_string("out", None, "Empty or new folder for the capture.", required=True)
    flags.DEFINE_string("corpora", None, "Folder of the corpora to draw prompts from.")
    flags.DEFINE_string("prompts", None, "JSONL of prompts, instead of --corpora.")
    flags.DEFINE_enum(
        "split", "train", ["train", "heldout"], "Side of the split that --corpora draws from."
    )
    flags.DEFINE_integer("num_prompts", 1000, "Prompts to draw from --corpora.")
    flags.DEFINE_integer("min_prompt_tokens", 32, "Shortest cut of a corpus text.")
    flags.DEFINE_integer("max_prompt_tokens", 192, "Longest cut; longer JSONL prompts too.")
    flags.DEFINE_integer("decode_tokens", 64, "Decode passes per prompt at most.")
    flags.DEFINE_integer(
        "min_decode_tokens", 16, "Decode passes before an end-of-text token may end a prompt."
    )
    flags.DEFINE_float("task_share", 0.5, "Share of task texts; languages get the rest.")
    flags.DEFINE_integer("seed", 0, "Draws the texts and their cuts.")
    flags.DEFINE_bool(
        "gates",
        False,
        "Keep the prompts' summed gate probabilities too, for an ablation of the fit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureConfig:
    """What to capture; see the flags of the same names.

    Raises:
        ConfigError: a field breaks its rule.
    """

    model: str
    out: str
    corpora: str | None
    prompts: str | None
    split: str
    num_prompts: int
    min_prompt_tokens: int
    max_prompt_tokens: int
    decode_tokens: int
    min_decode_tokens: int
    task_share: float
    seed: int
    gates: bool = False

    def __post_init__(self) -> None:
        if (self.corpora is None) == (self.prompts is None):
            raise ConfigError("corpora", self.corpora, "give either --corpora or --prompts")
        if self.split not in ("train", "heldout"):
            raise ConfigError("split", self.split, "must be 'train' or 'heldout'")
        for name in ("num_prompts", "min_prompt_tokens", "decode_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be >= 1")
        if self.max_prompt_tokens < self.min_prompt_tokens:
            raise ConfigError(
                "max_prompt_tokens", self.max_prompt_tokens, "must be >= min_prompt_tokens"
            )
        if not 0 <= self.min_decode_tokens <= self.decode_tokens:
            raise ConfigError(
                "min_decode_tokens", self.min_decode_tokens, "must lie in [0, decode_tokens]"
            )
        if not 0 < self.task_share < 1:
            raise ConfigError("task_share", self.task_share, "must lie between 0 and 1")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "must be >= 0")


def run(config: CaptureConfig) -> CaptureManifest:
    """Captures and writes.

    Args:
        config: what to capture.

    Returns:
        The capture's manifest.

    Raises:
        EldrError, CheckpointError, CorpusError: bad input, named.
    """
    folder = Path(config.model)
    model_config, params = load_model_dir(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = _prompts(config, tokenizer)
    num_blocks = blocks_for(prompts, config.decode_tokens, _BLOCK_SIZE_TOKENS)
    runner = PagedRunner(
        model_config,
        params,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE_TOKENS,
        token_buckets=(16, 512),
        max_blocks_per_seq=num_blocks // 16,
        debug=True,
    )
    writer = CaptureWriter(
        config.out,
        geometry=Geometry(
            num_layers=model_config.num_layers,
            num_experts=model_config.num_experts,
            top_k=model_config.num_experts_per_tok,
        ),
        model_name=folder.name,
        provenance={
            "model_sha256": _sha256(folder / "model.safetensors"),
            "prompts": _describe_prompts(config),
            "decode": f"greedy, at most {config.decode_tokens} passes, end of text ends it "
            f"after {config.min_decode_tokens}",
        },
    )
    gates = GateSums(model_config, params) if config.gates else None
    with progress("capture", len(prompts)) as advance:
        for capture in capture_prompts(
            runner,
            prompts,
            num_decode_tokens=config.decode_tokens,
            stop_token=model_config.eos_token_id,
            min_decode_tokens=config.min_decode_tokens,
        ):
            if gates is not None:
                capture = replace(capture, prefill_gates=gates.of(capture.token_ids))
            writer.add(capture)
            advance(1)
    return writer.close()


def _prompts(config: CaptureConfig, tokenizer: Tokenizer) -> list[Prompt]:
    if config.prompts is not None:
        return jsonl_prompts(config.prompts, tokenizer, max_tokens=config.max_prompt_tokens)
    if config.corpora is None:
        raise ConfigError("corpora", None, "give either --corpora or --prompts")
    return corpus_prompts(
        config.corpora,
        tokenizer,
        split="heldout" if config.split == "heldout" else "train",
        num_prompts=config.num_prompts,
        min_tokens=config.min_prompt_tokens,
        max_tokens=config.max_prompt_tokens,
        task_share=config.task_share,
        seed=config.seed,
    )


def _describe_prompts(config: CaptureConfig) -> str:
    if config.prompts is not None:
        return f"{Path(config.prompts).name} sha256 {_sha256(Path(config.prompts))}"
    return (
        f"{config.split} split of the corpora, seed {config.seed}, task share "
        f"{config.task_share:g}, {config.min_prompt_tokens}..{config.max_prompt_tokens} tokens"
    )


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    """Reads the flags, captures, says where."""
    values = flags.FLAGS
    manifest = run(
        CaptureConfig(
            model=values.model,
            out=values.out,
            corpora=values.corpora,
            prompts=values.prompts,
            split=values.split,
            num_prompts=values.num_prompts,
            min_prompt_tokens=values.min_prompt_tokens,
            max_prompt_tokens=values.max_prompt_tokens,
            decode_tokens=values.decode_tokens,
            min_decode_tokens=values.min_decode_tokens,
            task_share=values.task_share,
            seed=values.seed,
            gates=values.gates,
        )
    )
    print(f"captured {manifest.num_prompts} prompts into {values.out}")


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ArtefactError, ConfigError, ModelConfigError, CheckpointError, CorpusError))


if __name__ == "__main__":
    cli()
