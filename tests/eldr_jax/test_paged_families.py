"""The serving step for families whose layers slide, sink, norm twice or differ from each other."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from eldr_jax.config import ModelConfig
from eldr_jax.model import model_of
from eldr_jax.paged import paged_step
from eldr_jax.runner import Chunk, PagedRunner

BLOCK = 4
BLOCKS_PER_SEQUENCE = 12
# Shorter than the window of 9, longer, and one that fills the smallest bucket.
LENGTHS = (5, 41, 16, 23)


@pytest.fixture(scope="module", params=["gpt_oss", "gemma4"])
def config(request: pytest.FixtureRequest, families: dict[str, ModelConfig]) -> ModelConfig:
    return families[request.param]


@pytest.fixture(scope="module")
def params(config: ModelConfig, draw_params: Any) -> dict[str, Any]:
    return draw_params(config)


@pytest.fixture(scope="module")
def prompts(config: ModelConfig) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, config.vocab_size, n).astype(np.int32) for n in LENGTHS]


def _runner(config: ModelConfig, params: dict[str, Any], **options: Any) -> PagedRunner:
    return PagedRunner(
        config,
        params,
        **{"token_buckets": (16, 96)} | options,
        num_blocks=4 * BLOCKS_PER_SEQUENCE,
        block_size=BLOCK,
        max_blocks_per_seq=BLOCKS_PER_SEQUENCE,
        debug=True,
    )


@pytest.fixture(scope="module")
def runner(config: ModelConfig, params: dict[str, Any]) -> PagedRunner:
    return _runner(config, params)


def _chunk(prompt: np.ndarray, sequence: int, low: int = 0, high: int | None = None) -> Chunk:
    first = sequence * BLOCKS_PER_SEQUENCE
    blocks = np.arange(first, first + BLOCKS_PER_SEQUENCE, dtype=np.int32)
    return Chunk(token_ids=prompt[low:high], start=low, block_ids=blocks)


def _bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.int32)


@pytest.fixture(scope="module")
def alone(runner: PagedRunner, prompts: list[np.ndarray]) -> list[Any]:
    """Each prompt in a step of its own."""
    results = []
    for sequence, prompt in enumerate(prompts):
        results.append(runner.step(runner.new_pool(), [_chunk(prompt, sequence)])[1])
    return results


def test_agrees_with_the_whole_sequence_model(
    config: ModelConfig, params: dict[str, Any], prompts: list[np.ndarray], alone: list[Any]
) -> None:
    model = model_of(config, params)
    longest = max(LENGTHS)
    batch = np.stack([np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts])
    forward = jax.jit(lambda tokens: model(tokens))(batch)
    logits = np.asarray(jax.jit(model.logits)(forward.hidden))
    ids = np.stack([np.asarray(router.ids) for router in forward.routers])
    ids = ids.reshape(config.num_layers, len(prompts), longest, -1)
    for row, result in enumerate(alone):
        length = len(prompts[row])
        np.testing.assert_allclose(result.logits()[0], logits[row, length - 1], atol=3e-5)
        np.testing.assert_array_equal(result.expert_ids, ids[:, row, :length].transpose(0, 2, 1))


def test_bucket_chunking_and_company_change_no_bit(
    runner: PagedRunner, prompts: list[np.ndarray], alone: list[Any]
) -> None:
    # The prompt of 16 ran in the bucket of 16; now beside the others in the one of 96.
    order = [3, 1, 0, 2]
    _, packed = runner.step(runner.new_pool(), [_chunk(prompts[i], i) for i in order])
    begin = 0
    for place, index in enumerate(order):
        end = begin + len(prompts[index])
        assert packed.hidden is not None
        np.testing.assert_array_equal(_bits(packed.hidden[begin:end]), _bits(alone[index].hidden))
        np.testing.assert_array_equal(packed.counts[place], alone[index].counts[0])
        np.testing.assert_array_equal(
            _bits(packed.logits()[place]), _bits(alone[index].logits()[0])
        )
        begin = end
    for cuts in ([1], [7, 16, 30], list(range(0, 41, 9))):
        pool, hidden = runner.new_pool(), []
        for low, high in itertools.pairwise(sorted({0, *cuts, 41})):
            pool, part = runner.step(pool, [_chunk(prompts[1], 1, low, high)])
            hidden.append(part.hidden)
        np.testing.assert_array_equal(_bits(np.concatenate(hidden)), _bits(alone[1].hidden))


def test_decode_in_company_equals_prefill(
    runner: PagedRunner, prompts: list[np.ndarray], alone: list[Any]
) -> None:
    pool = runner.new_pool()
    for sequence, prompt in enumerate(prompts):
        pool, _ = runner.step(pool, [_chunk(prompt, sequence, 0, len(prompt) - 1)])
    last = [_chunk(prompt, i, len(prompt) - 1) for i, prompt in enumerate(prompts)]
    _, step = runner.step(pool, last)
    assert step.hidden is not None
    for index, expected in enumerate(alone):
        np.testing.assert_array_equal(_bits(step.hidden[index]), _bits(expected.hidden[-1]))


def test_whole_products_agree_with_tiles(
    config: ModelConfig, params: dict[str, Any], prompts: list[np.ndarray], alone: list[Any]
) -> None:
    whole = _runner(config, params, token_buckets=(48,), row_tile=None)
    _, result = whole.step(whole.new_pool(), [_chunk(prompts[1], 1)])
    np.testing.assert_array_equal(result.counts[0], alone[1].counts[0])
    np.testing.assert_allclose(result.logits(), alone[1].logits(), atol=3e-5)


def test_block_hand_over_continues_identically(
    runner: PagedRunner, prompts: list[np.ndarray]
) -> None:
    """Layers of unlike geometry travel in one array and arrive whole."""
    source, first = runner.step(runner.new_pool(), [_chunk(prompts[3], 0)])
    used = np.arange(-(-len(prompts[3]) // BLOCK))
    keys, values = runner.read_blocks(source, used)
    moved = np.arange(20, 20 + BLOCKS_PER_SEQUENCE, dtype=np.int32)[::-1]
    target = runner.write_blocks(runner.new_pool(), moved[: len(used)], keys, values)
    token, start = first.next_tokens[:1], len(prompts[3])
    here = Chunk(token_ids=token, start=start, block_ids=np.arange(12, dtype=np.int32))
    there = Chunk(token_ids=token, start=start, block_ids=moved)
    _, expected = runner.step(source, [here])
    _, result = runner.step(target, [there])
    np.testing.assert_array_equal(_bits(result.logits()), _bits(expected.logits()))


def test_what_left_the_window_does_not_matter(
    config: ModelConfig, params: dict[str, Any], prompts: list[np.ndarray]
) -> None:
    """With sliding layers alone, two steps back through the layers are all a token knows."""
    options = msgspec.structs.replace(config.attention, full_interval=0, full=None)
    sliding = msgspec.structs.replace(config, attention=options)
    shapes = jax.tree.map(np.shape, params["layers"][0])
    own = {**params, "layers": [params["layers"][0]] * 2}
    assert shapes == jax.tree.map(np.shape, own["layers"][1])
    slider = _runner(sliding, own, token_buckets=(48,))
    changed = prompts[1].copy()
    reach = 2 * (9 - 1)
    changed[: 41 - 1 - reach] = (changed[: 41 - 1 - reach] + 1) % config.vocab_size
    _, before = slider.step(slider.new_pool(), [_chunk(prompts[1], 1)])
    _, after = slider.step(slider.new_pool(), [_chunk(changed, 1)])
    np.testing.assert_array_equal(_bits(after.logits()), _bits(before.logits()))
    nearer = changed.copy()
    nearer[41 - 1 - reach] = (nearer[41 - 1 - reach] + 1) % config.vocab_size
    _, other = slider.step(slider.new_pool(), [_chunk(nearer, 1)])
    assert not np.array_equal(other.logits(), before.logits())


def test_serving_never_recompiles(runner: PagedRunner, prompts: list[np.ndarray]) -> None:
    pool = runner.warm_up(runner.new_pool())
    compiled = paged_step._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    for sequence, prompt in enumerate(prompts):
        pool, _ = runner.step(pool, [_chunk(prompt, sequence)])
    assert paged_step._cache_size() == compiled  # pyright: ignore[reportAttributeAccessIssue]
