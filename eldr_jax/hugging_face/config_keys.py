"""Reading keys of a Hugging Face `config.json`: renames, refusals, rotary settings.

transformers 5 moved the rotary settings into `rope_parameters` and renamed `num_experts` in some
families; both spellings are read. What is written uses the older one, which every reader knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from eldr_jax.architecture import Yarn
from eldr_jax.config import ConfigError, ModelConfig

# Our field -> key that all families share.
SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "initializer_range",
}
_SECONDARY_KEYS = {
    "num_experts": "num_local_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
}
_ROPE_TYPES = ("default", "yarn")
_Size = Annotated[int, Meta(ge=1)] | None
_Settings = dict[str, Any] | None
_Token = int | Annotated[list[int], Meta(min_length=1)] | None


class _Members(msgspec.Struct):
    """Types of the members that code reads before a record checks them."""

    hidden_size: _Size = None
    num_hidden_layers: _Size = None
    num_attention_heads: _Size = None
    num_key_value_heads: _Size = None
    bos_token_id: _Token = None
    eos_token_id: _Token = None
    layer_types: list[str] | None = None
    rope_scaling: _Settings = None
    rope_parameters: _Settings = None
    quantization_config: _Settings = None
    text_config: _Settings = None
    per_layer_config: dict[str, dict[str, Any]] | None = None


_YARN_KEYS = {
    "factor": "factor",
    "trained_context_tokens": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
}


def check_members(hf: Mapping[str, Any]) -> None:
    """Refuses a decoded `config.json` whose members are of the wrong type.

    Raises:
      ConfigError: names the member, what it is and what it must be.
    """
    convert(hf, _Members)


def read_fields(
    hf: Mapping[str, Any], keys: Mapping[str, str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Takes fields out of a decoded `config.json`.

    Args:
      hf: the decoded file.
      keys: our field -> its key.
      optional: keys that a file may leave out or leave null; their fields are left out too.

    Returns:
      Field -> value, with `bos_token_id` and `eos_token_id`.

    Raises:
      ConfigError: lists every missing key.
    """
    fields: dict[str, Any] = {}
    missing = []
    for field, key in keys.items():
        value = hf.get(key)
        if value is None and key in _SECONDARY_KEYS:
            value = hf.get(_SECONDARY_KEYS[key])
        if value is not None:
            fields[field] = value
        elif key not in optional:
            missing.append(key)
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    for field in ("bos_token_id", "eos_token_id"):
        value = hf.get(field)
        # A list of ends keeps its first one: the others are the chat template's business.
        fields[field] = value[0] if isinstance(value, list) else value
    return fields


def refuse_options(hf: Mapping[str, Any], off: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuses what the published architecture can be told to do and is not computed here.

    Args:
      hf: the decoded file.
      off: key -> values that leave the option off; a key that is absent counts as None.

    Raises:
      ConfigError: names the key and its value.
    """
    for key, allowed in off.items():
        if (value := hf.get(key)) is not None and value not in allowed:
            raise ConfigError(f"{key}={value!r} must be {allowed[0]!r}, nothing else is computed")


def read_rope(hf: Mapping[str, Any], default_theta: float) -> tuple[float, Yarn | None]:
    """Base of the rotary frequencies, and how they are stretched.

    Raises:
      ConfigError: a kind of scaling other than YaRN, or a setting of it that is not computed.
    """
    scaling = hf.get("rope_scaling")
    rope = hf.get("rope_parameters") or scaling or {}
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{key}={rope!r} must have rope_type {' or '.join(_ROPE_TYPES)}")
    theta = rope.get("rope_theta") or hf.get("rope_theta") or default_theta
    if kind == "default":
        return theta, None
    known = {"rope_type", "type", "rope_theta", *_YARN_KEYS.values()}
    if unknown := sorted(key for key in rope if key not in known and rope[key] is not None):
        raise ConfigError(f"{key}: {', '.join(unknown)} of yarn is not computed")
    fields = {f: rope[k] for f, k in _YARN_KEYS.items() if rope.get(k) is not None}
    return theta, convert(fields, Yarn)


def write_yarn(yarn: Yarn | None) -> dict[str, Any] | None:
    """The `rope_scaling` of a config."""
    if yarn is None:
        return None
    scaling = {key: getattr(yarn, field) for field, key in _YARN_KEYS.items()}
    return {"rope_type": "yarn"} | {k: v for k, v in scaling.items() if v is not None}


def write_fields(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """Puts fields under their keys; the inverse of `read_fields`."""
    hf = {key: getattr(config, field) for field, key in keys.items()}
    return hf | {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}


def layer_kinds(config: ModelConfig) -> list[str]:
    """`layer_types` of a config: sliding or full attention, layer by layer."""
    windows = [config.layer_attention(layer).window for layer in range(config.num_layers)]
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def full_interval(kinds: list[str], num_layers: int) -> int:
    """The n of layers n, 2n, ... that attend to everything; 0 where none does.

    Args:
      kinds: `layer_types` of a config.
      num_layers: how many there must be.

    Raises:
      ConfigError: the full layers are not at such places, or not every layer has its kind.
    """
    full = [index + 1 for index, kind in enumerate(kinds) if kind == "full_attention"]
    step = full[0] if full else 0
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"layer_types has {', '.join(unknown)}; full and sliding are computed")
    if step and full != list(range(step, len(kinds) + 1, step)):
        raise ConfigError(f"layer_types={kinds} must have full attention at every n-th layer")
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries, must have {num_layers}")
    return step


def convert(fields: Mapping[str, Any], record: type) -> Any:
    """Checks types and rules of a record's fields.

    Raises:
      ConfigError: names the field.
    """
    try:
        return msgspec.convert(fields, record)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from error
