"""The cost model's formulas: seconds and dollars of prefill, decode, cascades and lost prefixes.

Plain functions over SI units: FLOP, bytes, seconds, dollars, tokens. Where a figure of the cost
model is quoted in KB, callers say which KB they mean; here everything is bytes.

    prefill $/tok = 2P / (chips * peak * MFU) * chips * $/chip_s
    decode  $/tok = step_time / B * chips * $/chip_s
    step_time     = (W_bytes + B * ctx * kv_bytes_per_tok) / (chips * HBM_BW * util)

P counts the parameters a token uses, so 2P is its FLOPs.
"""

from __future__ import annotations

import math

from serving.core.errors import ConfigError

USD_PER_TOKEN_TO_MTOK = 1e6


def prefill_tokens_per_s(
    *, num_active_params: float, num_chips: int, peak_flops: float, mfu: float
) -> float:
    """Prompt tokens per second of a worker of `num_chips`."""
    _positive(num_active_params=num_active_params, num_chips=num_chips)
    _positive(peak_flops=peak_flops, mfu=mfu)
    return num_chips * peak_flops * mfu / (2.0 * num_active_params)


def prefill_usd_per_token(
    *,
    num_active_params: float,
    num_chips: int,
    peak_flops: float,
    mfu: float,
    usd_per_chip_s: float,
) -> float:
    """Dollars per prompt token; the number of chips cancels out."""
    _positive(usd_per_chip_s=usd_per_chip_s)
    rate = prefill_tokens_per_s(
        num_active_params=num_active_params, num_chips=num_chips, peak_flops=peak_flops, mfu=mfu
    )
    return num_chips * usd_per_chip_s / rate


def decode_step_s(
    *,
    weight_bytes: float,
    num_requests: float,
    context_tokens: float,
    kv_bytes_per_token: float,
    num_chips: int,
    hbm_bytes_per_s: float,
    utilization: float,
) -> float:
    """Seconds of a decode step bound by memory: weights once, every request's KV once.

    Args:
        weight_bytes: weights the step loads; of a MoE, see `moe_weight_bytes`.
        num_requests: B, requests in the step.
        context_tokens: mean context of a request.
        kv_bytes_per_token: KV of one token over all layers.
        num_chips: chips of the worker.
        hbm_bytes_per_s: memory bandwidth of a chip.
        utilization: share of it reached.
    """
    _positive(weight_bytes=weight_bytes, num_chips=num_chips)
    _positive(hbm_bytes_per_s=hbm_bytes_per_s, utilization=utilization)
    traffic = weight_bytes + num_requests * context_tokens * kv_bytes_per_token
    return traffic / (num_chips * hbm_bytes_per_s * utilization)


def decode_usd_per_token(
    *, step_s: float, num_requests: float, num_chips: int, usd_per_chip_s: float
) -> float:
    """Dollars per output token when `num_requests` share each step."""
    _positive(step_s=step_s, num_requests=num_requests, num_chips=num_chips)
    return step_s / num_requests * num_chips * usd_per_chip_s


def compute_step_s(
    *, num_active_params: float, num_requests: float, num_chips: int, peak_flops: float, mfu: float
) -> float:
    """The compute check: seconds of arithmetic of a decode step; memory binds while it is less."""
    return num_requests / prefill_tokens_per_s(
        num_active_params=num_active_params, num_chips=num_chips, peak_flops=peak_flops, mfu=mfu
    )


def marginal_hbm_s(
    *,
    context_tokens: float,
    kv_bytes_per_token: float,
    num_chips: int,
    hbm_bytes_per_s: float,
    utilization: float,
) -> float:
    """What one more request adds to a decode step: its KV traffic, seconds.

    Times the price of the worker's second it is the floor of $/token however full the step gets
    (while it exceeds the compute check of one request).
    """
    _positive(hbm_bytes_per_s=hbm_bytes_per_s, utilization=utilization, num_chips=num_chips)
    return context_tokens * kv_bytes_per_token / (num_chips * hbm_bytes_per_s * utilization)


def largest_batch(
    *,
    tpot_s: float,
    weight_bytes: float,
    context_tokens: float,
    kv_bytes_per_token: float,
    num_chips: int,
    hbm_bytes_per_s: float,
    utilization: float,
) -> int:
    """Most requests whose decode step still takes at most `tpot_s`; 0 when not even one fits."""
    _positive(context_tokens=context_tokens, kv_bytes_per_token=kv_bytes_per_token)
    budget = tpot_s * num_chips * hbm_bytes_per_s * utilization - weight_bytes
    return max(0, math.floor(budget / (context_tokens * kv_bytes_per_token)))


def expected_distinct_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Distinct experts of one layer when tokens choose independently: E * (1 - (1 - k/E)^n)."""
    if not 1 <= top_k <= num_experts:
        raise ConfigError("top_k", top_k, f"must lie in [1, {num_experts}]")
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def moe_weight_bytes(*, dense_bytes: float, expert_bytes: float, distinct_experts: float) -> float:
    """Weights a MoE decode step loads.

    Args:
        dense_bytes: attention, router, embeddings and shared experts: loaded by every step.
        expert_bytes: one expert of one layer.
        distinct_experts: experts activated by the batch, summed over layers.
    """
    return dense_bytes + expert_bytes * distinct_experts


def cascade_usd(*, small_usd: float, attempt_usd: float, big_usd: float, escalated: float) -> float:
    """Dollars per request of a cascade.

    Args:
        small_usd: a request answered by the small model.
        attempt_usd: the small model's part of an escalated one: prefill and assessment tokens.
        big_usd: a request answered by the big model.
        escalated: share of requests escalated.
    """
    _share(escalated=escalated)
    return (1.0 - escalated) * small_usd + escalated * (attempt_usd + big_usd)


def cascade_break_even(*, small_usd: float, attempt_usd: float, big_usd: float) -> float:
    """Escalated share at which a cascade costs as much as sending everything to the big model.

    (a - s) / (p + a - s), with a the big model, s the small one and p the attempt.
    """
    saved = big_usd - small_usd
    return saved / (attempt_usd + saved)


def cascade_break_even_against_routing(
    *, small_usd: float, attempt_usd: float, big_usd: float, misrouted: float
) -> float:
    """Escalated share at which a cascade costs as much as routing upfront: m * (a - s) / p.

    Args:
        small_usd: s, a request answered by the small model.
        attempt_usd: p, its part of an escalated one.
        big_usd: a, a request answered by the big model.
        misrouted: m, share of traffic that upfront routing sends to the big model needlessly.
    """
    _share(misrouted=misrouted)
    _positive(attempt_usd=attempt_usd)
    return misrouted * (big_usd - small_usd) / attempt_usd


def escalation_ttft_s(
    *, small_prefill_s: float, assessment_tokens: int, small_tpot_s: float, big_prefill_s: float
) -> float:
    """Time to first token of an escalated request: small prefill, assessment, big prefill."""
    return small_prefill_s + assessment_tokens * small_tpot_s + big_prefill_s


def prefix_seconds(num_tokens: float, *, prefill_tokens_per_s: float) -> float:
    """Prefill seconds a cached prefix saves (or its loss costs), at the LIVE prefill rate."""
    _positive(prefill_tokens_per_s=prefill_tokens_per_s)
    return num_tokens / prefill_tokens_per_s


def kv_bytes(num_tokens: float, *, kv_bytes_per_token: float) -> float:
    """Bytes of KV of a context."""
    return num_tokens * kv_bytes_per_token


def transfer_s(num_bytes: float, *, bytes_per_s: float, setup_s: float = 0.0) -> float:
    """Seconds to move bytes over a link; nothing moves in no time."""
    _positive(bytes_per_s=bytes_per_s)
    return setup_s + num_bytes / bytes_per_s if num_bytes > 0 else 0.0


def longest_transfer_tokens(
    *, limit_s: float, bytes_per_s: float, kv_bytes_per_token: float
) -> float:
    """Context whose transfer takes exactly `limit_s`; longer ones are banned for the class."""
    _positive(kv_bytes_per_token=kv_bytes_per_token)
    return limit_s * bytes_per_s / kv_bytes_per_token


def usd_per_mtok(usd_per_token: float) -> float:
    """Dollars per million tokens."""
    return usd_per_token * USD_PER_TOKEN_TO_MTOK


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(name, value, "must be a finite number > 0")


def _share(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(name, value, "must lie in [0, 1]")
