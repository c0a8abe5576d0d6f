"""Random draws keyed by the decision they serve.

The n-th decision of a router draws from the n-th stream of its seed, whatever was drawn
before, so a replay that repeats the decisions repeats the draws.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


class KeyedDraws:
    """Streams of one seed, one per sequence number (Philox, a counter-based generator)."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed & _MASK)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def at(self, sequence: int) -> np.random.Generator:
        """The generator at the start of a sequence number's stream.

        It is the same object every time: use it before asking for the next.
        """
        state = self._state
        counter = state["state"]["counter"]
        counter[0] = 0
        counter[1] = sequence
        state["buffer_pos"] = 4
        state["has_uint32"] = 0
        self._bits.state = state
        return self._generator
