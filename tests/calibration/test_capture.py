from __future__ import annotations

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from calibration import capture_main
from calibration.capture import blocks_for, capture_prompts
from calibration.captures import read_capture
from calibration.prompts import Prompt
from eldr_jax.checkpoint import save_model_dir
from eldr_jax.config import ModelConfig
from eldr_jax.model import init_params, model_of, params_of
from eldr_jax.runner import PagedRunner
from serving.core.errors import ConfigError

CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab_size=64,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    norm_topk_prob=True,
    tie_word_embeddings=True,
    initializer_range=0.5,
    bos_token_id=0,
    eos_token_id=0,
)
DECODE = 6


def make_prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    # More than one group, some prompts longer than a step, one of a single token.
    lengths = [1, 16, 17, 70, *rng.integers(1, 40, 15).tolist()]
    return [
        Prompt(prompt_id=f"p{i}", domain="code", token_ids=rng.integers(1, 64, n).astype(np.int32))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


OPTIONS = {"num_blocks": 96, "token_buckets": (16, 64), "max_blocks_per_seq": 6}


@pytest.fixture(scope="module")
def runner(params) -> PagedRunner:
    return PagedRunner(CONFIG, params, debug=True, **OPTIONS)


@pytest.fixture(scope="module")
def captures(runner):
    prompts = make_prompts()
    assert blocks_for(prompts, DECODE, 16) <= 96
    return prompts, list(
        capture_prompts(runner, prompts, num_decode_tokens=DECODE, stop_token=None)
    )


def test_captures_are_what_the_whole_sequence_model_routes(params, captures):
    prompts, got = captures
    assert [one.prompt_id for one in got] == [prompt.prompt_id for prompt in prompts]
    for prompt, one in list(zip(prompts, got, strict=True))[:5]:
        tokens = prompt.token_ids.tolist() + greedy(params, prompt)
        _, ids = whole_sequence(params, padded(tokens))
        routed = np.sort(np.asarray(ids), axis=2)
        num_prompt = len(prompt.token_ids)
        assert one.prefill_experts is not None
        assert np.array_equal(np.sort(one.prefill_experts, axis=2), routed[:num_prompt])
        decoded = routed[num_prompt : num_prompt + DECODE]
        assert np.array_equal(np.sort(one.decode_experts, axis=2), decoded)


@jax.jit
def whole_sequence(params, tokens):
    """Greedy token after each position [T], and experts [T, L, K], by the training model."""
    model = model_of(CONFIG, params)
    forward = model(tokens[None])
    ids = jax.numpy.stack([trace.ids for trace in forward.routers], axis=1)
    return model.logits(forward.hidden)[0].argmax(axis=-1), ids


def padded(tokens: list[int]) -> np.ndarray:
    """One length for all, so that one program serves them; causal, so padding changes nothing."""
    return np.pad(np.array(tokens, np.int32), (0, 96 - len(tokens)))


def test_counts_and_ids_tell_the_same(captures):
    for one in captures[1]:
        for counts, ids in ((one.prefill, one.prefill_experts), (one.decode, one.decode_experts)):
            found = np.zeros_like(counts)
            for token in ids:
                for layer, experts in enumerate(token):
                    found[layer, experts] += 1
            assert np.array_equal(found, counts)


def greedy(params, prompt: Prompt) -> list[int]:
    """The tokens after the prompt, DECODE + 1 of them."""
    tokens = prompt.token_ids.tolist()
    for _ in range(DECODE + 1):
        best, _ = whole_sequence(params, padded(tokens))
        tokens.append(int(best[len(tokens) - 1]))
    return tokens[len(prompt.token_ids) :]


def test_end_of_text_ends_a_decode_after_the_least_number_of_passes(params, runner, captures):
    prompts, free = captures
    generated = greedy(params, prompts[1])
    for stop in {generated[0], generated[3], 63}:
        (one,) = capture_prompts(
            runner,
            prompts[1:2],
            num_decode_tokens=DECODE,
            stop_token=stop,
            min_decode_tokens=2,
        )
        ends = [p for p in range(2, DECODE) if generated[p] == stop]
        expected = ends[0] if ends else DECODE
        assert len(one.decode_experts) == expected
        assert np.array_equal(one.decode_experts, free[1].decode_experts[:expected])


def test_a_prompt_beyond_the_context_and_a_runner_without_ids_are_refused(params, runner):
    prompts = [Prompt(prompt_id="p", domain="d", token_ids=np.ones(130, np.int32))]
    with pytest.raises(ValueError, match="'p': 136 tokens"):
        next(capture_prompts(runner, prompts, num_decode_tokens=DECODE, stop_token=None))
    blind = PagedRunner(CONFIG, params, **OPTIONS)
    short = [Prompt(prompt_id="p", domain="d", token_ids=np.ones(3, np.int32))]
    with pytest.raises(ValueError, match="debug=True"):
        next(capture_prompts(blind, short, num_decode_tokens=DECODE, stop_token=None))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, params):
    path = tmp_path_factory.mktemp("model")
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    save_model_dir(path, CONFIG, params_of(model_of(CONFIG, params)), tokenizer.to_str())
    return path


def config_of(model_dir, out, **change) -> capture_main.CaptureConfig:
    fields = {
        "model": str(model_dir),
        "out": str(out),
        "corpora": None,
        "prompts": "x.jsonl",
        "split": "train",
        "num_prompts": 4,
        "min_prompt_tokens": 2,
        "max_prompt_tokens": 20,
        "decode_tokens": 3,
        "min_decode_tokens": 1,
        "task_share": 0.5,
        "seed": 0,
    }
    return capture_main.CaptureConfig(**fields | change)


def test_a_jsonl_of_prompts_becomes_a_capture(model_dir, tmp_path):
    rows = [f'{{"id": "a{i}", "domain": "code", "prompt": "w{i} w2 w3"}}' for i in range(5)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(rows))
    manifest = capture_main.run(config_of(model_dir, tmp_path / "out", prompts=str(file)))
    assert manifest.num_prompts == 5
    got = read_capture(tmp_path / "out")
    assert got.prompt_ids == tuple(f"code:a{i}" for i in range(5))
    assert got.token_ids[:3].tolist() == [0, 2, 3]
    assert "prompts.jsonl sha256" in got.provenance["prompts"]
    assert len(got.provenance["model_sha256"]) == 64


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"corpora": "here"}, "corpora"),
        ({"prompts": None}, "corpora"),
        ({"split": "test"}, "split"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"max_prompt_tokens": 1}, "max_prompt_tokens"),
        ({"min_decode_tokens": 4}, "min_decode_tokens"),
        ({"task_share": 1.0}, "task_share"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_wrong_config_names_the_field(change, field):
    with pytest.raises(ConfigError) as caught:
        config_of("m", "o", **change)
    assert caught.value.field == field
