"""Whose turn it is to use the cores: a first-come-first-served lock.

Workers of one process share its cores, so only one may run a step at a time; each step is then
measured undisturbed. A plain lock lets a busy worker take it again and again.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class StepTurn:
    """A fair mutual exclusion; use it in a `with` statement."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()

    @property
    def num_waiting(self) -> int:
        """Threads that wait for their turn."""
        return len(self._queue)

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._queue.append(ticket)
        # The holder hands the turn over by opening the oldest ticket.
        ticket.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._held = False
