"""Tiny random checkpoints written by transformers, loaded here, and a table of how they agree.

Runs with the `parity` extra (`make parity`); skipped elsewhere. Weights are drawn so that nothing
is at its default: norms are not one, biases, sinks and scales not zero or one. Beside them, the
reference model of this repository as transformers loads it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from eldr_jax.checkpoint import load_model_dir
from eldr_jax.config import ModelConfig
from eldr_jax.model import Params

_REASON = "needs the parity extra: make parity"
VOCAB = 131
NUM_NEW_TOKENS = 24
LENGTHS = (1, 5, 16, 37, 64, 90)
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_QWEN = _SHARED | {
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_OLMOE = _SHARED | {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 24}
_MIXTRAL = _SHARED | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
_GPT_OSS = _SHARED | {
    "head_dim": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "intermediate_size": 32,
    "sliding_window": 12,
    "rope_parameters": _YARN | {"beta_fast": 8.0, "beta_slow": 1.0, "truncate": False},
    # Small enough that the clamp is met.
    "swiglu_limit": 1.5,
}
_GEMMA = _SHARED | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 24,
    "intermediate_size": 40,
    "sliding_window": 12,
    "final_logit_softcapping": 30.0,
}
_GEMMA_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
_GEMMA_WHOLE = {
    "text_config": _GEMMA,
    "vision_config": _GEMMA_VISION,
    # Beyond the vocabulary: a text, and what follows it, holds none of these.
    "image_token_id": VOCAB + 1,
    "video_token_id": VOCAB + 2,
    "audio_token_id": VOCAB + 3,
}
REFERENCE = "reference model, trained"
REFERENCE_FOLDER = Path(__file__).parents[2] / "configs/artefacts/reference_model"
# Name -> configuration class, model class, settings. One family may have several members.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _QWEN),
    "qwen3_moe, yarn, tied": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _QWEN | {"rope_parameters": _YARN, "tie_word_embeddings": True, "norm_topk_prob": False},
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", _OLMOE),
    "olmoe, clipped": ("OlmoeConfig", "OlmoeForCausalLM", _OLMOE | {"clip_qkv": 0.7}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL),
    "mixtral, sliding": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL | {"sliding_window": 12}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA),
    "gemma4, own values": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        _GEMMA
        | {
            "attention_k_eq_v": False,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4, multimodal folder": (
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        _GEMMA_WHOLE,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """What transformers makes of one prompt.

    Attributes:
      logits: float32 [T, V].
      ids: int32 [L, T, K], each token's experts in ascending order.
    """

    logits: np.ndarray
    ids: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One checkpoint, as transformers has it and as it loads here."""

    name: str
    torch: Any
    theirs: Any
    config: ModelConfig
    params: Params
    prompts: tuple[np.ndarray, ...]
    folder: Path

    def read(self, prompt: np.ndarray) -> Reading:
        """Runs a prompt through transformers, alone and without padding."""
        chosen: list[np.ndarray] = []

        def keep(module: Any, inputs: Any, output: Any) -> None:
            chosen.append(np.sort(output[2].numpy().astype(np.int32), axis=-1))

        routers = [m for m in self.theirs.modules() if type(m).__name__.endswith("Router")]
        hooks = [router.register_forward_hook(keep) for router in routers]
        try:
            with self.torch.no_grad():
                logits = self.theirs(self.torch.from_numpy(prompt[None].astype(np.int64))).logits
        finally:
            for hook in hooks:
                hook.remove()
        return Reading(logits=logits[0].numpy(), ids=np.stack(chosen))

    def continue_greedily(self, prompt: np.ndarray) -> np.ndarray:
        """The next tokens by transformers' own cached greedy decoding."""
        with self.torch.no_grad():
            tokens = self.theirs.generate(
                self.torch.from_numpy(prompt[None].astype(np.int64)),
                attention_mask=self.torch.ones((1, len(prompt)), dtype=self.torch.int64),
                max_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                use_cache=True,
            )
        return tokens[0, len(prompt) :].numpy()


def _draw(torch: Any, model: Any) -> None:
    """Random weights in which every tensor shows."""
    generator = torch.Generator().manual_seed(7)
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")
    }
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name or name.endswith(("scale", "scalar")):
            tensor.copy_(1.0 + 0.2 * noise)
            # Where scores have no factor, a trained model's norms carry it; with norms of one a
            # softmax is so sharp that float32 is 6e-5 from float64, on either side.
            if "self_attn" in name and model.config.model_type.startswith("gemma4"):
                tensor.mul_(tensor.shape[0] ** -0.25)
        elif tensor.ndim < 2 or name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        else:
            fan_in = tensor.shape[1] if tensor.ndim == 2 else max(tensor.shape[1:])
            gain = 2.0 if "router" in name or "gate.weight" in name else 1.0
            tensor.copy_(gain * noise * fan_in**-0.5)


def _write(torch: Any, transformers: Any, name: str, folder: Path) -> Any:
    """Draws a model and writes its checkpoint in several files with an index."""
    config_name, model_name, settings = CASES[name]
    if not hasattr(transformers, model_name):
        pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    with torch.no_grad():
        _draw(torch, model)
    model.save_pretrained(folder, max_shard_size="200KB")
    assert (folder / "model.safetensors.index.json").exists()
    return model.eval()


@pytest.fixture(scope="session", params=[*CASES, REFERENCE])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One checkpoint on both sides."""
    torch = pytest.importorskip("torch", reason=_REASON)
    transformers = pytest.importorskip("transformers", reason=_REASON)
    torch.set_num_threads(1)
    rng = np.random.default_rng(11)
    if request.param == REFERENCE:
        folder = REFERENCE_FOLDER
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        texts = _texts(folder, LENGTHS)
    else:
        folder = tmp_path_factory.mktemp("checkpoint")
        model = _write(torch, transformers, request.param, folder)
        texts = [rng.integers(3, VOCAB - 3, length) for length in LENGTHS]
    # Greedy decoding runs on past an end token, on both sides.
    model.generation_config.eos_token_id = None
    config, params = load_model_dir(folder)
    return Pair(
        name=request.param,
        torch=torch,
        theirs=model,
        config=config,
        params=params,
        prompts=tuple(text.astype(np.int32) for text in texts),
        folder=folder,
    )


def _texts(folder: Path, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Beginnings of a text, in tokens: code, law, and other scripts in turns."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (Path(__file__).parents[2] / "configs/prompts/demo.jsonl").read_text("utf-8")
    tokens = np.asarray(tokenizer.encode(text).ids)
    return [tokens[997 * index :][:length] for index, length in enumerate(lengths)]


_TABLE: dict[str, dict[str, str]] = {}


@pytest.fixture
def note(pair: Pair) -> dict[str, str]:
    """The pair's row of the table printed at the end."""
    return _TABLE.setdefault(pair.name, {})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what was measured, family by family."""
    if not _TABLE:
        return
    columns = ("max abs logit error", "largest logit", "expert ids equal", "greedy tokens equal")
    terminalreporter.section("parity with transformers")
    terminalreporter.line(" | ".join(("family", *columns)))
    for name, row in _TABLE.items():
        terminalreporter.line(" | ".join((name, *(row.get(column, "-") for column in columns))))
