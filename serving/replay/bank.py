"""Routing banks: what prompts touch in prefill, and which experts their decode tokens go to.

A bank is one `.npz` of plain arrays, written by calibration from a capture:

    header            uint8 [bytes]     JSON: schema_version, kind, geometry, provenance
    domain_of         int32 [P]         index into the header's domains
    token_starts      int64 [P + 1]     prompt p's tokens are token_ids[starts[p]:starts[p+1]]
    token_ids         int32 [...]
    prefill           unsigned [P, L, E]   each row sums to prompt tokens * k
    gates             unsigned [P, L, E]   optional: summed gate probabilities of the prompt
    row_starts        int64 [P + 1]     prompt p's routing rows
    rows              uint64 [R, L, Wd] experts of one decode token per layer, bit e % 64 of
                                        word e // 64

The replay realises a decode step as the union of one row per request: captured routing, never
the predictor's formula.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from serving.core.errors import ArtefactError

SCHEMA_VERSION = 1
KIND = "routing_bank"
WORD_BITS = 64
_ARRAYS = ("domain_of", "token_starts", "token_ids", "prefill", "row_starts", "rows")


class BankHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a bank says of itself.

    Attributes:
        num_layers, num_experts, top_k: the model's geometry.
        domains: names behind `domain_of`.
        provenance: which model, texts and command.
    """

    schema_version: int
    kind: str
    num_layers: int
    num_experts: int
    top_k: int
    domains: tuple[str, ...]
    provenance: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingBank:
    """A bank in memory; arrays as in the module's text.

    Attributes:
        header: geometry, domains, provenance.
        domain_of, token_starts, token_ids, prefill, gates, row_starts, rows: see the module.
    """

    header: BankHeader
    domain_of: np.ndarray
    token_starts: np.ndarray
    token_ids: np.ndarray
    prefill: np.ndarray
    row_starts: np.ndarray
    rows: np.ndarray
    gates: np.ndarray | None = None

    def __post_init__(self) -> None:
        header, num = self.header, self.num_prompts
        if num < 1:
            raise ValueError("a bank must hold at least one prompt")
        shape = (num, header.num_layers, header.num_experts)
        if self.prefill.shape != shape:
            raise ValueError(f"prefill has shape {self.prefill.shape}, must be {shape}")
        if self.gates is not None and self.gates.shape != shape:
            raise ValueError(f"gates has shape {self.gates.shape}, must be {shape}")
        wide = (header.num_layers, num_words(header.num_experts))
        if self.rows.dtype != np.uint64 or self.rows.shape[1:] != wide:
            raise ValueError(f"rows are {self.rows.dtype} {self.rows.shape}, must be uint64 {wide}")
        for name, total in (("token_starts", len(self.token_ids)), ("row_starts", len(self.rows))):
            starts = getattr(self, name)
            if starts.shape != (num + 1,) or starts[0] != 0 or starts[-1] != total:
                raise ValueError(f"{name} must run from 0 to {total} in {num + 1} steps")
            if (np.diff(starts) < 1).any():
                raise ValueError(f"{name} must ascend: every prompt has at least one entry")
        if self.domain_of.min() < 0 or self.domain_of.max() >= len(header.domains):
            raise ValueError(f"domain_of must lie in [0, {len(header.domains)})")
        counted = self.prefill.sum(axis=2, dtype=np.int64)
        wanted = np.diff(self.token_starts)[:, None] * header.top_k
        if not (counted == wanted).all():
            bad = int(np.flatnonzero((counted != wanted).any(axis=1))[0])
            raise ValueError(f"prefill of prompt {bad} must sum to tokens * k in every layer")
        if not (np.bitwise_count(self.rows).sum(axis=2, dtype=np.int64) == header.top_k).all():
            raise ValueError(f"every row must name {header.top_k} experts in every layer")

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.domain_of)

    def tokens(self, prompt: int) -> np.ndarray:
        """A prompt's token ids, int32."""
        return self.token_ids[self.token_starts[prompt] : self.token_starts[prompt + 1]]


def num_words(num_experts: int) -> int:
    """Words of 64 bits that a layer's experts take."""
    return -(-num_experts // WORD_BITS)


def pack_rows(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Expert ids to bit masks.

    Args:
        experts: integer [R, L, K], ids in [0, num_experts).
        num_experts: E.

    Returns:
        uint64 [R, L, Wd].
    """
    ids = experts.astype(np.int64)
    bits = np.uint64(1) << (ids % WORD_BITS).astype(np.uint64)
    word = ids // WORD_BITS
    masks = [
        np.bitwise_or.reduce(np.where(word == w, bits, np.uint64(0)), axis=2)
        for w in range(num_words(num_experts))
    ]
    return np.stack(masks, axis=2)


def write_bank(path: str | Path, bank: RoutingBank) -> None:
    """Writes a bank; its folder is made if absent."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    header = np.frombuffer(msgspec.json.encode(bank.header), np.uint8)
    arrays = {name: getattr(bank, name) for name in _ARRAYS}
    if bank.gates is not None:
        arrays["gates"] = bank.gates
    # Whole files only: a process that was stopped leaves no half of a bank.
    part = file.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez(stream, allow_pickle=False, header=header, **arrays)
    part.replace(file)


def read_bank(path: str | Path) -> RoutingBank:
    """Reads and checks a bank.

    Raises:
        ArtefactError: missing, damaged, of another kind or schema, or it does not add up.
    """
    arrays = _load(path)
    header = _header(path, arrays)
    try:
        return RoutingBank(
            header=header, gates=arrays.get("gates"), **{name: arrays[name] for name in _ARRAYS}
        )
    except KeyError as error:
        raise ArtefactError(path, f"array {error} is missing") from error
    except (ValueError, IndexError, TypeError) as error:
        raise ArtefactError(path, str(error)) from error


def read_header(path: str | Path) -> BankHeader:
    """What a bank says of itself, without its arrays.

    Raises:
        ArtefactError: missing, damaged, or of another kind or schema.
    """
    return _header(path, _load(path, ("header",)))


def _header(path: str | Path, arrays: Mapping[str, np.ndarray]) -> BankHeader:
    try:
        header = msgspec.json.decode(arrays["header"].tobytes(), type=BankHeader)
    except (KeyError, msgspec.DecodeError) as error:
        raise ArtefactError(path, f"header must be a bank's JSON header ({error})") from error
    if header.kind != KIND or header.schema_version != SCHEMA_VERSION:
        raise ArtefactError(
            path,
            f"kind {header.kind!r} schema_version {header.schema_version} must be {KIND!r} "
            f"{SCHEMA_VERSION}",
        )
    return header


def _load(path: str | Path, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Arrays of a file: the named ones, all without names."""
    try:
        # Opened here, so that a damaged file is closed again.
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            return {name: stored[name] for name in names or stored.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, AttributeError) as error:
        raise ArtefactError(path, f"must be a .npz of plain arrays ({error})") from error


def synthetic_bank(
    *,
    num_prompts: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_domains: int = 2,
    rows_per_prompt: int = 16,
    prompt_tokens: tuple[int, int] = (16, 64),
    strength: float = 2.0,
    seed: int = 0,
    provenance: Mapping[str, str] | None = None,
) -> RoutingBank:
    """A small bank of drawn routing, for tests and speed cells: no real text, no real model.

    Experts follow a softmax over normal preferences shared by a domain, `strength` wide; k are
    drawn without replacement (an exponential race).

    Args:
        num_prompts: P.
        num_layers: geometry.
        num_experts: geometry.
        top_k: geometry.
        num_domains: labels, in turn.
        rows_per_prompt: decode tokens per prompt.
        prompt_tokens: range of prompt lengths, both ends included.
        strength: of the domains' preferences; 0 is no structure.
        seed: of every draw.
        provenance: stored in the header.
    """
    rng = np.random.default_rng(seed)
    taste = np.exp(-strength * rng.standard_normal((num_domains, num_layers, num_experts)))
    lengths = rng.integers(prompt_tokens[0], prompt_tokens[1] + 1, num_prompts)
    domain_of = (np.arange(num_prompts) % num_domains).astype(np.int32)
    prefill = np.zeros((num_prompts, num_layers, num_experts), np.uint32)
    rows = []
    for prompt, domain in enumerate(domain_of):
        draws = int(lengths[prompt]) + rows_per_prompt
        race = rng.standard_exponential((draws, num_layers, num_experts)) * taste[domain]
        experts = np.argpartition(race, top_k - 1, axis=2)[:, :, :top_k]
        for layer in range(num_layers):
            prefill[prompt, layer] = np.bincount(
                experts[: lengths[prompt], layer].ravel(), minlength=num_experts
            )
        rows.append(pack_rows(experts[lengths[prompt] :], num_experts))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return RoutingBank(
        header=BankHeader(
            schema_version=SCHEMA_VERSION,
            kind=KIND,
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            domains=tuple(f"domain-{i}" for i in range(num_domains)),
            provenance=dict(provenance or {"drawn": f"seed {seed}, strength {strength:g}"}),
        ),
        domain_of=domain_of,
        token_starts=starts,
        token_ids=rng.integers(0, 50_000, int(starts[-1])).astype(np.int32),
        prefill=prefill,
        row_starts=np.arange(num_prompts + 1, dtype=np.int64) * rows_per_prompt,
        rows=np.concatenate(rows),
    )
