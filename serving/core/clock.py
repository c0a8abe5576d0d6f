"""Time as an argument: the server passes the system clock, the replay a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the core reads time."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Unix time in seconds, for records that leave the process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """Seconds from `time.monotonic`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds from `time.time`."""
        return time.time()


class ManualClock:
    """A clock that moves only when told (replay, tests)."""

    def __init__(self, now_s: float = 0.0, *, wall_offset_s: float = 0.0) -> None:
        self.now_s = now_s
        self.wall_offset_s = wall_offset_s

    def monotonic_s(self) -> float:
        """The virtual time in seconds."""
        return self.now_s

    def wall_s(self) -> float:
        """The virtual time plus a fixed offset, in seconds."""
        return self.now_s + self.wall_offset_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward by `seconds` (must not be negative)."""
        if not seconds >= 0:
            raise ValueError(f"{seconds=} must be >= 0: the clock never goes back")
        self.now_s += seconds
