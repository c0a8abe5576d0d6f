"""Published families against transformers: logits, experts, greedy continuation with cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eldr_jax.checkpoint import load_model_dir, save_model_dir
from eldr_jax.model import model_of
from eldr_jax.mxfp4 import dequantise
from eldr_jax.runner import Chunk, PagedRunner

pytestmark = pytest.mark.parity

BLOCK = 8
BLOCKS_PER_SEQUENCE = 16
BUCKETS = (16, 64, 256)
LOGIT_BAR = 1e-4


def _runner(pair: Any, buckets: tuple[int, ...] = BUCKETS) -> PagedRunner:
    return PagedRunner(
        pair.config,
        pair.params,
        num_blocks=128,
        block_size=BLOCK,
        token_buckets=buckets,
        max_blocks_per_seq=BLOCKS_PER_SEQUENCE,
        debug=True,
    )


@pytest.fixture(scope="module")
def runner(pair: Any) -> PagedRunner:
    return _runner(pair)


@pytest.fixture(scope="module")
def readings(pair: Any) -> list[Any]:
    return [pair.read(prompt) for prompt in pair.prompts]


def _chunk(prompt: np.ndarray, sequence: int, start: int = 0, stop: int | None = None) -> Chunk:
    blocks = np.arange(BLOCKS_PER_SEQUENCE, dtype=np.int32) + sequence * BLOCKS_PER_SEQUENCE
    return Chunk(token_ids=prompt[start:stop], start=start, block_ids=blocks)


def _sorted_ids(step_ids: np.ndarray) -> np.ndarray:
    """[L, K, T] to [L, T, K] in ascending order."""
    return np.sort(step_ids.transpose(0, 2, 1), axis=-1)


def test_whole_sequences_agree(pair: Any, readings: list[Any], note: dict[str, str]) -> None:
    """All prompts as rows of one padded batch, against each alone and unpadded."""
    model = model_of(pair.config, pair.params)
    longest = max(len(prompt) for prompt in pair.prompts)
    batch = np.stack([np.pad(prompt, (0, longest - len(prompt))) for prompt in pair.prompts])

    @jax.jit
    def forward(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = model(tokens)
        ids = jnp.stack([router.ids for router in result.routers])
        return model.logits(result.hidden), ids.reshape(len(ids), *tokens.shape, -1)

    logits, ids = (np.asarray(array) for array in forward(batch))
    worst = largest = 0.0
    for row, theirs in enumerate(readings):
        length = len(theirs.logits)
        worst = max(worst, float(np.abs(logits[row, :length] - theirs.logits).max()))
        largest = max(largest, float(np.abs(theirs.logits).max()))
        np.testing.assert_array_equal(np.sort(ids[:, row, :length], axis=-1), theirs.ids)
    note["max abs logit error"] = f"{worst:.1e}"
    note["largest logit"] = f"{largest:.1f}"
    assert worst <= LOGIT_BAR


def test_packed_prefill_picks_the_same_experts(
    pair: Any, runner: PagedRunner, readings: list[Any], note: dict[str, str]
) -> None:
    """All prompts in one step, in another order, and each alone in its own bucket."""
    num_equal = num_all = 0
    worst = 0.0
    mixes = [[index] for index in range(len(pair.prompts))] + [[3, 0, 5, 2, 4, 1], [1, 0], [4, 3]]
    for mix in mixes:
        chunks = [_chunk(pair.prompts[index], index) for index in mix]
        _, step = runner.step(runner.new_pool(), chunks)
        assert step.expert_ids is not None
        begin = 0
        for place, index in enumerate(mix):
            end = begin + len(pair.prompts[index])
            same = _sorted_ids(step.expert_ids[..., begin:end]) == readings[index].ids
            num_equal, num_all = num_equal + int(same.sum()), num_all + same.size
            error = np.abs(step.logits()[place] - readings[index].logits[-1]).max()
            worst = max(worst, float(error))
            begin = end
    note["expert ids equal"] = f"{100 * num_equal / num_all:.2f}% of {num_all}"
    assert num_equal == num_all
    assert worst <= LOGIT_BAR


def test_padding_changes_no_expert_and_no_bit(pair: Any) -> None:
    """A prompt that fills its bucket, and the same prompt in larger ones."""
    for prompt in (p for p in pair.prompts if len(p) in (16, 64)):
        exact = _runner(pair, (len(prompt),))
        _, expected = exact.step(exact.new_pool(), [_chunk(prompt, 0)])
        padded = _runner(pair, (256,))
        _, step = padded.step(padded.new_pool(), [_chunk(prompt, 0)])
        np.testing.assert_array_equal(step.expert_ids, expected.expert_ids)
        np.testing.assert_array_equal(step.counts[0], expected.counts[0])
        assert step.logits().tobytes() == expected.logits().tobytes()


def test_mxfp4_is_theirs() -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3)).astype(np.uint8)
    expected = theirs.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(dequantise(blocks, scales).swapaxes(1, 2), expected.numpy())


def test_greedy_continuation_with_cache_is_theirs(
    pair: Any, runner: PagedRunner, note: dict[str, str]
) -> None:
    """Chunked prefill, then all prompts decode side by side from the paged cache."""
    pool = runner.new_pool()
    tokens: list[list[int]] = []
    for sequence, prompt in enumerate(pair.prompts):
        cut = len(prompt) // 3
        if cut:
            pool, _ = runner.step(pool, [_chunk(prompt, sequence, 0, cut)])
        pool, step = runner.step(pool, [_chunk(prompt, sequence, cut)])
        tokens.append([int(step.next_tokens[0])])
    expected = [pair.continue_greedily(prompt) for prompt in pair.prompts]
    while len(tokens[0]) < len(expected[0]):
        chunks = [
            _chunk(np.append(prompt, made).astype(np.int32), sequence, len(prompt) + len(made) - 1)
            for sequence, (prompt, made) in enumerate(zip(pair.prompts, tokens, strict=True))
        ]
        pool, step = runner.step(pool, chunks)
        for made, token in zip(tokens, step.next_tokens, strict=True):
            made.append(int(token))
    num_equal = sum(list(e) == t for e, t in zip(expected, tokens, strict=True))
    note["greedy tokens equal"] = f"{num_equal} of {len(tokens)} x {len(tokens[0])} tokens"
    np.testing.assert_array_equal(tokens, expected)


def test_what_is_saved_here_loads_there(
    pair: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every tensor is found, none is left over, and the model is the same."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("saved")
    save_model_dir(folder, pair.config, pair.params)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=pair.torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    _, rounded = load_model_dir(folder)
    model = model_of(pair.config, rounded)
    prompt = pair.prompts[3]
    logits = jax.jit(lambda tokens: model.logits(model(tokens).hidden))(prompt[None])
    saved = dataclasses.replace(pair, theirs=theirs)
    np.testing.assert_allclose(logits[0], saved.read(prompt).logits, atol=LOGIT_BAR)
