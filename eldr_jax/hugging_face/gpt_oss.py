"""GPT-OSS checkpoints (`GptOssForCausalLM`; arXiv 2508.10925).

The gate adds a bias, chooses by its logits and takes the softmax over the chosen ones. Every head
has a sink; every other layer slides. Expert tensors may be MXFP4 (`eldr_jax.mxfp4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_jax.architecture import AttentionOptions, ConfigError, ExpertOptions, GateOptions
from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.hugging_face.config_keys import (
    SHARED_KEYS,
    convert,
    full_interval,
    layer_kinds,
    read_fields,
    read_rope,
    refuse_options,
    write_fields,
    write_yarn,
)
from eldr_jax.hugging_face.qwen3_moe import ATTENTION_NAMES, local_name
from eldr_jax.hugging_face.tensors import TensorGroup, interleaved_columns, transposed

__all__ = ["MODEL_TYPES", "block_groups", "local_name", "read_config", "write_config"]

MODEL_TYPES = ("gpt_oss",)

_NAMES = ATTENTION_NAMES | {
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.router.weight",
    "gate_bias": "mlp.router.bias",
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
    method = (hf.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ConfigError(f"quantization_config.quant_method={method!r} must be 'mxfp4'")
    fields = read_fields(hf, _KEYS, {"head_dim", "initializer_range", "tie_word_embeddings"})
    fields["rope_theta"], yarn = read_rope(hf, 150_000.0)
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_heads"])
    num_layers = fields["num_layers"]
    if (kinds := hf.get("layer_types")) is None:
        kinds = [
            "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
        ]
    window = hf.get("sliding_window")
    fields["attention"] = convert(
        {
            "bias": hf.get("attention_bias", True),
            "sinks": True,
            "query_key_norm": "none",
            "sliding_window": window,
            "full_interval": full_interval(kinds, num_layers) if window else 0,
            "yarn": yarn,
        },
        AttentionOptions,
    )
    fields["gate"] = GateOptions(bias=True, softmax="chosen")
    fields["expert"] = convert(
        {
            "activation": "clamped_silu",
            "bias": True,
            "alpha": hf.get("swiglu_alpha", 1.702),
            "limit": hf.get("swiglu_limit", 7.0),
        },
        ExpertOptions,
    )
    return convert({"family": "gpt_oss"} | fields, ModelConfig)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a `config.json`; see `hugging_face.family.Family`."""
    return write_fields(config, _KEYS) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": config.family,
        "attention_bias": config.attention.bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "layer_types": layer_kinds(config),
        "output_router_logits": False,
        "rope_scaling": write_yarn(config.attention.yarn),
        "rope_theta": config.rope_theta,
        "sliding_window": config.attention.sliding_window,
        "swiglu_alpha": config.expert.alpha,
        "swiglu_limit": config.expert.limit,
    }


def block_groups(config: ModelConfig, layer: int) -> list[TensorGroup]:
    """Tensors of one block; see `hugging_face.family.Family`."""
    shapes = block_shapes(config, layer)
    experts = interleaved_columns(
        shapes, "mlp.experts.gate_up_proj", "mlp.experts.down_proj", bias_suffix="_bias"
    )
    return transposed(shapes, _NAMES) + experts
