"""Drives the peer's full decision (Dynamo's SelectionService) in a python that has its package.

Run as a script by that python; needs nothing of this project. One JSON request per line on
standard input, one JSON answer per line on standard output:

    {"op": "hello"}                                      {"version"}
    {"op": "fleet", "workers": n, "choices": c, "block_size": b, "keep": k}
                                                         {}
    {"op": "decide", "prompts": [[token ...] ...]}       {"wall_ns": [...], "cpu_ns": [...]}

A decision is `select_and_reserve` from token ids: hashing, overlap, choice and reservation; with
two choices, one in each of two fleets one after the other, as prefill and decode are chosen. Its
work runs on threads of its own, so CPU time is the process's. A fleet holds the last `keep`
reservations; older ones are given back off the clock.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections import deque


class _Fleet:
    def __init__(self, services, keep: int) -> None:
        self.services, self.keep = services, keep
        self.open: deque[str] = deque()
        self.count = 0

    async def decide(self, prompts: list[list[int]]) -> dict:
        """One decision per prompt."""
        wall, cpu = [], []
        for tokens in prompts:
            self.count += 1
            name = f"selection-{self.count}"
            request = {"model_name": "model", "token_ids": tokens, "selection_id": name}
            began_cpu, began = time.process_time_ns(), time.perf_counter_ns()
            for service in self.services:
                await service.select_and_reserve(request)
            wall.append(time.perf_counter_ns() - began)
            cpu.append(time.process_time_ns() - began_cpu)
            self.open.append(name)
            if len(self.open) > self.keep:
                oldest = self.open.popleft()
                for service in self.services:
                    await service.free_reservation(oldest)
        return {"wall_ns": wall, "cpu_ns": cpu}


async def _answers() -> None:
    os.environ["DYN_ROUTER_USE_KV_EVENTS"] = "false"
    os.environ["DYN_LOG"] = "error"
    # Only now: it reads its environment when imported.
    service_of = importlib.import_module("dynamo._core").SelectionService
    fleet: _Fleet | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict = {}
        if request["op"] == "hello":
            answer = {"version": importlib.metadata.version("ai-dynamo-runtime")}
        elif request["op"] == "fleet":
            services = [service_of(indexer_threads=1) for _ in range(request["choices"])]
            for service in services:
                for number in range(request["workers"]):
                    await service.upsert_worker(_worker(number, request["block_size"]))
            fleet = _Fleet(services, request["keep"])
        else:
            assert fleet is not None
            answer = await fleet.decide(request["prompts"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _worker(number: int, block_size: int) -> dict:
    return {
        "worker_id": number,
        "model_name": "model",
        "endpoint": f"http://127.0.0.1:{9000 + number}",
        "block_size": block_size,
        "total_kv_blocks": 1 << 20,
        "max_num_batched_tokens": 8192,
    }


if __name__ == "__main__":
    asyncio.run(_answers())
