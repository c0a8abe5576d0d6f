"""What a fitted artefact gives the routers of a run: profiles, regions, signatures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.errors import ConfigError
from serving.core.experts import ExpertProfiles
from serving.core.signature import Signature, SignatureSource
from serving.fleet.fleet import Fleet
from serving.replay.bank import RoutingBank
from serving.signatures.artefact import SignatureArtefact
from serving.signatures.regions import FittedRegions, bind, fit_regions


def check_geometry(artefact: SignatureArtefact, bank: RoutingBank) -> None:
    """Refuses an artefact of another model than the bank's.

    Raises:
        ConfigError: the geometries differ.
    """
    model, header = artefact.model, bank.header
    fitted = (model.num_layers, model.num_experts, model.top_k)
    wanted = (header.num_layers, header.num_experts, header.top_k)
    if fitted != wanted:
        raise ConfigError("artefact", fitted, f"must have the bank's layers, experts, k {wanted}")


def expert_profiles(artefact: SignatureArtefact) -> ExpertProfiles:
    """The artefact's decode profiles as the objective takes them."""
    model, fitted = artefact.model, artefact.profiles
    weights = fitted.sizes / fitted.sizes.sum()
    return ExpertProfiles(
        version=artefact.version,
        signature_version=model.version,
        num_layers=model.num_layers,
        num_masked_layers=model.num_masked_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        mean_profile=np.asarray(weights @ fitted.profiles, np.float32),
        shrink_tokens=fitted.shrink_tokens,
        centroids=fitted.centroids,
        profiles=fitted.profiles,
        layer_scale=fitted.layer_scale,
    )


def bind_regions(fleet: Fleet, regions: FittedRegions | None) -> None:
    """Gives a fleet's decode workers the profiles of their regions."""
    if regions is None or regions.profiles is None:
        fleet.set_profiles(None)
        return
    scale, ids = regions.layer_scale, regions.worker_ids
    fleet.set_profiles(
        dict(zip(ids, regions.profiles, strict=True)),
        None if scale is None else dict(zip(ids, scale.tolist(), strict=True)),
    )


class Learned:
    """An artefact, and what follows from it for a fleet: worked out once per process.

    Attributes:
        artefact: as loaded.
        experts: its decode profiles.
    """

    def __init__(self, artefact: SignatureArtefact) -> None:
        self.artefact = artefact
        self.experts = expert_profiles(artefact)
        self._regions: dict[tuple[str, tuple[str, ...]], FittedRegions] = {}

    def regions(self, kind: str, worker_ids: tuple[str, ...]) -> FittedRegions | None:
        """Regions for decode workers: `balanced`, `vanilla` (no cap: the ablation) or `none`."""
        if kind == "none":
            return None
        key = (kind, worker_ids)
        if key not in self._regions:
            self._regions[key] = self._fit(kind, worker_ids)
        return self._regions[key]

    def _fit(self, kind: str, worker_ids: tuple[str, ...]) -> FittedRegions:
        artefact = self.artefact
        if kind == "balanced":
            return artefact.regions_for(worker_ids)
        vectors = artefact.model.vectors(artefact.calibration.prefill)
        rng = np.random.default_rng([artefact.manifest.regions_seed, len(worker_ids)])
        centroids = fit_regions(vectors, len(worker_ids), rng, balanced=False)
        return bind(centroids, worker_ids, version=f"{artefact.version}-vanilla")


@dataclass(slots=True)
class SignatureSourceOfPrompts:
    """Signatures of bank prompts, each made once.

    Attributes:
        artefact: fitted model; None gives no signatures.
        bank: the prompts.
        source: `live`, `token_table` or `none`.
    """

    artefact: SignatureArtefact | None
    bank: RoutingBank
    source: str
    _made: dict[int, Signature] | None = None

    def of(self, prompt: int) -> Signature | None:
        """The signature of a prompt; None when there is none to be had.

        Raises:
            ConfigError: a token table is asked for and was not fitted.
        """
        if self.artefact is None or self.source == "none":
            return None
        if self._made is None:
            self._made = {}
        made = self._made.get(prompt)
        if made is None:
            made = self._made[prompt] = self._make(self.artefact, prompt)
        return made

    def _make(self, artefact: SignatureArtefact, prompt: int) -> Signature:
        model = artefact.model
        counts = self.bank.prefill
        if artefact.manifest.evidence == "gates":
            if self.bank.gates is None or self.source != "live":
                raise ConfigError(
                    "artefact", "gates", "needs a bank with gate sums and live signatures"
                )
            counts = self.bank.gates
        if self.source == "token_table":
            if artefact.token_table is None:
                raise ConfigError("signatures.source", self.source, "the artefact has no table")
            return artefact.token_table.predict(self.bank.tokens(prompt), model)
        starts = self.bank.token_starts
        return model.signature(
            model.mask(counts[prompt]),
            int(starts[prompt + 1] - starts[prompt]),
            source=SignatureSource.LIVE,
        )
