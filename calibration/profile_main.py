"""Captures of a paper-sized model from real texts and published routing tables, without a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from absl import flags
from tokenizers import Tokenizer

from calibration.captures import CaptureManifest, CaptureWriter
from calibration.profile.generate import ProfileRouter
from calibration.profile.routing_tables import RoutingTables, read_tables, structureless
from calibration.profile.settings import Workload, choose, load_workloads
from calibration.profile.windows import draw_windows, read_side
from calibration.progress import progress
from eldr_jax.command_line import run_binary
from eldr_jax.training.data import CorpusError
from serving.core.errors import ArtefactError, ConfigError

_TOKENIZER = "olmoe_gpt-neox-olmo-dolma-v1_5.tokenizer.json"


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
    folder = Path(config.routing)
    tokenizer_file = folder / _TOKENIZER
    if not tokenizer_file.is_file():
        raise ArtefactError(tokenizer_file, "must be the tokenizer of the OLMoE tables")
    side = "serve" if config.side == "serve" else "calibrate"
    documents = read_side(config.corpora, workload.group, side)
    try:
        router = ProfileRouter(workload, _tables(folder, workload))
    except ValueError as error:
        raise ConfigError("workload", workload.name, str(error)) from error
    writer = CaptureWriter(
        config.out,
        geometry=workload.geometry,
        model_name=workload.name,
        provenance=_provenance(workload, router, side),
        chunk_prompts=128,
    )
    windows = draw_windows(
        documents,
        Tokenizer.from_file(str(tokenizer_file)),
        workload,
        num_prompts=config.num_prompts,
        # The two sides have no text in common; other draws keep their cuts apart as well.
        seed=2 * workload.seed + (side == "serve"),
    )
    with progress("profile", config.num_prompts) as advance:
        for window in windows:
            writer.add(router.capture(window, keep_prefill_experts=config.prefill_experts))
            advance(1)
    return writer.close()


def _tables(folder: Path, workload: Workload) -> RoutingTables:
    if workload.substrate == "mixtral":
        return read_tables(folder / "token_experts_mistral.tsv.gz", num_experts=8, top_k=2)
    tables = read_tables(folder / "token_experts_olmoe.tsv.gz", num_experts=64, top_k=8)
    return structureless(tables) if workload.substrate == "none" else tables


def _provenance(workload: Workload, router: ProfileRouter, side: str) -> dict[str, str]:
    geometry = workload.geometry
    layers = [
        f"slot {slot}: layers {int((router.slots < slot).sum())}.."
        f"{int((router.slots <= slot).sum()) - 1}"
        for slot in range(router.tables.num_slots)
    ]
    bias = workload.bias
    return {
        "prompts": f"{side} side of the {workload.group} corpora, workload {workload.name}",
        "composition": f"{geometry.num_layers} layers of {geometry.num_experts} experts, top "
        f"{geometry.top_k}, from {router.tables.num_slots} published {workload.substrate} layers "
        f"of {router.tables.num_experts}: {'; '.join(layers)}; every copy with its own "
        f"permutation, each expert split into {router.num_children} by token",
        "tables": ", ".join(
            f"{domain or 'others'}={table}" for domain, table in sorted(workload.tables.items())
        ),
        "bias": f"domain {bias.domain:g}, topic {bias.topic:g} of {bias.num_topics}, request "
        f"{bias.request:g}, style {bias.style:g} of {bias.num_styles} in decode only",
    }


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
