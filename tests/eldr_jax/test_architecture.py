"""Option records: rules that name field, value and rule, and one hint per unknown field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eldr_jax.architecture import (
    AttentionOptions,
    BlockOptions,
    ExpertOptions,
    FullAttention,
    Yarn,
)
from eldr_jax.config import ConfigError, load_model_config

MODELS = Path(__file__).parents[2] / "configs/models"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Yarn(factor=0.0, trained_context_tokens=8), r"factor=0\.0 must be positive"),
        (lambda: Yarn(factor=2.0, trained_context_tokens=0), "trained_context_tokens=0"),
        (
            lambda: Yarn(factor=2.0, trained_context_tokens=8, beta_fast=1.0),
            r"beta_slow=1\.0 must be below beta_fast=1\.0",
        ),
        (
            lambda: Yarn(factor=2.0, trained_context_tokens=8, attention_factor=-1.0),
            r"attention_factor=-1\.0",
        ),
        (
            lambda: FullAttention(num_kv_heads=1, head_dim=3, rope_theta=1.0),
            r"full\.head_dim=3 must be even",
        ),
        (
            lambda: FullAttention(num_kv_heads=1, head_dim=4, rope_theta=1.0, rotary_fraction=1.5),
            r"rotary_fraction=1\.5 must be at most 1",
        ),
        (lambda: AttentionOptions(clip=float("inf")), "clip=inf must be positive and finite"),
        (lambda: AttentionOptions(sliding_window=0), "sliding_window=0"),
        (lambda: AttentionOptions(full_interval=2), "full_interval=2 needs a sliding_window"),
        (lambda: AttentionOptions(sliding_window=4, full_interval=-1), "at least 0"),
        (lambda: ExpertOptions(limit=0.0), r"limit=0\.0"),
        (lambda: BlockOptions(dense_intermediate_size=4), "needs post_norms"),
        (lambda: BlockOptions(dense_intermediate_size=-4), "at least 0"),
    ],
)
def test_broken_rule_names_field_value_and_rule(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("beta_fast", "beta_fats", "beta_fast"),
        ("full_interval", "full_intervall", "full_interval"),
        ("softmax: chosen", "softmaxx: chosen", "softmax"),
        ("alpha: 1.702", "alfa: 1.702", "alpha"),
        ("head_dim", "head_dims", "head_dim"),
        ("schema_version", "schema_versoin", "schema_version"),
    ],
)
def test_unknown_field_of_any_record_gets_the_nearest_known_one(
    tmp_path: Path, old: str, new: str, hint: str
) -> None:
    text = (MODELS / "gpt_oss_120b.yaml").read_text()
    path = tmp_path / "model.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"nearest known field: {hint}\)"):
        load_model_config(path)


def test_full_layers_must_divide_the_heads_too(tmp_path: Path) -> None:
    text = (MODELS / "gemma_4_26b_a4b.yaml").read_text()
    path = tmp_path / "model.yaml"
    path.write_text(text.replace("num_kv_heads: 2", "num_kv_heads: 3"))
    with pytest.raises(ConfigError, match=r"full\.num_kv_heads=3 must divide num_heads=16"):
        load_model_config(path)
