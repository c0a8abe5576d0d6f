"""What the published Mixture-of-Experts families do differently, as frozen records.

`eldr_jax.config.ModelConfig` holds one of each of `AttentionOptions`, `GateOptions`,
`ExpertOptions` and `BlockOptions`; the defaults are those of Qwen3-MoE. The layers read these
records and never ask for the name of a family. All are hashable, so a config can be a static
argument of a jitted function.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec


class ConfigError(ValueError):
    """A model description that names a wrong field, value or rule."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strictly decoded, hashable record."""


class Yarn(_Record, frozen=True, kw_only=True):
    """Stretched rotary frequencies (YaRN, arXiv 2309.00071, section 3).

    Attributes:
      factor: longest context over the trained one.
      trained_context_tokens: context length the frequencies were trained for.
      beta_fast: turns over the trained context above which a frequency stays as it is.
      beta_slow: turns below which it is divided by `factor`.
      truncate: whether the ramp between the two starts and ends at whole dimensions.
      attention_factor: scales cosine and sine; None for the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    trained_context_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        _positive(self, "factor", "trained_context_tokens", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            _positive(self, "attention_factor")
        if self.beta_slow >= self.beta_fast:
            raise ConfigError(
                f"beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}"
            )


class FullAttention(_Record, frozen=True, kw_only=True):
    """Geometry of the layers that attend to everything, where it is not that of the others.

    Attributes:
      num_kv_heads: key/value heads of those layers.
      head_dim: width of their heads; even.
      rope_theta: base of their rotary frequencies.
      rotary_fraction: share of the head's pairs that turn, the fastest ones; the rest stay still.
      values_from_keys: whether values are the key projection (before its norm) instead of one of
        their own.
    """

    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_fraction: float = 1.0
    values_from_keys: bool = False

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        _positive(self, "num_kv_heads", "head_dim", "rope_theta", "rotary_fraction")
        if self.head_dim % 2:
            raise ConfigError(f"full.head_dim={self.head_dim} must be even, RoPE turns pairs")
        if self.rotary_fraction > 1:
            raise ConfigError(f"rotary_fraction={self.rotary_fraction} must be at most 1")


class AttentionOptions(_Record, frozen=True, kw_only=True):
    """Attention half of a block.

    Attributes:
      bias: whether the four projections add a bias.
      sinks: whether each query head has a learned logit that takes part in the softmax and
        brings no value.
      query_key_norm: RMSNorm of queries and keys: per `head`, over the whole `projection`, `none`.
      value_norm: whether values are normed per head, without a weight.
      clip: largest absolute entry of queries, keys and values before RoPE; None for no clipping.
      scale: factor of the scores; None for head_dim**-0.5.
      sliding_window: tokens a sliding layer looks back, itself included; None where none slides.
      full_interval: with a sliding window: layers n, 2n, ... (counted from 1) attend to
        everything, the others slide; 0 where all slide.
      full: geometry of the full layers where it differs.
      yarn: stretched frequencies.
    """

    bias: bool = False
    sinks: bool = False
    query_key_norm: Literal["head", "projection", "none"] = "head"
    value_norm: bool = False
    clip: float | None = None
    scale: float | None = None
    sliding_window: int | None = None
    full_interval: int = 0
    full: FullAttention | None = None
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        for name in ("clip", "scale", "sliding_window"):
            if getattr(self, name) is not None:
                _positive(self, name)
        if self.full_interval < 0:
            raise ConfigError(f"full_interval={self.full_interval} must be at least 0")
        for name in ("full_interval", "full"):
            if getattr(self, name) and self.sliding_window is None:
                raise ConfigError(f"{name}={getattr(self, name)!r} needs a sliding_window")


class GateOptions(_Record, frozen=True, kw_only=True):
    """The router of a block.

    Attributes:
      bias: whether the gate's logits add a bias.
      softmax: over `all` experts before the choice, or over the `chosen` ones after it.
      own_norm: whether the gate reads the residual stream through a norm of its own (no weight,
        then a learned scale over sqrt(D)) and each expert's weight is multiplied by a learned
        scale of that expert.
    """

    bias: bool = False
    softmax: Literal["all", "chosen"] = "all"
    own_norm: bool = False


class ExpertOptions(_Record, frozen=True, kw_only=True):
    """What one expert computes: activation(x gate) * (x up), then down.

    Attributes:
      activation: `silu`; `gelu_tanh`; or `clamped_silu`: g = min(xg, limit), u = xu held in
        +-limit, g * sigmoid(alpha * g) * (u + 1).
      bias: whether the three projections add a bias.
      alpha: gain of the sigmoid, `clamped_silu` only.
      limit: clamp, `clamped_silu` only.
    """

    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"
    bias: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        _positive(self, "alpha", "limit")


class BlockOptions(_Record, frozen=True, kw_only=True):
    """How the halves of a block are put together.

    Attributes:
      post_norms: whether what a half adds to the stream is normed before it is added.
      dense_intermediate_size: width of a dense MLP beside the experts, 0 for none. It shares the
        experts' activation; with `post_norms` both outputs are normed before they are summed.
      output_scale: whether the block's output is multiplied by one learned number.
    """

    post_norms: bool = False
    dense_intermediate_size: int = 0
    output_scale: bool = False

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        if self.dense_intermediate_size < 0:
            raise ConfigError(f"{self.dense_intermediate_size=} must be at least 0")
        if self.dense_intermediate_size and not self.post_norms:
            raise ConfigError(f"{self.dense_intermediate_size=} needs post_norms")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """Attention of one layer with everything resolved.

    Attributes:
      num_heads: query heads, H.
      num_kv_heads: key/value heads, Hkv.
      head_dim: width of a head, Dh.
      window: tokens it looks back, itself included; None for all.
      rope_theta: base of the rotary frequencies.
      rotary_fraction: share of the head's pairs that turn.
      values_from_keys: whether values are the unnormed key projection.
      scale: factor of the scores.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    rope_theta: float
    rotary_fraction: float
    values_from_keys: bool
    scale: float

    @property
    def query_width(self) -> int:
        """Columns of the query projection, H*Dh."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (and of the value) projection, Hkv*Dh."""
        return self.num_kv_heads * self.head_dim


def _positive(record: _Record, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value} must be positive and finite")
