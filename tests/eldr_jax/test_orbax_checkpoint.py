"""Orbax folders: exact round trips and one error for everything that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eldr_jax.checkpoint import CheckpointError
from eldr_jax.config import ModelConfig
from eldr_jax.orbax_checkpoint import load_orbax, save_orbax

DrawParams = Callable[..., dict[str, Any]]


def test_round_trip_is_exact(
    tmp_path: Path, family_config: ModelConfig, draw_params: DrawParams
) -> None:
    params = draw_params(family_config)
    save_orbax(tmp_path, family_config, params)
    config, loaded = load_orbax(tmp_path)
    assert config == family_config
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_types_are_kept_on_disk_and_cast_on_loading(
    tmp_path: Path, draw_params: DrawParams, families: dict[str, ModelConfig]
) -> None:
    config = families["mixtral"]
    params = jax.tree.map(lambda w: w.astype(ml_dtypes.bfloat16), draw_params(config))
    save_orbax(tmp_path, config, params)
    # A second save replaces the first.
    save_orbax(tmp_path, config, params)
    _, loaded = load_orbax(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("f4")), loaded, params)
    _, narrow = load_orbax(tmp_path, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}


def test_one_error_lists_everything_that_is_wrong(
    tmp_path: Path, draw_params: DrawParams, families: dict[str, ModelConfig]
) -> None:
    config = families["gpt_oss"]
    params = draw_params(config)
    save_orbax(tmp_path, config, params)
    described = (tmp_path / "model.json").read_text()
    described = described.replace('"sinks": true', '"sinks": false')
    described = described.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    described = described.replace('"num_experts": 6', '"num_experts": 5')
    (tmp_path / "model.json").write_text(described)
    with pytest.raises(CheckpointError) as caught:
        load_orbax(tmp_path)
    message = str(caught.value)
    assert "unexpected layers.1.sinks" in message
    assert "unexpected lm_head" in message
    assert "shape of layers.0.gate_bias is [6], must be [5]" in message

    del params["layers"][0]["bq"]
    with pytest.raises(CheckpointError, match=r"missing layers\.0\.bq \[16\]"):
        save_orbax(tmp_path / "other", config, params)


def test_unreadable_files_are_named(
    tmp_path: Path, draw_params: DrawParams, families: dict[str, ModelConfig]
) -> None:
    with pytest.raises(CheckpointError, match=r"model\.json: cannot be read"):
        load_orbax(tmp_path)
    (tmp_path / "model.json").write_text('{"family": "mixtral"}')
    with pytest.raises(CheckpointError, match=r"model\.json: .*vocab_size"):
        load_orbax(tmp_path)
    config = families["mixtral"]
    save_orbax(tmp_path / "whole", config, draw_params(config))
    (tmp_path / "whole/params").rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="params: is no folder"):
        load_orbax(tmp_path / "whole")
