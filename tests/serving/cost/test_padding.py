"""Padding is charged to whoever causes it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.buckets import BucketSet, powers_of_two
from serving.core.errors import ConfigError
from serving.cost.padding import PaddingModel, waste_usd

STEP = BucketSet(id="step", semantics="step", sizes_tokens=powers_of_two(8192))
PROMPT = BucketSet(id="prompt", semantics="prompt", sizes_tokens=powers_of_two(8192))


def row(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_one_who_tips_a_step_into_the_next_bucket_pays():
    model = PaddingModel(STEP)
    charge = model.charge(row(100, 100, 100), row(0, 400, 1000))
    assert charge.bucket_tokens.tolist() == [128, 512, 2048]
    # 100 -> 128; 400 runs in 512 anyway; 1,000 would have run in 1,024, together 2,048.
    assert charge.computed_tokens.tolist() == [128, 0, 1024]
    assert charge.waste_tokens.tolist() == [28, -100, 924]


def test_a_queue_that_just_fits_makes_the_next_request_dear():
    model = PaddingModel(STEP)
    assert model.charge(row(1), row(4096)).computed_tokens.tolist() == [4096]
    assert model.charge(row(1), row(4095)).computed_tokens.tolist() == [0]


def test_prompt_semantics_ignore_the_queue():
    model = PaddingModel(PROMPT)
    charge = model.charge(row(100, 100), row(0, 4000))
    assert charge.waste_tokens.tolist() == [28, 28]


def test_nothing_new_costs_nothing():
    for buckets in (STEP, PROMPT):
        charge = PaddingModel(buckets).charge(row(0, 0), row(0, 777))
        assert charge.waste_tokens.tolist() == [0, 0]
    assert PaddingModel(STEP).charge(row(0), row(0)).bucket_tokens.tolist() == [0]


def test_full_steps_of_the_largest_bucket_first():
    charge = PaddingModel(STEP).charge(row(8192 + 20, 8192), row(0, 0))
    assert charge.computed_tokens.tolist() == [8192 + 32, 8192]
    assert charge.bucket_tokens.tolist() == [32, 8192]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12))
def test_charges_add_up_to_what_the_worker_computes(arrivals):
    """Whatever the order, the charges of a queue sum to its padded total."""
    model = PaddingModel(STEP)
    queued, charged = 0, 0
    for tokens in arrivals:
        charge = model.charge(row(tokens), row(queued))
        charged += int(charge.computed_tokens[0])
        queued += tokens
    assert charged == STEP.padded_tokens(sum(arrivals)) == int(model.padded(row(queued))[0])


def test_waste_in_dollars():
    charge = PaddingModel(STEP).charge(row(1000), row(4096))
    assert waste_usd(charge, 1e-4, 0.002).tolist() == pytest.approx([3096 * 1e-4 * 0.002])


def test_bad_inputs_are_named():
    model = PaddingModel(STEP)
    with pytest.raises(ConfigError, match="new_tokens"):
        model.charge(row(-1), row(0))
    with pytest.raises(ConfigError, match="queued_tokens"):
        model.charge(row(1, 2), row(0))
