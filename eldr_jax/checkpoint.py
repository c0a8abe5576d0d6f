"""Model folders in the Hugging Face layout, and resumable training state.

A model folder holds `config.json`, `tokenizer.json` and the weights, either `model.safetensors`
or several files with `model.safetensors.index.json`. Tensor names and the [out, in] orientation
are those of `Qwen3MoeForCausalLM`, so transformers and vLLM load what is saved here and the other
way round. Weights rest in bfloat16 and work in float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors import safe_open
from safetensors.numpy import save_file

from eldr_jax.config import ConfigError, ModelConfig, from_hf, to_hf
from eldr_jax.model import Params, block_shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"


class CheckpointError(ValueError):
    """A model folder that does not hold what its `config.json` promises."""


# Our name -> suffix behind `model.layers.N.`; expert matrices apart.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate.weight",
}
_EXPERT_NAMES = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model's checkpoint, as stored.

    Args:
      config: geometry.

    Returns:
      Tensor name -> shape, matrices as [out, in].
    """
    vocab_shape = (config.vocab_size, config.hidden_size)
    shapes = {"model.embed_tokens.weight": vocab_shape, "model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = vocab_shape
    block = block_shapes(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, suffix in _BLOCK_NAMES.items():
            shapes[prefix + suffix] = block[name][::-1]
        for expert in range(config.num_experts):
            for name, projection in _EXPERT_NAMES.items():
                key = f"{prefix}mlp.experts.{expert}.{projection}.weight"
                shapes[key] = block[name][:0:-1]
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
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{config_path}: not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{config_path}: {error}") from error
    expected = tensor_shapes(config)
    tensors = dict(_stored_tensors(folder))
    problems = [f"missing {name} {list(expected[name])}" for name in expected.keys() - tensors]
    problems += [f"unexpected {name}" for name in tensors.keys() - expected.keys()]
    problems += [
        f"shape of {name} is {list(tensors[name].shape)}, must be {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if problems:
        raise CheckpointError(f"{folder}: " + "; ".join(sorted(problems)))
    return config, _params_from_tensors(config, tensors)


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


def _stored_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    for file_name in _weight_files(folder):
        file_path = folder / file_name
        try:
            with safe_open(file_path, framework="numpy") as stored:
                for name in stored.keys():  # noqa: SIM118 (not a mapping)
                    yield name, stored.get_tensor(name)
        except Exception as error:
            # The reader raises its own type and OSError alike; both mean the file is unusable.
            raise CheckpointError(f"{file_path}: cannot be read: {error}") from error


def _weight_files(folder: Path) -> list[str]:
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        return [WEIGHTS_FILE]
    try:
        weight_map: Mapping[str, str] = json.loads(index_path.read_text("utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: needs a weight_map of names to files") from error
    if outside := [name for name in files if Path(name).name != name]:
        raise CheckpointError(f"{index_path}: files must lie beside it, not {outside[0]!r}")
    return files


def _params_from_tensors(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Params:
    def wide(name: str) -> np.ndarray:
        return np.ascontiguousarray(tensors[name].T).astype(np.float32)

    params: Params = {
        "embed": np.ascontiguousarray(wide("model.embed_tokens.weight").T),
        "final_norm": wide("model.norm.weight"),
        "layers": [],
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = wide("lm_head.weight")
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        block = {name: wide(prefix + suffix) for name, suffix in _BLOCK_NAMES.items()}
        for name, projection in _EXPERT_NAMES.items():
            block[name] = np.stack(
                [
                    wide(f"{prefix}mlp.experts.{expert}.{projection}.weight")
                    for expert in range(config.num_experts)
                ]
            )
        params["layers"].append(block)
    return params


def _tensors_from_params(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    yield "model.embed_tokens.weight", np.asarray(params["embed"])
    yield "model.norm.weight", np.asarray(params["final_norm"])
    if not config.tie_word_embeddings:
        yield "lm_head.weight", np.asarray(params["lm_head"]).T
    for layer, block in enumerate(params["layers"]):
        prefix = f"model.layers.{layer}."
        for name, suffix in _BLOCK_NAMES.items():
            yield prefix + suffix, np.asarray(block[name]).T
        for name, projection in _EXPERT_NAMES.items():
            stacked = np.asarray(block[name])
            for expert in range(config.num_experts):
                yield f"{prefix}mlp.experts.{expert}.{projection}.weight", stacked[expert].T


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
