"""J of DESIGN "Placement", term by term, in seconds and dollars.

    J(x | r) = rate(x) * chip_seconds(x | r)
             + lambda[r] * (r's own visible delay)
             + sum over the others j of lambda[j] * min(E[len_r], E[rem_j]) * (t(S+r) - t(S))

Each function fills a `TermMatrix`: one row per worker, every entry a product an operator can
redo with the facts beside it. Pure functions of a `PlacementContext`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.costs import WorkerCosts
from serving.core.decision import TermKind
from serving.core.placement import PlacementContext, TermMatrix
from serving.core.worker import Phase

PREFILL_NAMES = ("queue", "prefill", "padding", "prefix_saving")
_PREFILL_KINDS = (TermKind.COST, TermKind.COST, TermKind.COST, TermKind.INFO)
DECODE_NAMES = ("transfer", "decode_delay", "decode_compute", "externality")
_COST4 = (TermKind.COST,) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What joins J in the score of `expert_cost`, printed as terms of their own.

    Attributes:
        region_prior: credit experts that the worker's region holds anyway.
        tail_power: p of t_ref * (t / t_ref)^p, the tail-weighted step time; 1 is plain.
        tail_reference_s: t_ref, the cell's median step time; None takes the median of the
            candidates' own steps with the request.
    """

    region_prior: bool = True
    tail_power: float = 1.0
    tail_reference_s: float | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.tail_power <= 8.0:
            raise ValueError(f"{self.tail_power=} must lie in [1, 8]")
        if self.tail_reference_s is not None and not self.tail_reference_s > 0:
            raise ValueError(f"{self.tail_reference_s=} must be > 0")


PLAIN = ScoreOptions(region_prior=False)


def terms(context: PlacementContext, options: ScoreOptions = PLAIN) -> TermMatrix:
    """The objective of the context's phase.

    Raises:
        ValueError: the context prices nothing (`costs` is None), or a NaN came out.
    """
    if context.phase is Phase.PREFILL:
        return prefill_terms(context)
    return decode_terms(context, options)


def prefill_terms(context: PlacementContext) -> TermMatrix:
    """Terms of running the prompt on each worker.

        queue          queued tokens * token_s * f                       at lambda
        prefill        (uncached * token_s + chunks * chunk_s) * f       at rate + lambda
        padding        (bucket - uncached) * token_s * f                 at rate + lambda
        prefix_saving  cached * token_s * f                              at rate + lambda (INFO)

    At least the last prompt token is always computed.
    """
    costs = _costs(context)
    request, view = context.request, context.view
    price = context.target.lambda_usd_per_s
    cached = np.minimum(context.cached_tokens, request.num_prompt_tokens - 1)
    uncached = request.num_prompt_tokens - cached.astype(np.int64)
    padded, chunks = costs.padded(uncached)
    speed = view.speed_factor
    token_s = costs.prefill_token_s * speed
    both = costs.rate_usd_per_s + price
    seconds = np.empty((4, len(speed)))
    np.multiply(view.queued_prefill_tokens, token_s, out=seconds[0])
    np.multiply(uncached, token_s, out=seconds[1])
    seconds[1] += chunks * costs.prefill_chunk_s * speed
    np.multiply(padded - uncached, token_s, out=seconds[2])
    np.multiply(cached, token_s, out=seconds[3])
    usd = seconds * both
    np.multiply(seconds[0], price, out=usd[0])
    facts = (
        ("uncached_tokens", uncached),
        ("padded_tokens", padded),
        ("ttft_s", seconds[0] + seconds[1] + seconds[2]),
    )
    return _checked(PREFILL_NAMES, _PREFILL_KINDS, seconds, usd, facts)


def decode_terms(context: PlacementContext, options: ScoreOptions = PLAIN) -> TermMatrix:
    """Terms of decoding the request on each worker; L = E[len_r], t0 = t(S), t1 = t(S + r).

        transfer        KV hand-over                                     at lambda
        decode_delay    L * t1                                           at lambda
        decode_compute  L * (t1 - t0)                                    at rate
        externality     sum_j min(L, rem_j) * (t1 - t0)                  at each lambda_j
        region_prior    own and others' steps * c2 * experts the region holds anyway (SCORE)
        tail_weight     J at t_ref * (t / t_ref)^p, minus J (SCORE)

    Requests that other routers run on a worker count as this request's class, half done.
    """
    costs = _costs(context)
    view = context.view
    length = context.request.length.mean_tokens
    price = context.target.lambda_usd_per_s
    rate = costs.rate_usd_per_s
    t0, t1, experts0, experts1, prior_experts = _step_times(context, costs, options.region_prior)
    added = t1 - t0
    other_tokens, other_usd = _others(context)
    seconds = np.empty((4, len(t0)))
    usd = np.empty((4, len(t0)))
    seconds[0] = context.transfer_s
    np.multiply(t1, length, out=seconds[1])
    np.multiply(added, length, out=seconds[2])
    np.multiply(added, other_tokens, out=seconds[3])
    np.multiply(seconds[:2], price, out=usd[:2])
    np.multiply(seconds[2], rate, out=usd[2])
    np.multiply(added, other_usd, out=usd[3])
    names, kinds = DECODE_NAMES, _COST4
    if prior_experts is not None:
        saved_s = prior_experts * (costs.expert_s * view.speed_factor)
        names, kinds, seconds, usd = _with_score(
            names,
            kinds,
            seconds,
            usd,
            "region_prior",
            saved_s * (length + other_tokens),
            saved_s * (length * (rate + price) + other_usd),
        )
    if options.tail_power != 1.0:
        extra0, extra1 = _tail_extra(t0, t1, context.feasible, options)
        grown = extra1 - extra0
        names, kinds, seconds, usd = _with_score(
            names,
            kinds,
            seconds,
            usd,
            "tail_weight",
            extra1 * length + grown * (length + other_tokens),
            extra1 * (length * price) + grown * (length * rate + other_usd),
        )
    facts = (
        ("step_s", t0),
        ("step_with_s", t1),
        ("experts", experts0),
        ("experts_with", experts1),
        ("others_tokens", other_tokens),
    )
    return _checked(names, kinds, seconds, usd, facts)


def breaks_target(context: PlacementContext, matrix: TermMatrix) -> np.ndarray:
    """Which workers would break a promise.

    TTFT in prefill; in decode the request's own TPOT or the strictest of those it would join.

    Returns:
        bool [W].
    """
    facts = dict(matrix.facts)
    if context.phase is Phase.PREFILL:
        waited = max(0.0, context.view.taken_at_s - context.request.arrival_s)
        return facts["ttft_s"] > context.target.ttft_p99_s - waited
    limit = np.minimum(context.view.tpot_limit_s, context.target.tpot_p99_s)
    return facts["step_with_s"] > limit


def _step_times(
    context: PlacementContext, costs: WorkerCosts, with_prior: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """t(S), t(S + r), experts before and after, and the prior's correction (<= 0) in experts.

    Experts of modelled requests come from their survival product, of the others from the
    mean curve: A = total - scale * miss^others * (survival summed).
    """
    view, experts = context.view, context.view.experts
    num = view.num_inflight.astype(np.float64)
    prior = None
    if experts is None or context.keep is None:
        before = costs.miss**num
        experts0 = costs.total_experts * (1.0 - before)
        experts1 = costs.total_experts * (1.0 - before * costs.miss)
    else:
        unknown = scale = experts.layer_scale
        others = view.num_inflight - experts.num_modelled
        if np.count_nonzero(others):
            unknown = scale * costs.miss ** np.maximum(others, 0)
        size = scale * experts.survival.shape[1]
        after = experts.survival @ context.keep
        experts0 = size - unknown * experts.survival_sum
        experts1 = size - unknown * after
        if with_prior and experts.survival_prior is not None:
            # Experts r adds beside the region's pseudo-members, less those it adds without.
            added = experts.survival_prior_sum - experts.survival_prior @ context.keep
            prior = unknown * (added - (experts.survival_sum - after))
    fixed = costs.step_base_s + costs.request_s * num
    attention = costs.attention_s * view.kv_tokens
    t0 = fixed + costs.expert_s * experts0
    t0 += attention
    t0 *= view.speed_factor
    t0 *= num > 0
    own_kv = context.request.num_prompt_tokens + 0.5 * context.request.length.mean_tokens
    t1 = fixed + costs.request_s
    t1 += costs.expert_s * experts1
    t1 += attention
    t1 += costs.attention_s * own_kv
    t1 *= view.speed_factor
    return t0, t1, experts0, experts1, prior


def _others(context: PlacementContext) -> tuple[np.ndarray, np.ndarray]:
    """sum_j min(L, rem_j) in tokens, and the same weighted by lambda_j, float64 [W] each."""
    view, length = context.view, context.request.length.mean_tokens
    num_rows = len(view.workers)
    members = view.members
    if members is None or len(members.worker_row) == 0:
        tokens, usd, known = np.zeros(num_rows), np.zeros(num_rows), 0
    else:
        shared = np.minimum(members.remaining_tokens, length)
        tokens = np.bincount(members.worker_row, shared, num_rows)
        shared *= members.lambda_usd_per_s
        usd = np.bincount(members.worker_row, shared, num_rows)
        known = members.num_of_worker
    unknown = view.num_inflight - known
    if np.count_nonzero(unknown):
        half = np.maximum(unknown, 0) * (0.5 * length)
        tokens += half
        usd += half * context.target.lambda_usd_per_s
    return tokens, usd


def _tail_extra(
    t0: np.ndarray, t1: np.ndarray, feasible: np.ndarray, options: ScoreOptions
) -> tuple[np.ndarray, np.ndarray]:
    """t_ref * (t / t_ref)^p - t for both step times."""
    reference = options.tail_reference_s
    if reference is None:
        reference = float(np.median(t1[feasible]))
    if not reference > 0:
        return np.zeros_like(t0), np.zeros_like(t1)
    power = options.tail_power
    return (
        reference * (t0 / reference) ** power - t0,
        reference * (t1 / reference) ** power - t1,
    )


def _with_score(
    names: tuple[str, ...],
    kinds: tuple[TermKind, ...],
    seconds: np.ndarray,
    usd: np.ndarray,
    name: str,
    more_seconds: np.ndarray,
    more_usd: np.ndarray,
) -> tuple[tuple[str, ...], tuple[TermKind, ...], np.ndarray, np.ndarray]:
    return (
        (*names, name),
        (*kinds, TermKind.SCORE),
        np.concatenate((seconds, more_seconds[None])),
        np.concatenate((usd, more_usd[None])),
    )


def _costs(context: PlacementContext) -> WorkerCosts:
    if context.costs is None:
        raise ValueError("costs=None: the objective needs the workers' coefficients")
    return context.costs


def _checked(
    names: tuple[str, ...],
    kinds: tuple[TermKind, ...],
    seconds: np.ndarray,
    usd: np.ndarray,
    facts: tuple[tuple[str, np.ndarray], ...],
) -> TermMatrix:
    """Term rows [T, W] as a matrix [W, T]; a NaN anywhere is an error, never a winner."""
    total = usd.sum()
    if total != total:
        column = names[int(np.isnan(usd).any(axis=1).argmax())]
        raise ValueError(f"term {column!r} is NaN: a coefficient or a view's row is broken")
    return TermMatrix(names=names, seconds=seconds.T, usd=usd.T, kinds=kinds, facts=facts)
