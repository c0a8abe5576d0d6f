"""Each rule alone, all rules together, and what the caller is told."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import InvalidRequest, Rejected, RejectReason
from serving.core.feasibility import (
    FitQuestion,
    FitRules,
    cell_rows,
    feasibility,
    hand_over_ok,
    raise_infeasible,
)
from serving.core.request import LengthBand
from serving.core.routing_table import TableCell
from serving.core.worker import Phase, Role, WorkerState
from tests.serving import decision_parts as parts

CELL = TableCell(variant="m", pool="p")
RULES = FitRules()


def question(seen=None, *, phase=Phase.DECODE, cell=CELL, rules=RULES, **changes):
    seen = parts.view(phase=phase) if seen is None else seen
    costs = parts.BOOK.rows(seen.workers)
    given_ = {
        "request": parts.request(),
        "phase": phase,
        "view": seen,
        "costs": costs,
        "cell": cell_rows((cell,), costs, rules),
        "rules": rules,
        "target": parts.TARGET,
    }
    return FitQuestion(**(given_ | changes))


def whys(asked):
    found = feasibility(asked)
    told = found.why_not(range(len(found.mask)))
    assert [not why for why in told] == found.mask.tolist()
    return told


def test_everybody_fits_an_idle_fleet():
    assert whys(question()) == ["", "", "", ""]


def test_identity_rules():
    workers = (
        parts.worker("a", model="other"),
        parts.worker("b", pool="other"),
        parts.worker("c", hardware="uncalibrated"),
        parts.worker("d", state=WorkerState.DRAINING),
        parts.worker("e"),
        parts.worker("f"),
    )
    seen = parts.view(6, workers=workers, accepts=[True, True, True, False, False, True])
    assert whys(question(seen)) == ["model", "pool", "cost_unknown", "state", "stale", ""]


def test_room_rules():
    long = parts.capabilities(max_context_tokens=139)
    workers = (parts.worker("a", capabilities=long), *(parts.worker(x) for x in "bcde"))
    # 100 prompt tokens and 40 at p95 are 9 blocks; 10% of 1,000 stay free on busy workers.
    seen = parts.view(
        5,
        workers=workers,
        num_inflight=[0, 1, 1, 0, 8],
        kv_blocks_free=[1000, 108, 109, 9, 1000],
    )
    assert whys(question(seen)) == ["context", "kv_blocks", "", "", "slots"]


def test_prefill_holds_the_prompt_and_needs_no_slot():
    seen = parts.view(2, phase=Phase.PREFILL, num_inflight=[50, 0], kv_blocks_free=[1000, 6])
    asked = question(seen, phase=Phase.PREFILL)
    assert whys(asked) == ["", "kv_blocks"]
    assert asked.kv_blocks() == 7


def test_excluded_workers():
    assert whys(question(exclude=frozenset({"w1"}))) == ["", "excluded", "", ""]


def test_hand_over_needs_equal_pages_and_connectors():
    source = parts.worker("p", Role.PREFILL)
    workers = (
        parts.worker("a"),
        parts.worker("b", capabilities=parts.capabilities(page_size_tokens=64)),
        parts.worker("c", capabilities=parts.capabilities(kv_connector="nixl")),
    )
    costs = parts.BOOK.rows(workers)
    ok = hand_over_ok(source, costs)
    assert ok.tolist() == [True, False, False]
    seen = parts.view(3, workers=workers)
    assert whys(question(seen, hand_over_ok=ok)) == ["", "hand_over", "hand_over"]


def test_tensor_parallel_matters_only_where_the_cell_says_so():
    source = parts.worker("p", Role.PREFILL)
    workers = (parts.worker("a", capabilities=parts.capabilities(tensor_parallel=4)),)
    assert hand_over_ok(source, parts.BOOK.rows(workers)).all()
    tpu = dataclasses.replace(parts.CELL, needs_equal_tensor_parallel=True)
    assert not hand_over_ok(source, type(parts.BOOK)({("m", "h"): tpu}).rows(workers)).any()


def test_a_long_hand_over_is_banned_unless_every_one_is():
    seconds = np.array([2.1, 1.9, 0.0, 2.1])  # 20% of the class's 10 s is 2 s
    assert whys(question(transfer_s=seconds)) == ["transfer", "", "", "transfer"]
    assert whys(question(transfer_s=np.full(4, 2.1))) == [""] * 4


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), phase=st.sampled_from(list(Phase)))
def test_the_mask_is_all_rules_together(seed, phase):
    draw = np.random.default_rng(seed)
    num = int(draw.integers(1, 8))
    workers = tuple(
        parts.worker(
            f"w{i}",
            model=str(draw.choice(["m", "m", "n"])),
            pool=str(draw.choice(["p", "p", "q"])),
            state=WorkerState.READY if draw.random() < 0.8 else WorkerState.PARKED,
            capabilities=parts.capabilities(max_context_tokens=int(draw.choice([120, 4096]))),
        )
        for i in range(num)
    )
    seen = parts.view(
        num,
        workers=workers,
        phase=phase,
        accepts=draw.random(num) < 0.8,
        num_inflight=draw.integers(0, 10, num),
        kv_blocks_free=draw.choice([5, 50, 200, 1000], num),
    )
    asked = question(
        seen,
        phase=phase,
        transfer_s=draw.choice([0.0, 3.0], num) if phase is Phase.DECODE else None,
        exclude=frozenset({"w0"}) if draw.random() < 0.3 else frozenset(),
    )
    found = feasibility(asked)
    together = np.logical_and.reduce([holds for _, holds in found.rules()])
    np.testing.assert_array_equal(found.mask, together)


def refused(asked):
    found = feasibility(asked)
    assert not found.mask.any()
    with pytest.raises((Rejected, InvalidRequest)) as caught:
        raise_infeasible(found, (CELL,))
    return caught.value


def test_a_cell_without_live_workers_is_a_hole():
    error = refused(question(parts.view(2, accepts=[False, False])))
    assert error.why is RejectReason.NO_LIVE_WORKER
    assert "none of 2 decode workers of pool 'p'" in error.detail


def test_no_room_says_who_broke_what():
    error = refused(question(parts.view(3, num_inflight=[8, 8, 1], kv_blocks_free=[900, 900, 20])))
    assert error.why is RejectReason.NO_CAPACITY
    assert "1 kv_blocks, 2 slots" in error.detail


def test_what_could_never_fit_is_the_callers_error():
    error = refused(question(request=parts.request(num_tokens=4090)))
    assert (error.field, error.retryable) == ("max_tokens", False)
    small = parts.capabilities(num_kv_blocks=8, max_context_tokens=9999)
    seen = parts.view(1, workers=(parts.worker("a", capabilities=small),), kv_blocks_free=[8])
    error = refused(question(seen))
    assert error.field == "token_ids"
    assert "needs 9 KV blocks" in error.rule


def test_length_band_not_max_tokens_reserves_kv():
    asked = question(
        request=parts.request(max_tokens=3000, length=LengthBand(mean_tokens=5, p95_tokens=12))
    )
    assert asked.kv_blocks() == 7


def test_blocks_follow_each_workers_block_size():
    workers = (
        parts.worker("a"),
        parts.worker("b", capabilities=parts.capabilities(block_size_tokens=64)),
    )
    length = LengthBand(mean_tokens=20.0, p95_tokens=44.5)
    asked = question(parts.view(2, workers=workers), request=parts.request(length=length))
    found = feasibility(asked)
    assert [found.blocks_on(0), found.blocks_on(1)] == [10, 3]
