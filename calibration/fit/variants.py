"""Fits with a part left out or exchanged, for ablations: what differs, and where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class FitVariant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fit of the calibration side.

    Attributes:
        name: "" for the fit itself; an ablation's name otherwise.
        idf, layer_mask, evidence: see `FitConfig`.
        domains: fit from these domains' prompts only; () takes all.
    """

    name: str = ""
    idf: bool = True
    layer_mask: bool = True
    evidence: Literal["counts", "gates"] = "counts"
    domains: tuple[str, ...] = ()


def fit_folder(folder: Path, fit: FitVariant) -> Path:
    """Folder of a variant's artefact inside that of its workload and seed."""
    return folder / (f"fit-{fit.name}" if fit.name else "fit")
