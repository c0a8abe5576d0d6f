"""What the router knows about the experts a request will touch: one type for every source."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class SignatureSource(enum.Enum):
    """Where a signature came from, best first."""

    LIVE = "live"
    CACHED_BLOCKS = "cached_blocks"
    TOKEN_TABLE = "token_table"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signature:
    """Expert counts of a prompt over the masked layers, and their unit vector.

    Attributes:
        counts: uint32 [Lm, E]; prompt tokens whose top-k at masked layer l holds expert e.
        num_tokens: prompt tokens counted; every row of `counts` sums to num_tokens * k.
        vector: float32 [Lm * E]; IDF-weighted, masked layers concatenated, one global L2
            norm of 1 (all zero when every weighted count is 0). FACTS section 1.
        source: where it came from.
        confidence: 1.0 for exact counts, lower for predictions; in (0, 1].
        version: version of the signature model (IDF and mask) that made the vector.
    """

    counts: np.ndarray
    num_tokens: int
    vector: np.ndarray
    source: SignatureSource
    version: str
    confidence: float = 1.0
