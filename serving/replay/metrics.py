"""Figures of one run, over its measured requests."""

from __future__ import annotations

import numpy as np

from serving.replay.decode_kernel import BINS_PER_FACTOR, LOWEST_S
from serving.replay.outcome import Outcome
from serving.replay.workload import Workload

_RESAMPLES = 200


def run_metrics(outcome: Outcome, workload: Workload, seed: int) -> dict[str, float]:
    """Metric name -> value.

    TPOT and TTFT are over measured requests that ended; distinct experts (per MoE layer) and
    step times are weighted by tokens, since a token is what a step is felt by.

    Args:
        outcome: of the run.
        workload: of the run.
        seed: of the bootstrap behind P99's interval.
    """
    measured = workload.measured
    tpot_ms = outcome.tpot_s[measured] * 1e3
    ttft_ms = outcome.ttft_s[measured] * 1e3
    tpot_ms, ttft_ms = tpot_ms[~np.isnan(tpot_ms)], ttft_ms[~np.isnan(ttft_ms)]
    steps, tokens, token_experts, seconds, token_seconds = outcome.step_sums.tolist()
    prompts, counts = np.unique(workload.prompt[measured], return_counts=True)
    found = {
        "num_requests": float(measured.stop - measured.start),
        "num_finished": float(len(tpot_ms)),
        "num_rejected": float(outcome.rejected[measured].sum()),
        "num_retries": float(outcome.num_retries),
        "num_preempted": float(outcome.num_preempted),
        "num_repeated_prompts": float(counts.sum() - len(prompts)),
        "cached_share": outcome.num_cached_tokens / max(1, outcome.num_prompt_tokens),
        "end_s": outcome.end_s,
        "rate_per_s": workload.rate_per_s,
    }
    if workload.shift < len(workload):
        found["shift_request"] = float(workload.shift - measured.start)
    if steps:
        found |= {
            "distinct_experts_per_step": token_experts / tokens / workload.bank.header.num_layers,
            "mean_batch": tokens / steps,
            "step_ms_mean": seconds / steps * 1e3,
            "step_ms_token_mean": token_seconds / tokens * 1e3,
            "step_ms_p50": _binned_quantile(outcome.step_bins, 0.5) * 1e3,
        }
    if len(tpot_ms):
        low, high = _p99_interval(tpot_ms, seed)
        found |= {
            "tpot_ms_mean": float(tpot_ms.mean()),
            "tpot_ms_p50": float(np.quantile(tpot_ms, 0.5)),
            "tpot_ms_p90": float(np.quantile(tpot_ms, 0.9)),
            "tpot_ms_p99": float(np.quantile(tpot_ms, 0.99)),
            "tpot_ms_p99_low": low,
            "tpot_ms_p99_high": high,
        }
    if len(ttft_ms):
        found |= {
            "ttft_ms_p50": float(np.quantile(ttft_ms, 0.5)),
            "ttft_ms_p99": float(np.quantile(ttft_ms, 0.99)),
        }
    return found


def tpot_series(
    outcome: Outcome, workload: Workload, window_requests: int
) -> tuple[float | None, ...]:
    """Mean TPOT in ms of each stretch of measured requests in a row; the last may be shorter.

    A stretch of which no request ended gives None.
    """
    if window_requests < 1:
        return ()
    tpot_ms = outcome.tpot_s[workload.measured] * 1e3
    stretches = [
        tpot_ms[begin : begin + window_requests]
        for begin in range(0, len(tpot_ms), window_requests)
    ]
    return tuple(None if np.isnan(part).all() else float(np.nanmean(part)) for part in stretches)


def _binned_quantile(bins: np.ndarray, share: float) -> float:
    """Middle of the bin that holds a quantile, seconds."""
    place = int(np.searchsorted(np.cumsum(bins), share * bins.sum()))
    return LOWEST_S * float(np.exp((place + 0.5) / BINS_PER_FACTOR))


def _p99_interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """95% interval of P99 over requests, percentile bootstrap."""
    rng = np.random.default_rng([seed, 99])
    drawn = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))]
    low, high = np.quantile(np.quantile(drawn, 0.99, axis=1), [0.025, 0.975])
    return float(low), float(high)
