"""Drives the peer's prefix index (Dynamo's RadixTree) in a python that has its package.

Run as a script by that python; needs nothing of this project. One JSON request per line on
standard input, one JSON answer per line on standard output:

    {"op": "hello"}                                  {"version", "rss_bytes"}
    {"op": "store", "events": [[worker, parent, [hash ...]] ...]}
                                                     {"ns": [per event], "rss_bytes"}
    {"op": "scores", "hashes": [...]}                {"scores": [[worker, blocks] ...]}
    {"op": "find", "prompts": [[hash ...] ...], "calls": n}
                                                     {"ns": [per call]}

A call is timed as its users pay for it: find_matches and the scores as a Python dict.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time


def _event(event_id: int, parent: int | None, hashes: list[int]) -> bytes:
    blocks = [{"block_hash": h, "tokens_hash": h} for h in hashes]
    stored = {"parent_hash": parent, "blocks": blocks}
    return json.dumps({"event_id": event_id, "data": {"stored": stored}, "dp_rank": 0}).encode()


def _rss_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _store(tree, request: dict) -> dict:
    encoded = [(w, _event(i, p, h)) for i, (w, p, h) in enumerate(request["events"])]
    spent = []
    for worker, payload in encoded:
        began = time.perf_counter_ns()
        tree.apply_event(worker, payload)
        spent.append(time.perf_counter_ns() - began)
    return {"ns": spent, "rss_bytes": _rss_bytes()}


def _find(tree, request: dict) -> dict:
    prompts, spent = request["prompts"], []
    for call in range(request["calls"]):
        prompt = prompts[call % len(prompts)]
        began = time.perf_counter_ns()
        scores = tree.find_matches(prompt).scores
        spent.append(time.perf_counter_ns() - began)
        del scores
    return {"ns": spent}


def main() -> None:
    """Answers requests until standard input ends."""
    os.environ["DYN_ROUTER_USE_KV_EVENTS"] = "false"
    os.environ["DYN_LOG"] = "error"
    # Only now: it reads its environment when imported.
    tree = importlib.import_module("dynamo._core").RadixTree()
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "hello":
            version = importlib.metadata.version("ai-dynamo-runtime")
            answer = {"version": version, "rss_bytes": _rss_bytes()}
        elif request["op"] == "store":
            answer = _store(tree, request)
        elif request["op"] == "scores":
            scores = tree.find_matches(request["hashes"]).scores
            answer = {"scores": [[worker, blocks] for (worker, _), blocks in scores.items()]}
        else:
            answer = _find(tree, request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
