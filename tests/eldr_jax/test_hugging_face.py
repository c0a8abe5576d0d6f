"""Published layouts of the families: names, orientation, round trips, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from eldr_jax.architecture import AttentionOptions, Yarn
from eldr_jax.checkpoint import CheckpointError, load_model_dir, save_model_dir, tensor_shapes
from eldr_jax.config import ConfigError, ModelConfig, block_shapes
from eldr_jax.hugging_face import family_of, from_hf, to_hf
from eldr_jax.hugging_face.config_keys import full_interval
from eldr_jax.mxfp4 import dequantise

DrawParams = Callable[..., dict[str, Any]]


def _bfloat16(params: dict[str, Any]) -> dict[str, Any]:
    """Weights that bfloat16 holds exactly, so that a round trip is exact."""
    return jax.tree.map(lambda w: w.astype(ml_dtypes.bfloat16).astype(np.float32), params)


def test_groups_give_every_leaf_of_a_block_once(family_config: ModelConfig) -> None:
    for layer in range(family_config.num_layers):
        groups = family_of(family_config).block_groups(family_config, layer)
        leaves = [leaf for group in groups for leaf in group.leaves]
        assert sorted(leaves) == sorted(block_shapes(family_config, layer))


def test_round_trip_is_exact(
    tmp_path: Path, family_config: ModelConfig, draw_params: DrawParams
) -> None:
    params = _bfloat16(draw_params(family_config))
    save_model_dir(tmp_path, family_config, params)
    config, loaded = load_model_dir(tmp_path)
    assert config == family_config
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: array.shape for name, array in stored.items()} == tensor_shapes(config)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_any_float_type_is_read(
    tmp_path: Path, families: dict[str, ModelConfig], draw_params: DrawParams, dtype: str
) -> None:
    config = families["olmoe"]
    params = jax.tree.map(lambda w: w.astype(np.float16).astype(np.float32), draw_params(config))
    save_model_dir(tmp_path, config, params)
    shapes = load_file(tmp_path / "model.safetensors")
    flat = {name: array.astype(np.float32).astype(dtype) for name, array in shapes.items()}
    save_file(flat, tmp_path / "model.safetensors")
    _, loaded = load_model_dir(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    save_file(flat | {"model.norm.weight": np.zeros(16, np.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"type of model\.norm\.weight is I32"):
        load_model_dir(tmp_path)


def test_fused_and_interleaved_experts_lie_as_published(
    families: dict[str, ModelConfig], draw_params: DrawParams, tmp_path: Path
) -> None:
    """gemma4 stacks gate rows on up rows; gpt_oss takes columns in turns."""
    for family in ("gemma4", "gpt_oss"):
        config = families[family]
        params = _bfloat16(draw_params(config))
        save_model_dir(tmp_path / family, config, params)
        stored = load_file(tmp_path / family / "model.safetensors")
        block = params["layers"][1]
        width = config.moe_intermediate_size
        if family == "gemma4":
            fused = stored["model.layers.1.experts.gate_up_proj"].astype(np.float32)
            np.testing.assert_array_equal(fused[2, :width], block["w_gate"][2].T)
            np.testing.assert_array_equal(fused[2, width:], block["w_up"][2].T)
        else:
            fused = stored["model.layers.1.mlp.experts.gate_up_proj"].astype(np.float32)
            np.testing.assert_array_equal(fused[2, :, 0::2], block["w_gate"][2])
            np.testing.assert_array_equal(fused[2, :, 1::2], block["w_up"][2])
            bias = stored["model.layers.1.mlp.experts.gate_up_proj_bias"].astype(np.float32)
            np.testing.assert_array_equal(bias[2, 1::2], block["b_up"][2])


def _quantise(tmp_path: Path, config: ModelConfig, draw_params: DrawParams) -> dict[str, Any]:
    """A GPT-OSS folder with MXFP4 experts; returns the stored tensors."""
    save_model_dir(tmp_path, config, _bfloat16(draw_params(config)))
    tensors = dict(load_file(tmp_path / "model.safetensors"))
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, width, out = tensors.pop(name).shape
        groups = (num_experts, out, width // 32)
        tensors[name + "_blocks"] = rng.integers(0, 256, (*groups, 16)).astype(np.uint8)
        tensors[name + "_scales"] = rng.integers(120, 130, groups).astype(np.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    hf = to_hf(config) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    return tensors


def test_mxfp4_experts_are_read(
    tmp_path: Path, families: dict[str, ModelConfig], draw_params: DrawParams
) -> None:
    config = msgspec.structs.replace(
        families["gpt_oss"], hidden_size=32, moe_intermediate_size=64, num_experts=3
    )
    tensors = _quantise(tmp_path, config, draw_params)
    loaded_config, params = load_model_dir(tmp_path)
    assert loaded_config == config
    block = params["layers"][1]
    prefix = "model.layers.1.mlp.experts."
    rows = dequantise(
        tensors[prefix + "gate_up_proj_blocks"], tensors[prefix + "gate_up_proj_scales"]
    )
    np.testing.assert_array_equal(block["w_gate"][2], rows[2, 0::2].T)
    np.testing.assert_array_equal(block["w_up"][2], rows[2, 1::2].T)
    rows = dequantise(tensors[prefix + "down_proj_blocks"], tensors[prefix + "down_proj_scales"])
    np.testing.assert_array_equal(block["w_down"][2], rows[2].T)


def test_broken_mxfp4_tensors_are_listed(
    tmp_path: Path, families: dict[str, ModelConfig], draw_params: DrawParams
) -> None:
    config = msgspec.structs.replace(
        families["gpt_oss"], hidden_size=32, moe_intermediate_size=64, num_experts=3
    )
    tensors = _quantise(tmp_path, config, draw_params)
    prefix = "model.layers.0.mlp.experts."
    del tensors[prefix + "down_proj_scales"]
    tensors[prefix + "gate_up_proj_blocks"] = np.zeros((3, 128, 1, 8), np.uint8)
    tensors[prefix + "gate_up_proj_scales"] = np.zeros((3, 128, 1), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model_dir(tmp_path)
    message = str(caught.value)
    assert f"missing {prefix}down_proj_scales [3, 32, 2]" in message
    assert f"shape of {prefix}gate_up_proj_blocks is [3, 128, 1, 8]" in message
    assert f"type of {prefix}gate_up_proj_scales is F32, must be U8" in message


def test_multimodal_folder_gives_its_text_model(
    tmp_path: Path, families: dict[str, ModelConfig], draw_params: DrawParams
) -> None:
    config = families["gemma4"]
    params = _bfloat16(draw_params(config))
    save_model_dir(tmp_path, config, params)
    tensors = load_file(tmp_path / "model.safetensors")
    deeper = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    tower = {"model.vision_tower.encoder.w": np.zeros(3, np.float32)}
    save_file(deeper | tower, tmp_path / "model.safetensors")
    hf = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma4", "text_config": hf, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    loaded_config, loaded = load_model_dir(tmp_path)
    assert loaded_config == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    save_file(deeper | {"model.something": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected model\.something"):
        load_model_dir(tmp_path)


def test_newer_spelling_of_layer_geometry_is_read(families: dict[str, ModelConfig]) -> None:
    config = families["gemma4"]
    hf = to_hf(config)
    full = config.attention.full
    assert full is not None
    del hf["global_head_dim"], hf["num_global_key_value_heads"]
    own = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
    assert from_hf(hf | {"per_layer_config": {"1": own}}) == config
    with pytest.raises(ConfigError, match="per_layer_config"):
        from_hf(hf | {"per_layer_config": {"0": own}})


def test_newer_spelling_of_the_number_of_experts_is_read(families: dict[str, ModelConfig]) -> None:
    hf = to_hf(families["qwen3_moe"])
    hf["num_local_experts"] = hf.pop("num_experts")
    assert from_hf(hf) == families["qwen3_moe"]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("olmoe", {"attention_bias": True}, "attention_bias=True must be False"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ("mixtral", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type default or yarn"),
        ("mixtral", {"num_local_experts": None}, "lacks num_local_experts"),
        (
            "qwen3_moe",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "mscale of yarn is not computed",
        ),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "every n-th"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 2}, "has chunked_attention"),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 99}, "has 99 entries, must have"),
        ("gpt_oss", {"layer_types": [None]}, r"layer_types\[0\]|\.layer_types"),
        ("gpt_oss", {"quantization_config": "mxfp4"}, "quantization_config"),
        ("qwen3_moe", {"num_attention_heads": 0}, "num_attention_heads"),
        ("qwen3_moe", {"hidden_size": "64"}, "hidden_size"),
        ("qwen3_moe", {"rope_scaling": "yarn"}, "rope_scaling"),
        ("qwen3_moe", {"eos_token_id": []}, "eos_token_id"),
        ("qwen3_moe", {"model_type": ["qwen3_moe"]}, "model_type"),
        ("gemma4", {"rope_parameters": {"full_attention": 3}}, "must be an object"),
        ("gemma4", {"text_config": {"hidden_size": 0}}, "hidden_size"),
        ("gemma4", {"enable_moe_block": False}, "enable_moe_block must be true"),
        ("gemma4", {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 must be 0"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input=8"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"rope_parameters\.full_attention",
        ),
    ],
)
def test_what_is_not_computed_is_refused(
    families: dict[str, ModelConfig], family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf(to_hf(families[family]) | change)


@settings(max_examples=50, deadline=None)
@given(num_layers=st.integers(1, 40), step=st.integers(0, 45), flipped=st.integers(0, 39))
def test_layer_kinds_are_read_back_or_refused(num_layers: int, step: int, flipped: int) -> None:
    full = [bool(step) and (layer + 1) % step == 0 for layer in range(num_layers)]
    kinds = ["full_attention" if f else "sliding_attention" for f in full]
    assert full_interval(kinds, num_layers) == (step if any(full) else 0)
    # With one layer changed, what is read must still describe these very layers.
    full[flipped % num_layers] ^= True
    kinds = ["full_attention" if f else "sliding_attention" for f in full]
    try:
        read = full_interval(kinds, num_layers)
    except ConfigError:
        return
    assert full == [bool(read) and (layer + 1) % read == 0 for layer in range(num_layers)]


def test_stretched_frequencies_are_read_and_written(families: dict[str, ModelConfig]) -> None:
    yarn = Yarn(factor=4.0, trained_context_tokens=64, attention_factor=1.1)
    config = msgspec.structs.replace(families["qwen3_moe"], attention=AttentionOptions(yarn=yarn))
    assert from_hf(to_hf(config)) == config


def test_a_model_its_config_json_cannot_describe_is_not_written(
    families: dict[str, ModelConfig],
) -> None:
    config = msgspec.structs.replace(families["qwen3_moe"], logit_softcap=5.0)
    with pytest.raises(ConfigError, match=r"logit_softcap=5\.0 must be None in the family"):
        to_hf(config)
