"""From logits to a token: greedy, or Gumbel-max with noise keyed by (seed, position).

Adding independent Gumbel noise to log-weights and taking the maximum draws from their softmax.
The noise depends on the request's seed and on the place of the token in its sequence only, so a
draw is the same in any batch, on any worker, and when a lost request is resumed from its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach p; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        seed: names the noise.
        num_logprobs: alternatives to report per token; None reports nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of the model itself: before temperature, filters and bans.

    Attributes:
        chosen: of the token taken, natural logarithm.
        top_ids: the likeliest tokens, likeliest first.
        top_values: theirs.
    """

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


def choose(
    logits: np.ndarray, sampling: Sampling, position: int, banned: frozenset[int] = frozenset()
) -> int:
    """Takes one token.

    Args:
        logits: float32 [V].
        sampling: the request's parameters.
        position: place of the new token in its sequence, prompt included.
        banned: tokens that must not be taken now (min_tokens); never the whole vocabulary.

    Returns:
        The token id; of equal scores the lowest id.
    """
    scores = logits.astype(np.float64)
    if banned:
        scores[list(banned)] = -np.inf
    if sampling.greedy:
        return int(scores.argmax())
    scores = _filtered(scores / sampling.temperature, sampling)
    return int((scores + _gumbel(sampling.seed, position, len(scores))).argmax())


def logprobs(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities to report for a taken token.

    Args:
        logits: float32 [V].
        token_id: the token taken.
        num_top: alternatives wanted, 0 .. V.
    """
    values = _log_softmax(logits.astype(np.float64))
    order = np.argsort(-values, kind="stable")[:num_top]
    return TokenLogprobs(
        chosen=float(values[token_id]),
        top_ids=tuple(order.tolist()),
        top_values=tuple(values[order].tolist()),
    )


def _filtered(scores: np.ndarray, sampling: Sampling) -> np.ndarray:
    """-inf for every token that min_p, then top_k, then top_p exclude (vLLM's order)."""
    if sampling.min_p > 0:
        scores = np.where(scores >= scores.max() + np.log(sampling.min_p), scores, -np.inf)
    if not 0 < sampling.top_k < len(scores) and sampling.top_p >= 1:
        return scores
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        shares = np.exp(_log_softmax(scores[order]))
        # A token stays while the ones before it have not reached p: the first always does.
        before = np.cumsum(shares) - shares
        order = order[before < sampling.top_p]
    kept = np.full_like(scores, -np.inf)
    kept[order] = scores[order]
    return kept


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max()
    return shifted - np.log(np.exp(shifted).sum())


def _gumbel(seed: int, position: int, size: int) -> np.ndarray:
    key = np.array([seed & _MASK_64, position], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).gumbel(size=size)
