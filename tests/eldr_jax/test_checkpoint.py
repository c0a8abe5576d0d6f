"""Model folders: the published layout, round trips, and complete error lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from eldr_jax.checkpoint import (
    CheckpointError,
    load_model_dir,
    restore_training_state,
    save_model_dir,
    save_training_state,
    tensor_shapes,
)
from eldr_jax.config import ConfigError, ModelConfig
from eldr_jax.model import model_of

ARTEFACT = Path(__file__).parents[2] / "configs/artefacts/reference_model"
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
)


DrawParams = Callable[..., dict[str, Any]]


@pytest.fixture
def bf16_params(draw_params: DrawParams) -> DrawParams:
    """Weights that bfloat16 holds exactly, so that a round trip is exact."""

    def draw(config: ModelConfig) -> dict[str, Any]:
        return jax.tree.map(
            lambda weight: weight.astype(ml_dtypes.bfloat16).astype(np.float32),
            draw_params(config),
        )

    return draw


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_exact_and_small(tmp_path: Path, bf16_params: DrawParams, tied: bool) -> None:
    config = msgspec.structs.replace(CONFIG, tie_word_embeddings=tied)
    params = bf16_params(config)
    save_model_dir(tmp_path, config, params, '{"tokenizer": 1}')
    loaded_config, loaded = load_model_dir(tmp_path)
    assert loaded_config == config
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    assert (tmp_path / "tokenizer.json").read_text() == '{"tokenizer": 1}'
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as stored:
        # Readers of the published format look for this mark.
        assert stored.metadata() == {"format": "pt"}
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"BF16"}  # noqa: SIM118


def test_names_and_orientation_are_the_published_ones(
    tmp_path: Path, bf16_params: DrawParams
) -> None:
    params = bf16_params(CONFIG)
    save_model_dir(tmp_path, CONFIG, params)
    stored = load_file(tmp_path / "model.safetensors")
    block = params["layers"][1]
    prefix = "model.layers.1."
    for name, expected in {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
        "lm_head.weight": params["lm_head"].T,
        f"{prefix}input_layernorm.weight": block["attn_norm"],
        f"{prefix}post_attention_layernorm.weight": block["mlp_norm"],
        f"{prefix}self_attn.q_proj.weight": block["wq"].T,
        f"{prefix}self_attn.k_proj.weight": block["wk"].T,
        f"{prefix}self_attn.v_proj.weight": block["wv"].T,
        f"{prefix}self_attn.o_proj.weight": block["wo"].T,
        f"{prefix}self_attn.q_norm.weight": block["q_norm"],
        f"{prefix}self_attn.k_norm.weight": block["k_norm"],
        f"{prefix}mlp.gate.weight": block["gate"].T,
        f"{prefix}mlp.experts.2.gate_proj.weight": block["w_gate"][2].T,
        f"{prefix}mlp.experts.2.up_proj.weight": block["w_up"][2].T,
        f"{prefix}mlp.experts.2.down_proj.weight": block["w_down"][2].T,
    }.items():
        np.testing.assert_array_equal(stored[name].astype(np.float32), expected, err_msg=name)
    assert stored.keys() == tensor_shapes(CONFIG).keys()


def test_shards_with_an_index_load_like_one_file(tmp_path: Path, bf16_params: DrawParams) -> None:
    params = bf16_params(CONFIG)
    save_model_dir(tmp_path, CONFIG, params)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file_name = f"model-{shard:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _, loaded = load_model_dir(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)

    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": file_name}}))
    with pytest.raises(CheckpointError, match="names ghost, no file holds it"):
        load_model_dir(tmp_path)
    lost = {"lost": "lost.safetensors", "gone": "gone.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map | lost}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: .*; lost\.safetensors: "):
        load_model_dir(tmp_path)
    save_file({names[0]: tensors[names[0]]}, tmp_path / "twice.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "twice.safetensors"}}))
    with pytest.raises(CheckpointError, match="in another file"):
        load_model_dir(tmp_path)
    index.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="needs a weight_map"):
        load_model_dir(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(CheckpointError, match="must lie beside it"):
        load_model_dir(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="needs a weight_map"):
        load_model_dir(tmp_path)


def test_one_error_lists_everything_that_is_wrong(tmp_path: Path, bf16_params: DrawParams) -> None:
    save_model_dir(tmp_path, CONFIG, bf16_params(CONFIG))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    del tensors["model.layers.1.mlp.experts.1.up_proj.weight"]
    tensors["model.layers.0.mlp.gate.bias"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(13, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model_dir(tmp_path)
    message = str(caught.value)
    assert "missing model.layers.0.self_attn.q_norm.weight [4]" in message
    assert "missing model.layers.1.mlp.experts.1.up_proj.weight [6, 12]" in message
    assert "unexpected model.layers.0.mlp.gate.bias" in message
    assert "shape of model.norm.weight is [13], must be [12]" in message


def test_unreadable_files_are_named(tmp_path: Path, bf16_params: DrawParams) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_model_dir(tmp_path)
    save_model_dir(tmp_path, CONFIG, bf16_params(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load_model_dir(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"config\.json: model_type='llama'"):
        load_model_dir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be an object"):
        load_model_dir(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_model_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_model_dir(tmp_path)


def test_training_state_round_trip_keeps_the_newest(tmp_path: Path) -> None:
    state = {"a": jnp.arange(3.0), "b": [jnp.int32(7)]}
    assert restore_training_state(tmp_path, state) is None
    for step in (1, 2, 3):
        save_training_state(tmp_path, step, jax.tree.map(lambda x, by=step: x + by, state))
    restored = restore_training_state(tmp_path, state)
    assert restored is not None
    step, tree = restored
    assert step == 3
    np.testing.assert_array_equal(tree["a"], [3.0, 4.0, 5.0])
    assert int(tree["b"][0]) == 10


@pytest.fixture(scope="module")
def artefact() -> tuple[ModelConfig, dict[str, Any], Tokenizer]:
    config, params = load_model_dir(ARTEFACT)
    return config, params, Tokenizer.from_file(str(ARTEFACT / "tokenizer.json"))


def test_committed_model_reads_text_better_than_chance(
    artefact: tuple[ModelConfig, dict[str, Any], Tokenizer],
) -> None:
    config, params, tokenizer = artefact
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id("<|endoftext|>") == config.bos_token_id == config.eos_token_id
    text = "The patient should talk to a doctor about the symptoms and the treatment."
    tokens = jnp.asarray([[config.bos_token_id, *tokenizer.encode(text).ids]])
    model = model_of(config, params)
    read = jax.jit(lambda tokens: jax.nn.log_softmax(model.logits(model(tokens).hidden)))
    scores = read(tokens[:, :-1])
    loss = -float(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean())
    # Chance is ln(8192) = 9.0; unigram frequencies alone give about 7.
    assert loss < 6.0


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x[1:]  # 12,345\n",
        "安装 Debian 系统",
        "د انتونو",
        "a\u0000\U0001f600",
    ],
)
def test_committed_tokenizer_is_lossless(
    artefact: tuple[ModelConfig, dict[str, Any], Tokenizer], text: str
) -> None:
    tokenizer = artefact[2]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_committed_weights_fit_the_repository() -> None:
    assert (ARTEFACT / "model.safetensors").stat().st_size <= 32_000_000
