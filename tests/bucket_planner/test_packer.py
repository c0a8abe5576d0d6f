"""The step packer against a plain simulation that moves one step at a time."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.buckets import BucketSet, powers_of_two
from bucket_planner.cost_curve import MeasuredCost, TokenCost
from bucket_planner.errors import PlannerConfigError
from bucket_planner.lengths import Trace
from bucket_planner.packer import PackerConfig, pack_trace, workers_for

BUCKETS = BucketSet(id="b", semantics="step", sizes_tokens=powers_of_two(64, min_tokens=4))
CURVE = MeasuredCost(tokens=(4, 64), ms=(10.0, 100.0))


def make_trace(requests):
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(
        name="t",
        prompt_tokens=np.array(prompts, np.int64),
        arrival_s=np.array(arrivals, np.float64),
        output_tokens=np.array(outputs, np.int64),
    )


def steps_of(trace, **config):
    config = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_workers": 1, **config}
    found = pack_trace(trace, PackerConfig(**config), buckets=BUCKETS, curve=CURVE)
    return Counter(dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True)))


def step_by_step(requests, *, budget, max_num_seqs, decodes):
    """The same rule, one step and one request object at a time."""
    pending = sorted(([a, p, o] for a, p, o in requests), key=lambda r: r[0])
    waiting, running, now, steps = [], [], 0.0, Counter()
    while pending or waiting or running:
        while pending and pending[0][0] <= now:
            waiting.append(pending.pop(0))
        if not waiting and not running:
            now = pending[0][0]
            continue
        scheduled = len(running)
        ended = [r for r in running if r[2] == 1]
        for request in running:
            request[2] -= 1
        seats = max_num_seqs - len(running)
        running = [r for r in running if r not in ended]
        room, index = budget - scheduled, 0
        started = []
        while index < len(waiting) and room > 0 and seats > 0:
            request = waiting[index]
            chunk = min(room, request[1])
            request[1] -= chunk
            room -= chunk
            scheduled += chunk
            seats -= 1
            if request[1] > 0:
                break
            started.append(request)
            index += 1
        waiting = [r for r in waiting if r[1] > 0]
        for request in started:
            request[2] -= 1
            if decodes and request[2] > 0:
                running.append(request)
        steps[scheduled] += 1
        padded = BUCKETS.bucket_of(scheduled)
        now += float(CURVE.cost(np.array([padded]))[0]) / 1e3
    return steps


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda tick: tick * 0.0777), st.integers(1, 150), st.integers(1, 9)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(REQUESTS, st.sampled_from([2, 8]), st.sampled_from(["mixed", "prefill"]))
def test_packer_equals_the_step_by_step_rule(requests, max_num_seqs, role):
    expected = step_by_step(requests, budget=64, max_num_seqs=max_num_seqs, decodes=role == "mixed")
    assert steps_of(make_trace(requests), max_num_seqs=max_num_seqs, role=role) == expected


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.integers(1, 4))
def test_every_token_is_scheduled_once(requests, num_workers):
    steps = steps_of(make_trace(requests), num_workers=num_workers)
    total = sum(tokens * count for tokens, count in steps.items())
    assert total == sum(prompt + output - 1 for _, prompt, output in requests)
    assert max(steps) <= 64


def test_by_hand():
    # 100 tokens in a 64-token budget: 64, then 36; two more output tokens, one a step.
    assert steps_of(make_trace([(0.0, 100, 3)])) == {64: 1, 36: 1, 1: 2}
    # A prefill worker hands over after the prompt.
    assert steps_of(make_trace([(0.0, 100, 3)]), role="prefill") == {64: 1, 36: 1}


def test_workers_for_half_load():
    trace = make_trace([(float(i), 64, 1) for i in range(11)])
    config = PackerConfig(max_num_batched_tokens=64, max_num_seqs=8)
    # 11 full steps of 0.1 s over 10 s are 11% of one worker; ten times as many need three.
    assert workers_for(trace, config, buckets=BUCKETS, curve=CURVE) == 1
    busy = make_trace([(i / 10, 64, 1) for i in range(101)])
    assert workers_for(busy, config, buckets=BUCKETS, curve=CURVE) == 3


def test_what_a_replay_needs():
    plain = Trace(name="plain", prompt_tokens=np.array([3, 4]))
    config = PackerConfig(max_num_batched_tokens=64, max_num_seqs=8)
    with pytest.raises(PlannerConfigError, match="arrival"):
        pack_trace(plain, config, buckets=BUCKETS, curve=CURVE)
    silent = Trace(name="s", prompt_tokens=np.array([3]), arrival_s=np.array([0.0]))
    with pytest.raises(PlannerConfigError, match="output lengths"):
        pack_trace(silent, config, buckets=BUCKETS, curve=CURVE)
    trace = make_trace([(0.0, 3, 1)])
    with pytest.raises(PlannerConfigError, match="ms"):
        pack_trace(trace, config, buckets=BUCKETS, curve=TokenCost())
    wide = PackerConfig(max_num_batched_tokens=128, max_num_seqs=8)
    with pytest.raises(PlannerConfigError, match="128"):
        pack_trace(trace, wide, buckets=BUCKETS, curve=CURVE)


@pytest.mark.parametrize(
    ("settings_", "field"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 64}, "max_num_seqs"),
        ({"max_num_batched_tokens": 512, "num_workers": -1}, "num_workers"),
    ],
)
def test_bad_settings_are_named(settings_, field):
    with pytest.raises(PlannerConfigError, match=field):
        PackerConfig(**settings_)
