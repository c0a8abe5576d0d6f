"""From captured prompts to a routing bank: what the replay realises decode steps from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from calibration.capture_checks import Geometry
from serving.replay.bank import KIND, SCHEMA_VERSION, BankHeader, RoutingBank, pack_rows


def bank_part(
    arrays: Mapping[str, np.ndarray], geometry: Geometry, rows_per_prompt: int
) -> dict[str, np.ndarray]:
    """The prompts of a capture's chunk that decoded.

    Args:
        arrays: a chunk, see `calibration.captures`; at least one prompt decoded.
        geometry: of the model.
        rows_per_prompt: decode tokens kept per prompt at most, evenly spaced.

    Returns:
        Arrays that `bank_of` joins.
    """
    prompt_tokens, decode_tokens = arrays["num_prompt_tokens"], arrays["num_decode_tokens"]
    use = np.flatnonzero(decode_tokens > 0)
    token_starts, row_starts = _starts(prompt_tokens), _starts(decode_tokens)
    num_rows = np.minimum(decode_tokens[use], rows_per_prompt)
    rows = [
        row_starts[prompt] + np.arange(count) * decode_tokens[prompt] // count
        for prompt, count in zip(use, num_rows, strict=True)
    ]
    tokens = [arrays["token_ids"][token_starts[p] : token_starts[p + 1]] for p in use]
    gates = {"gates": arrays["prefill_gates"][use]} if "prefill_gates" in arrays else {}
    return gates | {
        "domain": arrays["domain"][use],
        "num_tokens": prompt_tokens[use],
        "token_ids": np.concatenate(tokens),
        "prefill": arrays["prefill"][use],
        "num_rows": num_rows,
        "rows": pack_rows(arrays["decode_experts"][np.concatenate(rows)], geometry.num_experts),
    }


def bank_of(
    parts: Sequence[Mapping[str, np.ndarray]], geometry: Geometry, provenance: dict[str, str]
) -> RoutingBank:
    """Joins parts into a bank.

    Args:
        parts: from `bank_part`, at least one.
        geometry: of the model.
        provenance: stored in the header.
    """

    def joined(name: str) -> np.ndarray:
        return np.concatenate([part[name] for part in parts])

    names = joined("domain")
    domains = sorted(set(names.tolist()))
    index = {name: number for number, name in enumerate(domains)}
    return RoutingBank(
        header=BankHeader(
            schema_version=SCHEMA_VERSION,
            kind=KIND,
            num_layers=geometry.num_layers,
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
            domains=tuple(domains),
            provenance=provenance,
        ),
        domain_of=np.array([index[name] for name in names.tolist()], np.int32),
        token_starts=_starts(joined("num_tokens")),
        token_ids=joined("token_ids").astype(np.int32),
        prefill=joined("prefill"),
        gates=joined("gates") if all("gates" in part for part in parts) else None,
        row_starts=_starts(joined("num_rows")),
        rows=joined("rows"),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
