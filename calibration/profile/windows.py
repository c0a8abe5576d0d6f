"""Prompts and continuations cut from real texts, on one side of a calibrate/serve split.

The split goes by what a text says, not by its id: translations of a page, and a problem with
its translations (MGSM's are those of GSM8K's first test problems), stay on one side.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from calibration.profile.settings import Workload
from eldr_jax.training.data import CorpusError, Document, read_corpus

Side = Literal["calibrate", "serve"]

_CALIBRATE_SHARE = 0.3
_MGSM = re.compile(r"^mgsm/(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A prompt and what follows it in its text.

    Attributes:
        prompt_id: unique; names the text and the cut.
        domain: text domain.
        subject: what the split and the topics go by, see `subject_of`.
        prompt: int32 [P].
        continuation: int32 [G]; the text's next tokens, and beyond its end tokens drawn from
            the text itself.
    """

    prompt_id: str
    domain: str
    subject: str
    prompt: np.ndarray
    continuation: np.ndarray


def subject_of(document_id: str) -> str:
    """What a text is about: equal for a page's or a problem's translations."""
    if problem := _MGSM.match(document_id):
        return f"gsm8k-test/{problem.group(1)}"
    return document_id.split("#", 1)[0] if document_id.startswith("handbook/") else document_id


def side_of(document_id: str) -> Side:
    """Side of a text; a function of its subject alone."""
    return "calibrate" if unit_hash("side", subject_of(document_id)) < _CALIBRATE_SHARE else "serve"


def unit_hash(*parts: str) -> float:
    """A number in [0, 1) that depends on nothing but the parts."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def read_side(corpora_dir: str | Path, group: str, side: Side) -> list[Document]:
    """All texts of a group's corpora on one side.

    Raises:
        CorpusError: no corpus of that group, or a malformed row.
    """
    files = sorted(Path(corpora_dir).glob(f"{group}_*.jsonl"))
    if not files:
        raise CorpusError(f"{corpora_dir}: must hold corpora {group}_*.jsonl")
    return [
        document for file in files for document in read_corpus(file) if side_of(document.id) == side
    ]


def draw_windows(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    workload: Workload,
    *,
    num_prompts: int,
    seed: int,
) -> Iterator[Window]:
    """Draws prompts by the workload's mix; texts of a domain take turns, cuts are new each time.

    Args:
        documents: texts of one side.
        tokenizer: of the substrate.
        workload: mix, lengths.
        num_prompts: how many.
        seed: of every draw.

    Raises:
        CorpusError: a domain of the mix without a usable text.
    """
    rng = np.random.default_rng(seed)
    texts = {
        domain: _tokenised((d for d in documents if d.domain == domain), tokenizer, workload, rng)
        for domain in workload.mix
    }
    if empty := [domain for domain, found in texts.items() if not found]:
        raise CorpusError(
            f"domain {empty[0]!r} has no text of {workload.min_prompt_tokens} tokens on this side"
        )
    domains = list(workload.mix)
    shares = np.array([workload.mix[domain] for domain in domains])
    turns = dict.fromkeys(domains, 0)
    for number in range(num_prompts):
        domain = domains[int(rng.choice(len(domains), p=shares / shares.sum()))]
        document, ids = texts[domain][turns[domain] % len(texts[domain])]
        turns[domain] += 1
        yield _cut(document, ids, workload, number, rng)


def _tokenised(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    workload: Workload,
    rng: np.random.Generator,
) -> list[tuple[Document, np.ndarray]]:
    """Texts long enough for a prompt and a token after it, in a drawn order."""
    kept = list(documents)
    encoded = tokenizer.encode_batch([document.text for document in kept])
    pairs = [
        (document, np.array(item.ids, np.int32))
        for document, item in zip(kept, encoded, strict=True)
        if len(item.ids) > workload.min_prompt_tokens
    ]
    return [pairs[i] for i in rng.permutation(len(pairs))]


def _cut(
    document: Document,
    ids: np.ndarray,
    workload: Workload,
    number: int,
    rng: np.random.Generator,
) -> Window:
    longest = min(workload.max_prompt_tokens, len(ids) - 1)
    length = int(rng.integers(workload.min_prompt_tokens, longest + 1))
    start = int(rng.integers(0, len(ids) - length))
    prompt = ids[start : start + length]
    continuation = ids[start + length : start + length + workload.decode_tokens]
    lacking = workload.decode_tokens - len(continuation)
    # Past its end a text goes on in its own vocabulary, as generated text does.
    redrawn = rng.choice(ids, size=lacking)
    return Window(
        prompt_id=f"{number}:{document.domain}:{document.id}@{start}",
        domain=document.domain,
        subject=subject_of(document.id),
        prompt=prompt,
        continuation=np.concatenate([continuation, redrawn]).astype(np.int32),
    )
