"""Gemma-4 MoE checkpoints, their text model (`Gemma4ForCausalLM` and the multimodal folder).

Layers that attend to everything have heads of their own geometry, take values from the key
projection and turn a share of each head. A dense MLP runs beside the experts, the gate reads the
stream through a norm of its own, and both halves are normed before they are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_jax.architecture import (
    AttentionOptions,
    BlockOptions,
    ConfigError,
    ExpertOptions,
    FullAttention,
    GateOptions,
)
from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.hugging_face.config_keys import (
    SHARED_KEYS,
    check_members,
    convert,
    full_interval,
    layer_kinds,
    read_fields,
    refuse_options,
    write_fields,
)
from eldr_jax.hugging_face.qwen3_moe import ATTENTION_NAMES
from eldr_jax.hugging_face.tensors import TensorGroup, fused_rows, transposed

MODEL_TYPES = ("gemma4_text", "gemma4")

_NAMES = ATTENTION_NAMES | {
    "attn_post_norm": "post_attention_layernorm.weight",
    "dense_norm": "pre_feedforward_layernorm.weight",
    "dense_gate": "mlp.gate_proj.weight",
    "dense_up": "mlp.up_proj.weight",
    "dense_down": "mlp.down_proj.weight",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "mlp_norm": "pre_feedforward_layernorm_2.weight",
    "gate": "router.proj.weight",
    "gate_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
    "expert_post_norm": "post_feedforward_layernorm_2.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
    "output_scale": "layer_scalar",
}
_KEYS = SHARED_KEYS | {
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    # Image tokens alone look both ways; there are none in a text.
    "use_bidirectional_attention": ("vision",),
}
_OTHER_TOWERS = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads a decoded `config.json`; see `hugging_face.family.Family`."""
    # The multimodal file says some of it beside its text model.
    text = {**hf, **(hf.get("text_config") or {})}
    check_members(text)
    refuse_options(text, _OFF)
    if not text.get("enable_moe_block"):
        raise ConfigError("enable_moe_block must be true, dense members are not computed")
    fields = read_fields(text, _KEYS, {"initializer_range", "tie_word_embeddings"})
    fields.setdefault("tie_word_embeddings", True)
    num_layers = fields["num_layers"]
    if (kinds := text.get("layer_types")) is None:
        kinds = [
            "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)
        ]
    rope = _rope(text)
    fields["rope_theta"] = rope["sliding_attention"].get("rope_theta", 10_000.0)
    fields["attention"] = convert(
        {
            "value_norm": True,
            "scale": 1.0,
            "sliding_window": text.get("sliding_window"),
            "full_interval": full_interval(kinds, num_layers),
            "full": _full_attention(text, kinds, rope["full_attention"]),
        },
        AttentionOptions,
    )
    fields["block"] = convert(
        {
            "post_norms": True,
            "dense_intermediate_size": text.get("intermediate_size"),
            "output_scale": True,
        },
        BlockOptions,
    )
    fields |= {
        "family": "gemma4",
        "norm_topk_prob": True,
        "scale_embeddings": True,
        "logit_softcap": text.get("final_logit_softcapping"),
        "gate": GateOptions(own_norm=True),
        "expert": ExpertOptions(activation="gelu_tanh"),
    }
    return convert(fields, ModelConfig)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a `config.json` of the text model."""
    full = config.attention.full
    if full is None:
        raise ConfigError("attention.full must be given, the family's full layers have their own")
    return write_fields(config, _KEYS) | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": full.values_from_keys,
        "enable_moe_block": True,
        "final_logit_softcapping": config.logit_softcap,
        "global_head_dim": full.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "intermediate_size": config.block.dense_intermediate_size,
        "layer_types": layer_kinds(config),
        "num_global_key_value_heads": full.num_kv_heads,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": full.rotary_fraction,
                "rope_theta": full.rope_theta,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": config.rope_theta, "rope_type": "default"},
        },
        "sliding_window": config.attention.sliding_window,
        "vocab_size_per_layer_input": config.vocab_size,
    }


def block_groups(config: ModelConfig, layer: int) -> list[TensorGroup]:
    """Tensors of one block; see `hugging_face.family.Family`."""
    shapes = block_shapes(config, layer)
    experts = fused_rows(shapes, "experts.gate_up_proj", "experts.down_proj")
    return transposed(shapes, _NAMES) + experts


def local_name(name: str) -> str | None:
    """The multimodal folder keeps the text model one level deeper, beside other towers."""
    if name.startswith(_OTHER_TOWERS):
        return None
    return name.replace("model.language_model.", "model.", 1)


def _rope(text: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    kinds = {"sliding_attention": "default", "full_attention": "proportional"}
    rope = text.get("rope_parameters") or {}
    for kind, expected in kinds.items():
        settings = rope.get(kind, {})
        if not isinstance(settings, Mapping):
            raise ConfigError(f"rope_parameters.{kind}={settings!r} must be an object")
        if settings.get("rope_type", expected) != expected or settings.get("factor", 1.0) != 1.0:
            raise ConfigError(f"rope_parameters.{kind}={settings!r} must be unscaled {expected!r}")
    return {kind: rope.get(kind, {}) for kind in kinds}


def _full_attention(
    text: Mapping[str, Any], kinds: list[str], rope: Mapping[str, Any]
) -> FullAttention:
    values_from_keys = bool(text.get("attention_k_eq_v", False))
    head_dim = text.get("global_head_dim", 512)
    num_kv_heads = text.get("num_global_key_value_heads") if values_from_keys else None
    # Newer files list each layer's own geometry instead.
    if own := text.get("per_layer_config"):
        expected = {str(index) for index, kind in enumerate(kinds) if kind == "full_attention"}
        distinct = [dict(layer) for layer in own.values()]
        if set(own) != expected or any(layer != distinct[0] for layer in distinct):
            raise ConfigError("per_layer_config must give all full layers the same geometry")
        head_dim = distinct[0].get("head_dim", text.get("head_dim"))
        num_kv_heads = distinct[0].get("num_key_value_heads")
    return convert(
        {
            "head_dim": head_dim,
            "num_kv_heads": num_kv_heads or text.get("num_key_value_heads"),
            "rope_theta": rope.get("rope_theta", 1_000_000.0),
            "rotary_fraction": rope.get("partial_rotary_factor", 0.25),
            "values_from_keys": values_from_keys,
        },
        FullAttention,
    )
