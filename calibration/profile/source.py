"""Captures of a workload's prompts, one side of the split, drawn as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from calibration.captures import PromptCapture
from calibration.profile.generate import ProfileRouter
from calibration.profile.routing_tables import RoutingTables, read_tables, structureless
from calibration.profile.settings import Workload
from calibration.profile.windows import Side, draw_windows, read_side
from serving.core.errors import ArtefactError, ConfigError

TOKENIZER = "olmoe_gpt-neox-olmo-dolma-v1_5.tokenizer.json"


class ProfileSource:
    """Real texts and published tables, ready to be routed.

    Args:
        corpora: folder of the corpora.
        routing: folder of the routing tables and their tokenizer.

    Raises:
        ArtefactError: the tokenizer is missing.
    """

    def __init__(self, corpora: str | Path, routing: str | Path) -> None:
        self._corpora = corpora
        self._routing = Path(routing)
        file = self._routing / TOKENIZER
        if not file.is_file():
            raise ArtefactError(file, "must be the tokenizer of the OLMoE tables")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tables: dict[str, RoutingTables] = {}

    def router(self, workload: Workload) -> ProfileRouter:
        """Draws expert ids for a workload.

        Raises:
            ConfigError: the workload does not fit its substrate.
            ArtefactError: the tables cannot be read.
        """
        try:
            return ProfileRouter(workload, self._tables_of(workload.substrate))
        except ValueError as error:
            raise ConfigError("workload", workload.name, str(error)) from error

    def captures(
        self,
        router: ProfileRouter,
        side: Side,
        num_prompts: int,
        *,
        keep_prefill_experts: bool = False,
    ) -> Iterator[PromptCapture]:
        """Captures of a side's prompts.

        Args:
            router: of the workload.
            side: texts to fit from, or texts to serve.
            num_prompts: how many.
            keep_prefill_experts: keep the prompts' expert ids too (large).

        Raises:
            CorpusError: the corpora cannot be used.
        """
        workload = router.workload
        documents = read_side(self._corpora, workload.group, side)
        windows = draw_windows(
            documents,
            self._tokenizer,
            workload,
            num_prompts=num_prompts,
            # The two sides have no text in common; other draws keep their cuts apart as well.
            seed=2 * workload.seed + (side == "serve"),
        )
        for window in windows:
            yield router.capture(window, keep_prefill_experts=keep_prefill_experts)

    def _tables_of(self, substrate: str) -> RoutingTables:
        if substrate not in self._tables:
            folder = self._routing
            if substrate == "mixtral":
                file, num_experts, top_k = "token_experts_mistral.tsv.gz", 8, 2
            else:
                file, num_experts, top_k = "token_experts_olmoe.tsv.gz", 64, 8
            tables = read_tables(folder / file, num_experts=num_experts, top_k=top_k)
            self._tables[substrate] = structureless(tables) if substrate == "none" else tables
        return self._tables[substrate]


def provenance_of(router: ProfileRouter, side: Side) -> dict[str, str]:
    """What a capture of this router's prompts is made of."""
    workload = router.workload
    geometry = workload.geometry
    layers = [
        f"slot {slot}: layers {int((router.slots < slot).sum())}.."
        f"{int((router.slots <= slot).sum()) - 1}"
        for slot in range(router.tables.num_slots)
    ]
    bias = workload.bias
    return {
        "prompts": f"{side} side of the {workload.group} corpora, workload {workload.name}, "
        f"seed {workload.seed}",
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
