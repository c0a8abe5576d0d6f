"""J of DESIGN "Placement": prices of running one request on each worker.

    J(x | r) = rate(x) * chip_seconds(x | r)
             + lambda[r] * (r's own visible delay)
             + sum over the others j of lambda[j] * min(E[len_r], E[rem_j]) * (t(S+r) - t(S))

`price` works out the physical quantities for all workers and J as one array; the same
quantities spell it out term by term (`matrix`) when somebody asks, which is after the choice.
The terms are products an operator can redo with the facts beside them; they sum to J.

Prefill of a prompt, `f` the worker's measured slowness:

    queue           (tokens before * token_s + their chunks * chunk_s) * f  at lambda
    prefill_delay   (uncached * token_s + chunks * chunk_s) * f           at lambda
    prefill_compute the same seconds                                      at rate
    padding         (computed - uncached) * token_s * f                   at rate + lambda
    interference    seconds computed                                      at sum_j lambda_j
    prefix_saving   cached * token_s * f                                  at rate + lambda, INFO
    ttft            queue + computed                                      at lambda, INFO

`computed` and `chunks` are what the request ADDS to the steps of the tokens waiting there
(core/padding.py): padding is negative where it fills slack that others caused. `interference`
is what a prefill step costs those who decode on the same worker. `prefix_saving` is
saved tokens / live prefill tokens per second * (rate + lambda): there is no alpha.

Decode, L = E[len_r], t0 = t(S), t1 = t(S + r):

    transfer        KV hand-over                                          at lambda
    decode_delay    L * t1                                                at lambda
    decode_compute  L * (t1 - t0)                                         at rate
    externality     sum_j min(L, rem_j) * (t1 - t0)                       at each lambda_j
    expert_locality J by the mean number of experts, minus J              INFO
    region_prior    (L + others) * c2 * f * experts the region holds      SCORE
    even_steps      (sqrt(n / n_even) - 1) * L * t1                       at lambda, SCORE
    tail_weight     J at t_ref * (t / t_ref)^p, minus J                   SCORE

Why `even_steps`: J is the mean delay. Experts saturate, so a worker that many share is cheap to
join, and the mean is lowest with some workers fuller and slower than others, which is what P99
sees: there the request's own delay has to count for more. Where few share a worker its step
time tells who happens to be there, and leaning on it scatters what belongs together: there it
has to count for less. A count of n fluctuates by sqrt(n), so what lasts of a difference stands
out of the noise in proportion to sqrt(n), and so grows the weight of the request's own delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.core.costs import WorkerCosts
from serving.core.decision import TermKind
from serving.core.placement import PlacementContext, TermMatrix
from serving.core.prefill_prices import PrefillPrices
from serving.core.step_kernel import (
    ALONE,
    DECODE,
    EXPERTS,
    EXPERTS_WITH,
    MEAN,
    OTHER_TOKENS,
    OTHER_USD,
    PRICED,
    PRIOR,
    SCORE,
    SURVIVAL,
    WITH,
)
from serving.core.worker import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What joins J in the score of `expert_cost`, printed as terms of their own.

    Attributes:
        region_prior: credit experts that the worker's region holds anyway.
        even_from_requests: n_even, the mean number of requests per worker at which the
            request's own delay counts as it is; with more it counts for more, with fewer for
            less, as sqrt(n / n_even) up to 1.2: beyond it the median pays more than P99 gains.
            Below a quarter of n_even there is hardly anybody to gather with and it counts as it
            is, as it always does with None.
        tail_power: p of t_ref * (t / t_ref)^p, the tail-weighted step time; 1 is plain.
        tail_reference_s: t_ref, the cell's median step time; None takes the median of the
            feasible workers' steps with the request.
    """

    region_prior: bool = True
    even_from_requests: float | None = 16.0
    tail_power: float = 1.0
    tail_reference_s: float | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.tail_power <= 8.0:
            raise ValueError(f"{self.tail_power=} must lie in [1, 8]")
        if self.even_from_requests is not None and not self.even_from_requests > 0:
            raise ValueError(f"{self.even_from_requests=} must be > 0")
        if self.tail_reference_s is not None and not self.tail_reference_s > 0:
            raise ValueError(f"{self.tail_reference_s=} must be > 0")


PLAIN = ScoreOptions(region_prior=False, even_from_requests=None)


class Prices(Protocol):
    """Priced workers of one choice.

    Attributes:
        score_usd: float64 [W], J plus what joins it in the score only.
    """

    @property
    def score_usd(self) -> np.ndarray:
        """J plus what joins it in the score only, float64 [W]."""
        ...

    def keeps_target(self) -> bool:
        """Whether no worker would break one: seen at a glance, and the usual case."""
        ...

    def breaks_target(self) -> np.ndarray:
        """Which workers would break a promise of the class, bool [W]."""
        ...

    def matrix(self) -> TermMatrix:
        """The terms of all W workers."""
        ...


def price(
    context: PlacementContext, options: ScoreOptions = PLAIN, rows: np.ndarray | None = None
) -> Prices:
    """Prices the workers of a context for its phase.

    Args:
        context: the choice.
        options: what joins J in the score.
        rows: int64 [R], decode in a large cell: only these rows' survival vectors are read;
            the prices of the others mean nothing. None reads all.

    Raises:
        ValueError: the context has no coefficients (`costs` is None).
    """
    if context.costs is None:
        raise ValueError("costs=None: the objective needs the workers' coefficients")
    if context.phase is Phase.PREFILL:
        return PrefillPrices(context, context.costs)
    return DecodePrices(context, context.costs, options, rows)


class DecodePrices:
    """Prices of decoding the request beside what each worker runs.

    Requests that other routers run on a worker count as this request's class, half done, and
    as touching the mean number of experts.

    Attributes:
        score_usd: float64 [W], J plus region prior, even steps and tail weighting.
        step_s: float64 [W], t(S); 0 on an idle worker.
        step_with_s: float64 [W], t(S + r).
    """

    def __init__(
        self,
        context: PlacementContext,
        costs: WorkerCosts,
        options: ScoreOptions,
        rows: np.ndarray | None,
    ) -> None:
        self._context = context
        self._rate = costs.rate_for(context.request.slo)
        self._costs = costs
        self._length = context.request.length.mean_tokens
        self._price = context.target.lambda_usd_per_s
        self._known = _known(context, options)
        self._out, self._more_even = out, _ = _decode(
            context, costs, self._known, rows, options.even_from_requests
        )
        self.step_s, self.step_with_s = out[ALONE], out[WITH]
        self.score_usd = out[SCORE]
        self._tail: tuple[np.ndarray, np.ndarray] | None = None
        if options.tail_power != 1.0:
            extra0, extra1 = self._tail = _tail_extra(
                self.step_s, self.step_with_s, context, options
            )
            per_added = self._rate * self._length + out[OTHER_USD]
            self.score_usd = self.score_usd + per_added * (extra1 - extra0)
            self.score_usd += extra1 * (self._price * self._length)

    def keeps_target(self) -> bool:
        """Whether `breaks_target` is False everywhere."""
        limit_s = min(
            float(self._context.view.tpot_limit_s.min(initial=np.inf)),
            self._context.target.tpot_p99_s,
        )
        return float(self.step_with_s.max(initial=0.0)) <= limit_s

    def breaks_target(self) -> np.ndarray:
        """A step longer than the request's own TPOT, or the strictest it would join, bool [W]."""
        limit = np.minimum(self._context.view.tpot_limit_s, self._context.target.tpot_p99_s)
        return self.step_with_s > limit

    def packed(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """J with delay free inside an allowance: what packing compares.

        Args:
            share: of the class's TPOT, of the strictest promise on the worker, and of its
                slots, that may be used up before delay counts.

        Returns:
            float64 [W] compute and hand-over in dollars, and bool [W] who stays inside.
        """
        context, costs = self._context, self._costs
        usd = self._rate * self._length * (self.step_with_s - self.step_s)
        usd += context.transfer_s * self._price
        limit = np.minimum(context.view.tpot_limit_s, context.target.tpot_p99_s)
        inside = self.step_with_s <= share * limit
        inside &= context.view.num_inflight + 1.0 <= share * costs.max_num_seqs
        return usd, inside

    def matrix(self) -> TermMatrix:
        """The terms, float64 [W, 4 to 8]."""
        length, price, out = self._length, self._price, self._out
        other_tokens, other_usd = out[OTHER_TOKENS], out[OTHER_USD]
        added_s = self.step_with_s - self.step_s
        delay_s, compute_s = length * self.step_with_s, length * added_s
        names = ["transfer", "decode_delay", "decode_compute", "externality"]
        seconds = [self._context.transfer_s, delay_s, compute_s, other_tokens * added_s]
        usd = [
            self._context.transfer_s * price,
            delay_s * price,
            compute_s * self._rate,
            other_usd * added_s,
        ]
        grows = length * self._rate + other_usd
        if self._known == PRIOR:
            saved_s = out[PRICED] - self.step_with_s
            names.append("region_prior")
            seconds.append(saved_s * (length + other_tokens))
            usd.append(saved_s * (grows + length * price))
        if self._more_even:
            names.append("even_steps")
            seconds.append(self._more_even * delay_s)
            usd.append(self._more_even * delay_s * price)
        if self._tail is not None:
            extra0, extra1 = self._tail
            names.append("tail_weight")
            seconds.append(extra1 * length + (extra1 - extra0) * (length + other_tokens))
            usd.append(extra1 * (length * price) + (extra1 - extra0) * grows)
        kinds = [TermKind.COST] * 4 + [TermKind.SCORE] * (len(names) - 4)
        if self._known != MEAN:
            fewer = self._mean_experts() - out[EXPERTS : EXPERTS_WITH + 1]
            fewer *= self._costs.expert_s * self._context.view.speed_factor
            names.append("expert_locality")
            kinds.append(TermKind.INFO)
            seconds.append(length * fewer[1])
            usd.append(grows * (fewer[1] - fewer[0]) + length * price * fewer[1])
        return TermMatrix(
            names=tuple(names),
            kinds=tuple(kinds),
            seconds=np.stack(seconds, axis=1),
            usd=np.stack(usd, axis=1),
            facts=(
                ("step_s", self.step_s),
                ("step_with_s", self.step_with_s),
                ("experts", out[EXPERTS]),
                ("experts_with", out[EXPERTS_WITH]),
                ("others_tokens", other_tokens),
            ),
        )

    def _mean_experts(self) -> np.ndarray:
        """Expected experts without and with the request, float64 [2, W], signatures unknown."""
        costs, num = self._costs, self._context.view.num_inflight
        missed = costs.total_experts * costs.miss**num
        return np.stack((costs.total_experts - missed, costs.total_experts - missed * costs.miss))


_NO_PRODUCTS = np.zeros(0, np.float32)
_NO_MEMBERS = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def _known(context: PlacementContext, options: ScoreOptions) -> int:
    """What a context knows of experts, as `DECODE` asks it."""
    experts = context.view.experts
    if experts is None or context.keep is None:
        return MEAN
    return PRIOR if options.region_prior and experts.survival_prior is not None else SURVIVAL


def _decode(
    context: PlacementContext,
    costs: WorkerCosts,
    known: int,
    rows: np.ndarray | None,
    even_from: float | None,
) -> tuple[np.ndarray, float]:
    """Everything `DECODE` works out, float64 [8, W], and by how much more own delay counts."""
    view, request, experts = context.view, context.request, context.view.experts
    num = view.num_inflight
    left = prior = modelled = num
    left_with = prior_with = _NO_PRODUCTS
    scale = total = costs.total_experts
    if known != MEAN and experts is not None:
        left, modelled = experts.survival_sum, experts.num_modelled
        scale, total = experts.layer_scale, experts.total_experts
        left_with = _dot(experts.survival, context.keep, rows)
        if known == PRIOR and experts.survival_prior_sum is not None:
            prior = experts.survival_prior_sum
            prior_with = _dot(experts.survival_prior, context.keep, rows)
    members = view.members
    if members is None:
        member_rows, num_members = _NO_MEMBERS, np.zeros(len(num))
    else:
        member_rows, num_members = members[:3], members.num_of_worker
    length = request.length.mean_tokens
    return DECODE.run(
        num,
        view.kv_tokens,
        view.speed_factor,
        costs.columns,
        costs.rate_for(request.slo),
        left,
        left_with,
        prior,
        prior_with,
        scale,
        total,
        modelled,
        *member_rows,
        num_members,
        context.transfer_s,
        context.feasible,
        known,
        request.num_prompt_tokens + 0.5 * length,
        length,
        context.target.lambda_usd_per_s,
        0.0 if even_from is None else even_from,
    )


def _dot(
    matrix: np.ndarray | None, vector: np.ndarray | None, rows: np.ndarray | None
) -> np.ndarray:
    """Product of `matrix` and `vector`, float32 [W]; with `rows` only those, 0 elsewhere."""
    assert matrix is not None
    assert vector is not None
    if rows is None:
        return matrix @ vector
    products = np.zeros(len(matrix), np.float32)
    products[rows] = matrix.take(rows, axis=0) @ vector
    return products


def _tail_extra(
    step_s: np.ndarray, step_with_s: np.ndarray, context: PlacementContext, options: ScoreOptions
) -> tuple[np.ndarray, np.ndarray]:
    """t_ref * (t / t_ref)^p - t for both step times."""
    reference = options.tail_reference_s
    if reference is None:
        reference = float(np.median(step_with_s[context.feasible]))
    if not reference > 0:
        return np.zeros_like(step_s), np.zeros_like(step_with_s)
    power = options.tail_power
    return (
        reference * (step_s / reference) ** power - step_s,
        reference * (step_with_s / reference) ** power - step_with_s,
    )
