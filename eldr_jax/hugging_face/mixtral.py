"""Mixtral checkpoints (`MixtralForCausalLM`; arXiv 2401.04088).

Queries and keys are not normed; some members of the family slide in every layer.
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
from eldr_jax.hugging_face.qwen3_moe import ATTENTION_NAMES, local_name
from eldr_jax.hugging_face.tensors import TensorGroup, per_expert, transposed

__all__ = ["MODEL_TYPES", "block_groups", "local_name", "read_config", "write_config"]

MODEL_TYPES = ("mixtral",)

_NAMES = ATTENTION_NAMES | {
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "block_sparse_moe.gate.weight",
}
_EXPERTS = {
    "w_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "w_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "w_down": "block_sparse_moe.experts.{expert}.w2.weight",
}
_KEYS = SHARED_KEYS | {
    "head_dim": "head_dim",
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoded `config.json`; see `hugging_face.family.Family`."""
    refuse_options(hf, {"hidden_act": ("silu",)})
    fields = read_fields(hf, _KEYS, {"head_dim", "initializer_range", "tie_word_embeddings"})
    fields["rope_theta"], yarn = read_rope(hf, 1_000_000.0)
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_heads"])
    fields["attention"] = convert(
        {"query_key_norm": "none", "sliding_window": hf.get("sliding_window"), "yarn": yarn},
        AttentionOptions,
    )
    return convert({"family": "mixtral", "norm_topk_prob": True} | fields, ModelConfig)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a `config.json`; see `hugging_face.family.Family`."""
    return write_fields(config, _KEYS) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": config.family,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "output_router_logits": False,
        "rope_scaling": write_yarn(config.attention.yarn),
        "rope_theta": config.rope_theta,
        "sliding_window": config.attention.sliding_window,
    }


def block_groups(config: ModelConfig, layer: int) -> list[TensorGroup]:
    """Tensors of one block; see `hugging_face.family.Family`."""
    shapes = block_shapes(config, layer)
    return transposed(shapes, _NAMES) + per_expert(shapes, _EXPERTS)
