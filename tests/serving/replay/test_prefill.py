from __future__ import annotations

import numpy as np
import pytest

from serving.replay.prefill import PrefillWorker, PrefixCache
from serving.replay.service import PrefillTimes

TIMES = PrefillTimes(base_s=1.0, token_s=0.01, attended_s=0.0, moe_s=np.zeros(1025))


def hashes(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint64)


def drain(worker: PrefillWorker) -> list[tuple[float, list[int]]]:
    steps = []
    while (seconds := worker.start()) is not None:
        steps.append((round(seconds, 6), worker.finish()))
    return steps


def test_chunks_pack_prompts_in_turn():
    worker = PrefillWorker(TIMES, chunk_tokens=100)
    for request, num in ((0, 60), (1, 90), (2, 30)):
        worker.enqueue(request, num, hashes())
    assert drain(worker) == [(2.0, [0]), (1.8, [1, 2])]


def test_a_long_prompt_takes_several_chunks():
    worker = PrefillWorker(TIMES, chunk_tokens=100)
    worker.enqueue(7, 250, hashes())
    # Two full chunks are one stretch; the rest of it may share its step.
    assert worker.start() == pytest.approx(4.0)
    worker.enqueue(8, 40, hashes())
    assert worker.finish() == []
    assert drain(worker) == [(1.9, [7, 8])]


def test_a_prompt_of_whole_chunks_ends_with_its_stretch():
    worker = PrefillWorker(TIMES, chunk_tokens=100)
    worker.enqueue(7, 300, hashes())
    worker.enqueue(8, 10, hashes())
    assert drain(worker) == [(6.0, [7]), (1.1, [8])]


def test_buckets_pad():
    worker = PrefillWorker(TIMES, chunk_tokens=128, buckets_tokens=(16, 64, 128))
    worker.enqueue(0, 17, hashes())
    assert drain(worker) == [(1.64, [0])]
    assert worker.num_padded_tokens == 64


def test_cached_blocks_are_not_computed_but_the_last_token_is():
    worker = PrefillWorker(TIMES, chunk_tokens=100, block_tokens=10, cache_blocks=8)
    worker.enqueue(0, 25, hashes(1, 2))
    worker.enqueue(1, 35, hashes(1, 2, 3))
    worker.enqueue(2, 20, hashes(1, 2))
    first = worker.start()
    assert first == pytest.approx(1.8)  # nothing was cached when they were begun together
    worker.finish()
    worker.enqueue(3, 35, hashes(1, 2, 3))
    worker.enqueue(4, 20, hashes(1, 2))
    assert worker.start() == pytest.approx(1.0 + 0.01 * (5 + 1))
    assert worker.finish() == [3, 4]
    assert worker.num_cached_tokens == 30 + 19


def test_the_cache_evicts_what_nobody_asked_for():
    cache = PrefixCache(4)
    cache.insert([1, 2])
    cache.insert([3, 4])
    assert cache.match([1, 2, 9]) == 2
    cache.insert([5])
    assert len(cache) == 4
    assert cache.match([1, 2]) == 2
    assert cache.match([3, 4]) == 1  # the last block went first
    cache.clear()
    assert cache.match([1]) == 0


def test_no_capacity_caches_nothing():
    cache = PrefixCache(0)
    cache.insert([1])
    assert len(cache) == 0


def test_a_lost_worker_names_what_it_held():
    worker = PrefillWorker(TIMES, chunk_tokens=10)
    worker.enqueue(0, 5, hashes())
    worker.enqueue(1, 50, hashes())
    worker.start()
    assert worker.lose() == [0, 1]
    assert worker.idle
    assert worker.num_queued == 0
