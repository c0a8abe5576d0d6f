"""Published token -> expert tables of OLMoE and Mixtral, as inclusion probabilities.

Source: github.com/allenai/OLMoE, scripts/routing_output (Muennighoff et al., OLMoE, arXiv
2409.02060): for every vocabulary token, how often each expert took it, per domain and for three
layers. Rows of the TSV: domain, layer slot, token id, "expert:count ..." .
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.core.errors import ArtefactError

# Weight of the domain's mean behind a token's own counts: a token seen once is no oracle.
_PRIOR_TOKENS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTables:
    """Per-token expert probabilities of one source model.

    Attributes:
        num_experts, top_k: of the source model.
        num_slots: published layers.
        vocab_size: one more than the largest token id published.
        rows: float32 [num_slots, R, E]; a row sums to k.
        index: table domain -> int32 [vocab_size], each token's row: the domain's own where it
            was seen there, else that of all domains together, else the domain's mean.
        frequency: table domain -> float64 [vocab_size], share of the domain's tokens.
    """

    num_experts: int
    top_k: int
    num_slots: int
    vocab_size: int
    rows: np.ndarray
    index: Mapping[str, np.ndarray]
    frequency: Mapping[str, np.ndarray]

    def rows_of(self, token_ids: np.ndarray, domain: str) -> np.ndarray:
        """Row of each token, int32 [T]; ids beyond the vocabulary take the domain's mean."""
        index = self.index[domain]
        inside = np.minimum(token_ids, self.vocab_size - 1)
        mean_row = index[-1]
        return np.where(token_ids < self.vocab_size, index[inside], mean_row)


def read_tables(path: str | Path, *, num_experts: int, top_k: int) -> RoutingTables:
    """Reads a `token_experts_*.tsv.gz`.

    Args:
        path: the file.
        num_experts: E of the source model.
        top_k: its experts per token.

    Raises:
        ArtefactError: unreadable, or a row that breaks the format; names file, line and rule.
    """
    counts = _read_counts(Path(path), num_experts)
    domains = sorted({domain for domain, _ in counts})
    num_slots = 1 + max(slot for _, slot in counts)
    # One id more than was seen, so that the last entry of every index is the mean.
    vocab_size = 2 + max(int(ids.max()) for ids, _ in counts.values())
    if missing := [
        (domain, slot)
        for domain in domains
        for slot in range(num_slots)
        if (domain, slot) not in counts
    ]:
        raise ArtefactError(path, f"domain and layer slot {missing[0]} are missing")
    index: dict[str, np.ndarray] = {}
    frequency: dict[str, np.ndarray] = {}
    rows_by_slot: list[np.ndarray] = []
    for slot in range(num_slots):
        parts: list[np.ndarray] = []
        pooled = np.zeros((vocab_size, num_experts), np.float32)
        for domain in domains:
            ids, matrix = counts[domain, slot]
            pooled[ids] += matrix
        pooled_ids = np.flatnonzero(pooled.any(axis=1))
        pooled_mean = pooled.sum(axis=0) / (pooled.sum() / top_k)
        num_rows = len(pooled_ids)
        parts.append(_probabilities(pooled[pooled_ids], pooled_mean, top_k))
        pooled_index = np.full(vocab_size, -1, np.int32)
        pooled_index[pooled_ids] = np.arange(num_rows)
        for domain in domains:
            ids, matrix = counts[domain, slot]
            mean = matrix.sum(axis=0) / (matrix.sum() / top_k)
            own = _probabilities(np.vstack([matrix, np.zeros_like(mean)[None]]), mean, top_k)
            parts.append(own)
            if slot == 0:
                by_token = pooled_index.copy()
                by_token[ids] = num_rows + np.arange(len(ids))
                by_token[by_token < 0] = num_rows + len(ids)
                index[domain] = by_token
                share = np.zeros(vocab_size)
                share[ids] = matrix.sum(axis=1)
                frequency[domain] = share / share.sum()
            num_rows += len(own)
        rows_by_slot.append(np.concatenate(parts))
    if len({len(rows) for rows in rows_by_slot}) != 1:
        raise ArtefactError(path, "every layer slot must hold the same tokens")
    return RoutingTables(
        num_experts=num_experts,
        top_k=top_k,
        num_slots=num_slots,
        vocab_size=vocab_size,
        rows=np.stack(rows_by_slot),
        index=index,
        frequency=frequency,
    )


def structureless(tables: RoutingTables) -> RoutingTables:
    """The same experts' popularity without any structure: every token takes the overall mean."""
    domains = tuple(tables.index)
    mean = np.mean(
        [tables.frequency[domain] @ tables.rows[:, tables.index[domain]] for domain in domains],
        axis=0,
    ).astype(np.float32)
    return RoutingTables(
        num_experts=tables.num_experts,
        top_k=tables.top_k,
        num_slots=tables.num_slots,
        vocab_size=tables.vocab_size,
        rows=mean[:, None],
        index={domain: np.zeros(tables.vocab_size, np.int32) for domain in domains},
        frequency=tables.frequency,
    )


def _probabilities(counts: np.ndarray, mean: np.ndarray, top_k: int) -> np.ndarray:
    """Shrunk inclusion probabilities; each row sums to k."""
    seen = counts.sum(axis=1, keepdims=True) / top_k
    return ((counts + _PRIOR_TOKENS * mean) / (seen + _PRIOR_TOKENS)).astype(np.float32)


def _read_counts(
    file: Path, num_experts: int
) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """(domain, slot) -> token ids int64 [T] ascending and counts float32 [T, E]."""
    ids: dict[tuple[str, int], list[int]] = {}
    entries: dict[tuple[str, int], list[str]] = {}
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    domain, slot, token, text = line.rstrip("\n").split("\t")
                    key = (domain, int(slot))
                    ids.setdefault(key, []).append(int(token))
                except ValueError as error:
                    raise ArtefactError(
                        file, f"line {number}: must be domain, slot, token id, counts ({error})"
                    ) from error
                entries.setdefault(key, []).append(text)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ArtefactError(file, f"must be a readable gzip file ({error})") from error
    if not ids:
        raise ArtefactError(file, "must hold at least one row")
    counts = {}
    for key, texts in entries.items():
        sizes = np.array([text.count(":") for text in texts])
        try:
            numbers = np.fromstring(" ".join(texts).replace(":", " "), np.int64, sep=" ")
        except ValueError as error:
            raise ArtefactError(file, f"{key}: must be expert:count pairs ({error})") from error
        if len(numbers) != 2 * sizes.sum() or not len(numbers):
            raise ArtefactError(file, f"{key}: must be expert:count pairs")
        pairs = numbers.reshape(-1, 2)
        if pairs.min() < 0 or pairs[:, 0].max() >= num_experts:
            raise ArtefactError(file, f"{key}: expert ids must be < {num_experts}")
        matrix = np.zeros((len(texts), num_experts), np.float32)
        matrix[np.repeat(np.arange(len(texts)), sizes), pairs[:, 0]] = pairs[:, 1]
        order = np.argsort(ids[key])
        counts[key] = (np.array(ids[key])[order], matrix[order])
    return counts
