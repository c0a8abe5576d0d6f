"""Captures: which experts prompts touched in prefill and decode, as files that are checked.

A capture is a folder: `manifest.json` and chunks `chunk-00000.npz`, each of some prompts:

    prompt_id, domain          text [n]
    num_prompt_tokens          int32 [n]
    num_decode_tokens          int32 [n]    decode forward passes, one token each
    prefill, decode            unsigned [n, L, E]; each layer's row sums to tokens * k
    token_ids                  int32 [sum of num_prompt_tokens], prompts laid end to end
    decode_experts             unsigned [sum of num_decode_tokens, L, K]
    prefill_experts            unsigned [sum of num_prompt_tokens, L, K], optional
    prefill_gates              unsigned [n, L, E], optional; see `calibration.gates`

Nothing is pickled. A reader refuses what does not add up and names file, row, field and rule:
counts that are wrong silently would only show as a router that places badly.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from calibration.capture_checks import CaptureError, Geometry, check_chunk

SCHEMA_VERSION = 1
KIND = "expert_capture"
MANIFEST = "manifest.json"


class ChunkEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chunk file of a capture."""

    file: str
    num_prompts: int
    num_bytes: int
    sha256: str


class CaptureManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`manifest.json`; provenance says which model, which texts, which command."""

    schema_version: int
    kind: str
    model_name: str
    geometry: Geometry
    num_prompts: int
    provenance: dict[str, str]
    chunks: tuple[ChunkEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptCapture:
    """One prompt's capture.

    Attributes:
        prompt_id, domain: whose it is.
        token_ids: int32 [P].
        prefill: unsigned [L, E].
        decode: unsigned [L, E].
        decode_experts: unsigned [G, L, K]; experts of each decode token.
        prefill_experts: unsigned [P, L, K], or None where they were not kept.
        prefill_gates: unsigned [L, E] summed gate probabilities, or None where there are none.
    """

    prompt_id: str
    domain: str
    token_ids: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    decode_experts: np.ndarray
    prefill_experts: np.ndarray | None = None
    prefill_gates: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """A whole capture in memory; arrays as in the module's text, over all N prompts.

    Attributes:
        geometry: L, E, k.
        model_name: the captured model.
        provenance: which model, texts and command.
        digest: hash over the chunks' checksums; names this capture in what is fitted from it.
    """

    geometry: Geometry
    model_name: str
    provenance: dict[str, str]
    digest: str
    prompt_ids: tuple[str, ...]
    domains: tuple[str, ...]
    num_prompt_tokens: np.ndarray
    num_decode_tokens: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    token_ids: np.ndarray
    decode_experts: np.ndarray
    prefill_experts: np.ndarray | None
    prefill_gates: np.ndarray | None = None

    def decode_starts(self) -> np.ndarray:
        """int64 [N + 1]; rows of `decode_experts` of prompt i are [starts[i], starts[i + 1])."""
        return np.concatenate([[0], np.cumsum(self.num_decode_tokens, dtype=np.int64)])

    def of_domains(self, domains: Sequence[str]) -> Capture:
        """The prompts of some domains only.

        Raises:
            CaptureError: there are none.
        """
        use = np.isin(np.array(self.domains), list(domains))
        if not use.any():
            raise CaptureError("capture", f"holds no prompt of {list(domains)}", field="domain")
        of_token = np.repeat(use, self.num_prompt_tokens)
        experts, gates = self.prefill_experts, self.prefill_gates
        return replace(
            self,
            prompt_ids=tuple(np.array(self.prompt_ids)[use].tolist()),
            domains=tuple(np.array(self.domains)[use].tolist()),
            num_prompt_tokens=self.num_prompt_tokens[use],
            num_decode_tokens=self.num_decode_tokens[use],
            prefill=self.prefill[use],
            decode=self.decode[use],
            token_ids=self.token_ids[of_token],
            decode_experts=self.decode_experts[np.repeat(use, self.num_decode_tokens)],
            prefill_experts=None if experts is None else experts[of_token],
            prefill_gates=None if gates is None else gates[use],
        )

    def without_prefill_experts(self) -> Capture:
        """The same prompts without what a token table is fitted from."""
        return replace(self, prefill_experts=None)


class CaptureWriter:
    """Writes a capture chunk by chunk; `close` writes the manifest that makes it readable."""

    def __init__(
        self,
        path: str | Path,
        *,
        geometry: Geometry,
        model_name: str,
        provenance: dict[str, str],
        chunk_prompts: int = 256,
    ) -> None:
        if chunk_prompts < 1:
            raise ValueError(f"{chunk_prompts=} must be >= 1")
        self._folder = Path(path)
        self._geometry = geometry
        self._model_name = model_name
        self._provenance = provenance
        self._chunk_prompts = chunk_prompts
        self._pending: list[PromptCapture] = []
        self._chunks: list[ChunkEntry] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(self._folder.iterdir()):
            raise CaptureError(self._folder, "must be an empty folder")

    def add(self, prompt: PromptCapture) -> None:
        """Adds one prompt.

        Raises:
            CaptureError: its counts do not add up.
        """
        self._pending.append(prompt)
        if len(self._pending) == self._chunk_prompts:
            self._flush()

    def close(self) -> CaptureManifest:
        """Writes what is left and the manifest."""
        if self._pending:
            self._flush()
        manifest = CaptureManifest(
            schema_version=SCHEMA_VERSION,
            kind=KIND,
            model_name=self._model_name,
            geometry=self._geometry,
            num_prompts=sum(chunk.num_prompts for chunk in self._chunks),
            provenance=self._provenance,
            chunks=tuple(self._chunks),
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (self._folder / MANIFEST).write_bytes(text + b"\n")
        return manifest

    def _flush(self) -> None:
        file = self._folder / f"chunk-{len(self._chunks):05d}.npz"
        arrays = pack_prompts(self._pending, self._geometry)
        check_chunk(arrays, self._geometry, file)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        raw = buffer.getvalue()
        file.write_bytes(raw)
        self._chunks.append(
            ChunkEntry(
                file=file.name,
                num_prompts=len(self._pending),
                num_bytes=len(raw),
                sha256=hashlib.sha256(raw).hexdigest(),
            )
        )
        self._pending = []


def read_capture(path: str | Path, *, with_prefill_experts: bool = True) -> Capture:
    """Reads and checks a whole capture.

    Args:
        path: folder.
        with_prefill_experts: False leaves the largest array on disk.

    Raises:
        CaptureError: a file is missing, damaged, of an unknown schema, or does not add up.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    chunks = [arrays for _, arrays in read_chunks(folder, manifest)]
    if not chunks:
        raise CaptureError(folder, "must hold at least one prompt", field="chunks")
    keep_prefill = with_prefill_experts and all("prefill_experts" in chunk for chunk in chunks)
    have_gates = all("prefill_gates" in chunk for chunk in chunks)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([chunk[name] for chunk in chunks])

    digest = hashlib.sha256("".join(chunk.sha256 for chunk in manifest.chunks).encode())
    return Capture(
        geometry=manifest.geometry,
        model_name=manifest.model_name,
        provenance=manifest.provenance,
        digest=digest.hexdigest()[:16],
        prompt_ids=tuple(joined("prompt_id").tolist()),
        domains=tuple(joined("domain").tolist()),
        num_prompt_tokens=joined("num_prompt_tokens"),
        num_decode_tokens=joined("num_decode_tokens"),
        prefill=joined("prefill"),
        decode=joined("decode"),
        token_ids=joined("token_ids"),
        decode_experts=joined("decode_experts"),
        prefill_experts=joined("prefill_experts") if keep_prefill else None,
        prefill_gates=joined("prefill_gates") if have_gates else None,
    )


def capture_in_memory(
    prompts: Sequence[PromptCapture],
    *,
    geometry: Geometry,
    model_name: str,
    provenance: dict[str, str],
) -> Capture:
    """The capture that writing and reading these prompts would give, without the files.

    Raises:
        CaptureError: no prompt, or counts that do not add up.
    """
    if not prompts:
        raise CaptureError("capture", "must hold at least one prompt", field="prompts")
    arrays = pack_prompts(prompts, geometry)
    check_chunk(arrays, geometry, Path("capture in memory"))
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return Capture(
        geometry=geometry,
        model_name=model_name,
        provenance=provenance,
        digest=digest.hexdigest()[:16],
        prompt_ids=tuple(arrays.pop("prompt_id").tolist()),
        domains=tuple(arrays.pop("domain").tolist()),
        prefill_experts=arrays.pop("prefill_experts", None),
        prefill_gates=arrays.pop("prefill_gates", None),
        **arrays,
    )


def read_manifest(folder: Path) -> CaptureManifest:
    """Reads and checks a capture's manifest.

    Raises:
        CaptureError: unreadable, not JSON, another kind or schema, or a wrong field.
    """
    file = folder / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CaptureError(file, f"must be readable ({error.strerror})") from error
    try:
        header = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise CaptureError(file, f"must be JSON ({error})") from error
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise CaptureError(file, f"must be {KIND!r}", field="kind")
    if header.get("schema_version") != SCHEMA_VERSION:
        raise CaptureError(
            file,
            f"{header.get('schema_version')!r} must be {SCHEMA_VERSION}",
            field="schema_version",
        )
    try:
        return msgspec.json.decode(raw, type=CaptureManifest)
    except msgspec.ValidationError as error:
        raise CaptureError(file, str(error)) from error


def read_chunks(
    folder: Path, manifest: CaptureManifest
) -> Iterator[tuple[Path, dict[str, np.ndarray]]]:
    """Reads chunk by chunk, so that a large capture need not fit in memory.

    Yields:
        The file and its checked arrays.

    Raises:
        CaptureError: as `read_capture`.
    """
    for entry in manifest.chunks:
        if Path(entry.file).name != entry.file:
            raise CaptureError(folder / MANIFEST, f"{entry.file!r} must be a plain name")
        file = folder / entry.file
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise CaptureError(file, f"must be readable ({error.strerror})") from error
        if len(raw) != entry.num_bytes:
            raise CaptureError(file, f"has {len(raw)} bytes, must have {entry.num_bytes}")
        if (digest := hashlib.sha256(raw).hexdigest()) != entry.sha256:
            raise CaptureError(file, f"sha256 is {digest}, must be {entry.sha256}")
        try:
            with np.load(io.BytesIO(raw), allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except (ValueError, OSError, EOFError, KeyError) as error:
            raise CaptureError(file, f"must be a .npz of plain arrays ({error})") from error
        check_chunk(arrays, manifest.geometry, file)
        if len(arrays["num_prompt_tokens"]) != entry.num_prompts:
            raise CaptureError(
                file, f"must hold {entry.num_prompts} prompts", field="num_prompt_tokens"
            )
        yield file, arrays


def pack_prompts(prompts: Sequence[PromptCapture], geometry: Geometry) -> dict[str, np.ndarray]:
    """A chunk's arrays, as in the module's text."""
    expert_dtype = np.min_scalar_type(geometry.num_experts - 1)

    def counts(name: str) -> np.ndarray:
        stacked = np.stack([getattr(prompt, name) for prompt in prompts])
        return stacked.astype(np.min_scalar_type(int(stacked.max(initial=0))))

    arrays = {
        "prompt_id": np.array([prompt.prompt_id for prompt in prompts]),
        "domain": np.array([prompt.domain for prompt in prompts]),
        "num_prompt_tokens": np.array([len(prompt.token_ids) for prompt in prompts], np.int32),
        "num_decode_tokens": np.array([len(prompt.decode_experts) for prompt in prompts], np.int32),
        "prefill": counts("prefill"),
        "decode": counts("decode"),
        "token_ids": np.concatenate([prompt.token_ids for prompt in prompts]).astype(np.int32),
        "decode_experts": np.concatenate([prompt.decode_experts for prompt in prompts]).astype(
            expert_dtype
        ),
    }
    kept = [prompt.prefill_experts for prompt in prompts if prompt.prefill_experts is not None]
    if len(kept) == len(prompts):
        arrays["prefill_experts"] = np.concatenate(kept).astype(expert_dtype)
    if all(prompt.prefill_gates is not None for prompt in prompts):
        arrays["prefill_gates"] = counts("prefill_gates")
    return arrays
