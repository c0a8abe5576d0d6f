"""Held-out quality of a signature artefact: what its promises are worth on unseen prompts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np

from calibration.captures import Capture, CaptureError
from calibration.fit.pipeline import capture_metrics
from calibration.fit.token_routes import mean_cosine
from calibration.quality import union_reduction
from serving.core.errors import ConfigError
from serving.core.signature import SignatureSource
from serving.signatures.artefact import SignatureArtefact

SCHEMA_VERSION = 1


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Written as JSON by `calibration.evaluate_main`.

    Attributes:
        artefact: its version.
        model_name: model of artefact and capture.
        capture: digest of the held-out capture.
        num_prompts: prompts in it.
        num_prompts_by_domain: by label.
        metrics: metric name -> value.
        provenance: what the capture says of itself.
    """

    artefact: str
    model_name: str
    capture: str
    num_prompts: int
    num_prompts_by_domain: dict[str, int]
    metrics: dict[str, float]
    provenance: dict[str, str]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Choices of an evaluation.

    Attributes:
        num_pairs: prompt pairs behind Spearman.
        union_batches: decode batch sizes.
        union_draws: batches per label and size.
        seed: of every draw.
    """

    num_pairs: int = 30_000
    union_batches: tuple[int, ...] = (8, 16, 32, 64)
    union_draws: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_pairs", "union_draws"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be >= 1")
        if any(size < 1 for size in self.union_batches):
            raise ConfigError("union_batches", self.union_batches, "must be numbers >= 1")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "must be >= 0")


def evaluate(
    artefact: SignatureArtefact, capture: Capture, config: EvaluationConfig
) -> EvaluationReport:
    """Measures an artefact on a capture it was not fitted from.

    Args:
        artefact: the fit.
        capture: held-out prompts of the same model.
        config: choices.

    Raises:
        CaptureError: another geometry than the artefact's.
    """
    model = artefact.model
    geometry = capture.geometry
    found = (geometry.num_layers, geometry.num_experts, geometry.top_k)
    wanted = (model.num_layers, model.num_experts, model.top_k)
    if found != wanted:
        raise CaptureError("capture", f"{found} must be the artefact's {wanted}", field="geometry")
    metrics = capture_metrics(
        capture,
        model,
        num_pairs=config.num_pairs,
        union_batches=config.union_batches,
        union_draws=config.union_draws,
        rng=np.random.default_rng([config.seed, 0]),
    )
    masked = model.mask(capture.prefill)
    vectors = model.vectors(masked)
    if artefact.token_table is not None:
        starts = np.concatenate([[0], np.cumsum(capture.num_prompt_tokens)])
        prompts = [capture.token_ids[a:b] for a, b in itertools.pairwise(starts)]
        metrics["token_table_cosine"] = mean_cosine(artefact.token_table, prompts, vectors, model)
    metrics |= _decode_error(artefact, capture, masked)
    metrics |= _region_reductions(artefact, capture, vectors, config)
    names, sizes = np.unique(np.array(capture.domains), return_counts=True)
    return EvaluationReport(
        artefact=artefact.version,
        model_name=capture.model_name,
        capture=capture.digest,
        num_prompts=len(capture.prompt_ids),
        num_prompts_by_domain=dict(zip(names.tolist(), sizes.tolist(), strict=True)),
        metrics=metrics,
        provenance=capture.provenance,
    )


def render_card(artefact: SignatureArtefact, report: EvaluationReport, commands: str) -> str:
    """The artefact's README.md.

    Args:
        artefact: the fit.
        report: its held-out evaluation.
        commands: shell lines that rebuild it.
    """
    manifest = artefact.manifest
    model = artefact.model
    layers = ", ".join(str(layer) for layer in model.layers.tolist())
    lines = [
        f"# Signature model of {manifest.model_name}",
        "",
        "IDF weights, layer mask, decode profiles, regions and token table for decode placement,",
        "fitted by `calibration.fit_main`; `serving.signatures.artefact.load_artefact` reads it.",
        "",
        f"- version `{manifest.version}`, mask `{manifest.mask_version}`",
        f"- geometry: {model.num_layers} MoE layers, {model.num_experts} experts, "
        f"top {model.top_k}; mask: layers {layers}",
        f"- {len(artefact.calibration.num_decode_tokens)} calibration prompts; "
        f"{report.num_prompts} held-out prompts in the report",
        "",
        "## Rebuild",
        "",
        "```",
        commands.strip(),
        "```",
        "",
        "Data: " + manifest.provenance.get("prompts", "see manifest.json") + ".",
        "Held out: " + report.provenance.get("prompts", "see evaluation.json") + ".",
        "",
        "## Figures",
        "",
        "Fitted: on the calibration prompts themselves. Held out: on prompts neither the model",
        "nor the fit has seen. `union_reduction_G_B`: share of distinct experts saved when the B",
        "requests of a decode batch come from one domain of group G (`region_K`: from one of K",
        "regions, chosen by prefill signature alone) instead of all.",
        "",
        "| metric | fitted | held out |",
        "|---|---|---|",
    ]
    names = [name for name in manifest.metrics if not name.startswith("mask_spearman")]
    names += [name for name in report.metrics if name not in manifest.metrics]
    for name in names:
        lines.append(
            f"| {name} | {_figure(manifest.metrics.get(name))} | "
            f"{_figure(report.metrics.get(name))} |"
        )
    return "\n".join(lines) + "\n"


def _decode_error(
    artefact: SignatureArtefact, capture: Capture, masked: np.ndarray
) -> dict[str, float]:
    """How well q predicts realised decode frequencies, against two simpler guesses."""
    model = artefact.model
    use = np.flatnonzero(capture.num_decode_tokens > 0)
    if not len(use):
        return {}
    tokens = capture.num_decode_tokens[use].astype(np.float64)
    realised = model.mask(capture.decode[use]).reshape(len(use), -1) / tokens[:, None]
    prompts = [
        model.signature(masked[i], int(capture.num_prompt_tokens[i]), source=SignatureSource.LIVE)
        for i in use
    ]
    shrunk = np.stack([artefact.profiles.expert_probability(prompt) for prompt in prompts])
    raw = np.stack([prompt.counts.ravel() / prompt.num_tokens for prompt in prompts])
    mean = artefact.profiles.expert_probability(None)

    def error(guess: np.ndarray) -> float:
        squared = ((guess - realised) ** 2).mean(axis=1)
        return float(np.sqrt(squared @ tokens / tokens.sum()))

    return {
        "decode_rmse_shrunk": error(shrunk),
        "decode_rmse_prefill_only": error(raw),
        "decode_rmse_mean_profile": error(mean),
    }


def _region_reductions(
    artefact: SignatureArtefact,
    capture: Capture,
    vectors: np.ndarray,
    config: EvaluationConfig,
) -> dict[str, float]:
    metrics = {}
    rng = np.random.default_rng([config.seed, 1])
    for num_regions, centroids in sorted(artefact.prefitted.items()):
        labels = (vectors @ centroids.T).argmax(axis=1).astype(str)
        for batch_size in config.union_batches:
            reduction = union_reduction(
                capture, labels, batch_size=batch_size, num_draws=config.union_draws, rng=rng
            )
            if reduction is not None:
                metrics[f"union_reduction_region_{num_regions}_{batch_size}"] = reduction
    return metrics


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
