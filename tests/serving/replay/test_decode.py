"""The decode kernel against a plain re-implementation, request by request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.replay.bank import synthetic_bank
from serving.replay.compiled import HAS_NUMBA, _layers_python, _row_of_python, layers_s, row_of
from serving.replay.decode import DecodeFleet
from serving.replay.decode_kernel import Requests, Times

LAYERS, EXPERTS, TOP_K, BLOCK = 3, 16, 2, 4
BANK = synthetic_bank(
    num_prompts=6,
    num_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    rows_per_prompt=4,
    prompt_tokens=(4, 9),
)


def times(slots: int = 8, *, ranks: int = 1) -> Times:
    tokens = np.arange(slots + 1)[:, None]
    experts = np.arange(EXPERTS + 1)[None, :]
    masks = np.zeros((ranks, 1), np.uint64)
    for expert in range(EXPERTS):
        masks[expert * ranks // EXPERTS, 0] |= np.uint64(1 << expert)
    return Times(
        rows=BANK.rows,
        masks=masks,
        moe_s=(1e-3 + 1e-4 * experts + 1e-5 * tokens) * (tokens > 0),
        rest_s=5e-4 + 1e-5 * np.arange(slots + 1.0),
        mean_s=np.full(slots + 1, 2e-3),
        mean_experts=np.full(slots + 1, 12.0),
        context_s=np.array([1e-7]),
        block_tokens=np.array([BLOCK]),
        realised=np.array([1]),
    )


def requests(targets: list[int], contexts: list[int]) -> Requests:
    num = len(targets)
    prompt = np.arange(num) % BANK.num_prompts
    return Requests(
        row_start=BANK.row_starts[prompt],
        num_rows=np.diff(BANK.row_starts)[prompt],
        key=np.random.default_rng(1).integers(0, 1 << 63, num, np.uint64),
        produced=np.zeros(num, np.int64),
        target=np.array(targets),
        context=np.array(contexts),
        first_s=np.full(num, np.nan),
        last_s=np.full(num, np.nan),
    )


def fleet(rows: Requests, *, slots: int = 8, kv_blocks: int = 1000, ranks: int = 1, workers=1):
    return DecodeFleet(
        workers,
        max_num_seqs=slots,
        kv_blocks=kv_blocks,
        requests=rows,
        times=times(slots, ranks=ranks),
        recompute_token_s=1e-3,
    )


def by_hand(targets, contexts, joins, *, ranks: int = 1):
    """One worker with room for everybody: (first, last) per request, from sets of experts."""
    rows, step = requests(targets, contexts), times(len(targets), ranks=ranks)
    first, last = [None] * len(targets), [None] * len(targets)
    produced, context = [0] * len(targets), list(contexts)
    waiting = sorted(range(len(targets)), key=lambda r: joins[r])
    active: list[int] = []
    now = 0.0
    while active or waiting:
        if not active:
            # Whoever finds the worker idle starts at once, alone.
            now = max(now, joins[waiting[0]])
            active.append(waiting.pop(0))
        while waiting and joins[waiting[0]] < now:
            active.append(waiting.pop(0))
        seconds = float(step.rest_s[len(active)])
        seconds_moe = 0.0
        for layer in range(LAYERS):
            union = set()
            for r in active:
                row = _row_of_python(rows.key[r], produced[r], rows.row_start[r], rows.num_rows[r])
                word = int(BANK.rows[row, layer, 0])
                union |= {e for e in range(EXPERTS) if word >> e & 1}
            held = [sum(e * ranks // EXPERTS == k for e in union) for k in range(ranks)]
            seconds_moe += float(step.moe_s[len(active), max(held)])
        now += seconds + seconds_moe + 1e-7 * sum(context[r] for r in active)
        for r in list(active):
            produced[r] += 1
            context[r] += 1
            first[r] = now if first[r] is None else first[r]
            if produced[r] == targets[r]:
                last[r] = now
                active.remove(r)
    return first, last


@settings(max_examples=25, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 12), st.floats(0, 0.03)),
        min_size=1,
        max_size=7,
    ),
    ranks=st.sampled_from([1, 2, 4]),
)
def test_steps_are_those_of_a_plain_simulation(plan, ranks):
    targets, contexts = [p[0] for p in plan], [p[1] for p in plan]
    joins = [p[2] for p in plan]
    rows = requests(targets, contexts)
    decode = fleet(rows, ranks=ranks)
    seen = []
    for request in sorted(range(len(plan)), key=lambda r: joins[r]):
        seen += decode.advance(joins[request])
        decode.join(0, request, joins[request])
    seen += decode.advance(np.inf)
    first, last = by_hand(targets, contexts, joins, ranks=ranks)
    np.testing.assert_allclose(rows.first_s, first, rtol=1e-12)
    np.testing.assert_allclose(rows.last_s, last, rtol=1e-12)
    assert [e.time_s for e in seen] == sorted(e.time_s for e in seen)
    assert sorted(e.request for e in seen if e.finished) == list(range(len(plan)))
    assert decode.workers.kv_blocks[0] == 0


def test_advancing_in_small_bites_changes_nothing():
    def last_s(bites: int):
        rows = requests([20, 15, 9], [5, 5, 5])
        decode = fleet(rows, workers=2)
        for request in range(3):
            decode.join(request % 2, request, 0.0)
        for until_s in np.linspace(0, 0.2, bites):
            decode.advance(float(until_s))
        decode.advance(np.inf)
        return rows.last_s

    np.testing.assert_array_equal(last_s(1), last_s(97))


def test_a_full_worker_lets_requests_wait_and_takes_them_in_turn():
    rows = requests([5] * 5, [4] * 5)
    decode = fleet(rows, slots=2)
    for request in range(5):
        decode.join(0, request, 0.0)
    # The first starts alone at once; the second fills the other slot.
    assert (decode.running()[0], decode.waiting()[0]) == (2, 3)
    order = [e.request for e in decode.advance(np.inf) if e.finished]
    assert order == [0, 1, 2, 3, 4]


def test_a_worker_out_of_kv_preempts_the_latest_and_still_ends_everybody():
    rows = requests([30, 30, 30], [8, 8, 8])
    decode = fleet(rows, kv_blocks=16)
    for request in range(3):
        decode.join(0, request, 0.0)
    ended = [e.request for e in decode.advance(np.inf) if e.finished]
    assert sorted(ended) == [0, 1, 2]
    assert ended[0] == 0
    assert decode.num_preempted >= 1
    assert rows.produced.tolist() == [30, 30, 30]
    assert decode.workers.kv_blocks[0] == 0


def test_a_lost_worker_forgets_and_the_others_do_not():
    rows = requests([50, 50, 50], [4, 4, 4])
    decode = fleet(rows, workers=2, slots=1)
    for request, worker in ((0, 0), (1, 0), (2, 1)):
        decode.join(worker, request, 0.0)
    decode.advance(0.01)
    assert decode.lose(0) == [0, 1]
    assert [e.request for e in decode.advance(np.inf) if e.finished] == [2]


def test_a_slow_worker_takes_its_factor_and_reports_it():
    def last_s(factor: float):
        rows = requests([10], [4])
        decode = fleet(rows)
        decode.set_factor(0, factor)
        decode.join(0, 0, 0.0)
        decode.advance(np.inf)
        return float(rows.last_s[0]), decode.measured_factors()[0]

    plain, slow = last_s(1.0), last_s(2.5)
    assert slow[0] == pytest.approx(2.5 * plain[0])
    assert (plain[1], slow[1]) == (pytest.approx(1.0), pytest.approx(2.5))


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
def test_compiled_pieces_equal_their_plain_twins():
    rng = np.random.default_rng(3)
    step = times(8, ranks=2)
    for key, token in zip(rng.integers(0, 1 << 63, 50, np.uint64), range(50), strict=True):
        assert row_of(key, token, 3, 7) == _row_of_python(key, token, 3, 7)
        chosen = rng.integers(0, len(BANK.rows), 5)
        both = []
        for function in (layers_s, _layers_python):
            words, found = np.zeros((LAYERS, 1), np.uint64), np.zeros(1, np.int64)
            seconds = function(BANK.rows, chosen, 5, step.masks, step.moe_s, words, found)
            both.append((seconds, int(found[0])))
        assert both[0] == both[1]


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
def test_without_numba_the_same_steps_come_out():
    """The whole file again in an interpreter that finds no numba; here: one run's bits."""
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "import test_decode as t, numpy as np\n"
        "from serving.replay.compiled import HAS_NUMBA\n"
        "assert not HAS_NUMBA\n"
        "print(t.one_run())"
    )
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[3]), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == one_run()


def one_run() -> str:
    rows = requests([30, 12, 30, 7], [8, 3, 8, 5])
    decode = fleet(rows, kv_blocks=14, workers=2)
    for request in range(4):
        decode.join(request % 2, request, 0.001 * request)
    decode.advance(np.inf)
    return rows.last_s.tobytes().hex() + decode.tally.bins.tobytes().hex()[:64]
