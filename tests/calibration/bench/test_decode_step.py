"""The decode-step measurement on a tiny model: what is held fixed, what varies, what is refused."""

import jax
import numpy as np
import pytest

from calibration.bench.decode_step import PASSES, fit_decode_steps
from eldr_jax.config import ModelConfig
from eldr_jax.model import init_params
from eldr_jax.runner import PagedRunner

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)


class ExpertClock:
    """Time that passes by 3 ms a step plus 2 ms per distinct expert of the last step."""

    def __init__(self, runner):
        self._runner = runner
        self._now_s = 0.0

    def monotonic_s(self):
        self._now_s += 0.0 if self._runner.last is None else 3e-3 + 2e-3 * self._runner.last
        self._runner.last = None
        return self._now_s

    def wall_s(self):
        return self._now_s


class WatchedRunner(PagedRunner):
    """Remembers the last step's distinct experts and what it ran."""

    last = None
    sizes: tuple = ()

    def step(self, pool, chunks):
        pool, result = super().step(pool, chunks)
        self.last = result.distinct_experts
        self.sizes = (*self.sizes, (result.num_tokens, len(chunks)))
        return pool, result


@pytest.fixture(scope="module")
def runner():
    params = init_params(CONFIG, jax.random.key(0))
    return WatchedRunner(
        CONFIG, params, num_blocks=64, block_size=8, token_buckets=(16,), max_blocks_per_seq=4
    )


def _prompts(num):
    draw = np.random.default_rng(1)
    return [draw.integers(0, 64, 9).astype(np.int32) for _ in range(num)]


def test_finds_the_slope_with_tokens_held_fixed(runner):
    fit = fit_decode_steps(
        runner,
        _prompts(6),
        4,
        num_steps=8,
        rng=np.random.default_rng(0),
        clock=ExpertClock(runner),
        progress=lambda done, total: None,
    )
    assert fit.slope_ms == pytest.approx(2.0)
    assert fit.intercept_ms == pytest.approx(3.0)
    assert fit.r2 == pytest.approx(1.0)
    assert fit.experts_min < fit.experts_max
    decode = [size for size in runner.sizes if size[1] == 4]
    assert decode == [(4, 4)] * (8 * PASSES)


def test_refuses_too_few_blocks(runner):
    with pytest.raises(ValueError, match="need 80 blocks"):
        fit_decode_steps(
            runner,
            _prompts(4),
            4,
            num_steps=10,
            rng=np.random.default_rng(0),
            clock=ExpertClock(runner),
            progress=lambda done, total: None,
        )


def test_refuses_too_few_prompts(runner):
    with pytest.raises(ValueError, match="batch=8"):
        fit_decode_steps(
            runner,
            _prompts(4),
            8,
            num_steps=1,
            rng=np.random.default_rng(0),
            clock=ExpertClock(runner),
            progress=lambda done, total: None,
        )
