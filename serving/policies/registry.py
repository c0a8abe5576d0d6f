"""Placement rules by name. To add one: write its file, add its row, add its tests' row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from serving.core.errors import ConfigError
from serving.core.objective import ScoreOptions
from serving.core.placement import Policy
from serving.policies.cost_p2c import CostPowerOfTwo, CostPowerOfTwoOptions
from serving.policies.domain import Domain
from serving.policies.eldr_online import EldrOnline
from serving.policies.eldr_static import EldrStatic
from serving.policies.expert_cost import ExpertCost, ExpertCostOptions
from serving.policies.jsq import JoinShortestQueue
from serving.policies.kv_aware import KvAware
from serving.policies.p2c import PowerOfTwo
from serving.policies.p2c_work import PowerOfTwoWork
from serving.policies.packed_cost import PackedCost, PackingOptions
from serving.policies.random_choice import RandomChoice
from serving.policies.round_robin import RoundRobin


def _expert_cost(
    *,
    region_prior: bool = True,
    even_from_requests: float | None = 16.0,
    tail_power: float = 1.0,
    tail_reference_s: float | None = None,
    max_spread: bool = False,
    sample_above: int = 128,
    num_near: int = 32,
    num_light: int = 32,
    sample_small: bool = False,
    small_share: float | None = None,
) -> Policy:
    score = ScoreOptions(
        region_prior=region_prior,
        even_from_requests=even_from_requests,
        tail_power=tail_power,
        tail_reference_s=tail_reference_s,
    )
    return ExpertCost(
        ExpertCostOptions(
            score=score,
            max_spread=max_spread,
            sample_above=sample_above,
            num_near=num_near,
            num_light=num_light,
            sample_small=sample_small,
            small_share=small_share,
        )
    )


def _cost_p2c(
    *,
    prefix_bias: float = 4.0,
    num_greedy: int = 8,
    num_drawn: int = 2,
    look_ahead: bool = True,
) -> Policy:
    return CostPowerOfTwo(
        CostPowerOfTwoOptions(
            prefix_bias=prefix_bias,
            num_greedy=num_greedy,
            num_drawn=num_drawn,
            look_ahead=look_ahead,
        )
    )


def _packed_cost(
    *,
    share_a: float = 0.5,
    share_b: float = 0.9,
    share_c: float = 1.0,
    ttft_share: float = 0.25,
    fill: float = 0.85,
) -> Policy:
    return PackedCost(
        PackingOptions(
            share_a=share_a, share_b=share_b, share_c=share_c, ttft_share=ttft_share, fill=fill
        )
    )


POLICIES: Mapping[str, Callable[..., Policy]] = {
    "random": RandomChoice,
    "rr": RoundRobin,
    "jsq": JoinShortestQueue,
    "p2c": PowerOfTwo,
    "p2c_work": PowerOfTwoWork,
    "kv_aware": KvAware,
    "cost_p2c": _cost_p2c,
    "packed_cost": _packed_cost,
    "domain": Domain,
    "eldr_static": EldrStatic,
    "eldr_online": EldrOnline,
    "expert_cost": _expert_cost,
}
"""Registry name -> factory; a factory's keyword arguments are the policy's options."""


def make_policy(name: str, **options: object) -> Policy:
    """Builds a policy.

    Args:
        name: registry name.
        **options: the policy's own options; see its file.

    Raises:
        ConfigError: unknown name, unknown option, or an option's value breaks its rule.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError("policy", name, f"must be one of {sorted(POLICIES)}")
    known = sorted(inspect.signature(factory).parameters)
    for option in options:
        if option not in known:
            raise ConfigError(f"policy.{name}.{option}", options[option], f"must be one of {known}")
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.{name}", dict(options), str(error)) from error
