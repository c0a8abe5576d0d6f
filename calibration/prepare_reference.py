"""The replay's inputs from a model that runs here: its captures, one bank, fits per seed.

A model cannot be drawn again, so all seeds share its routing and its captured texts; what a seed
draws is the fit's pairs and k-means starts, and in the replay the order and times of requests.

    OUT/reference/capture-train, capture-heldout, bank.npz
    OUT/reference-s0/fit, fit-NAME
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from calibration import capture_main, replay_bank_main
from calibration.capture_main import CaptureConfig
from calibration.captures import MANIFEST as CAPTURE_MANIFEST
from calibration.captures import Capture, read_capture
from calibration.fit.pipeline import FitConfig, fit_capture
from calibration.fit.variants import FitVariant, fit_folder
from calibration.replay_bank_main import ReplayBankConfig
from serving.signatures.manifest import MANIFEST

NAME = "reference"


class ReferenceSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to capture of a model and fit from it.

    Attributes:
        model: its folder, from the file's folder.
        seeds: of the fits.
        fits: what is fitted per seed.
        num_calibrate, num_serve: prompts of the training split and of the held-out one.
        rows_per_prompt: decode tokens kept per served prompt at most.
        capture_seed: draws the texts' order and their cuts.
    """

    model: str
    seeds: tuple[int, ...]
    fits: tuple[FitVariant, ...] = (FitVariant(),)
    num_calibrate: int = 1000
    num_serve: int = 1600
    rows_per_prompt: int = 48
    capture_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_calibrate", "num_serve", "rows_per_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")


def prepare_reference(
    item: ReferenceSet, *, model: Path, corpora: str, out: Path, num_regions: Sequence[int]
) -> int:
    """Makes what is missing.

    Args:
        item: what to make.
        model: folder of the model.
        corpora: folder of the corpora.
        out: folder for banks and fits.
        num_regions: numbers of decode workers to fit regions for.

    Returns:
        How many banks and fits were made.

    Raises:
        EldrError, CheckpointError, CorpusError: bad input, named.
    """
    made = 0
    bank = out / NAME / "bank.npz"
    if not bank.exists():
        folder = _captured(item, "heldout", item.num_serve, model, corpora, out)
        replay_bank_main.run(
            ReplayBankConfig(
                capture=str(folder), out=str(bank), rows_per_prompt=item.rows_per_prompt
            )
        )
        made += 1
    capture: Capture | None = None
    for seed in item.seeds:
        for fit in item.fits:
            folder = fit_folder(out / f"{NAME}-s{seed}", fit)
            if (folder / MANIFEST).exists():
                continue
            if capture is None:
                capture = read_capture(
                    _captured(item, "train", item.num_calibrate, model, corpora, out)
                )
            config = FitConfig(
                num_regions=tuple(num_regions),
                idf=fit.idf,
                layer_mask=fit.layer_mask,
                evidence=fit.evidence,
                seed=seed,
            )
            chosen = capture.of_domains(fit.domains) if fit.domains else capture
            if fit.name:
                chosen = chosen.without_prefill_experts()
            fit_capture(chosen, folder, config)
            made += 1
    return made


def _captured(
    item: ReferenceSet, split: str, num_prompts: int, model: Path, corpora: str, out: Path
) -> Path:
    """A side's capture; one that was cut short is made again."""
    folder = out / NAME / f"capture-{split}"
    if not (folder / CAPTURE_MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)
        capture_main.run(
            CaptureConfig(
                model=str(model),
                out=str(folder),
                corpora=corpora,
                prompts=None,
                split=split,
                num_prompts=num_prompts,
                min_prompt_tokens=32,
                max_prompt_tokens=192,
                decode_tokens=64,
                min_decode_tokens=16,
                task_share=0.5,
                seed=item.capture_seed,
                gates=any(fit.evidence == "gates" for fit in item.fits),
            )
        )
    return folder
