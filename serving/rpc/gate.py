"""Whether the doors take new work: open, or draining with the running work counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from serving.core.errors import Rejected, RejectReason


class DrainGate:
    """Counts requests in progress and refuses new ones while the server drains."""

    def __init__(self, *, retry_after_s: float = 1.0) -> None:
        self._retry_after_s = retry_after_s
        self._num_running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self._draining

    @property
    def num_running(self) -> int:
        """Requests inside."""
        return self._num_running

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Holds one request inside.

        Raises:
            Rejected: the server is draining.
        """
        self.arrive()
        try:
            yield
        finally:
            self.leave()

    def arrive(self) -> None:
        """Takes one request in that says itself when it has ended: `leave` must follow.

        Raises:
            Rejected: the server is draining.
        """
        self.check()
        self._num_running += 1
        self._idle.clear()

    def leave(self) -> None:
        """One that arrived has ended."""
        self._num_running -= 1
        if self._num_running == 0:
            self._idle.set()

    def check(self) -> None:
        """Refuses when draining, for work that does not stay inside.

        Raises:
            Rejected: the server is draining.
        """
        if self._draining:
            raise Rejected(
                RejectReason.DRAINING,
                "this router is shutting down; call another one",
                retry_after_s=self._retry_after_s,
            )

    def close(self) -> None:
        """Starts draining; for good."""
        self._draining = True

    async def idle(self, within_s: float) -> bool:
        """Waits until nobody is inside; False when `within_s` seconds did not suffice."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
