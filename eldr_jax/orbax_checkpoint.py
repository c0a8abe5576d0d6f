"""A model as an orbax checkpoint: sharded, parallel, and without another framework's names.

A folder holds `model.json` (the geometry, strictly decoded) and `params/` (the weight tree of
`eldr_jax.model.params_of`, in any float type). Loading compares the tree's shapes with the
geometry before a weight is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import orbax.checkpoint as ocp

from eldr_jax.checkpoint import CheckpointError
from eldr_jax.config import ModelConfig
from eldr_jax.model import Params, param_shapes

CONFIG_FILE = "model.json"
PARAMS_DIR = "params"


def save_orbax(path: str | Path, config: ModelConfig, params: Params) -> None:
    """Writes a model; an older one at the same place is replaced.

    Args:
      path: folder, made if absent.
      config: geometry.
      params: weights as in `eldr_jax.model.params_of`, NumPy or JAX, kept in their types.

    Raises:
      CheckpointError: the weights are not those of `config`; lists all that differ.
    """
    folder = Path(path).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _compare(folder, config, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMS_DIR, jax.tree.map(jnp.asarray, params), force=True)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def load_orbax(path: str | Path, dtype: Any = jnp.float32) -> tuple[ModelConfig, Params]:
    """Reads a model.

    Args:
      path: folder written by `save_orbax`.
      dtype: type the weights get.

    Returns:
      Geometry and weights as JAX arrays.

    Raises:
      CheckpointError: a file is missing or unreadable, or tensors are missing, too many or of a
        wrong shape; one error lists all of them.
    """
    folder = Path(path).absolute()
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=ModelConfig)
    except OSError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    if not (folder / PARAMS_DIR).is_dir():
        raise CheckpointError(f"{folder / PARAMS_DIR}: is no folder")
    with ocp.StandardCheckpointer() as checkpointer:
        # A folder that orbax did not write has no metadata: everything is missing.
        _compare(folder, config, checkpointer.metadata(folder / PARAMS_DIR).item_metadata)
        like = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, dtype),
            param_shapes(config),
            is_leaf=lambda node: isinstance(node, tuple),
        )
        return config, checkpointer.restore(folder / PARAMS_DIR, like)


def _compare(folder: Path, config: ModelConfig, tree: Any) -> None:
    expected = _named_shapes(param_shapes(config))
    found = _named_shapes(tree)
    problems = [f"missing {name} {list(expected[name])}" for name in expected.keys() - found]
    problems += [f"unexpected {name}" for name in found.keys() - expected.keys()]
    problems += [
        f"shape of {name} is {list(found[name])}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise CheckpointError(f"{folder}: " + "; ".join(sorted(problems)))


def _named_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(getattr(leaf, "shape", leaf))
        for path, leaf in leaves
    }
