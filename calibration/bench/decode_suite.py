"""Decode step time of the committed reference model against distinct experts per layer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from calibration.bench.decode_step import PASSES, DecodeFit, fit_decode_steps
from calibration.bench.report import BenchOptions, BenchReport, Table
from eldr_jax.checkpoint import load_model_dir
from eldr_jax.runner import PagedRunner
from serving.core.clock import SystemClock

BATCHES = (4, 8, 16)
BAR_R2 = 0.8
_ROOT = Path(__file__).resolve().parents[2]
_MODEL = _ROOT / "configs/artefacts/reference_model"
_PROMPTS = _ROOT / "configs/prompts/demo.jsonl"
_PROMPT_TOKENS = 32
_NUM_STEPS = 48


def run(options: BenchOptions) -> BenchReport:
    """Runs the suite.

    Raises:
        OSError: the model or the prompts are missing.
    """
    config, params = load_model_dir(_MODEL)
    runner = PagedRunner(
        config, params, num_blocks=_NUM_STEPS * max(BATCHES) * 2, token_buckets=(16, 32)
    )
    prompts = _prompts()
    fits = [
        fit_decode_steps(
            runner,
            prompts,
            batch,
            num_steps=batch if options.quick else _NUM_STEPS,
            rng=np.random.default_rng((options.seed, batch)),
            clock=SystemClock(),
            progress=lambda done, total, batch=batch: (
                options.say(f"batch {batch}: {done}/{total}") if done == total else None
            ),
        )
        for batch in BATCHES
    ]
    return BenchReport(
        suite="decode_step",
        facts={
            "cores": os.cpu_count(),
            "moe layers": config.num_layers,
            "experts": config.num_experts,
            "top k": config.num_experts_per_tok,
        },
        tables=(_table(fits),),
        missed=tuple(
            f"batch {fit.batch}: R2 {fit.r2:.3f} is below {BAR_R2}"
            for fit in fits
            if fit.r2 < BAR_R2
        ),
    )


def _table(fits: list[DecodeFit]) -> Table:
    return Table(
        name="step time over distinct experts per layer, tokens held fixed",
        columns=("batch", "steps", "experts from", "to", "ms per expert", "ms at none", "R2"),
        rows=tuple(
            (
                fit.batch,
                fit.num_steps,
                fit.experts_min,
                fit.experts_max,
                fit.slope_ms,
                fit.intercept_ms,
                fit.r2,
            )
            for fit in fits
        ),
        note=f"each step is the fastest of {PASSES} runs; an expert counts once in each layer",
    )


def _prompts() -> list[np.ndarray]:
    tokenizer = Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    rows = [json.loads(line) for line in _PROMPTS.read_text(encoding="utf-8").splitlines()]
    ids = [tokenizer.encode(row["prompt"]).ids[:_PROMPT_TOKENS] for row in rows]
    return [np.array(row, np.int32) for row in ids]
