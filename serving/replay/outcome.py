"""What a run of the replay leaves behind; its figures are made in metrics.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, kw_only=True, eq=False)
class Outcome:
    """What a run left behind; arrays over all N requests.

    Attributes:
        ttft_s: float64 [N], nan where no first token came.
        tpot_s: float64 [N], (last - first decode token) / (n - 1); nan where fewer than two
            decode tokens came or the request did not end.
        decode_worker: int64 [N], -1 before placement.
        rejected: bool [N].
        num_retries: placements after a refusal or a loss.
        num_preempted: see `DecodeFleet`.
        step_sums, step_bins: see `decode_kernel.Tally`.
        num_cached_tokens, num_prompt_tokens: over all prefill workers.
        end_s: virtual seconds.
        lines: sampled decision and outcome lines.
    """

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    decode_worker: np.ndarray
    rejected: np.ndarray
    num_retries: int
    num_preempted: int
    step_sums: np.ndarray
    step_bins: np.ndarray
    num_cached_tokens: int
    num_prompt_tokens: int
    end_s: float
    lines: list
