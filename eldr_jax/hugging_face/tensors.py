"""How tensors of a published checkpoint and leaves of the weight tree turn into each other.

A `TensorGroup` is the smallest set of stored tensors that is, as a whole, a set of leaves: one
matrix and its transpose, E expert matrices and their stack, or one fused tensor and the two leaves
it holds. Reading and writing are given side by side, so that what is written loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Stored tensors that together are some leaves of a block.

    Attributes:
      leaves: names as in `eldr_jax.config.block_shapes`.
      tensors: stored name -> stored shape, in the order `read` takes and `write` gives them.
      read: stored arrays to leaves, both in order; keeps the type.
      write: the inverse.
    """

    leaves: tuple[str, ...]
    tensors: Mapping[str, Shape]
    read: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def transposed(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> list[TensorGroup]:
    """Groups of one tensor: vectors as they are, matrices stored as [out, in].

    Args:
      shapes: of the block's leaves.
      names: leaf -> stored name; leaves the block does not have are passed over.
    """
    return [
        TensorGroup(
            leaves=(leaf,), tensors={name: shapes[leaf][::-1]}, read=_transpose, write=_transpose
        )
        for leaf, name in names.items()
        if leaf in shapes
    ]


def per_expert(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> list[TensorGroup]:
    """Groups of E matrices, one an expert, each stored as [out, in].

    Args:
      shapes: of the block's leaves.
      names: leaf -> stored name with `{expert}` in it.
    """
    groups = []
    for leaf, name in names.items():
        num_experts, rows, columns = shapes[leaf]
        tensors = {name.format(expert=index): (columns, rows) for index in range(num_experts)}
        groups.append(TensorGroup(leaves=(leaf,), tensors=tensors, read=_stack, write=_unstack))
    return groups


def fused_rows(shapes: Mapping[str, Shape], gate_up: str, down: str) -> list[TensorGroup]:
    """Expert stacks as [E, out, in], with the gate's and the up projection's rows in one tensor."""
    num_experts, hidden, width = shapes["w_gate"]
    return [
        TensorGroup(
            leaves=("w_gate", "w_up"),
            tensors={gate_up: (num_experts, 2 * width, hidden)},
            read=lambda arrays: np.split(arrays[0].swapaxes(1, 2), 2, axis=2),
            write=lambda leaves: [np.concatenate(leaves, axis=2).swapaxes(1, 2)],
        ),
        TensorGroup(
            leaves=("w_down",),
            tensors={down: (num_experts, hidden, width)},
            read=_swap,
            write=_swap,
        ),
    ]


def interleaved_columns(
    shapes: Mapping[str, Shape], gate_up: str, down: str, bias_suffix: str
) -> list[TensorGroup]:
    """Expert stacks as [E, in, out]; gate and up alternate column by column, biases alike."""
    num_experts, hidden, width = shapes["w_gate"]
    pair = {"read": _take_turns, "write": _interleave}
    same = {"read": list, "write": list}
    return [
        TensorGroup(
            leaves=("w_gate", "w_up"), tensors={gate_up: (num_experts, hidden, 2 * width)}, **pair
        ),
        TensorGroup(
            leaves=("b_gate", "b_up"),
            tensors={gate_up + bias_suffix: (num_experts, 2 * width)},
            **pair,
        ),
        TensorGroup(leaves=("w_down",), tensors={down: (num_experts, width, hidden)}, **same),
        TensorGroup(
            leaves=("b_down",), tensors={down + bias_suffix: (num_experts, hidden)}, **same
        ),
    ]


def _transpose(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.T for array in arrays]


def _swap(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.swapaxes(1, 2) for array in arrays]


def _stack(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.stack([array.T for array in arrays])]


def _unstack(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [matrix.T for matrix in leaves[0]]


def _take_turns(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [arrays[0][..., ::2], arrays[0][..., 1::2]]


def _interleave(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.stack(leaves, axis=-1).reshape(*leaves[0].shape[:-1], -1)]
