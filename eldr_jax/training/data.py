"""Texts, their domains, the one train/held-out split, and batches that depend on the step alone.

The split is public because calibration must keep away from the same texts: `split_of` for an id,
`Document.split` for a row of a corpus (some corpora are held out as a whole).

A corpus is a JSON-lines file with `id`, `text` or `prompt`, and `domain` or `lang`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

Split = Literal["train", "heldout"]

TRAINING_CORPORA = (
    "task_code",
    "task_medical",
    "task_math",
    "task_legal",
    "language_debian_handbook",
)
HELD_OUT_CORPORA = ("task_prompts", "language_mgsm")
END_OF_TEXT = "<|endoftext|>"

_HELD_OUT_PAGES = 0.10
_HELD_OUT_TASK_TEXTS = 0.05


class CorpusError(ValueError):
    """A corpus row or a corpus that cannot be used; names the file, the line and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text of a corpus.

    Attributes:
      id: id in its corpus; not unique across languages.
      domain: `code`, `medical`, `math`, `legal`, or `lang/` and a language code.
      text: the text.
      split: `train`, or `heldout` from training and calibration.
    """

    id: str
    domain: str
    text: str
    split: Split


def split_of(doc_id: str) -> Split:
    """Side of the train/held-out split on which a text of a training corpus lies.

    A handbook page (`handbook/PAGE#n`) is held out as a whole and in every language at once,
    about one page in ten: its translations say the same. Everything else of the training corpora
    goes text by text, about one in twenty. Problems of `mgsm/` are always held out. Rows of
    `HELD_OUT_CORPORA` are held out whatever their id, see `Document.split`.

    Args:
      doc_id: the row's id.

    Returns:
      `train` or `heldout`; a function of the id alone.
    """
    if doc_id.startswith("mgsm/"):
        return "heldout"
    if doc_id.startswith("handbook/"):
        key, share = doc_id.split("#", 1)[0], _HELD_OUT_PAGES
    else:
        key, share = doc_id, _HELD_OUT_TASK_TEXTS
    digest = hashlib.sha1(f"heldout:{key}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") / 2**32 < share else "train"


def read_corpus(path: str | Path) -> list[Document]:
    """Reads one corpus file.

    Args:
      path: `NAME.jsonl`; the name decides whether the whole corpus is held out.

    Returns:
      Its rows in file order.

    Raises:
      CorpusError: a row without id, text or domain, with file and line.
      OSError: the file cannot be read.
    """
    path = Path(path)
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                text = row["text"] if "text" in row else row["prompt"]
                domain = row["domain"] if "domain" in row else f"lang/{row['lang']}"
                doc_id = row["id"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise CorpusError(
                    f"{path.name}:{number}: a row must be a JSON object with id, text or prompt, "
                    f"and domain or lang ({error!r})"
                ) from error
            held_out = path.stem in HELD_OUT_CORPORA
            split: Split = "heldout" if held_out else split_of(doc_id)
            documents.append(Document(id=doc_id, domain=domain, text=text, split=split))
    return documents


def read_training_documents(corpora_dir: str | Path) -> list[Document]:
    """All rows of the training corpora that lie on the training side.

    Args:
      corpora_dir: folder with the files of `TRAINING_CORPORA` and `HELD_OUT_CORPORA`.

    Returns:
      Documents in corpus and file order.

    Raises:
      CorpusError: a training text whose id is also a row of a held-out corpus.
    """
    folder = Path(corpora_dir)
    kept = [
        document
        for name in TRAINING_CORPORA
        for document in read_corpus(folder / f"{name}.jsonl")
        if document.split == "train"
    ]
    held_out = {
        document.id
        for name in HELD_OUT_CORPORA
        for document in read_corpus(folder / f"{name}.jsonl")
    }
    if both := sorted(held_out.intersection(document.id for document in kept)):
        raise CorpusError(f"ids both trained on and held out: {', '.join(both[:5])}")
    return kept


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Token ids of each document, behind the end-of-text token that parts it from the last.

    Args:
      tokenizer: of fewer than 65,536 tokens.
      documents: texts.

    Returns:
      One uint16 array [1 + tokens] per document.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([end, *item.ids], dtype=np.uint16) for item in encoded]


class PackedStreams:
    """Training sequences packed per domain, so that nearly all of a sequence is one domain.

    A domain's documents are shuffled once, joined, and cut into windows; every pass over a domain
    shifts the cuts and draws a new order. Domains take turns by weight in a fixed cycle. So the
    batch of a step is a function of (seed, step): a resumed run sees what it would have seen.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encoded: Sequence[np.ndarray],
        *,
        sequence_tokens: int,
        task_share: float,
        seed: int,
    ) -> None:
        """Packs the documents.

        Args:
          documents: training texts.
          encoded: their token ids from `encode_documents`.
          sequence_tokens: T; a sequence has one token more, the last target.
          task_share: share of sequences from the task domains, the rest goes to languages; inside
            each group every domain gets the same, so small ones are oversampled.
          seed: of every shuffle.

        Raises:
          CorpusError: a domain shorter than one sequence.
        """
        self._length = sequence_tokens + 1
        self._seed = seed
        self._streams: dict[str, np.ndarray] = {}
        for index, domain in enumerate(sorted({document.domain for document in documents})):
            parts = [ids for d, ids in zip(documents, encoded, strict=True) if d.domain == domain]
            order = np.random.default_rng([seed, 0, index]).permutation(len(parts))
            stream = np.concatenate([parts[i] for i in order])
            if len(stream) < 2 * self._length:
                raise CorpusError(
                    f"domain {domain!r} has {len(stream)} tokens, "
                    f"needs at least {2 * self._length}, two sequences"
                )
            self._streams[domain] = stream
        self._cycle = domain_cycle(sorted(self._streams), task_share)
        self._turn = _turns(self._cycle)

    @property
    def domain_tokens(self) -> dict[str, int]:
        """Tokens of each domain's stream."""
        return {domain: len(stream) for domain, stream in self._streams.items()}

    @property
    def domains(self) -> list[str]:
        """Names of the domains; a batch speaks of them by their place here."""
        return list(self._streams)

    def batch(self, step: int, num_sequences: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequences of one step.

        Args:
          step: from 0.
          num_sequences: B.

        Returns:
          Tokens [B, T + 1] int32, and each sequence's domain [B] int32.
        """
        slots = range(step * num_sequences, (step + 1) * num_sequences)
        tokens = np.stack([self._sequence(slot) for slot in slots]).astype(np.int32)
        places = {domain: place for place, domain in enumerate(self._streams)}
        domains = [places[self._cycle[slot % len(self._cycle)]] for slot in slots]
        return tokens, np.array(domains, np.int32)

    def _sequence(self, slot: int) -> np.ndarray:
        cycle_number, place = divmod(slot, len(self._cycle))
        domain = self._cycle[place]
        nth = cycle_number * self._cycle.count(domain) + self._turn[place]
        stream = self._streams[domain]
        # The last window is given up to let the cuts shift by up to one window.
        num_windows = len(stream) // self._length - 1
        epoch, index = divmod(nth, num_windows)
        domain_index = list(self._streams).index(domain)
        rng = np.random.default_rng([self._seed, 1, domain_index, epoch])
        shift = int(rng.integers(self._length))
        start = shift + int(rng.permutation(num_windows)[index]) * self._length
        return stream[start : start + self._length]


def domain_cycle(domains: Sequence[str], task_share: float) -> list[str]:
    """The order in which domains take turns.

    Args:
      domains: names; those beginning with `lang/` form the language group.
      task_share: share of turns for the other group; ignored when one group is empty.

    Returns:
      A cycle in which every domain of a group has equally many turns, spread evenly.

    Raises:
      ValueError: the share is not between 0 and 1.
    """
    if not 0.0 < task_share < 1.0:
        raise ValueError(f"task_share={task_share} must lie between 0 and 1")
    languages = [domain for domain in domains if domain.startswith("lang/")]
    tasks = [domain for domain in domains if not domain.startswith("lang/")]
    if not languages or not tasks:
        return list(domains)
    # Turns of a task domain against one of a language, at a resolution of 1 in 4.
    per_language = 4
    ratio = task_share / (1.0 - task_share) * len(languages) / len(tasks)
    per_task = max(1, round(per_language * ratio))
    wanted = dict.fromkeys(tasks, per_task) | dict.fromkeys(languages, per_language)
    total = sum(wanted.values())
    given = dict.fromkeys(wanted, 0)
    cycle = []
    for turn in range(1, total + 1):
        # Whoever is furthest behind its even share goes next; names break ties.
        domain = max(wanted, key=lambda name: (wanted[name] * turn / total - given[name], name))
        given[domain] += 1
        cycle.append(domain)
    return cycle


def _turns(cycle: Sequence[str]) -> list[int]:
    """For each place of the cycle, how often its domain had its turn before."""
    seen: dict[str, int] = {}
    turns = []
    for domain in cycle:
        turns.append(seen.get(domain, 0))
        seen[domain] = turns[-1] + 1
    return turns
