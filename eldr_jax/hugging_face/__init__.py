"""Published checkpoints: their `config.json` and tensor names, one module a family."""

from eldr_jax.hugging_face.registry import family_of, from_hf, to_hf
from eldr_jax.hugging_face.tensors import TensorGroup

__all__ = ["TensorGroup", "family_of", "from_hf", "to_hf"]
