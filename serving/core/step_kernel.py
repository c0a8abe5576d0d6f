"""Decode step times and J of all workers at once, as arrays; what they mean stands in objective.py.

`DECODE` is the hot loop of decode placement (core/native.py): its NumPy definition comes first,
the loop that is compiled after it.
"""

from __future__ import annotations

import math

import numpy as np

from serving.core.costs import ATTENTION_S, EXPERT_S, MISS, REQUEST_S, STEP_BASE_S
from serving.core.native import Kernel

ALONE, WITH, PRICED, EXPERTS, EXPERTS_WITH, OTHER_TOKENS, OTHER_USD, SCORE = range(8)
"""Rows of what `DECODE` answers, float64 [8, W].

ALONE, WITH: t(S) and t(S + r), seconds. PRICED: WITH plus the step time of experts that the
worker's region holds beyond those of its requests. EXPERTS, EXPERTS_WITH: distinct experts
expected without and with the request. OTHER_TOKENS, OTHER_USD: sum_j min(L, rem_j) in tokens, and
weighted by lambda_j. SCORE: J with PRICED for WITH, and more of the request's own delay.
"""

_FEW_OF_EVEN, _MOST_EVEN = 0.25, 1.2

MEAN, SURVIVAL, PRIOR = range(3)
"""What is known of experts: their mean number, survival vectors, and those of regions as well."""


def _decode_numpy(
    num: np.ndarray,
    kv_tokens: np.ndarray,
    speed: np.ndarray,
    costs: np.ndarray,
    rate: np.ndarray,
    left: np.ndarray,
    left_with: np.ndarray,
    prior: np.ndarray,
    prior_with: np.ndarray,
    scale: np.ndarray,
    total: np.ndarray,
    modelled: np.ndarray,
    member_row: np.ndarray,
    member_tokens: np.ndarray,
    member_price: np.ndarray,
    num_members: np.ndarray,
    transfer_s: np.ndarray,
    feasible: np.ndarray,
    known: int,
    own_kv: float,
    length: float,
    price: float,
    even_from: float,
) -> tuple[np.ndarray, float]:
    """Prices decoding a request on each of W workers.

    Args:
        num: float64 [W], requests.
        kv_tokens: float64 [W], their context tokens.
        speed: float64 [W], measured slowness.
        costs: float64 [C, W], `WorkerCosts.columns`.
        rate: float64 [W], $/s of the request's class.
        left: float64 [W], row sums of the survival vectors.
        left_with: float32 [W], their products with the request's 1 - q.
        prior: float64 [W], row sums of the vectors with the region's pseudo-members.
        prior_with: float32 [W], their products with the request's 1 - q.
        scale: float64 [W], distinct experts over all layers per masked pair.
        total: float64 [W], experts of all layers.
        modelled: float64 [W], requests behind the survival vectors.
        member_row: int64 [N], the open requests' workers.
        member_tokens: float64 [N], their remaining tokens.
        member_price: float64 [N], their $/s.
        num_members: float64 [W], how many of them each worker has.
        transfer_s: float64 [W], hand-over seconds.
        feasible: bool [W], the workers whose mean load is looked at.
        known: MEAN, SURVIVAL or PRIOR; `left`, `left_with` and `modelled` are read from SURVIVAL
            on, `prior` and `prior_with` for PRIOR.
        own_kv: the request's context tokens.
        length: its expected output tokens.
        price: its $/s.
        even_from: requests per worker from which its own delay counts for more; 0 for never.

    Returns:
        float64 [8, W], see the rows' names; and by how much more its own delay counts.
    """
    out = np.empty((8, len(num)))
    miss, expert_s = costs[MISS], costs[EXPERT_S]
    steps, saved_s = out[:2], None
    if known == MEAN:
        missed = total * miss**num
        np.subtract(total, missed, out=steps[0])
        np.subtract(total, missed * miss, out=steps[1])
    else:
        scaled = np.empty((4 if known == PRIOR else 2, len(num)))
        np.multiply(left, scale, out=scaled[0])
        np.multiply(left_with, scale, out=scaled[1])
        if known == PRIOR:
            np.multiply(prior, scale, out=scaled[2])
            np.multiply(prior_with, scale, out=scaled[3])
        others = num - modelled
        if np.count_nonzero(others):
            scaled *= miss ** np.maximum(others, 0.0)
        np.subtract(total, scaled[:2], out=steps)
        if known == PRIOR:
            # Experts r adds beside the region's pseudo-members, less those it adds alone.
            saved_s = scaled[2] - scaled[3] - scaled[0] + scaled[1]
            saved_s *= expert_s
            saved_s *= speed
    out[EXPERTS : EXPERTS_WITH + 1] = steps
    steps *= expert_s
    fixed = costs[REQUEST_S] * num
    fixed += costs[STEP_BASE_S]
    fixed += costs[ATTENTION_S] * kv_tokens
    steps += fixed
    steps[1] += costs[ATTENTION_S] * own_kv + costs[REQUEST_S]
    steps *= speed
    # t(empty) = 0: waking an idle worker costs its whole step.
    steps[0] *= num > 0
    out[PRICED] = steps[1] if saved_s is None else steps[1] + saved_s
    shared = np.minimum(member_tokens, length)
    out[OTHER_TOKENS] = np.bincount(member_row, shared, len(num))
    shared *= member_price
    out[OTHER_USD] = np.bincount(member_row, shared, len(num))
    # Requests of other routers count as this one's class, half done.
    half = np.maximum(num - num_members, 0.0) * (0.5 * length)
    out[OTHER_TOKENS] += half
    out[OTHER_USD] += half * price
    # J = (rate L + sum_j lambda_j min) (t1 - t0) + lambda (L t1 + transfer)
    score = (rate * length + out[OTHER_USD]) * (out[PRICED] - out[ALONE])
    score += out[PRICED] * (price * length)
    score += transfer_s * price
    more = 0.0
    if even_from > 0.0:
        more = _more_even(float(num[feasible].sum()), int(np.count_nonzero(feasible)), even_from)
        if more != 0.0:
            score += out[WITH] * (more * (price * length))
    out[SCORE] = score
    return out, more


def _more_even(num_requests: float, num_workers: int, even_from: float) -> float:
    """By how much more a request's own delay counts; see objective.py."""
    mean = num_requests / max(1, num_workers)
    if mean < _FEW_OF_EVEN * even_from:
        return 0.0
    return min(_MOST_EVEN, math.sqrt(mean / even_from)) - 1.0


def _decode_loop(
    num, kv_tokens, speed, costs, rate,
    left, left_with, prior, prior_with, scale, total, modelled,
    member_row, member_tokens, member_price, num_members, transfer_s, feasible,
    known, own_kv, length, price, even_from,
):  # fmt: skip
    """`_decode_numpy`, one worker after another; same sums in the same order."""
    num_rows = num.shape[0]
    out = np.zeros((8, num_rows))
    more = 0.0
    if even_from > 0.0:
        requests, workers = 0.0, 0
        for w in range(num_rows):
            if feasible[w]:
                requests += num[w]
                workers += 1
        mean = requests / max(1, workers)
        if mean >= _FEW_OF_EVEN * even_from:
            more = min(_MOST_EVEN, math.sqrt(mean / even_from)) - 1.0
    for j in range(member_row.shape[0]):
        shared = min(member_tokens[j], length)
        out[OTHER_TOKENS, member_row[j]] += shared
        out[OTHER_USD, member_row[j]] += shared * member_price[j]
    for w in range(num_rows):
        n, expert_s, miss = num[w], costs[EXPERT_S, w], costs[MISS, w]
        saved_s = 0.0
        if known == MEAN:
            missed = total[w] * miss**n
            without, beside = total[w] - missed, total[w] - missed * miss
        else:
            first, first_with = left[w] * scale[w], left_with[w] * scale[w]
            others, company = n - modelled[w], 1.0
            if others > 0.0:
                company = miss**others
                first, first_with = first * company, first_with * company
            without, beside = total[w] - first, total[w] - first_with
            if known == PRIOR:
                second = prior[w] * scale[w] * company
                second_with = prior_with[w] * scale[w] * company
                saved_s = (second - second_with - first + first_with) * expert_s * speed[w]
        fixed = costs[REQUEST_S, w] * n + costs[STEP_BASE_S, w]
        fixed += costs[ATTENTION_S, w] * kv_tokens[w]
        alone = (without * expert_s + fixed) * speed[w] if n > 0.0 else 0.0
        own = costs[ATTENTION_S, w] * own_kv + costs[REQUEST_S, w]
        with_s = (beside * expert_s + fixed + own) * speed[w]
        priced = with_s + saved_s
        half = max(n - num_members[w], 0.0) * (0.5 * length)
        out[OTHER_TOKENS, w] += half
        out[OTHER_USD, w] += half * price
        score = (rate[w] * length + out[OTHER_USD, w]) * (priced - alone)
        score += priced * (price * length)
        score += transfer_s[w] * price
        out[SCORE, w] = score + with_s * (more * (price * length))
        out[ALONE, w], out[WITH, w], out[PRICED, w] = alone, with_s, priced
        out[EXPERTS, w], out[EXPERTS_WITH, w] = without, beside
    return out, more


DECODE = Kernel(
    _decode_numpy,
    _decode_loop,
    "Tuple((f8[:,::1],f8))(f8[::1],f8[::1],f8[::1],f8[:,::1],f8[::1],f8[::1],f4[::1],f8[::1],f4[::1],"
    "f8[::1],f8[::1],f8[::1],i8[::1],f8[::1],f8[::1],f8[::1],f8[::1],b1[::1],i8,f8,f8,f8,f8)",
)
