"""The rules a capture's chunk obeys, and the error that names the one it breaks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from serving.core.errors import ArtefactError

# Gate sums are kept as whole numbers of this part of a token, scaled by k so that a layer's row
# adds up to tokens * k as counts do; small enough for 2^20 tokens in 32 bits.
GATE_UNITS = 256
_SCALARS = ("prompt_id", "domain", "num_prompt_tokens", "num_decode_tokens")


class CaptureError(ArtefactError):
    """A capture that cannot be used.

    Attributes:
        row: prompt's row in the file, or None when the whole file is meant.
        field: array or manifest field, "" when the whole file is meant.
        rule: the rule broken.
    """

    reason = "BAD_CAPTURE"

    def __init__(self, path: object, rule: str, *, row: int | None = None, field: str = "") -> None:
        self.row = row
        self.field = field
        self.rule = rule
        place = ", ".join(part for part in (f"row {row}" if row is not None else "", field) if part)
        super().__init__(path, f"{place}: {rule}" if place else rule)


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """MoE geometry of the captured model: L, E, k."""

    num_layers: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.top_k) < 1 or self.top_k > self.num_experts:
            raise ValueError(f"{self} must be positive with top_k <= num_experts")


def check_chunk(arrays: dict[str, np.ndarray], geometry: Geometry, file: Path) -> None:
    """Checks that a chunk adds up.

    Raises:
        CaptureError: the first broken rule, with file, row and field.
    """
    for name in (*_SCALARS, "prefill", "decode", "token_ids", "decode_experts"):
        if name not in arrays:
            raise CaptureError(file, "is missing", field=name)
    num_prompts = len(arrays["num_prompt_tokens"])
    for name in _SCALARS:
        if arrays[name].shape != (num_prompts,):
            raise CaptureError(file, f"must have shape ({num_prompts},)", field=name)
    for name, least in (("num_prompt_tokens", 1), ("num_decode_tokens", 0)):
        if (wrong := np.flatnonzero(arrays[name] < least)).size:
            raise CaptureError(file, f"must be >= {least}", row=int(wrong[0]), field=name)
    for phase, tokens_name in (("prefill", "num_prompt_tokens"), ("decode", "num_decode_tokens")):
        tokens = arrays[tokens_name].astype(np.int64)
        _check_counts(arrays[phase], tokens, geometry, file, phase)
        experts = arrays.get(f"{phase}_experts")
        if experts is not None:
            _check_experts(experts, arrays[phase], tokens, geometry, file, f"{phase}_experts")
    gates = arrays.get("prefill_gates")
    if gates is not None:
        _check_gates(gates, arrays["num_prompt_tokens"], geometry, file)
    total = int(arrays["num_prompt_tokens"].sum())
    if arrays["token_ids"].shape != (total,):
        raise CaptureError(file, f"must have shape ({total},)", field="token_ids")


def _check_counts(
    counts: np.ndarray, tokens: np.ndarray, geometry: Geometry, file: Path, name: str
) -> None:
    shape = (len(tokens), geometry.num_layers, geometry.num_experts)
    if counts.shape != shape or counts.dtype.kind != "u":
        raise CaptureError(file, f"must be unsigned of shape {shape}", field=name)
    sums = counts.sum(axis=2, dtype=np.int64)
    wanted = tokens[:, None] * geometry.top_k
    if (wrong := np.argwhere(sums != wanted)).size:
        row, layer = wrong[0].tolist()
        raise CaptureError(
            file,
            f"layer {layer} sums to {sums[row, layer]}, must be tokens * k = {wanted[row, 0]}",
            row=row,
            field=name,
        )
    if (wrong := np.flatnonzero(counts.max(axis=(1, 2)) > tokens)).size:
        row = int(wrong[0])
        raise CaptureError(
            file, f"a count must be <= the {tokens[row]} tokens", row=row, field=name
        )


def _check_gates(gates: np.ndarray, tokens: np.ndarray, geometry: Geometry, file: Path) -> None:
    shape = (len(tokens), geometry.num_layers, geometry.num_experts)
    if gates.shape != shape or gates.dtype.kind != "u":
        raise CaptureError(file, f"must be unsigned of shape {shape}", field="prefill_gates")
    wanted = tokens[:, None].astype(np.int64) * geometry.top_k * GATE_UNITS
    # Every entry is rounded by itself, and probabilities are float32.
    off = np.abs(gates.sum(axis=2, dtype=np.int64) - wanted)
    if (wrong := np.argwhere(off > geometry.num_experts + 1e-3 * wanted)).size:
        row, layer = wrong[0].tolist()
        rule = f"layer {layer} must sum to tokens * k * {GATE_UNITS} = {wanted[row, 0]}, it is off"
        raise CaptureError(file, f"{rule} by {off[row, layer]}", row=row, field="prefill_gates")


def _check_experts(
    experts: np.ndarray,
    counts: np.ndarray,
    tokens: np.ndarray,
    geometry: Geometry,
    file: Path,
    name: str,
) -> None:
    shape = (int(tokens.sum()), geometry.num_layers, geometry.top_k)
    if experts.shape != shape or experts.dtype.kind != "u":
        raise CaptureError(file, f"must be unsigned of shape {shape}", field=name)
    if experts.size and int(experts.max()) >= geometry.num_experts:
        raise CaptureError(file, f"ids must be < {geometry.num_experts}", field=name)
    starts = np.concatenate([[0], np.cumsum(tokens)])
    layer_offset = (np.arange(geometry.num_layers) * geometry.num_experts)[:, None]
    for row in range(len(tokens)):
        flat = experts[starts[row] : starts[row + 1]].astype(np.int64) + layer_offset
        found = np.bincount(flat.ravel(), minlength=counts[row].size)
        if not np.array_equal(found, counts[row].ravel()):
            raise CaptureError(file, "must add up to the counts", row=row, field=name)
    doubled = np.zeros(len(experts), bool)
    for first in range(geometry.top_k):
        for second in range(first):
            doubled |= (experts[..., first] == experts[..., second]).any(axis=1)
    if doubled.any():
        row = int(np.searchsorted(starts, np.argmax(doubled), side="right")) - 1
        raise CaptureError(file, "a token's experts must be distinct", row=row, field=name)
