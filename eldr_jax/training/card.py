"""The reference model's card: every figure comes from the report, the run's log or the recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from eldr_jax.config import ModelConfig
from eldr_jax.training.recipe import Recipe

_GROUP_TITLES = {
    "task": "tasks (prompts of other benchmarks than those trained on)",
    "language": "languages (handbook pages held out in every language)",
    "language_mgsm": "languages, MGSM (nothing of it in training; bn, sw, te, th never seen)",
}


def render_card(
    config: ModelConfig,
    recipe: Recipe,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> str:
    """Writes the card.

    Args:
      config: geometry.
      recipe: settings of the run.
      summary: content of `report.json`.
      records: lines of the run's `log.jsonl`.

    Returns:
      Markdown.
    """
    # A resumed run repeats the steps after its last saved state: the later record counts.
    by_step = {record["step"]: record for record in records}
    log = [by_step[step] for step in sorted(by_step)]
    sections = [
        _head(config),
        _training(recipe, summary, log),
        "## Held-out loss\n\nExact gate, nothing dropped; each text's first "
        f"{summary['max_tokens']} tokens, at most {summary['max_texts']} texts of a domain.\n",
        *(_losses(name, group) for name, group in summary["groups"].items()),
        _positions(summary["loss_by_position"]),
        _reduction_intro(summary),
        *(_reductions(name, group) for name, group in summary["groups"].items()),
        "## Expert load\n\nEvery domain sends equally many tokens. Over all "
        f"{config.num_experts} experts of a layer. Where only tasks or only languages are sent, "
        "the experts of the others idle.\n",
        _load(
            "the mixture that training balanced: half tasks, half languages",
            {"load": summary["mixture_load"]},
        ),
        *(_load(name, group) for name, group in summary["groups"].items()),
        _REBUILD,
    ]
    return "\n".join(sections)


def _fill(paragraph: str, item: bool = False) -> str:
    """Breaks a paragraph, or an item of a list, into lines of at most 100 characters."""
    return textwrap.fill(
        " ".join(paragraph.split()),
        100,
        initial_indent="- " if item else "",
        subsequent_indent="  " if item else "",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _head(config: ModelConfig) -> str:
    intro = _fill(
        f"""The model that the embedded workers serve. It is small enough for a laptop CPU and real
        enough that its experts specialise: {config.num_params / 1e6:.1f} million weights,
        {config.num_layers} layers, all MoE, {config.num_experts} experts of width
        {config.moe_intermediate_size}, {config.num_experts_per_tok} per token; width
        {config.hidden_size}, {config.num_heads} query and {config.num_kv_heads} key/value heads of
        {config.head_dim}, tied embeddings, vocabulary {config.vocab_size} (byte-level BPE trained
        on the same texts). The format is that of `Qwen3MoeForCausalLM`, weights in bfloat16. It
        writes text that looks like its domain; it answers no questions, and no claim about quality
        is made beyond the figures below."""
    )
    return f"""# eldr-ref: a small Mixture-of-Experts language model

{intro}

This page is written by `python -m eldr_jax.report_main --card=...`: no figure is typed by hand.
"""


def _training(recipe: Recipe, summary: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    last = log[-1]
    measured = " and ".join(
        f"{100 * row['mean']:.0f}% at {row['batch']}"
        for row in summary["groups"]["task"]["reduction"]
    )
    step_tokens = recipe.batch_sequences * recipe.sequence_tokens
    run = _fill(
        f"""{last["step"]} steps of {step_tokens} tokens
        ({last["step"] * step_tokens / 1e6:.1f} million), **{last["cpu_s"] / 60:.1f} CPU minutes**
        (user and system time of the process, on 2 cores, compilation included). Sequences of
        {recipe.sequence_tokens} tokens, in the last {recipe.long_steps} steps of
        {recipe.long_sequence_tokens}; longer contexts were never trained. AdamW, peak learning
        rate {recipe.peak_learning_rate}, cosine. Everything else is in `recipe.yaml`."""
    )
    balance = _fill(
        f"""Load balance over the whole mixture (coefficient {recipe.balance_coefficient}), so that
        a domain may keep to its experts.""",
        item=True,
    )
    z_loss = _fill(f"z-loss ({recipe.z_coefficient}).", item=True)
    specialisation = _fill(
        f"""**Specialisation** ({recipe.information_coefficient}, up to
        {recipe.information_target} nats of information between domain and expert in a layer, for
        {", ".join(recipe.information_domains)} only). It is there because a model this small, on
        this little text, parts languages by itself but hardly the subjects of English prose,
        whereas large models do: published measurements give 17-21% fewer distinct experts for
        batches of one task and 3-10% for batches of one language. Domain labels are used in
        training only. **What this model has, {measured} sequences for tasks, is made, not found,
        and is not the published size**: a gain measured with it says what a router gains from that
        much specialisation, not how much a large model has. `information_target` sets it.""",
        item=True,
    )
    shown = [*log[:: max(1, len(log) // 8)], last]
    rows = "\n".join(
        f"| {r['step']} | {r['cross_entropy']:.3f} | {r['balance_loss']:.3f} | "
        f"{r['information']:.3f} | {100 * r['dropped_share']:.1f} | "
        f"{r['min_load']:.2f}..{r['max_load']:.2f} | {r['cpu_s'] / 60:.1f} |"
        for r in shown
    )
    return f"""## Training

{run}

Three losses shape the router (`eldr_jax/training/objective.py` cites the sources):
{balance}
{z_loss}
{specialisation}

Means over the last {recipe.log_steps} steps; load is an expert's share over the even share, lowest
and highest of all layers.

| step | loss, nats | balance | information, nats | dropped, % | load | CPU min |
|---|---|---|---|---|---|---|
{rows}
"""


def _losses(name: str, group: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {domain} | {row['num_texts']} | {row['num_tokens']} | {row['nats_per_token']:.3f} | "
        f"{row['bits_per_byte']:.3f} |"
        for domain, row in group["loss"].items()
    )
    return f"""### {_GROUP_TITLES.get(name, name)}

| domain | texts | tokens | nats/token | bits/byte |
|---|---|---|---|---|
{rows}
"""


def _positions(buckets: Sequence[Mapping[str, float]]) -> str:
    header = " | ".join(f"from {bucket['first_token']}" for bucket in buckets)
    cells = " | ".join(f"{bucket['nats_per_token']:.3f}" for bucket in buckets)
    return f"""### by place in the context (held-out handbook pages joined)

| token | {header} |
|---|{"---|" * len(buckets)}
| nats/token | {cells} |
"""


def _reduction_intro(summary: Mapping[str, Any]) -> str:
    return f"""## Distinct experts of same-domain against mixed batches

Held-out texts, read step by step: a batch of n sequences, one token of each, each at a place of
its own. Same-domain batches are n texts of one domain, mixed ones draw the domain of each place
evenly. {summary["num_draws"]} batches of each kind and size; 95% bootstrap interval over batches.
Teacher forcing, not generated text.
"""


def _reductions(name: str, group: Mapping[str, Any]) -> str:
    layers = range(len(group["reduction"][0]["same"]))
    header = " | ".join(f"layer {layer}" for layer in layers)
    lines = [
        f"### {_GROUP_TITLES.get(name, name)}, {group['steps']} steps a batch",
        "",
        f"| n | fewer, % | 95% | {header} |",
        "|---|---|---|" + "---|" * len(layers),
    ]
    for row in group["reduction"]:
        cells = " | ".join(
            f"{100 * cut:.1f} ({same:.1f}/{mixed:.1f})"
            for cut, same, mixed in zip(row["reduction"], row["same"], row["mixed"], strict=True)
        )
        lines.append(
            f"| {row['batch']} | **{100 * row['mean']:.1f}** | "
            f"{100 * row['ci_low']:.1f}..{100 * row['ci_high']:.1f} | {cells} |"
        )
    largest = group["reduction"][-1]
    domains = ", ".join(f"{d} {100 * cut:.1f}%" for d, cut in largest["by_domain"].items())
    lines += ["", f"By domain at n = {largest['batch']}: {domains}.", ""]
    return "\n".join(lines)


def _load(name: str, group: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f"| {layer} | {row['max_over_mean']:.2f} | {row['min_over_mean']:.2f} | {row['cv']:.2f} |"
        for layer, row in enumerate(group["load"])
    )
    return f"""### {_GROUP_TITLES.get(name, name)}

| layer | max/mean | min/mean | coefficient of variation |
|---|---|---|---|
{rows}
"""


_REBUILD = """## Data and split

Trained on Python's standard library (code), MedQuAD (medical), GSM8K's training problems (math),
MMLU law questions and licence texts (legal), and the Debian Handbook in 18 languages; licences and
attributions in `NOTICE`. Half of the sequences are tasks, half languages; small domains are
oversampled. `eldr_jax.training.data.split_of` holds out about 5% of the task texts and about a
tenth of the handbook's pages, the same pages in every language. Task prompts (HumanEval, GSM8K
test, PubMedQA, MMLU) and MGSM were held out as a whole.

## Rebuild

```
python -m eldr_jax.train_main --corpora=DIR --run_dir=out/train
python -m eldr_jax.report_main --model=out/train/model --corpora=DIR --run_dir=out/train \\
    --card=out/train/model/README.md
```
The first is resumable: start it again with the same flags. On Linux with glibc set
```
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0
export GLIBC_TUNABLES=$GLIBC_TUNABLES:glibc.malloc.trim_threshold=17179869184
```
before it: XLA takes and returns its buffers at every step, and without this the kernel maps them
anew each time, page by page (2.8 against 1.8 CPU seconds a step where this model was trained). On
another processor, number of cores or library version the floating-point sums differ and the
weights come out close, not equal.
"""
