"""Work of a step from shapes, against counting by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr_jax.config import ModelConfig
from eldr_jax.step_work import Step, kv_bytes_per_token, read_bytes, step_flops

CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    first=st.integers(0, 40),
    window=st.none() | st.integers(1, 50),
    is_decode=st.booleans(),
)
def test_pairs_are_the_keys_that_rows_see(rows, first, window, is_decode):
    step = Step(num_tokens=rows, num_logits=1, first_position=first, is_decode=is_decode)
    seen = [first if is_decode else first + row for row in range(rows)]
    want = sum(at + 1 if window is None else min(at + 1, window) for at in seen)
    assert step.pairs(window) == want


def test_flops_of_a_prefill():
    step = Step(num_tokens=3, num_logits=1, first_position=0, is_decode=False)
    projections = 2 * 8 * 16 + 2 * 8 * 8  # q and o, k and v
    per_row = projections + 8 * 4 + 2 * 3 * 8 * 16  # with the gate and two experts
    attention = 4 * 6 * 16  # six pairs
    assert step_flops(CONFIG, step) == 2 * (2 * 3 * per_row + attention) + 2 * 8 * 100


def test_a_decode_reads_the_weights_of_the_experts_it_touches():
    step = Step(num_tokens=1, num_logits=1, first_position=9, is_decode=True)
    expert = 3 * 8 * 16
    untouched = 2 * 2 * expert  # two of four experts in each of two layers
    weights = CONFIG.num_params - 100 * 8 - untouched
    assert kv_bytes_per_token(CONFIG, 2) == 2 * 2 * 2 * 8
    assert read_bytes(CONFIG, step, 2) == pytest.approx(2 * weights + 10 * 64)
