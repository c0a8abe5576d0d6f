"""Qwen3-MoE checkpoints (`Qwen3MoeForCausalLM`; arXiv 2505.09388)."""

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
from eldr_jax.hugging_face.tensors import TensorGroup, per_expert, transposed

MODEL_TYPES = ("qwen3_moe",)

ATTENTION_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
BLOCK_NAMES = ATTENTION_NAMES | {
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate.weight",
}
EXPERT_NAMES = {
    "w_gate": "mlp.experts.{expert}.gate_proj.weight",
    "w_up": "mlp.experts.{expert}.up_proj.weight",
    "w_down": "mlp.experts.{expert}.down_proj.weight",
}
_KEYS = SHARED_KEYS | {
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu",),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoded `config.json`; see `hugging_face.family.Family`."""
    refuse_options(hf, _OFF)
    fields = read_fields(
        hf, _KEYS, {"head_dim", "initializer_range", "tie_word_embeddings", "norm_topk_prob"}
    )
    fields["rope_theta"], yarn = read_rope(hf, 10_000.0)
    fields["attention"] = AttentionOptions(yarn=yarn)
    # The published defaults of the family where a file leaves the key out.
    fields.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    fields.setdefault("norm_topk_prob", False)
    return convert({"family": "qwen3_moe"} | fields, ModelConfig)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a `config.json`; see `hugging_face.family.Family`."""
    return write_fields(config, _KEYS) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": config.family,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        # Width of dense layers, of which there are none; readers want the key all the same.
        "intermediate_size": config.moe_intermediate_size * config.num_experts_per_tok,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "rope_scaling": write_yarn(config.attention.yarn),
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def block_groups(config: ModelConfig, layer: int) -> list[TensorGroup]:
    """Tensors of one block; see `hugging_face.family.Family`."""
    shapes = block_shapes(config, layer)
    return transposed(shapes, BLOCK_NAMES) + per_expert(shapes, EXPERT_NAMES)


def local_name(name: str) -> str | None:
    """Stored names are ours; see `hugging_face.family.Family`."""
    return name
