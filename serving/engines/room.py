"""The line of finished prefills that wait for a decode worker with room, first come first served.

Placing costs time, so nobody tries in a loop: the head of the line tries when a request ends
and at every beat of the sweep (a worker may be back, a client may have reported an end).
"""

from __future__ import annotations

import asyncio
from collections import deque

from serving.engines.base import StopSwitch


class RoomLine:
    """Waiters in order; one event loop owns it."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def wait(self, switch: StopSwitch, limit_s: float, *, in_front: bool) -> None:
        """Waits for a turn to try.

        Args:
            switch: ends the wait from outside.
            limit_s: longest wait.
            in_front: at the head of the line, for one whose turn came and who found no room.

        Raises:
            CallStopped: the switch was thrown.
            TimeoutError: no turn came.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if in_front:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            await switch.wait(turn, limit_s)
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def next(self) -> None:
        """Something ended: the head of the line may try."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
