"""Text prompts to token ids at the door: off the event loop, with a bounded cache."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from serving.core.errors import ArtefactError, InvalidRequest

Encode = Callable[[str], list[int]]


class TextTokenizer:
    """Encodes prompts as the model's tokenizer does, special tokens included.

    The cache keeps whole prompts, newest use last, up to a number of characters: prompts
    repeat exactly when clients retry or fan out, and characters are what memory follows.
    """

    def __init__(
        self,
        encode: Encode,
        *,
        vocab_size: int,
        max_prompt_chars: int,
        cache_chars: int = 8 << 20,
        num_threads: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_hits = 0
        self._encode = encode
        self._max_prompt_chars = max_prompt_chars
        self._cache_chars = cache_chars
        self._cached_chars = 0
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def token_ids(self, text: str) -> np.ndarray:
        """Token ids of a prompt, read-only int32 [P].

        Raises:
            InvalidRequest: empty, or longer than any prompt that could fit the context.
        """
        if not text:
            raise InvalidRequest("text", text, "the prompt must not be empty")
        if len(text) > self._max_prompt_chars:
            raise InvalidRequest(
                "text", f"{len(text)} characters", f"must be <= {self._max_prompt_chars} characters"
            )
        cached = self._cache.get(text)
        if cached is not None:
            self._cache.move_to_end(text)
            self.num_hits += 1
            return cached
        loop = asyncio.get_running_loop()
        ids = np.array(await loop.run_in_executor(self._threads, self._encode, text), np.int32)
        ids.setflags(write=False)
        self._remember(text, ids)
        return ids

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _remember(self, text: str, ids: np.ndarray) -> None:
        if text in self._cache or len(text) > self._cache_chars:
            return
        self._cache[text] = ids
        self._cached_chars += len(text)
        while self._cached_chars > self._cache_chars:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_chars -= len(oldest)


def load_tokenizer(path: str | Path, *, max_prompt_chars: int) -> TextTokenizer:
    """Reads a Hugging Face `tokenizer.json` (the file, or the folder holding it).

    Raises:
        ArtefactError: the file is missing or is no tokenizer.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ArtefactError(file, "no such tokenizer file")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for every malformed file
        raise ArtefactError(file, f"is not a tokenizer: {error}") from error
    return TextTokenizer(
        lambda text: tokenizer.encode(text).ids,
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        max_prompt_chars=max_prompt_chars,
    )
