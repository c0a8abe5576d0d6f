"""Model geometry: invariants, YAML, Hugging Face keys."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eldr_jax.config import ConfigError, ModelConfig, load_model_config
from eldr_jax.hugging_face import from_hf, to_hf

REPO = Path(__file__).parents[2]
TINY = ModelConfig(
    vocab_size=300,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("family", "dense", "one of qwen3_moe"),
        ("vocab_size", 0, "at least 1"),
        ("num_layers", -1, "at least 1"),
        ("num_kv_heads", 3, "divide num_heads=4"),
        ("head_dim", 7, "even"),
        ("num_experts_per_tok", 9, "num_experts=8"),
        ("rms_norm_eps", 0.0, "positive"),
        ("rope_theta", float("inf"), "finite"),
        ("eos_token_id", 300, r"\[0, 300\)"),
    ],
)
def test_broken_rule_names_field_value_and_rule(field: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value!r}.*{rule}"):
        msgspec.structs.replace(TINY, **{field: value})


def test_config_is_hashable_and_equal_by_value() -> None:
    assert hash(TINY) == hash(msgspec.structs.replace(TINY))
    assert msgspec.structs.replace(TINY, num_layers=3) != TINY


@pytest.mark.parametrize("tied", [True, False])
def test_hf_round_trip(tied: bool) -> None:
    config = msgspec.structs.replace(TINY, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)
    assert from_hf(to_hf(config)) == config


def test_published_qwen3_30b_config_is_read() -> None:
    # Keys and values of Qwen/Qwen3-30B-A3B's config.json.
    hf = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = from_hf(hf)
    assert (config.num_layers, config.num_experts, config.num_experts_per_tok) == (48, 128, 8)
    # The published count is 30.5 billion.
    assert round(config.num_params / 1e9, 1) == 30.5
    written = to_hf(config)
    kept = hf.keys() - {"intermediate_size", "max_window_layers"}
    assert {key: written[key] for key in kept} == {key: hf[key] for key in kept}


def test_newer_hf_layout_of_the_rotary_base_is_read() -> None:
    hf = to_hf(TINY)
    del hf["rope_theta"]
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert from_hf(hf).rope_theta == 5000.0
    hf["rope_parameters"]["rope_type"] = "longrope"
    with pytest.raises(ConfigError, match="rope_parameters"):
        from_hf(hf)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("attention_bias", True),
        ("decoder_sparse_step", 2),
        ("hidden_act", "gelu"),
        ("mlp_only_layers", [0]),
        ("rope_scaling", {"type": "longrope"}),
        ("use_sliding_window", True),
    ],
)
def test_hf_options_that_are_not_computed_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        from_hf(to_hf(TINY) | {key: value})


def test_hf_missing_keys_are_all_listed() -> None:
    hf = to_hf(TINY)
    del hf["num_experts"], hf["hidden_size"]
    with pytest.raises(ConfigError, match="hidden_size, num_experts"):
        from_hf(hf)


def test_hf_wrong_type_names_the_key() -> None:
    with pytest.raises(ConfigError, match="num_experts"):
        from_hf(to_hf(TINY) | {"num_experts": "many"})


def test_model_file_of_the_reference_model() -> None:
    config = load_model_config(REPO / "configs/models/eldr_ref.yaml")
    # In bfloat16 the weights must fit the repository: 32 MB.
    assert config.num_params * 2 <= 32_000_000


def test_model_file_errors_name_the_file_and_the_nearest_field(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    text = (REPO / "configs/models/eldr_ref.yaml").read_text()
    path.write_text(text.replace("num_experts_per_tok", "num_expert_per_tok"))
    with pytest.raises(ConfigError, match=r"model.yaml.*nearest known field: num_experts_per_tok"):
        load_model_config(path)
    path.write_text(text.replace("head_dim: 32", "head_dim: 31"))
    with pytest.raises(ConfigError, match=r"model.yaml.*head_dim=31 must be even"):
        load_model_config(path)
    path.write_text(text.replace("schema_version: 1", "schema_version: 2"))
    with pytest.raises(ConfigError, match="schema_version=2 must be 1"):
        load_model_config(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        load_model_config(path)
