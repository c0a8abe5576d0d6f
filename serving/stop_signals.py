"""What SIGTERM and SIGINT do to a server process: the first one asks, the second one kills."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_wanted() -> asyncio.Event:
    """An event of the running loop that the first signal sets; the next one does its default."""
    loop = asyncio.get_running_loop()
    wanted = asyncio.Event()

    def on_signal() -> None:
        wanted.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    return wanted


async def ended_first(work: asyncio.Future[Any], wanted: asyncio.Event) -> bool:
    """Waits for either; whether `work` ended before the signal came."""
    waiting = asyncio.ensure_future(wanted.wait())
    await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()


async def abandon(work: asyncio.Future[Any]) -> None:
    """Cancels `work` and waits until it has cleaned up, whatever it ends with."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
