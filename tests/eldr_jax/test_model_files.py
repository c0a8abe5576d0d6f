"""The published geometries in configs/models, against figures from the models' own papers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eldr_jax.config import load_model_config
from eldr_jax.hugging_face import from_hf, to_hf

MODELS = Path(__file__).parents[2] / "configs/models"
# Name -> (MoE layers, experts, top-k), billions of weights as published.
PUBLISHED = {
    "qwen3_30b_a3b": ((48, 128, 8), 30.5),
    "qwen3_235b_a22b": ((94, 128, 8), 235.1),
    "gpt_oss_120b": ((36, 128, 4), 116.8),
    "gemma_4_26b_a4b": ((30, 128, 8), 25.2),
    "olmoe_1b_7b": ((16, 64, 8), 6.9),
    "mixtral_8x7b": ((32, 8, 2), 46.7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_geometry_and_number_of_weights_are_the_published_ones(name: str) -> None:
    config = load_model_config(MODELS / f"{name}.yaml")
    geometry, billions = PUBLISHED[name]
    assert (config.num_layers, config.num_experts, config.num_experts_per_tok) == geometry
    assert round(config.num_params / 1e9, 1) == billions


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_says_all_that_the_file_says(name: str) -> None:
    config = load_model_config(MODELS / f"{name}.yaml")
    assert from_hf(to_hf(config)) == config


def test_layers_slide_where_the_published_models_do() -> None:
    gpt_oss = load_model_config(MODELS / "gpt_oss_120b.yaml")
    windows = [gpt_oss.layer_attention(layer).window for layer in range(gpt_oss.num_layers)]
    assert windows == [128, None] * 18
    gemma = load_model_config(MODELS / "gemma_4_26b_a4b.yaml")
    layers = [gemma.layer_attention(layer) for layer in range(gemma.num_layers)]
    assert [layer.window for layer in layers] == ([1024] * 5 + [None]) * 5
    assert {(a.num_kv_heads, a.head_dim) for a in layers if a.window} == {(8, 256)}
    assert {(a.num_kv_heads, a.head_dim) for a in layers if not a.window} == {(2, 512)}
    assert gemma.max_kv_shape == (8, 512)


def test_every_model_file_is_tested() -> None:
    assert {path.stem for path in MODELS.glob("*.yaml")} == {*PUBLISHED, "eldr_ref"}
