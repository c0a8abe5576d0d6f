"""The main job end to end on this machine: `make demo`.

Starts a router, 2 prefill and 4 decode workers of the reference model (behind gRPC on loopback
ports of this process), sends real prompts with Poisson arrivals, and compares decode placement
rules in interleaved, paired rounds on each worker's own measured step time.

    python -m serving.demo_main --out=out/demo [--prompts=FILE.jsonl] [--rounds=5]
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from absl import app, flags
from rich.console import Console
from tokenizers import Tokenizer

from serving.app import App
from serving.config import LogSection, ServerConfig, load_config
from serving.core.clock import SystemClock
from serving.core.errors import ConfigError, EldrError
from serving.demo.alone import generate_alone
from serving.demo.client import DemoClient, Prompt, read_prompts
from serving.demo.progress import Progress
from serving.demo.report import comparison_line, summarise_runs, summary_json, table_of
from serving.demo.rounds import Run, differing_outputs, measure_capacity, play_round
from serving.demo.signatures import ShuffledSignatures

_ROOT = Path(__file__).resolve().parents[1]
_EXPLAINED = "eldr"

_CONFIG = flags.DEFINE_string(
    "config", str(_ROOT / "configs/serving/demo.yaml"), "Server config with an embedded fleet."
)
_OUT = flags.DEFINE_string("out", "out/demo", "Folder for summary.json and decisions.jsonl.")
_PROMPTS = flags.DEFINE_string(
    "prompts", str(_ROOT / "configs/prompts/demo.jsonl"), "JSONL file of {id, prompt, domain}."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Paired rounds.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("output_tokens", 24, "Output tokens per request.", lower_bound=2)
_LOAD = flags.DEFINE_float(
    "load", 0.85, "Arrival rate over the fleet's measured capacity.", lower_bound=0.05
)
_SEED = flags.DEFINE_integer("seed", 0, "Of order, arrivals and bootstrap.", lower_bound=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the flags say; see their help."""

    server: ServerConfig
    prompts: tuple[Prompt, ...]
    out: Path
    rounds: int
    output_tokens: int
    load: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the rounds gave: runs, the arrival rate used, one decision explained."""

    runs: tuple[Run, ...]
    rate_per_s: float
    explanation: str


async def run(config: DemoConfig, console: Console) -> int:
    """Plays the demo; the exit status is 1 when a request failed or outputs differ."""
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", str(config.out), f"cannot be made: {error}") from error
    _check_lengths(config)
    log_path = config.out / "decisions.jsonl"
    log_path.unlink(missing_ok=True)
    server = msgspec.structs.replace(config.server, log=LogSection(decisions=str(log_path)))
    with Progress(console) as progress:
        async with App(server, progress=progress.say) as fleet:
            assert fleet.embedded is not None  # _check_lengths
            for line in fleet.summary():
                console.print(line, highlight=False, soft_wrap=True)
            played = await _play(config, fleet, progress)
            alone = await asyncio.to_thread(
                generate_alone,
                fleet.embedded.runner,
                _token_ids(config),
                config.output_tokens,
                lambda done: progress.say("the model run alone", done, len(config.prompts)),
            )
    differing = differing_outputs(played.runs, alone)
    result = summarise_runs(played.runs, seed=config.seed)
    settings = {
        "rounds": config.rounds,
        "prompts": len(config.prompts),
        "output_tokens": config.output_tokens,
        "arrivals_per_s": played.rate_per_s,
        "load": config.load,
        "seed": config.seed,
    }
    summary = summary_json(result, settings=settings, differing=differing)
    (config.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(played.explanation, highlight=False, soft_wrap=True)
    console.print(table_of(result["policies"]))
    for name, plain in result["comparisons"].items():
        line = comparison_line(name, plain, result["at_equal_batch"][name])
        console.print(line, highlight=False, soft_wrap=True)
    same = "identical" if not differing else f"DIFFER for {len(differing)} prompts"
    console.print(
        f"outputs over all policies, rounds and the model run alone: {same}; "
        f"{played.rate_per_s:.1f} arrivals/s; written to {config.out}/summary.json",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if differing or any(run.num_failed for run in played.runs) else 0


def _check_lengths(config: DemoConfig) -> None:
    """Refuses prompts that no worker could hold, before anything is started."""
    section = config.server.embedded
    if section is None:
        raise ConfigError("embedded", None, "the demo needs an embedded fleet")
    limit = section.max_blocks_per_seq * section.block_size_tokens - config.output_tokens
    if limit < 1:
        context = limit + config.output_tokens
        rule = f"must be < {context}, the fleet's context"
        raise ConfigError("output_tokens", config.output_tokens, rule)
    for key, tokens in _token_ids(config).items():
        if not 1 <= len(tokens) <= limit:
            rule = f"must hold 1 to {limit} tokens, so that {config.output_tokens} more fit"
            raise ConfigError(f"prompts[{key}]", f"{len(tokens)} tokens", rule)


async def _play(config: DemoConfig, fleet: App, progress: Progress) -> Played:
    signatures = ShuffledSignatures(fleet.relay.signatures, np.random.default_rng(config.seed))
    fleet.relay.signatures = signatures

    def use_shuffled(shuffled: bool) -> None:
        signatures.shuffled = False
        if shuffled:
            signatures.shuffle()

    total = len(config.prompts)
    runs: list[Run] = []
    async with DemoClient(fleet.address) as client:
        await fleet.warmed_up()
        progress.say("measuring capacity", 0, total)
        capacity_per_s = await measure_capacity(
            client, config.prompts, max_tokens=config.output_tokens, clock=SystemClock()
        )
        rate_per_s = config.load * capacity_per_s
        for number in range(config.rounds):
            label = f"round {number + 1} of {config.rounds}"
            runs += await play_round(
                client,
                config.prompts,
                number=number,
                rate_per_s=rate_per_s,
                max_tokens=config.output_tokens,
                seed=config.seed,
                use_policy=fleet.set_policy,
                use_shuffled=use_shuffled,
                progress=lambda name, done, label=label: progress.say(
                    f"{label}, {name}", done, total
                ),
            )
        explained = [run for run in runs if run.policy == _EXPLAINED][-1].answers[-1]
        explanation = await client.explain(explained.request_id)
    return Played(runs=tuple(runs), rate_per_s=rate_per_s, explanation=explanation)


def _token_ids(config: DemoConfig) -> dict[str, np.ndarray]:
    path = config.server.input_path(config.server.model.tokenizer)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    return {
        prompt.key: np.array(tokenizer.encode(prompt.text).ids, np.int32)
        for prompt in config.prompts
    }


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"demo_main: {error}", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str]) -> None:
    """Flags to config to `run`; exits 2 when a flag or config is wrong."""
    # A table needs room even where the output is a file or a pipe.
    console = Console(width=None if sys.stdout.isatty() else 120)
    logging.basicConfig(level=logging.WARNING)
    try:
        if len(argv) > 1:
            raise ConfigError("argv", argv[1:], "takes flags only")
        if not math.isfinite(_LOAD.value):
            raise ConfigError("load", _LOAD.value, "must be finite")
        config = DemoConfig(
            server=load_config(Path(_CONFIG.value)),
            prompts=tuple(read_prompts(Path(_PROMPTS.value))),
            out=Path(_OUT.value),
            rounds=_ROUNDS.value,
            output_tokens=_TOKENS.value,
            load=_LOAD.value,
            seed=_SEED.value,
        )
        status = asyncio.run(run(config, console))
    except EldrError as error:
        print(f"demo_main: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("demo_main: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
