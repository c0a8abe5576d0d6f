"""The demo's control: the same rule on signatures that belong to somebody else."""

from __future__ import annotations

import numpy as np

from serving.core.request import Request
from serving.core.signature import Signature
from serving.engines.relay import SignatureFinder


class ShuffledSignatures:
    """Stands before the router's signature reader and, when told, hands out another prompt's.

    It sees every prompt once unshuffled before the first shuffled run, so each prompt can be
    given the true signature of a fixed other prompt: as exact as its own, but wrong.

    Attributes:
        shuffled: whether it does.
    """

    def __init__(self, inner: SignatureFinder, rng: np.random.Generator) -> None:
        self.shuffled = False
        self._inner = inner
        self._rng = rng
        self._seen: dict[bytes, Signature] = {}
        self._swap: dict[bytes, bytes] = {}

    def shuffle(self) -> None:
        """From now on: a fresh random derangement of the prompts seen."""
        keys = list(self._seen)
        order = self._rng.permutation(len(keys))
        # A cycle through a random order leaves nobody in place.
        self._swap = {keys[a]: keys[b] for a, b in zip(order, np.roll(order, 1), strict=True)}
        self.shuffled = True

    def best(self, sent: object, request: Request) -> Signature | None:
        """See `SignatureReader.best`."""
        key = request.token_ids.tobytes()
        if self.shuffled:
            # A prompt that failed in every run before has no partner, so it goes without.
            return self._seen.get(self._swap.get(key, b""))
        signature = self._inner.best(sent, request)
        if signature is not None:
            self._seen[key] = signature
        return signature

    def predicted(self, request: Request) -> Signature | None:
        """See `SignatureReader.predicted`."""
        return self._inner.predicted(request)
