"""Geometry of a Mixture-of-Experts decoder: one frozen record that fixes shapes and arithmetic.

`ModelConfig` comes from a YAML file of `configs/models` (`load_model_config`) or from the
`config.json` of a Hugging Face folder (`eldr_jax.hugging_face`). It is hashable, so it can be a
static argument of a jitted function. What the families compute differently is in the option
records of `eldr_jax.architecture`.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path

import msgspec
import yaml

from eldr_jax.architecture import (
    AttentionOptions,
    BlockOptions,
    ConfigError,
    ExpertOptions,
    FullAttention,
    GateOptions,
    LayerAttention,
    Yarn,
)

__all__ = ["FAMILIES", "ConfigError", "ModelConfig", "block_shapes", "load_model_config"]

SCHEMA_VERSION = 1
FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "gemma4")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape and arithmetic of one model. Every layer is a MoE layer.

    Attributes:
      family: whose checkpoints it reads and writes, one of `FAMILIES`; the arithmetic is in the
        other fields alone.
      vocab_size: rows of the embedding, V.
      hidden_size: width of the residual stream, D.
      num_layers: decoder blocks, L.
      num_heads: query heads, H.
      num_kv_heads: key/value heads, Hkv; divides `num_heads`. Layers that attend to everything
        may have their own (`attention.full`), as for `head_dim` and `rope_theta`.
      head_dim: width of one head, Dh; even (RoPE turns pairs).
      num_experts: experts of a layer, E.
      num_experts_per_tok: experts a token goes to, K.
      moe_intermediate_size: width of one expert, F.
      rms_norm_eps: added to the mean square before the root.
      rope_theta: base of the rotary frequencies.
      norm_topk_prob: whether the K chosen probabilities are divided by their sum.
      tie_word_embeddings: whether the output head is the transposed embedding.
      max_position_embeddings: longest sequence in tokens.
      initializer_range: standard deviation of freshly drawn weights.
      bos_token_id: id that opens a document, or None.
      eos_token_id: id that ends a document, or None.
      scale_embeddings: whether embedded tokens are multiplied by sqrt(D).
      logit_softcap: c where logits become c * tanh(logits / c); None to leave them.
      attention: what the attention half does differently from Qwen3-MoE.
      gate: the same for the router.
      expert: the same for an expert.
      block: how the halves are put together.
    """

    family: str = "qwen3_moe"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    norm_topk_prob: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    scale_embeddings: bool = False
    logit_softcap: float | None = None
    attention: AttentionOptions = AttentionOptions()
    gate: GateOptions = GateOptions()
    expert: ExpertOptions = ExpertOptions()
    block: BlockOptions = BlockOptions()

    def __post_init__(self) -> None:
        """Checks the invariants.

        Raises:
          ConfigError: names the field, its value and the rule.
        """
        if self.family not in FAMILIES:
            raise ConfigError(f"family={self.family!r} must be one of {', '.join(FAMILIES)}")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if not 0.0 < value < float("inf"):
                raise ConfigError(f"{name}={value} must be positive and finite")
        if self.logit_softcap is not None and not 0.0 < self.logit_softcap < float("inf"):
            raise ConfigError(f"logit_softcap={self.logit_softcap} must be positive and finite")
        full = self.attention.full
        for field, num_kv_heads in (
            ("num_kv_heads", self.num_kv_heads),
            ("attention.full.num_kv_heads", full.num_kv_heads if full else 1),
        ):
            if self.num_heads % num_kv_heads:
                raise ConfigError(f"{field}={num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even, RoPE turns pairs")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok} must not exceed "
                f"num_experts={self.num_experts}"
            )
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ConfigError(f"{name}={value} must lie in [0, {self.vocab_size})")

    @property
    def query_width(self) -> int:
        """Columns of the query projection, H*Dh."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key (and of the value) projection, Hkv*Dh."""
        return self.num_kv_heads * self.head_dim

    def layer_attention(self, layer: int) -> LayerAttention:
        """Attention of layer `layer`, counted from 0, with everything resolved."""
        options = self.attention
        every = options.full_interval
        slides = options.sliding_window is not None and not (every and (layer + 1) % every == 0)
        full = None if slides else options.full
        head_dim = full.head_dim if full else self.head_dim
        return LayerAttention(
            num_heads=self.num_heads,
            num_kv_heads=full.num_kv_heads if full else self.num_kv_heads,
            head_dim=head_dim,
            window=options.sliding_window if slides else None,
            rope_theta=full.rope_theta if full else self.rope_theta,
            rotary_fraction=full.rotary_fraction if full else 1.0,
            values_from_keys=full.values_from_keys if full else False,
            scale=head_dim**-0.5 if options.scale is None else options.scale,
        )

    @property
    def max_kv_shape(self) -> tuple[int, int]:
        """Most key/value heads, and widest head, of any layer: (Hkv, Dh)."""
        layers = [self.layer_attention(layer) for layer in range(self.num_layers)]
        return max(a.num_kv_heads for a in layers), max(a.head_dim for a in layers)

    @property
    def num_params(self) -> int:
        """Weights of the whole model, a tied head counted once."""
        heads = 1 if self.tie_word_embeddings else 2
        blocks = sum(
            math.prod(shape)
            for layer in range(self.num_layers)
            for shape in block_shapes(self, layer).values()
        )
        return (heads * self.vocab_size + 1) * self.hidden_size + blocks


def block_shapes(config: ModelConfig, layer: int = 0) -> dict[str, tuple[int, ...]]:
    """Name and shape of each weight of one block.

    Args:
      config: geometry.
      layer: which block, from 0; blocks of sliding and of full attention may differ.

    Returns:
      Name -> shape, matrices as [in, out]. Always: `attn_norm`, `wq`, `wk`, `wo`, `mlp_norm`,
      `gate`, `w_gate`, `w_up`, `w_down`. By option: `wv`, `q_norm`, `k_norm`, biases `bq`, `bk`,
      `bv`, `bo`, `sinks` [H], `gate_bias` [E], `gate_scale` [D], `expert_scale` [E], expert
      biases `b_gate`, `b_up`, `b_down`, `attn_post_norm`, `mlp_post_norm`, the dense MLP's
      `dense_norm`, `dense_gate`, `dense_up`, `dense_down`, `dense_post_norm`,
      `expert_post_norm`, and `output_scale` [1].
    """
    d, f, e = config.hidden_size, config.moe_intermediate_size, config.num_experts
    attention, options = config.layer_attention(layer), config.attention
    query, kv = attention.query_width, attention.kv_width
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (d,), "wq": (d, query), "wk": (d, kv)}
    if not attention.values_from_keys:
        shapes["wv"] = (d, kv)
    shapes["wo"] = (query, d)
    if options.query_key_norm == "head":
        shapes |= {"q_norm": (attention.head_dim,), "k_norm": (attention.head_dim,)}
    elif options.query_key_norm == "projection":
        shapes |= {"q_norm": (query,), "k_norm": (kv,)}
    shapes |= {"mlp_norm": (d,), "gate": (d, e)}
    shapes |= {"w_gate": (e, d, f), "w_up": (e, d, f), "w_down": (e, f, d)}
    if options.bias:
        shapes |= {"bq": (query,), "bk": (kv,)}
        if not attention.values_from_keys:
            shapes["bv"] = (kv,)
        shapes["bo"] = (d,)
    if options.sinks:
        shapes["sinks"] = (config.num_heads,)
    if config.gate.bias:
        shapes["gate_bias"] = (e,)
    if config.gate.own_norm:
        shapes |= {"gate_scale": (d,), "expert_scale": (e,)}
    if config.expert.bias:
        shapes |= {"b_gate": (e, f), "b_up": (e, f), "b_down": (e, d)}
    if config.block.post_norms:
        shapes |= {"attn_post_norm": (d,), "mlp_post_norm": (d,)}
    if width := config.block.dense_intermediate_size:
        shapes |= {"dense_norm": (d,), "dense_gate": (d, width), "dense_up": (d, width)}
        shapes |= {"dense_down": (width, d), "dense_post_norm": (d,), "expert_post_norm": (d,)}
    if config.block.output_scale:
        shapes["output_scale"] = (1,)
    return shapes


class _ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of `configs/models`."""

    schema_version: int
    name: str
    source: str = ""
    model: ModelConfig

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version={self.schema_version} must be {SCHEMA_VERSION}")


def load_model_config(path: str | Path) -> ModelConfig:
    """Reads a model file of `configs/models`.

    Args:
      path: YAML file with `schema_version`, `name`, optional `source`, and `model`.

    Returns:
      The model's geometry.

    Raises:
      ConfigError: the file is no YAML mapping of that shape; names the field and the rule.
      OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return msgspec.convert(yaml.safe_load(text), _ModelFile).model
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}{_nearest_field(str(error))}") from error


_RECORDS = {
    "model": ModelConfig,
    "attention": AttentionOptions,
    "full": FullAttention,
    "yarn": Yarn,
    "gate": GateOptions,
    "expert": ExpertOptions,
    "block": BlockOptions,
}


def _nearest_field(message: str) -> str:
    """A hint naming the known field closest to the unknown one that `message` complains of."""
    found = re.search(r"unknown field `([^`]+)`(?: - at `\$\.?([\w.]*)`)?", message)
    if found is None:
        return ""
    record = _RECORDS.get((found.group(2) or "").rpartition(".")[2], _ModelFile)
    near = difflib.get_close_matches(found.group(1), record.__struct_fields__, n=1, cutoff=0.0)
    return f" (nearest known field: {near[0]})"
