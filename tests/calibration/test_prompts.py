from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from calibration.prompts import corpus_prompts, jsonl_prompts
from eldr_jax.training.data import HELD_OUT_CORPORA, TRAINING_CORPORA, CorpusError, split_of

WORDS = {f"w{i}": i for i in range(100)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    for name in (*TRAINING_CORPORA, *HELD_OUT_CORPORA):
        rows = []
        for index in range(60):
            text = " ".join(f"w{n}" for n in rng.integers(1, 100, int(rng.integers(1, 40))))
            if name.startswith("language"):
                kind = "handbook" if "handbook" in name else "mgsm"
                row = {"id": f"{kind}/page{index}#0", "lang": ("de", "ja")[index % 2]}
                rows.append(row | {"text": text})
            else:
                domain = name.removeprefix("task_").replace("prompts", "math")
                rows.append({"id": f"{name}/{index}", "domain": domain, "prompt": text})
        lines = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text(lines + "\n")
    return folder


def draw(corpora, tokenizer, **change):
    options = {
        "split": "train",
        "num_prompts": 60,
        "min_tokens": 5,
        "max_tokens": 12,
        "task_share": 0.5,
        "seed": 3,
    }
    return corpus_prompts(corpora, tokenizer, **options | change)


def test_prompts_are_cut_and_the_seed_decides(corpora, tokenizer):
    prompts = draw(corpora, tokenizer)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert min(lengths) >= 5
    assert max(lengths) <= 12
    assert len(set(lengths)) > 3
    again = draw(corpora, tokenizer)
    assert [p.prompt_id for p in again] == [p.prompt_id for p in prompts]
    assert all(
        np.array_equal(a.token_ids, b.token_ids) for a, b in zip(again, prompts, strict=True)
    )
    other = draw(corpora, tokenizer, seed=4)
    assert [p.prompt_id for p in other] != [p.prompt_id for p in prompts]


def test_domains_take_turns(corpora, tokenizer):
    sizes = Counter(prompt.domain for prompt in draw(corpora, tokenizer))
    languages = sum(n for domain, n in sizes.items() if domain.startswith("lang/"))
    assert languages == 30
    assert sizes["lang/de"] == sizes["lang/ja"]
    assert set(sizes) == {"code", "medical", "math", "legal", "lang/de", "lang/ja"}


def test_no_text_is_on_both_sides(corpora, tokenizer):
    train = draw(corpora, tokenizer, num_prompts=10_000, min_tokens=1)
    held_out = draw(corpora, tokenizer, num_prompts=10_000, min_tokens=1, split="heldout")
    ids = {prompt.prompt_id for prompt in train}
    assert len(ids) == len(train)
    assert ids.isdisjoint(prompt.prompt_id for prompt in held_out)
    assert all(split_of(i.split(":", 1)[1]) == "train" for i in ids)
    assert not any("mgsm/" in i or "task_prompts" in i for i in ids)
    assert len(train) + len(held_out) == 60 * 7


def test_unusable_requests_are_refused(corpora, tokenizer):
    with pytest.raises(CorpusError, match="at least 500 tokens"):
        draw(corpora, tokenizer, min_tokens=500, max_tokens=600)
    with pytest.raises(ValueError, match="min_tokens"):
        draw(corpora, tokenizer, min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"id": "a", "domain": "d", "prompt": "w1"}'] * 2, "'a' stands twice"),
        (['{"id": "a", "domain": "d", "prompt": ""}'], "'a' is empty"),
        (['{"id": "a", "domain": "d"}'], r"p\.jsonl:1"),
        (["{"], r"p\.jsonl:1"),
        ([], "at least one row"),
    ],
)
def test_a_bad_jsonl_is_named(tokenizer, tmp_path, rows, message):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(rows))
    with pytest.raises(CorpusError, match=message):
        jsonl_prompts(file, tokenizer, max_tokens=5)


def test_jsonl_prompts_are_cut(tokenizer, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "a", "lang": "de", "text": "w1 w2 w3"}')
    (prompt,) = jsonl_prompts(file, tokenizer, max_tokens=2)
    assert (prompt.prompt_id, prompt.domain) == ("lang/de:a", "lang/de")
    assert prompt.token_ids.tolist() == [1, 2]
