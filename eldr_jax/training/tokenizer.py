"""The reference model's tokenizer: byte-level BPE over the training texts.

Byte-level, so every text encodes and decodes back exactly. Digits stand alone, as in Qwen's
tokenizers, so that numbers cost what they are long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from eldr_jax.config import ConfigError
from eldr_jax.training.data import END_OF_TEXT, CorpusError

SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")

# Contractions, letter runs with one leading space or sign, single digits, sign runs, line ends,
# blanks: the shape of the GPT-4 and Qwen patterns.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Fits a byte-level BPE vocabulary.

    Args:
      texts: training texts.
      vocab_size: size with the special tokens, whose ids come first.

    Returns:
      The tokenizer; it adds no tokens of its own when encoding.

    Raises:
      ConfigError: the vocabulary has no room for 256 bytes and the special tokens.
      CorpusError: the texts do not fill it.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ConfigError(f"vocab_size={vocab_size} must be at least {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise CorpusError(
            f"vocab_size={vocab_size} cannot be filled, the texts give only "
            f"{tokenizer.get_vocab_size()} tokens"
        )
    return tokenizer


def tokenizer_config(max_tokens: int) -> dict[str, Any]:
    """Content of `tokenizer_config.json`, by which transformers and vLLM load the tokenizer.

    Args:
      max_tokens: longest sequence of the model.

    Returns:
      A dictionary.
    """
    return {
        "add_bos_token": False,
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_tokens,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
