"""What a family gives so that its checkpoints can be read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from eldr_jax.config import ModelConfig
from eldr_jax.hugging_face.tensors import TensorGroup


class Family(Protocol):
    """One published architecture. Each family is a module with these members."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """Values of `model_type` in its `config.json`."""
        ...

    def read_config(self, hf: Mapping[str, Any], /) -> ModelConfig:
        """A decoded `config.json` to a geometry; ConfigError for what is not computed."""
        ...

    def write_config(self, config: ModelConfig, /) -> dict[str, Any]:
        """A geometry to the content of a `config.json`."""
        ...

    def block_groups(self, config: ModelConfig, layer: int, /) -> list[TensorGroup]:
        """Tensors of one block, named behind `model.layers.N.`; all its leaves, each once."""
        ...

    def local_name(self, name: str, /) -> str | None:
        """A stored name as `block_groups` spells it; None for tensors of other towers."""
        ...
