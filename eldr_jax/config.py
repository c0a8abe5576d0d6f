"""Geometry of a Mixture-of-Experts decoder: one frozen record, three ways in and one way out.

`ModelConfig` is everything that fixes the shape and the arithmetic of a model. It comes from a
YAML file of `configs/models` (`load_model_config`) or from the `config.json` of a Hugging Face
folder (`from_hf`), and goes out as such a `config.json` (`to_hf`). It is hashable, so it can be a
static argument of a jitted function.

Only the `qwen3_moe` family exists today. A further family is a new member of `FAMILIES`, a key
map beside `_from_qwen3_moe`, and one field for each thing in which its arithmetic differs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

SCHEMA_VERSION = 1
FAMILIES = ("qwen3_moe",)


class ConfigError(ValueError):
    """A model description that names a wrong field, value or rule."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and arithmetic of one model. Every layer is a MoE layer.

    Attributes:
      family: architecture, one of `FAMILIES`.
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, D.
      num_layers: decoder blocks, L.
      num_heads: query heads, H.
      num_kv_heads: key/value heads, Hkv; divides `num_heads`.
      head_dim: width of one head, Dh; even (RoPE turns pairs).
      num_experts: experts of a layer, E.
      num_experts_per_tok: experts a token goes to, K.
      moe_intermediate_size: width of one expert, F.
      rms_norm_eps: added to the mean square before the root.
      rope_theta: base of the rotary frequencies.
      norm_topk_prob: whether the K chosen probabilities are divided by their sum.
      tie_word_embeddings: whether the output head is the transposed embedding.
      max_position_embeddings: longest sequence in tokens.
      initializer_range: standard deviation of freshly drawn weights.
      bos_token_id: id that opens a document, or None.
      eos_token_id: id that ends a document, or None.
    """

    family: str = "qwen3_moe"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        if self.family not in FAMILIES:
            raise ConfigError(f"family={self.family!r} must be one of {', '.join(FAMILIES)}")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even, RoPE turns pairs")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} must not exceed "
                f"num_experts={self.num_experts}"
            )
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ConfigError(f"{name}={value} must lie in [0, {self.vocab_size})")

    @property
    def query_width(self) -> int:
        """Columns of the query projection, H*Dh."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (and of the value) projection, Hkv*Dh."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Weights of the whole model, a tied head counted once."""
        d, f, e = self.hidden_size, self.moe_intermediate_size, self.num_experts
        attention = 2 * d * self.query_width + 2 * d * self.kv_width + 2 * self.head_dim
        layer = attention + 2 * d + d * e + 3 * e * d * f
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * d + d + self.num_layers * layer


class _ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of `configs/models`."""

    schema_version: int
    name: str
    source: str = ""
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version={self.schema_version} must be {SCHEMA_VERSION}")


def load_model_config(path: str | Path) -> ModelConfig:
    """Reads a model file of `configs/models`.

    Args:
      path: YAML file with `schema_version`, `name`, optional `source`, and `model`.

    Returns:
      The model's geometry.

    Raises:
      ConfigError: the file is no YAML mapping of that shape; names the field and the rule.
      OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return msgspec.convert(yaml.safe_load(text), _ModelFile).model
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}{_nearest_field(str(error))}") from error


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the content of a Hugging Face `config.json`.

    Args:
      hf: the decoded file.

    Returns:
      The model's geometry.

    Raises:
      ConfigError: an architecture or an option that this model does not compute, or a missing
        key.
    """
    family = hf.get("model_type")
    if family != "qwen3_moe":
        raise ConfigError(f"model_type={family!r} must be one of {', '.join(FAMILIES)}")
    return _from_qwen3_moe(hf)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a Hugging Face `config.json`.

    Args:
      config: the model's geometry.

    Returns:
      A dictionary that transformers and vLLM load as `Qwen3MoeForCausalLM`.
    """
    hf: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": config.family,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        # Width of dense layers, of which there are none; readers want the key all the same.
        "intermediate_size": config.moe_intermediate_size * config.num_experts_per_tok,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "rope_scaling": None,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
    }
    hf |= {key: getattr(config, field) for field, key in _QWEN3_MOE_KEYS.items()}
    for field in ("bos_token_id", "eos_token_id"):
        hf[field] = getattr(config, field)
    return dict(sorted(hf.items()))


# Our field -> key of the family's config.json.
_QWEN3_MOE_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "norm_topk_prob": "norm_topk_prob",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
}
# What the published architecture can be told to do and we do not compute: key -> values that
# leave it off.
_QWEN3_MOE_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "decoder_sparse_step": (1, None),
    "hidden_act": ("silu", None),
    "mlp_only_layers": ([], None),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
}


def _from_qwen3_moe(hf: Mapping[str, Any]) -> ModelConfig:
    for key, allowed in _QWEN3_MOE_OFF.items():
        if hf.get(key) not in allowed:
            raise ConfigError(f"{key}={hf[key]!r} must be {allowed[0]!r}, nothing else is computed")
    flat = dict(hf)
    # transformers 5 moved the rotary base into a dictionary of its own.
    rope = flat.get("rope_parameters")
    if rope is not None:
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_parameters={rope!r} must have rope_type 'default'")
        flat.setdefault("rope_theta", rope.get("rope_theta"))
    fields: dict[str, Any] = {"family": "qwen3_moe"}
    missing = [key for key in _QWEN3_MOE_KEYS.values() if flat.get(key) is None]
    optional = {"head_dim", "initializer_range", "tie_word_embeddings", "norm_topk_prob"}
    if required := [key for key in missing if key not in optional]:
        raise ConfigError(f"config.json lacks {', '.join(required)}")
    for field, key in _QWEN3_MOE_KEYS.items():
        if key not in missing:
            fields[field] = flat[key]
    # The published defaults of the family where a file leaves the key out.
    fields.setdefault("head_dim", flat["hidden_size"] // flat["num_attention_heads"])
    fields.setdefault("norm_topk_prob", False)
    for field in ("bos_token_id", "eos_token_id"):
        value = flat.get(field)
        # A list of ends keeps its first one: the others are the chat template's business.
        fields[field] = value[0] if isinstance(value, list) else value
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from error


def _nearest_field(message: str) -> str:
    """A hint naming the known field closest to the unknown one that `message` complains of."""
    found = re.search(r"unknown field `([^`]+)`", message)
    if found is None:
        return ""
    known = ModelConfig.__struct_fields__ if "$.model" in message else _ModelFile.__struct_fields__
    near = difflib.get_close_matches(found.group(1), known, n=1, cutoff=0.0)
    return f" (nearest known field: {near[0]})"
