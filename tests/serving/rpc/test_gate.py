"""The gate counts what is inside and lets nobody in once it closes."""

from __future__ import annotations

import asyncio

import pytest

from serving.core.errors import Rejected, RejectReason
from serving.rpc.gate import DrainGate


def test_drain_waits_for_what_is_inside() -> None:
    async def run() -> None:
        gate = DrainGate(retry_after_s=3.0)
        assert await gate.idle(0.0)
        with gate.enter():
            gate.close()
            assert gate.num_running == 1
            assert not await gate.idle(0.01)
            waiting = asyncio.create_task(gate.idle(5.0))
            await asyncio.sleep(0)
            with pytest.raises(Rejected) as caught, gate.enter():
                pass
            assert caught.value.why is RejectReason.DRAINING
            assert caught.value.retry_after_s == 3.0
        assert await waiting
        assert gate.num_running == 0

    asyncio.run(run())


def test_a_failing_request_leaves_too() -> None:
    gate = DrainGate()
    with pytest.raises(RuntimeError), gate.enter():
        raise RuntimeError
    assert gate.num_running == 0
