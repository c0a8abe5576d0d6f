"""What a decode worker says of the KV it pulled, in the trailing metadata of its answer.

    eldr-pull-s: seconds, eldr-pull-blocks, eldr-pull-bytes

An engine that says nothing leaves the router to its priors of links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SECONDS, _BLOCKS, _BYTES = "eldr-pull-s", "eldr-pull-blocks", "eldr-pull-bytes"
_LEAST_S, _MOST_S = 1e-6, 600.0
_MOST_BLOCKS, _MOST_BYTES = 1 << 20, 1 << 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """One hand-over.

    Attributes:
        num_blocks: KV blocks moved, >= 1.
        num_bytes: their bytes, >= 1.
        seconds: from asking for them to having them all, > 0.
    """

    num_blocks: int
    num_bytes: int
    seconds: float

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """As trailing metadata."""
        facts = {_SECONDS: f"{self.seconds:.9f}", _BLOCKS: self.num_blocks, _BYTES: self.num_bytes}
        return tuple((key, str(value)) for key, value in facts.items())


def pulled_of(trailers: Mapping[str, str]) -> Pulled | None:
    """Reads trailing metadata; None where nothing was pulled, or what is said makes no sense.

    A worker's word may be wrong, never harmful: figures no machine reaches are no measurement.
    """
    try:
        seconds = float(trailers[_SECONDS])
        blocks, num_bytes = int(trailers[_BLOCKS]), int(trailers[_BYTES])
    except (KeyError, ValueError):
        return None
    if not _LEAST_S <= seconds <= _MOST_S:
        return None
    if not (0 < blocks <= _MOST_BLOCKS and 0 < num_bytes <= _MOST_BYTES):
        return None
    return Pulled(num_blocks=blocks, num_bytes=num_bytes, seconds=seconds)
