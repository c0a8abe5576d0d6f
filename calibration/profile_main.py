"""Captures of a paper-sized model from real texts and published routing tables, without a model."""

from __future__ import annotations

from dataclasses import dataclass

from absl import flags

from calibration.captures import CaptureManifest, CaptureWriter
from calibration.profile.settings import choose, load_workloads
from calibration.profile.source import ProfileSource, provenance_of
from calibration.progress import progress
from eldr_jax.command_line import run_binary
from eldr_jax.training.data import CorpusError
from serving.core.errors import ArtefactError, ConfigError


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("workloads", "configs/replay/eldr/workloads.yaml", "File of the workloads.")
    flags.DEFINE_string("workload", None, "Name of the workload.", required=True)
    flags.DEFINE_enum(
        "side", "calibrate", ["calibrate", "serve"], "Texts to fit from, or texts to serve."
    )
    flags.DEFINE_integer("num_prompts", 1000, "Prompts to draw.")
    flags.DEFINE_string("corpora", None, "Folder of the corpora.", required=True)
    flags.DEFINE_string(
        "routing", None, "Folder of the routing tables and their tokenizer.", required=True
    )
    flags.DEFINE_string("out", None, "Empty or new folder for the capture.", required=True)
    flags.DEFINE_bool(
        "prefill_experts", False, "Keep the prompts' expert ids too: large, gives a token table."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """What to generate; see the flags of the same names.

    Raises:
        ConfigError: a field breaks its rule.
    """

    workloads: str
    workload: str
    side: str
    num_prompts: int
    corpora: str
    routing: str
    out: str
    prefill_experts: bool = False

    def __post_init__(self) -> None:
        if self.side not in ("calibrate", "serve"):
            raise ConfigError("side", self.side, "must be 'calibrate' or 'serve'")
        if self.num_prompts < 1:
            raise ConfigError("num_prompts", self.num_prompts, "must be >= 1")


def run(config: ProfileConfig) -> CaptureManifest:
    """Generates and writes a capture.

    Args:
        config: what to generate.

    Returns:
        The capture's manifest.

    Raises:
        ConfigError, ArtefactError, CorpusError: bad input, named.
    """
    workload = choose(load_workloads(config.workloads), config.workload)
    source = ProfileSource(config.corpora, config.routing)
    side = "serve" if config.side == "serve" else "calibrate"
    router = source.router(workload)
    writer = CaptureWriter(
        config.out,
        geometry=workload.geometry,
        model_name=workload.name,
        provenance=provenance_of(router, side),
        chunk_prompts=128,
    )
    with progress("profile", config.num_prompts) as advance:
        for prompt in source.captures(
            router, side, config.num_prompts, keep_prefill_experts=config.prefill_experts
        ):
            writer.add(prompt)
            advance(1)
    return writer.close()


def main() -> None:
    """Reads the flags, generates, says where."""
    values = flags.FLAGS
    manifest = run(
        ProfileConfig(
            workloads=values.workloads,
            workload=values.workload,
            side=values.side,
            num_prompts=values.num_prompts,
            corpora=values.corpora,
            routing=values.routing,
            out=values.out,
            prefill_experts=values.prefill_experts,
        )
    )
    print(f"generated {manifest.num_prompts} prompts into {values.out}")


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ArtefactError, ConfigError, CorpusError))


if __name__ == "__main__":
    cli()
