"""Tokenising at the door: off the loop, cached, bounded."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from serving.core.errors import ArtefactError, InvalidRequest
from serving.rpc.tokenize import TextTokenizer, load_tokenizer


def test_cache_is_bounded_by_characters_and_drops_the_oldest() -> None:
    calls: list[str] = []
    threads: set[int] = set()

    def encode(text: str) -> list[int]:
        calls.append(text)
        threads.add(threading.get_ident())
        return [len(text)]

    tokenizer = TextTokenizer(encode, vocab_size=9, max_prompt_chars=100, cache_chars=10)

    async def run() -> None:
        for text in ("aaaaa", "bbbbb", "aaaaa", "c", "aaaaa", "bbbbb"):
            assert (await tokenizer.token_ids(text)).tolist() == [len(text)]

    asyncio.run(run())
    tokenizer.close()
    # "c" pushes out "bbbbb", the least recently used.
    assert calls == ["aaaaa", "bbbbb", "c", "bbbbb"]
    assert tokenizer.num_hits == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("text", "rule"), [("", "must not be empty"), ("x" * 101, "<= 100")])
def test_bad_texts(text: str, rule: str) -> None:
    tokenizer = TextTokenizer(lambda _: [1], vocab_size=9, max_prompt_chars=100)
    with pytest.raises(InvalidRequest, match=rule):
        asyncio.run(tokenizer.token_ids(text))
    tokenizer.close()


def test_a_tokenizer_file(tmp_path: Path) -> None:
    source = Tokenizer(WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    source.pre_tokenizer = Whitespace()
    source.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, max_prompt_chars=100)
    assert tokenizer.vocab_size == 3
    assert asyncio.run(tokenizer.token_ids("world hello you")).tolist() == [1, 0, 2]
    tokenizer.close()


def test_a_broken_file_is_an_artefact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="no such tokenizer"):
        load_tokenizer(tmp_path, max_prompt_chars=100)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ArtefactError, match="is not a tokenizer"):
        load_tokenizer(tmp_path, max_prompt_chars=100)
