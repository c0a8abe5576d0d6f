"""OLMoE checkpoints (`OlmoeForCausalLM`; arXiv 2409.02060).

Queries and keys are normed over the whole projection, and the chosen probabilities are not
divided by their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_jax.architecture import AttentionOptions
from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.hugging_face.config_keys import (
    SHARED_KEYS,
    convert,
    read_fields,
    read_rope,
    refuse_options,
    write_fields,
    write_yarn,
)
from eldr_jax.hugging_face.qwen3_moe import BLOCK_NAMES, EXPERT_NAMES, local_name
from eldr_jax.hugging_face.tensors import TensorGroup, per_expert, transposed

__all__ = ["MODEL_TYPES", "block_groups", "local_name", "read_config", "write_config"]

MODEL_TYPES = ("olmoe",)

_KEYS = SHARED_KEYS | {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
_OFF: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "hidden_act": ("silu",)}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoded `config.json`; see `hugging_face.family.Family`."""
    refuse_options(hf, _OFF)
    optional = {"initializer_range", "tie_word_embeddings", "norm_topk_prob", "num_key_value_heads"}
    fields = read_fields(hf, _KEYS, optional)
    fields["rope_theta"], yarn = read_rope(hf, 10_000.0)
    fields.setdefault("num_kv_heads", fields["num_heads"])
    fields.setdefault("norm_topk_prob", False)
    fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
    fields["attention"] = convert(
        {"query_key_norm": "projection", "clip": hf.get("clip_qkv"), "yarn": yarn}, AttentionOptions
    )
    return convert({"family": "olmoe"} | fields, ModelConfig)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a `config.json`; see `hugging_face.family.Family`."""
    return write_fields(config, _KEYS) | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": config.family,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": config.attention.clip,
        "hidden_act": "silu",
        "output_router_logits": False,
        "rope_scaling": write_yarn(config.attention.yarn),
        "rope_theta": config.rope_theta,
    }


def block_groups(config: ModelConfig, layer: int) -> list[TensorGroup]:
    """Tensors of one block; see `hugging_face.family.Family`."""
    shapes = block_shapes(config, layer)
    return transposed(shapes, BLOCK_NAMES) + per_expert(shapes, EXPERT_NAMES)
