"""The artefact folder as files: `manifest.json` and checked `.npz` files beside it.

Arrays are read with pickle off, and only after their size and SHA-256 agree with the manifest.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from serving.core.errors import ArtefactError

SCHEMA_VERSION = 1
KIND = "signature_model"
MANIFEST = "manifest.json"
_MAX_FILE_BYTES = 1 << 30

Arrays = Mapping[str, np.ndarray]


class StepTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MoE layer time fitted to a latency table: t = base + expert * A + token * T.

    Attributes:
        base_us: microseconds per layer.
        per_expert_us: microseconds per distinct expert.
        per_token_us: microseconds per token of the step.
        min_tokens, max_tokens: range of T that was fitted.
        r_squared: of the fit.
        num_rows: table rows in that range.
        source: the table's file name and SHA-256.
    """

    base_us: float
    per_expert_us: float
    per_token_us: float
    min_tokens: int
    max_tokens: int
    r_squared: float
    num_rows: int
    source: str


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and checksum of one file beside the manifest."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`manifest.json`.

    Attributes:
        version: content hash of all arrays.
        mask_version: see `SignatureModel`.
        model_name: variant the counts came from.
        num_layers, num_experts, top_k: its MoE geometry.
        shrink_tokens: see `DecodeProfiles`.
        prior_tokens, table_confidence: see `TokenTable`; 0 when there is no table.
        regions_seed: draws the k-means start, for every K.
        fitted_regions: K values stored ready-made.
        step_time: fitted step-time coefficients, or None.
        metrics: fit metrics by name.
        provenance: what was fitted, from what, by which command.
        files: every file of the folder that is read, by name.
        evidence: what IDF weighs: `counts` of tokens, or `gates`, summed gate probabilities (an
            ablation that only the replay can give a router).
    """

    schema_version: int
    kind: str
    version: str
    mask_version: str
    model_name: str
    num_layers: int
    num_experts: int
    top_k: int
    shrink_tokens: float
    prior_tokens: float
    table_confidence: float
    regions_seed: int
    fitted_regions: tuple[int, ...]
    step_time: StepTime | None
    metrics: dict[str, float]
    provenance: dict[str, str]
    files: dict[str, FileEntry]
    evidence: Literal["counts", "gates"] = "counts"


def write_arrays(folder: Path, groups: Mapping[str, Arrays]) -> dict[str, FileEntry]:
    """Writes one `.npz` per group and returns their entries for the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, arrays in groups.items():
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        raw = buffer.getvalue()
        (folder / name).write_bytes(raw)
        files[name] = FileEntry(num_bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    return files


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, indented."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks `manifest.json`.

    Raises:
        ArtefactError: unreadable, not JSON, another kind or schema, or a wrong field.
    """
    file = folder / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ArtefactError(file, f"cannot be read ({error.strerror})") from error
    try:
        header = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ArtefactError(file, f"must be JSON ({error})") from error
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise ArtefactError(file, f"kind must be {KIND!r}")
    if header.get("schema_version") != SCHEMA_VERSION:
        raise ArtefactError(
            file, f"schema_version={header.get('schema_version')!r} must be {SCHEMA_VERSION}"
        )
    try:
        return msgspec.json.decode(raw, type=Manifest)
    except msgspec.ValidationError as error:
        raise ArtefactError(file, str(error)) from error


def read_arrays(file: Path, entry: FileEntry) -> Arrays:
    """Reads one `.npz` after checking its size and checksum.

    Raises:
        ArtefactError: unreadable, other bytes than the manifest's, or no plain arrays.
    """
    try:
        num_bytes = file.stat().st_size
        if num_bytes != entry.num_bytes or num_bytes > _MAX_FILE_BYTES:
            raise ArtefactError(file, f"has {num_bytes} bytes, must have {entry.num_bytes}")
        raw = file.read_bytes()
    except OSError as error:
        raise ArtefactError(file, f"cannot be read ({error.strerror})") from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != entry.sha256:
        raise ArtefactError(file, f"sha256 is {digest}, must be {entry.sha256}")
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise ArtefactError(file, f"is not a readable .npz of plain arrays ({error})") from error


def content_version(groups: Mapping[str, Arrays]) -> str:
    """A hash of names, types, shapes and values of all arrays; no file detail enters."""
    digest = hashlib.sha256()
    for file_name in sorted(groups):
        for name, array in sorted(groups[file_name].items()):
            digest.update(f"{file_name}/{name}:{array.dtype.str}:{array.shape};".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return "sig-" + digest.hexdigest()[:16]


def narrow(array: np.ndarray) -> np.ndarray:
    """The same whole numbers in the smallest unsigned type."""
    largest = int(array.max(initial=0))
    return array.astype(np.min_scalar_type(largest))
