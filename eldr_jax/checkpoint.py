"""Model folders in the Hugging Face layout, and resumable training state.

A model folder holds `config.json`, `tokenizer.json` and the weights, either `model.safetensors`
or several files with `model.safetensors.index.json`. Tensor names and orientation are those of the
family's published checkpoints (`eldr_jax.hugging_face`), so transformers and vLLM load what is
saved here and the other way round. Weights are saved in bfloat16 and work in float32; any float
type is read, and MXFP4 (`eldr_jax.mxfp4`). Names, shapes and types are checked before a weight is
read, and weights are read one at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import msgspec
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open
from safetensors.numpy import save_file

from eldr_jax import mxfp4
from eldr_jax.config import ConfigError, ModelConfig
from eldr_jax.hugging_face import TensorGroup, family_of, from_hf, to_hf
from eldr_jax.model import Params

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"


class CheckpointError(ValueError):
    """A model folder that does not hold what its `config.json` promises."""


# Leaf -> name of the tensors outside the blocks, which all families share.
_OUTER_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model's checkpoint, as stored.

    Args:
      config: geometry.

    Returns:
      Tensor name -> shape.
    """
    shapes = {name: shape for _, name, shape in _outer_tensors(config)}
    for _, group in _block_groups(config):
        shapes |= group.tensors
    return shapes


def load_model_dir(path: str | Path) -> tuple[ModelConfig, Params]:
    """Loads a model folder.

    Args:
      path: folder with `config.json` and the weights.

    Returns:
      The geometry, and the weights as the float32 NumPy tree that `eldr_jax.model.params_of`
      documents (any float type on disk is widened).

    Raises:
      CheckpointError: a file is missing or unreadable, or tensors are missing, too many or of a
        wrong shape; one error lists all of them.
      ConfigError: `config.json` describes a model that is not computed here.
    """
    folder = Path(path)
    config_path = folder / CONFIG_FILE
    try:
        config = from_hf(json.loads(config_path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{config_path}: cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{config_path}: not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from error
    with ExitStack() as stack:
        stored = _Stored.open(folder, config, stack)
        stored.check(tensor_shapes(config))
        return config, _read_params(config, stored)


def save_model_dir(
    path: str | Path, config: ModelConfig, params: Params, tokenizer_json: str | None = None
) -> None:
    """Writes a model folder: weights in bfloat16, one file.

    Args:
      path: folder, made if absent; files of the same names are replaced.
      config: geometry.
      params: weights as in `eldr_jax.model.params_of`.
      tokenizer_json: content of `tokenizer.json`, or None to leave the tokenizer alone.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(array).astype(ml_dtypes.bfloat16))
        for name, array in _tensors_from_params(config, params)
    }
    # Renamed into place: a reader never meets half a file.
    partial = folder / f"{WEIGHTS_FILE}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    # The writer leaves the file to its owner alone; weights are as readable as what is beside.
    partial.chmod(0o644)
    os.replace(partial, folder / WEIGHTS_FILE)
    _write_json(folder / CONFIG_FILE, to_hf(config))
    if tokenizer_json is not None:
        (folder / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")


def save_training_state(directory: str | Path, step: int, state: Any) -> None:
    """Saves a tree of arrays with orbax, keeping the newest two steps.

    Args:
      directory: folder of the run's checkpoints.
      step: step number.
      state: tree of arrays.
    """
    with _manager(directory) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()


def restore_training_state(directory: str | Path, like: Any) -> tuple[int, Any] | None:
    """Restores the newest saved step.

    Args:
      directory: folder of the run's checkpoints.
      like: tree of arrays, or of their shapes and types, with the expected structure.

    Returns:
      Step and tree, or None where nothing was saved.
    """
    with _manager(directory) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        return step, manager.restore(step, args=ocp.args.StandardRestore(abstract))


def _manager(directory: str | Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(Path(directory).absolute(), options=options)


class _Stored:
    """Tensors of a folder by the family's local names; read when asked for."""

    def __init__(self, folder: Path, places: dict[str, tuple[Any, str]]) -> None:
        self._folder = folder
        self._places = places

    @classmethod
    def open(cls, folder: Path, config: ModelConfig, stack: ExitStack) -> _Stored:
        places: dict[str, tuple[Any, str]] = {}
        problems = []
        family = family_of(config)
        files, indexed = _weight_files(folder)
        for file_name in files:
            try:
                opened = stack.enter_context(safe_open(folder / file_name, framework="numpy"))
                names = list(opened.keys())
            except Exception as error:
                # The reader raises its own type and OSError alike; both mean it is unusable.
                problems.append(f"{file_name}: cannot be read: {error}")
                continue
            indexed -= set(names)
            for name in names:
                if (local := family.local_name(name)) is None:
                    continue
                if local in places:
                    problems.append(f"{name} is in {file_name} and in another file")
                places[local] = (opened, name)
        if not problems:
            problems = [f"{INDEX_FILE} names {name}, no file holds it" for name in sorted(indexed)]
        if problems:
            raise CheckpointError(f"{folder}: " + "; ".join(problems))
        return cls(folder, places)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """One error with everything that is missing, too much or of a wrong shape or type."""
        problems = []
        used = set()
        for name, shape in expected.items():
            parts = self._parts(name, shape)
            if absent := [part for part in parts if part not in self._places]:
                problems += [f"missing {part} {list(parts[part][0])}" for part in absent]
            for part in parts.keys() - absent:
                wanted, types = parts[part]
                view = self._view(part)
                if (got := tuple(view.get_shape())) != wanted:
                    problems.append(f"shape of {part} is {list(got)}, must be {list(wanted)}")
                if view.get_dtype() not in types:
                    rule = f"must be {' or '.join(types)}"
                    problems.append(f"type of {part} is {view.get_dtype()}, {rule}")
            used |= parts.keys()
        problems += [f"unexpected {name}" for name in self._places.keys() - used]
        if problems:
            raise CheckpointError(f"{self._folder}: " + "; ".join(sorted(problems)))

    def read(self, name: str) -> np.ndarray:
        """A tensor as float32."""
        if name in self._places:
            opened, stored_name = self._places[name]
            return opened.get_tensor(stored_name).astype(np.float32)
        blocks, scales = (
            self._places[name + suffix][0].get_tensor(self._places[name + suffix][1])
            for suffix in (mxfp4.BLOCKS_SUFFIX, mxfp4.SCALES_SUFFIX)
        )
        try:
            # Quantised along the input axis, which is the last one of the stored tensor alone.
            return mxfp4.dequantise(blocks, scales).swapaxes(1, 2)
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {name}: {error}") from error

    def _view(self, name: str) -> Any:
        opened, stored_name = self._places[name]
        return opened.get_slice(stored_name)

    def _parts(
        self, name: str, shape: tuple[int, ...]
    ) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """The stored tensors that are `name`: itself, or its MXFP4 blocks and scales."""
        blocks, scales = name + mxfp4.BLOCKS_SUFFIX, name + mxfp4.SCALES_SUFFIX
        can_be_packed = len(shape) == 3 and shape[1] % mxfp4.BLOCK_VALUES == 0
        if name in self._places or not can_be_packed or not {blocks, scales} & self._places.keys():
            return {name: (shape, _FLOAT_TYPES)}
        num_experts, width, out = shape
        groups = (num_experts, out, width // mxfp4.BLOCK_VALUES)
        packed = mxfp4.BLOCK_VALUES // 2
        return {blocks: ((*groups, packed), ("U8",)), scales: (groups, ("U8",))}


class _Index(msgspec.Struct):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


def _weight_files(folder: Path) -> tuple[list[str], set[str]]:
    """Names of the weight files, and of the tensors that the index promises."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return [WEIGHTS_FILE], set()
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule = "needs a weight_map of names to files"
        raise CheckpointError(f"{index_path}: {rule}: {error}") from error
    files = sorted(set(weight_map.values()))
    if outside := [name for name in files if Path(name).name != name]:
        raise CheckpointError(f"{index_path}: files must lie beside it, not {outside[0]!r}")
    return files, set(weight_map)


def _outer_tensors(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Leaf, name and stored shape of the tensors outside the blocks."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    yield "embed", _OUTER_NAMES["embed"], vocab_shape
    yield "final_norm", _OUTER_NAMES["final_norm"], (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head", _OUTER_NAMES["lm_head"], vocab_shape


def _block_groups(config: ModelConfig) -> Iterator[tuple[int, TensorGroup]]:
    """Layer and groups of stored tensors of all blocks, under their full names."""
    family = family_of(config)
    for layer in range(config.num_layers):
        for group in family.block_groups(config, layer):
            names = {f"model.layers.{layer}.{name}": s for name, s in group.tensors.items()}
            yield layer, dataclasses.replace(group, tensors=names)


def _read_params(config: ModelConfig, stored: _Stored) -> Params:
    params: Params = {"layers": [{} for _ in range(config.num_layers)]}
    for leaf, name, _ in _outer_tensors(config):
        array = stored.read(name)
        params[leaf] = np.ascontiguousarray(array.T if leaf == "lm_head" else array)
    for layer, group in _block_groups(config):
        leaves = group.read([stored.read(name) for name in group.tensors])
        for leaf, array in zip(group.leaves, leaves, strict=True):
            params["layers"][layer][leaf] = np.ascontiguousarray(array)
    return params


def _tensors_from_params(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    for leaf, name, _ in _outer_tensors(config):
        array = np.asarray(params[leaf])
        yield name, array.T if leaf == "lm_head" else array
    for layer, group in _block_groups(config):
        block = params["layers"][layer]
        arrays = group.write([np.asarray(block[leaf]) for leaf in group.leaves])
        yield from zip(group.tensors, arrays, strict=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
