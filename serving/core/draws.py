"""Random draws keyed by the decision they serve.

The n-th decision of a router draws from the n-th stream of its seed, whatever was drawn
before, so a replay that repeats the decisions repeats the draws.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

_MASK = (1 << 64) - 1
_PER_SEED, _PER_DECISION, _PER_DRAW = (
    0xD1342543DE82EF95,
    0x9E3779B97F4A7C15,
    0xDA942042E4DD58B5,
)


class KeyedDraws:
    """Streams of one seed, one per sequence number (Philox, a counter-based generator).

    What `at` returns stands in for a `numpy.random.Generator`: most decisions draw a number or
    two if any, and moving a generator takes longer than that, so `random` needs none and the
    generator moves when something else is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed & _MASK)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state
        self._seed = (seed & _MASK) * _PER_SEED
        self._sequence, self._turn, self._moved = 0, 0, False

    def at(self, sequence: int) -> np.random.Generator:
        """The generator at the start of a sequence number's stream.

        It is the same object every time: use it before asking for the next.
        """
        self._sequence, self._turn, self._moved = sequence, 0, False
        return cast("np.random.Generator", self)

    def random(self, size: int | None = None) -> Any:
        """The next uniform number in [0, 1), a hash of seed, sequence number and turn; or many."""
        if size is not None:
            return self.__getattr__("random")(size)
        self._turn += 1
        # splitmix64's finaliser over a counter.
        value = (self._seed + self._sequence * _PER_DECISION + self._turn * _PER_DRAW) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((value ^ (value >> 31)) >> 11) * 2.0**-53

    def __getattr__(self, name: str) -> Any:
        """Another method of a generator, which is first moved to where `at` said."""
        if not self._moved:
            self._move(self._sequence)
            self._moved = True
        return getattr(self._generator, name)

    def _move(self, sequence: int) -> None:
        state = self._state
        counter = state["state"]["counter"]
        counter[0] = 0
        counter[1] = sequence
        state["buffer_pos"] = 4
        state["has_uint32"] = 0
        self._bits.state = state
