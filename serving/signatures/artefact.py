"""The fitted signature artefact: what the router learned about one model variant's experts.

Written by `calibration.fit_main`, read by router, workers and replay. `version` is a hash of
the arrays' content, so two fits of the same data have the same version on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from serving.core.errors import ArtefactError
from serving.signatures.manifest import (
    KIND,
    MANIFEST,
    SCHEMA_VERSION,
    Arrays,
    Manifest,
    StepTime,
    content_version,
    narrow,
    read_arrays,
    read_manifest,
    write_arrays,
    write_manifest,
)
from serving.signatures.model import SignatureModel, mask_version_of
from serving.signatures.profiles import DecodeProfiles
from serving.signatures.regions import FittedRegions, assign, fit_regions
from serving.signatures.token_table import TokenTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationSet:
    """Masked counts of the calibration prompts, kept so that regions can be fitted for any K.

    Attributes:
        prefill: uint32 [N, Lm, E].
        decode: uint32 [N, Lm, E].
        num_decode_tokens: int32 [N].
    """

    prefill: np.ndarray
    decode: np.ndarray
    num_decode_tokens: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SignatureArtefact:
    """Everything the router learned about the experts of one model variant.

    Attributes:
        model: IDF and mask.
        profiles: shrinkage clusters and decode profiles.
        calibration: masked counts behind the regions.
        token_table: predictor before prefill, or None when it was not fitted.
        prefitted: K -> centroids float32 [K, M].
        manifest: see `Manifest`; `manifest.version` goes into every decision record.
    """

    model: SignatureModel
    profiles: DecodeProfiles
    calibration: CalibrationSet
    token_table: TokenTable | None
    prefitted: Mapping[int, np.ndarray]
    manifest: Manifest

    @property
    def version(self) -> str:
        """Version written into every decision record."""
        return self.manifest.version

    def regions_for(self, worker_ids: Sequence[str]) -> FittedRegions:
        """One region per worker, worker i getting centroid i.

        Ready-made when K was fitted beforehand, else fitted now from the calibration set with
        the manifest's seed, which gives the same centroids as if it had been.

        Args:
            worker_ids: K >= 1 distinct ids.
        """
        num_regions = len(worker_ids)
        vectors = self.model.vectors(self.calibration.prefill)
        centroids = self.prefitted.get(num_regions)
        if centroids is None:
            rng = np.random.default_rng([self.manifest.regions_seed, num_regions])
            centroids = fit_regions(vectors, num_regions, rng)
        profiles, layer_scale = self._region_profiles(vectors, centroids)
        return FittedRegions(
            version=self.version,
            worker_ids=tuple(worker_ids),
            centroids=centroids,
            profiles=profiles,
            layer_scale=layer_scale,
        )

    def _region_profiles(
        self, vectors: np.ndarray, centroids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """P_d [K, M] and layer scale [K] from the members of each region."""
        labels = assign(vectors, centroids)
        nearest = np.argmax(vectors @ self.profiles.centroids.T, axis=1)
        decode = self.calibration.decode.reshape(len(labels), -1).astype(np.float64)
        tokens = self.calibration.num_decode_tokens
        profiles, scales = [], []
        for region, centroid in enumerate(centroids):
            members = np.flatnonzero(labels == region)
            num_tokens = int(tokens[members].sum())
            if num_tokens == 0:
                cluster = int(np.argmax(self.profiles.centroids @ centroid))
                profiles.append(self.profiles.profiles[cluster])
                scales.append(self.profiles.layer_scale[cluster])
                continue
            profiles.append(decode[members].sum(axis=0) / num_tokens)
            scales.append(self.profiles.layer_scale[nearest[members]].mean())
        return np.asarray(profiles, np.float32), np.asarray(scales, np.float32)


def write_artefact(
    path: str | Path,
    *,
    model_name: str,
    layers: np.ndarray,
    idf: np.ndarray,
    num_layers: int,
    top_k: int,
    profiles: DecodeProfiles,
    calibration: CalibrationSet,
    token_table: TokenTable | None,
    prefitted: Mapping[int, np.ndarray],
    regions_seed: int,
    step_time: StepTime | None,
    metrics: Mapping[str, float],
    provenance: Mapping[str, str],
    evidence: Literal["counts", "gates"] = "counts",
) -> Manifest:
    """Writes an artefact folder; `load_artefact` reads it back.

    Args:
        path: folder, made if absent; files of the same names are replaced.
        model_name: variant the counts came from.
        layers: int32 [Lm].
        idf: float32 [Lm, E].
        num_layers: L.
        top_k: experts per token and layer.
        profiles: shrinkage clusters.
        calibration: masked counts.
        token_table: predictor, or None.
        prefitted: K -> centroids.
        regions_seed: seed behind `prefitted`.
        step_time: coefficients, or None.
        metrics: fit metrics.
        provenance: data and command.
        evidence: see `Manifest`.

    Returns:
        The manifest written.
    """
    groups: dict[str, Arrays] = {
        "signature.npz": {"layers": layers.astype(np.int32), "idf": idf.astype(np.float32)},
        "profiles.npz": {
            "centroids": profiles.centroids,
            "profiles": profiles.profiles,
            "sizes": profiles.sizes,
            "layer_scale": profiles.layer_scale,
        },
        "calibration.npz": {
            "prefill": narrow(calibration.prefill),
            "decode": narrow(calibration.decode),
            "num_decode_tokens": calibration.num_decode_tokens.astype(np.int32),
        },
        "regions.npz": {f"centroids_{k}": value for k, value in sorted(prefitted.items())},
    }
    if token_table is not None:
        groups["token_table.npz"] = {
            "token_ids": token_table.token_ids.astype(np.int32),
            "num_seen": token_table.num_seen.astype(np.int32),
            "starts": token_table.starts.astype(np.int64),
            "entries": narrow(token_table.entries),
            "counts": narrow(token_table.counts),
            "mean": token_table.mean.astype(np.float32),
        }
    folder = Path(path)
    files = write_arrays(folder, groups)
    num_experts = idf.shape[1]
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kind=KIND,
        version=content_version(groups),
        mask_version=mask_version_of(
            layers, num_layers=num_layers, num_experts=num_experts, top_k=top_k
        ),
        model_name=model_name,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        shrink_tokens=profiles.shrink_tokens,
        prior_tokens=token_table.prior_tokens if token_table else 0.0,
        table_confidence=token_table.confidence if token_table else 0.0,
        regions_seed=regions_seed,
        fitted_regions=tuple(sorted(prefitted)),
        step_time=step_time,
        metrics=dict(metrics),
        provenance=dict(provenance),
        files=files,
        evidence=evidence,
    )
    write_manifest(folder, manifest)
    return manifest


def load_artefact(path: str | Path) -> SignatureArtefact:
    """Reads an artefact folder.

    Args:
        path: folder written by `write_artefact`.

    Returns:
        The artefact, fully checked.

    Raises:
        ArtefactError: missing or damaged file, unknown schema, wrong shape; names the file and
            the rule.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    groups = {}
    for name, entry in manifest.files.items():
        if Path(name).name != name or not name.endswith(".npz"):
            raise ArtefactError(folder / MANIFEST, f"files: {name!r} must be a plain .npz name")
        groups[name] = read_arrays(folder / name, entry)
    if (version := content_version(groups)) != manifest.version:
        raise ArtefactError(
            folder / MANIFEST, f"version {manifest.version!r} must be {version!r}, the content's"
        )
    try:
        return _assemble(manifest, groups)
    except KeyError as error:
        raise ArtefactError(folder, f"file or array {error} is missing") from error
    except (ValueError, IndexError, TypeError) as error:
        raise ArtefactError(folder, str(error)) from error


def _assemble(manifest: Manifest, groups: Mapping[str, Arrays]) -> SignatureArtefact:
    signature = groups["signature.npz"]
    model = SignatureModel(
        version=manifest.version,
        mask_version=manifest.mask_version,
        layers=signature["layers"],
        num_layers=manifest.num_layers,
        num_experts=manifest.num_experts,
        top_k=manifest.top_k,
        idf=_floats(signature["idf"]),
    )
    expected = mask_version_of(
        model.layers,
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
    )
    if manifest.mask_version != expected:
        raise ValueError(f"mask_version {manifest.mask_version!r} must be {expected!r}")
    stored = groups["profiles.npz"]
    profiles = DecodeProfiles(
        centroids=_floats(stored["centroids"]),
        profiles=_floats(stored["profiles"]),
        sizes=stored["sizes"],
        layer_scale=stored["layer_scale"],
        shrink_tokens=manifest.shrink_tokens,
    )
    if profiles.centroids.shape[1] != model.size:
        raise ValueError(f"profiles.npz is {profiles.centroids.shape[1]} wide, not {model.size}")
    calibration = _calibration(groups["calibration.npz"], model)
    prefitted = {k: groups["regions.npz"][f"centroids_{k}"] for k in manifest.fitted_regions}
    for k, centroids in prefitted.items():
        if centroids.shape != (k, model.size):
            raise ValueError(f"centroids_{k} have shape {centroids.shape}, not ({k}, {model.size})")
    return SignatureArtefact(
        model=model,
        profiles=profiles,
        calibration=calibration,
        token_table=_token_table(manifest, groups, model),
        prefitted=prefitted,
        manifest=manifest,
    )


def _floats(stored: np.ndarray) -> np.ndarray:
    """As the decision's compiled loops take them, however they were stored."""
    return np.ascontiguousarray(stored, np.float32)


def _calibration(stored: Arrays, model: SignatureModel) -> CalibrationSet:
    calibration = CalibrationSet(
        prefill=stored["prefill"].astype(np.uint32),
        decode=stored["decode"].astype(np.uint32),
        num_decode_tokens=stored["num_decode_tokens"],
    )
    shape = (len(calibration.num_decode_tokens), *model.idf.shape)
    if not len(calibration.num_decode_tokens):
        raise ValueError("calibration.npz holds no prompt")
    for name in ("prefill", "decode"):
        if getattr(calibration, name).shape != shape:
            raise ValueError(f"{name} has shape {getattr(calibration, name).shape}, not {shape}")
    wanted = calibration.num_decode_tokens[:, None].astype(np.int64) * model.top_k
    if not (calibration.decode.sum(axis=2, dtype=np.int64) == wanted).all():
        raise ValueError("decode rows must sum to num_decode_tokens * k")
    return calibration


def _token_table(
    manifest: Manifest, groups: Mapping[str, Arrays], model: SignatureModel
) -> TokenTable | None:
    stored = groups.get("token_table.npz")
    if stored is None:
        return None
    table = TokenTable(
        token_ids=stored["token_ids"],
        num_seen=stored["num_seen"],
        starts=stored["starts"],
        entries=stored["entries"].astype(np.uint32),
        counts=stored["counts"].astype(np.uint32),
        mean=stored["mean"],
        prior_tokens=manifest.prior_tokens,
        confidence=manifest.table_confidence,
    )
    if table.mean.shape != (model.size,):
        raise ValueError(f"token table's mean has shape {table.mean.shape}, not ({model.size},)")
    return table
