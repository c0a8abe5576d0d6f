"""Small members of the families, and weights drawn without compiling anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eldr_jax.architecture import (
    AttentionOptions,
    BlockOptions,
    ExpertOptions,
    FullAttention,
    GateOptions,
    Yarn,
)
from eldr_jax.config import ModelConfig, block_shapes


def _draw_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def weight(shape: tuple[int, ...]) -> np.ndarray:
        scale = shape[-2] ** -0.5 if len(shape) > 1 else 0.1
        # Norms lie around one but not at it, so that a forgotten one shows.
        return (rng.normal(size=shape) * scale + (len(shape) == 1)).astype(np.float32)

    params: dict[str, Any] = {
        "embed": weight((config.vocab_size, config.hidden_size)),
        "final_norm": weight((config.hidden_size,)),
        "layers": [
            {name: weight(shape) for name, shape in block_shapes(config, layer).items()}
            for layer in range(config.num_layers)
        ],
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = weight((config.hidden_size, config.vocab_size))
    return params


@pytest.fixture(scope="session")
def draw_params() -> Callable[..., dict[str, Any]]:
    """Function of a geometry and a seed to a float32 NumPy weight tree."""
    return _draw_params


def _small(family: str, **options: Any) -> ModelConfig:
    shared: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 12,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "max_position_embeddings": 512,
    }
    return ModelConfig(family=family, **shared | options)


_FAMILIES = {
    "qwen3_moe": _small("qwen3_moe"),
    # Heads as wide as the stream divided among them: the family's config.json gives no width.
    "olmoe": _small(
        "olmoe",
        head_dim=4,
        hidden_size=16,
        norm_topk_prob=False,
        attention=AttentionOptions(query_key_norm="projection", clip=0.8),
    ),
    "mixtral": _small(
        "mixtral", attention=AttentionOptions(query_key_norm="none", sliding_window=9)
    ),
    "gpt_oss": _small(
        "gpt_oss",
        attention=AttentionOptions(
            bias=True,
            sinks=True,
            query_key_norm="none",
            sliding_window=9,
            full_interval=2,
            yarn=Yarn(factor=4.0, trained_context_tokens=32, truncate=False),
        ),
        gate=GateOptions(bias=True, softmax="chosen"),
        expert=ExpertOptions(activation="clamped_silu", bias=True, limit=1.5),
    ),
    "gemma4": _small(
        "gemma4",
        tie_word_embeddings=True,
        scale_embeddings=True,
        logit_softcap=20.0,
        attention=AttentionOptions(
            value_norm=True,
            scale=1.0,
            sliding_window=9,
            full_interval=2,
            full=FullAttention(
                num_kv_heads=1,
                head_dim=8,
                rope_theta=1000.0,
                rotary_fraction=0.25,
                values_from_keys=True,
            ),
        ),
        gate=GateOptions(own_norm=True),
        expert=ExpertOptions(activation="gelu_tanh"),
        block=BlockOptions(post_norms=True, dense_intermediate_size=10, output_scale=True),
    ),
}


@pytest.fixture(scope="session")
def families() -> dict[str, ModelConfig]:
    """A small member of each family, with the family's own options all in use."""
    return _FAMILIES


@pytest.fixture(scope="session", params=list(_FAMILIES))
def family_config(request: pytest.FixtureRequest) -> ModelConfig:
    """Each family's small member in turn."""
    return _FAMILIES[request.param]
