"""The line for decode room keeps its order and forgets those who leave."""

from __future__ import annotations

import asyncio

import pytest

from serving.engines.base import CallStopped, StopSwitch
from serving.engines.room import RoomLine


def test_first_come_first_served_and_a_failed_try_keeps_its_place() -> None:
    async def body() -> None:
        line, served = RoomLine(), []

        async def one(name: str, *, tries: int) -> None:
            for number in range(tries):
                await line.wait(StopSwitch(), 10.0, in_front=number > 0)
                served.append(name)

        tasks = [asyncio.create_task(one(name, tries=2)) for name in "ab"]
        await asyncio.sleep(0)
        for _ in range(4):
            line.next()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert served == ["a", "a", "b", "b"]
        line.next()
        assert len(line) == 0

    asyncio.run(body())


def test_who_gives_up_or_is_stopped_leaves_the_line() -> None:
    async def body() -> None:
        line, switch = RoomLine(), StopSwitch()
        with pytest.raises(TimeoutError):
            await line.wait(StopSwitch(), 0.01, in_front=False)
        waiting = asyncio.create_task(line.wait(switch, float("inf"), in_front=False))
        await asyncio.sleep(0)
        assert len(line) == 1
        switch.throw()
        with pytest.raises(CallStopped):
            await waiting
        cancelled = asyncio.create_task(line.wait(StopSwitch(), 10.0, in_front=False))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert len(line) == 0

    asyncio.run(body())
