"""What a step must compute and read at least, from the model's shapes alone.

The yardstick for what a compiler reports and for how fast a step can possibly be. A multiply and
an add are two FLOPs; norms, rotary angles, softmax and the gate's choice are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from eldr_jax.config import ModelConfig, block_shapes
from eldr_jax.sharding import MeshPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Rows of a step.

    Attributes:
      num_tokens: rows.
      num_logits: rows whose logits are wanted.
      first_position: place of the first row (prefill), or of every row (decode).
      is_decode: whether every row is a sequence of its own; else all rows are one sequence.
    """

    num_tokens: int
    num_logits: int
    first_position: int
    is_decode: bool

    def pairs(self, window: int | None) -> int:
        """(row, key) pairs of one layer's attention.

        Args:
          window: tokens that a row sees, itself included; None for all.
        """
        first, rows = self.first_position, self.num_tokens
        if self.is_decode:
            seen = first + 1
            return rows * (seen if window is None else min(seen, window))
        if window is None:
            window = first + rows
        # Rows before the window is full see position + 1 keys.
        growing = max(0, min(rows, window - first))
        return growing * first + growing * (growing + 1) // 2 + (rows - growing) * window


def step_flops(config: ModelConfig, step: Step) -> float:
    """FLOPs of a step: projections, attention, gate, K experts a row, dense parts, head."""
    flops = 2.0 * step.num_logits * config.hidden_size * config.vocab_size
    for layer in range(config.num_layers):
        attention = config.layer_attention(layer)
        flops += 2.0 * step.num_tokens * _row_weights(config, layer)
        flops += 4.0 * step.pairs(attention.window) * attention.query_width
    return flops


def _row_weights(config: ModelConfig, layer: int) -> int:
    """Matrix weights of one block that one row meets."""
    total = 0
    for name, shape in block_shapes(config, layer).items():
        if name in ("w_gate", "w_up", "w_down"):
            total += config.num_experts_per_tok * shape[1] * shape[2]
        elif len(shape) == 2 and not name.startswith("b_"):
            total += shape[0] * shape[1]
    return total


def weight_bytes(config: ModelConfig, plan: MeshPlan, itemsize: int) -> float:
    """Weights that one device holds, in bytes."""
    return config.num_params * itemsize / plan.num_shards


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in all layers, in bytes."""
    widths = (config.layer_attention(layer).kv_width for layer in range(config.num_layers))
    return 2 * itemsize * sum(widths)


def read_bytes(config: ModelConfig, step: Step, itemsize: int) -> float:
    """Weights and keys and values that a step reads at least once.

    Rows that choose their experts evenly touch E * (1 - (1 - K/E)^T) of a layer's experts.
    """
    untouched = (1.0 - config.num_experts_per_tok / config.num_experts) ** step.num_tokens
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    experts = config.num_layers * config.num_experts * expert
    weights = config.num_params - untouched * experts
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    kv_rows = step.num_tokens * (step.first_position + 1) if step.is_decode else step.num_tokens
    return weights * itemsize + kv_rows * kv_bytes_per_token(config, itemsize)
