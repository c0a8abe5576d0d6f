"""Weights for tests without compiling anything to draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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


@pytest.fixture
def draw_params() -> Callable[..., dict[str, Any]]:
    """Function of a geometry and a seed to a float32 NumPy weight tree."""
    return _draw_params
