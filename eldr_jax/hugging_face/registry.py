"""The families whose checkpoints are read and written, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr_jax.config import ConfigError, ModelConfig
from eldr_jax.hugging_face import gemma4, gpt_oss, mixtral, olmoe, qwen3_moe
from eldr_jax.hugging_face.config_keys import check_members
from eldr_jax.hugging_face.family import Family

_FAMILIES: dict[str, Family] = {
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
    "gemma4": gemma4,
}
_BY_MODEL_TYPE = {
    model_type: family for family in _FAMILIES.values() for model_type in family.MODEL_TYPES
}


def family_of(config: ModelConfig) -> Family:
    """The family that reads and writes a model's checkpoints."""
    return _FAMILIES[config.family]


def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Reads the content of a Hugging Face `config.json`.

    Args:
      hf: the decoded file.

    Returns:
      The model's geometry.

    Raises:
      ConfigError: an architecture or an option that is not computed, or missing keys.
    """
    if not isinstance(hf, Mapping):
        raise ConfigError(f"config.json={hf!r} must be an object")
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BY_MODEL_TYPE:
        raise ConfigError(f"model_type={model_type!r} must be one of {', '.join(_BY_MODEL_TYPE)}")
    check_members(hf)
    return _BY_MODEL_TYPE[model_type].read_config(hf)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the content of a Hugging Face `config.json`.

    Args:
      config: the model's geometry.

    Returns:
      A dictionary that transformers and vLLM load as the family's causal language model.

    Raises:
      ConfigError: the model computes something that the family's file cannot say.
    """
    family = family_of(config)
    hf = family.write_config(config) | {"torch_dtype": "bfloat16", "use_cache": True}
    said = family.read_config(hf)
    lost = [
        field
        for field in config.__struct_fields__
        if getattr(said, field) != getattr(config, field)
    ]
    if lost:
        field = lost[0]
        raise ConfigError(
            f"{field}={getattr(config, field)!r} must be {getattr(said, field)!r} in the family "
            f"{config.family}, its config.json has no way to say otherwise"
        )
    return dict(sorted(hf.items()))
