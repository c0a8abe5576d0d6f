"""Prompts to capture: seeded prefixes of corpus texts on one side of the split, or a JSONL.

The split is the training's own (`eldr_jax.training.data`), so what is held out from training
is held out from calibration too, translations of a held-out problem included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from eldr_jax.training.data import (
    HELD_OUT_CORPORA,
    TRAINING_CORPORA,
    CorpusError,
    Document,
    Split,
    domain_cycle,
    read_corpus,
    read_training_documents,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt to run.

    Attributes:
        prompt_id: unique in the capture.
        domain: label for reports; the fit never sees it.
        token_ids: int32 [P], P >= 1.
    """

    prompt_id: str
    domain: str
    token_ids: np.ndarray


def corpus_prompts(
    corpora_dir: str | Path,
    tokenizer: Tokenizer,
    *,
    split: Split,
    num_prompts: int,
    min_tokens: int,
    max_tokens: int,
    task_share: float,
    seed: int,
) -> list[Prompt]:
    """Draws prefixes of texts, domains taking turns.

    Args:
        corpora_dir: folder with the corpora of `eldr_jax.training.data`.
        tokenizer: the model's.
        split: which side of the split.
        num_prompts: how many at most; fewer when the texts run out.
        min_tokens: shorter texts are left out, and no cut falls below it.
        max_tokens: no cut falls above it.
        task_share: share of task texts, the rest languages; inside each group every domain
            gets the same.
        seed: draws the texts and their cuts; the same seed gives the same prompts.

    Raises:
        CorpusError: no usable text.
        ValueError: bad limits.
    """
    if not 1 <= min_tokens <= max_tokens:
        raise ValueError(f"{min_tokens=} must lie in [1, {max_tokens=}]")
    rng = np.random.default_rng(seed)
    queues: dict[str, list[Document]] = {}
    for document in _documents(Path(corpora_dir), split):
        queues.setdefault(document.domain, []).append(document)
    for domain in sorted(queues):
        queues[domain] = [queues[domain][i] for i in rng.permutation(len(queues[domain]))]
    cycle = domain_cycle(sorted(queues), task_share)
    prompts: list[Prompt] = []
    while len(prompts) < num_prompts and any(queues.values()):
        for domain in cycle:
            if len(prompts) == num_prompts:
                break
            prompt = _next_prompt(queues[domain], tokenizer, min_tokens, max_tokens, rng)
            if prompt is not None:
                prompts.append(prompt)
    if not prompts:
        raise CorpusError(f"no text of at least {min_tokens} tokens in {corpora_dir}")
    return prompts


def jsonl_prompts(path: str | Path, tokenizer: Tokenizer, *, max_tokens: int) -> list[Prompt]:
    """Reads prompts from JSON lines with `id`, `prompt` or `text`, and `domain` or `lang`.

    Args:
        path: the file.
        tokenizer: the model's.
        max_tokens: longer prompts are cut.

    Raises:
        CorpusError: a malformed row, or an id twice; names the file and the line.
    """
    prompts = []
    seen = set()
    for document in read_corpus(path):
        prompt_id = f"{document.domain}:{document.id}"
        if prompt_id in seen:
            raise CorpusError(f"{Path(path).name}: id {document.id!r} stands twice")
        seen.add(prompt_id)
        ids = tokenizer.encode(document.text).ids[:max_tokens]
        if not ids:
            raise CorpusError(f"{Path(path).name}: id {document.id!r} is empty")
        prompts.append(_prompt(document, ids))
    if not prompts:
        raise CorpusError(f"{Path(path).name}: must hold at least one row")
    return prompts


def _documents(folder: Path, split: Split) -> list[Document]:
    if split == "train":
        return read_training_documents(folder)
    return [
        document
        for name in (*TRAINING_CORPORA, *HELD_OUT_CORPORA)
        for document in read_corpus(folder / f"{name}.jsonl")
        if document.split == "heldout"
    ]


def _next_prompt(
    queue: list[Document],
    tokenizer: Tokenizer,
    min_tokens: int,
    max_tokens: int,
    rng: np.random.Generator,
) -> Prompt | None:
    """The next text of a domain that is long enough, cut; None when there is none left."""
    while queue:
        document = queue.pop()
        ids = tokenizer.encode(document.text).ids
        if len(ids) >= min_tokens:
            cut = int(rng.integers(min_tokens, min(max_tokens, len(ids)) + 1))
            return _prompt(document, ids[:cut])
    return None


def _prompt(document: Document, ids: list[int]) -> Prompt:
    return Prompt(
        prompt_id=f"{document.domain}:{document.id}",
        domain=document.domain,
        token_ids=np.array(ids, np.int32),
    )
