"""Token-table predictor: a signature before prefill, from token ids alone (FACTS section 1).

Which experts a token goes to depends little on its context, so counts of (token, expert) pairs
from calibration predict a prompt's counts. A token seen n times speaks for itself with weight
n, the mean of all tokens with weight `prior_tokens`; an unseen token is all mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from serving.core.signature import Signature, SignatureSource
from serving.signatures.model import SignatureModel

# A small vocabulary's table is also kept unpacked, which answers several times faster.
_MAX_UNPACKED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTable:
    """Sparse (token, masked layer, expert) counts.

    Attributes:
        token_ids: int32 [T], ascending; tokens seen in calibration.
        num_seen: int32 [T], how often.
        starts: int64 [T + 1]; entries of token t are starts[t]:starts[t + 1].
        entries: uint32 [Z], flat index l * E + e into the masked layers.
        counts: uint32 [Z], routings of the token there.
        mean: float32 [M]; probability that a token touches each expert, each layer sums to k.
        prior_tokens: weight of the mean.
        confidence: what a predicted token is worth beside a computed one when decode is
            predicted, in (0, 1], chosen on prompts of the fit that the table had not seen;
            carried by every prediction.
    """

    token_ids: np.ndarray
    num_seen: np.ndarray
    starts: np.ndarray
    entries: np.ndarray
    counts: np.ndarray
    mean: np.ndarray
    prior_tokens: float
    confidence: float
    _unpacked: np.ndarray | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if self.num_seen.shape != (num_tokens,) or self.starts.shape != (num_tokens + 1,):
            raise ValueError("token_ids, num_seen and starts must be [T], [T] and [T + 1]")
        if self.entries.shape != self.counts.shape or self.starts[-1] != len(self.entries):
            raise ValueError("entries and counts must be as long as starts[-1]")
        if self.starts[0] != 0 or (np.diff(self.starts) < 0).any():
            raise ValueError("starts must begin at 0 and never fall")
        if num_tokens and (np.diff(self.token_ids) <= 0).any():
            raise ValueError("token_ids must ascend")
        if self.entries.size and int(self.entries.max()) >= self.mean.size:
            raise ValueError(f"entries must be < {self.mean.size}")
        if not self.prior_tokens > 0:
            raise ValueError(f"prior_tokens={self.prior_tokens} must be > 0")
        if not 0 < self.confidence <= 1:
            raise ValueError(f"confidence={self.confidence} must lie in (0, 1]")
        small = 0 < num_tokens * self.mean.size * 4 <= _MAX_UNPACKED_BYTES
        object.__setattr__(self, "_unpacked", self._unpack() if small else None)

    def expected(self, token_ids: np.ndarray) -> np.ndarray:
        """Expected counts of a prompt, float64 [M]; each layer sums to P * k.

        Args:
            token_ids: integer [P].
        """
        unique, times = np.unique(token_ids, return_counts=True)
        place = np.searchsorted(self.token_ids, unique)
        place = np.minimum(place, max(len(self.token_ids) - 1, 0))
        known = (
            self.token_ids[place] == unique if len(self.token_ids) else np.zeros(len(unique), bool)
        )
        rows, repeats = place[known], times[known]
        unseen = times[~known].sum() * self.mean
        if self._unpacked is not None:
            return repeats.astype(np.float32) @ self._unpacked[rows] + unseen
        weights = repeats / (self.num_seen[rows] + self.prior_tokens)
        lengths = self.starts[rows + 1] - self.starts[rows]
        # Positions of all entries of all rows at once: a ramp per row, laid end to end.
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        ramp = np.arange(total) - np.repeat(ends - lengths, lengths)
        at = np.repeat(self.starts[rows], lengths) + ramp
        counts = np.bincount(
            self.entries[at],
            weights=self.counts[at] * np.repeat(weights, lengths),
            minlength=self.mean.size,
        )
        return counts + self.prior_tokens * weights.sum() * self.mean + unseen

    def _unpack(self) -> np.ndarray:
        """Expected experts of each token seen, float32 [T, M]."""
        rows = np.repeat(np.arange(len(self.token_ids)), np.diff(self.starts))
        dense = np.tile(np.float32(self.prior_tokens) * self.mean, (len(self.token_ids), 1))
        dense[rows, self.entries] += self.counts
        dense /= (self.num_seen + self.prior_tokens).astype(np.float32)[:, None]
        return dense

    def predict(self, token_ids: np.ndarray, model: SignatureModel) -> Signature:
        """A TOKEN_TABLE signature of a prompt.

        Args:
            token_ids: integer [P], P >= 1.
            model: the signature model this table was fitted with.
        """
        num_tokens = len(token_ids)
        expected = self.expected(token_ids).reshape(model.idf.shape)
        counts = _round_rows(expected, num_tokens * model.top_k, num_tokens)
        return model.signature(
            counts, num_tokens, source=SignatureSource.TOKEN_TABLE, confidence=self.confidence
        )


def _round_rows(expected: np.ndarray, row_sum: int, most: int) -> np.ndarray:
    """Whole counts near `expected`, every row with the exact sum, none above `most`."""
    counts = np.floor(np.minimum(expected, most)).astype(np.int64)
    remainder = np.where(counts < most, expected - counts, -np.inf)
    order = np.argsort(-remainder, axis=1, kind="stable")
    missing = row_sum - counts.sum(axis=1)
    for row, lack in enumerate(missing):
        # Rounding leaves less than E to place; a loop only guards against a crowded row.
        while lack > 0:
            open_columns = order[row][counts[row, order[row]] < most][:lack]
            counts[row, open_columns] += 1
            lack -= len(open_columns)
        if lack < 0:
            surplus = order[row][::-1]
            surplus = surplus[counts[row, surplus] > 0][: -int(lack)]
            counts[row, surplus] -= 1
    return counts.astype(np.uint32)
