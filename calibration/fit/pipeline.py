"""The fit, from a capture to a signature artefact, in the order in which parts need each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from calibration.captures import Capture, CaptureError
from calibration.fit.decode_profiles import choose_shrinkage, fit_profiles
from calibration.fit.layer_mask import LayerMask, random_pairs, select_layers
from calibration.fit.token_routes import DecodedPrompts, fit_token_table
from calibration.quality import (
    domain_groups,
    prefill_decode_correlation,
    signature_spearman,
    union_reduction,
)
from serving.signatures.artefact import CalibrationSet, write_artefact
from serving.signatures.manifest import Manifest, StepTime
from serving.signatures.model import SignatureModel, idf_weights, mask_version_of
from serving.signatures.regions import fit_regions

_STREAM = {"pairs": 0, "clusters": 1, "shrinkage": 2, "quality": 3, "confidence": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Choices of a fit.

    Attributes:
        num_pairs: random prompt pairs behind the layer mask.
        num_clusters: shrinkage clusters.
        shrink_tokens: shrinkage, 0 to choose it on prompts the clusters have not seen.
        num_regions: region counts fitted ready-made.
        union_batches: decode batch sizes of the union metrics.
        union_draws: batches drawn per label.
        idf: weigh experts by how few prompts hit them; False is an ablation, all weigh 1.
        layer_mask: keep the layers that predict decode best; False is an ablation, all stay.
        evidence: what IDF weighs: counts, or summed gate probabilities (an ablation; experts are
            still weighed by the prompts that count them, since every gate gives every expert
            something).
        seed: of every draw.
    """

    num_pairs: int = 30_000
    num_clusters: int = 32
    shrink_tokens: float = 0.0
    num_regions: tuple[int, ...] = (2, 4, 8, 16)
    union_batches: tuple[int, ...] = (8, 16, 32, 64)
    union_draws: int = 50
    idf: bool = True
    layer_mask: bool = True
    evidence: Literal["counts", "gates"] = "counts"
    seed: int = 0

    def rng(self, part: str) -> np.random.Generator:
        """The generator of one part; parts do not disturb each other's draws."""
        return np.random.default_rng([self.seed, _STREAM[part]])


Stage = Callable[[str], None]


def fit_capture(
    capture: Capture,
    out: str | Path,
    config: FitConfig,
    *,
    step_time: StepTime | None = None,
    provenance: dict[str, str] | None = None,
    on_stage: Stage = lambda stage: None,
) -> Manifest:
    """Fits everything and writes the artefact.

    Args:
        capture: calibration prompts; those that never decoded are left out.
        out: artefact folder.
        config: choices.
        step_time: coefficients to store, or None.
        provenance: stored beside what the capture says of itself.
        on_stage: told the name of each stage as it begins.

    Returns:
        The manifest written.

    Raises:
        CaptureError: fewer than four prompts that decoded, or gates asked for and not captured.
    """
    geometry = capture.geometry
    use = np.flatnonzero(capture.num_decode_tokens > 0)
    if len(use) < 4:
        raise CaptureError(
            "capture", f"needs at least 4 prompts that decoded, has {len(use)}", field="decode"
        )
    prefill, decode = capture.prefill[use], capture.decode[use]
    weighed = evidence_of(capture, config.evidence)[use]
    num_prompt_tokens = capture.num_prompt_tokens[use]
    num_decode_tokens = capture.num_decode_tokens[use]

    on_stage("layer mask")
    idf_all = idf_weights((prefill > 0).sum(axis=0), len(use))
    if not config.idf:
        idf_all = np.ones_like(idf_all)
    pairs = random_pairs(len(use), config.num_pairs, config.rng("pairs"))
    mask = select_layers(weighed * idf_all, decode, pairs)
    if not config.layer_mask:
        mask = dataclasses.replace(mask, layers=np.sort(mask.order))
    model = SignatureModel(
        version="being fitted",
        mask_version=mask_version_of(
            mask.layers,
            num_layers=geometry.num_layers,
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
        ),
        layers=mask.layers,
        num_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        idf=idf_all[mask.layers],
    )
    masked = model.mask(prefill)
    vectors = model.vectors(model.mask(weighed))

    on_stage("decode profiles")
    shrink_tokens = config.shrink_tokens
    if shrink_tokens == 0.0:
        shrink_tokens, _ = choose_shrinkage(
            vectors,
            masked,
            num_prompt_tokens,
            decode,
            num_decode_tokens,
            mask.layers,
            num_clusters=config.num_clusters,
            rng=config.rng("shrinkage"),
        )
    profiles = fit_profiles(
        vectors,
        decode,
        num_decode_tokens,
        mask.layers,
        num_clusters=config.num_clusters,
        shrink_tokens=shrink_tokens,
        rng=config.rng("clusters"),
    )

    on_stage("token table")
    token_table = token_cosine = None
    if capture.prefill_experts is not None and config.evidence == "counts":
        all_vectors = model.vectors(model.mask(capture.prefill))
        token_table, token_cosine = fit_token_table(
            capture.token_ids,
            capture.num_prompt_tokens,
            capture.prefill_experts,
            all_vectors,
            model,
            DecodedPrompts(
                decode=capture.decode,
                num_tokens=capture.num_decode_tokens,
                num_clusters=config.num_clusters,
                shrink_tokens=shrink_tokens,
                rng=config.rng("confidence"),
            ),
        )

    on_stage("regions")
    prefitted = {
        k: fit_regions(vectors, k, np.random.default_rng([config.seed, k]))
        for k in config.num_regions
    }

    on_stage("metrics")
    metrics = _mask_metrics(mask) | {
        "num_prompts": float(len(use)),
        "shrink_tokens": shrink_tokens,
        "num_clusters": float(len(profiles.sizes)),
    }
    if token_cosine is not None:
        metrics["token_table_cosine"] = token_cosine
    if token_table is not None:
        metrics["token_table_confidence"] = token_table.confidence
    metrics |= capture_metrics(
        capture,
        model,
        num_pairs=config.num_pairs,
        union_batches=config.union_batches,
        union_draws=config.union_draws,
        rng=config.rng("quality"),
        evidence=config.evidence,
    )
    return write_artefact(
        out,
        model_name=capture.model_name,
        layers=mask.layers,
        idf=model.idf,
        num_layers=geometry.num_layers,
        top_k=geometry.top_k,
        profiles=profiles,
        calibration=CalibrationSet(
            prefill=model.mask(weighed),
            decode=model.mask(decode),
            num_decode_tokens=num_decode_tokens,
        ),
        token_table=token_table,
        prefitted=prefitted,
        regions_seed=config.seed,
        step_time=step_time,
        metrics=metrics,
        provenance={"capture": capture.digest}
        | capture.provenance
        | _ablations(config)
        | (provenance or {}),
        evidence=config.evidence,
    )


def capture_metrics(
    capture: Capture,
    model: SignatureModel,
    *,
    num_pairs: int,
    union_batches: Sequence[int],
    union_draws: int,
    rng: np.random.Generator,
    evidence: Literal["counts", "gates"] = "counts",
) -> dict[str, float]:
    """The figures a signature stands on, measured on any capture of the model.

    Args:
        capture: fitted from or held out.
        model: IDF and mask.
        num_pairs: prompt pairs.
        union_batches: decode batch sizes.
        union_draws: batches per label and size.
        rng: every draw.
        evidence: what the signature weighs.

    Returns:
        Metric name -> value; a union reduction that a capture is too small for is absent.
    """
    use = capture.num_decode_tokens > 0
    prefill, decode = capture.prefill[use], capture.decode[use]
    weighed = evidence_of(capture, evidence)[use]
    per_request, pooled = prefill_decode_correlation(prefill, decode)
    metrics = {
        "spearman": signature_spearman(model, weighed, decode, num_pairs=num_pairs, rng=rng),
        "prefill_decode_correlation": per_request,
        "prefill_decode_correlation_pooled": pooled,
    }
    for group, labels in domain_groups(capture.domains).items():
        for batch_size in union_batches:
            reduction = union_reduction(
                capture, labels, batch_size=batch_size, num_draws=union_draws, rng=rng
            )
            if reduction is not None:
                metrics[f"union_reduction_{group}_{batch_size}"] = reduction
    return metrics


def evidence_of(capture: Capture, evidence: Literal["counts", "gates"]) -> np.ndarray:
    """What a signature weighs, unsigned [N, L, E].

    Raises:
        CaptureError: gates are asked for and were not captured.
    """
    if evidence == "counts":
        return capture.prefill
    if capture.prefill_gates is None:
        raise CaptureError("capture", "was made without gate probabilities", field="prefill_gates")
    return capture.prefill_gates


def _ablations(config: FitConfig) -> dict[str, str]:
    """What was left out on purpose, for the artefact's provenance."""
    left_out = [name for name in ("idf", "layer_mask") if not getattr(config, name)]
    return {"without": ", ".join(left_out)} if left_out else {}


def _mask_metrics(mask: LayerMask) -> dict[str, float]:
    curve = {f"mask_spearman_{n:02d}": float(rho) for n, rho in enumerate(mask.spearman, 1)}
    return curve | {"num_masked_layers": float(len(mask.layers))}
