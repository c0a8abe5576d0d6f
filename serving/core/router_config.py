"""How a router decides, beyond its policies: one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serving.core.admission import Limits
from serving.core.feasibility import FitRules
from serving.core.request import SloClass, SloTarget
from serving.core.transfer import LinkSpeeds

SWITCHES = ("experts", "policy", "prefix_index", "regions", "routing_table", "signature")
"""Kill switches: learned or pushed parts that can be turned off live."""

DEFAULT_TARGETS: Mapping[SloClass, SloTarget] = {
    # TTFT and TPOT: FACTS section 2c. Lambda of B balances $3.5e-4 against 0.254 s (DESIGN
    # "Placement"), A about ten times more, C about a hundredth.
    SloClass.A: SloTarget(
        ttft_p99_s=0.5, tpot_p99_s=0.03, deadline_s=float("inf"), lambda_usd_per_s=1.4e-2
    ),
    SloClass.B: SloTarget(
        ttft_p99_s=2.0, tpot_p99_s=0.08, deadline_s=float("inf"), lambda_usd_per_s=1.4e-3
    ),
    SloClass.C: SloTarget(
        ttft_p99_s=float("inf"),
        tpot_p99_s=float("inf"),
        deadline_s=86400.0,
        lambda_usd_per_s=1.4e-5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a router decides.

    Attributes:
        router_id: this replica's name, part of lease ids.
        seed: of the draws.
        hash_seed: of the block hashes; a deployment secret.
        lease_s: life of a reservation without renewal.
        targets: per class.
        limits, fit, links: see their types.
        record_share: share of decisions that get a decision line, in [0, 1]; a replay of many
            thousands keeps a sample.
        record_everyone: share of decisions recorded with every candidate, in [0, 1].
        signature_weight: trust in signatures, in [0, 1]; `Router.set_signature_weight`.
        explain_requests: requests whose lines `explain` can still show.
        max_unrecorded: placed stages waiting for `record`; beyond it the oldest is recorded
            inline.
    """

    router_id: str = "router-0"
    seed: int = 0
    hash_seed: int = 0
    lease_s: float = 120.0
    targets: Mapping[SloClass, SloTarget] = field(default_factory=lambda: DEFAULT_TARGETS)
    limits: Limits = field(default_factory=Limits)
    fit: FitRules = field(default_factory=FitRules)
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    record_share: float = 1.0
    record_everyone: float = 0.01
    signature_weight: float = 1.0
    explain_requests: int = 2048
    max_unrecorded: int = 256

    def __post_init__(self) -> None:
        if not self.router_id:
            raise ValueError("router_id must not be empty")
        if not self.lease_s > 0:
            raise ValueError(f"{self.lease_s=} must be > 0")
        missing = [slo.value for slo in SloClass if slo not in self.targets]
        if missing:
            raise ValueError(f"targets miss classes {missing}")
        for name in ("record_share", "record_everyone", "signature_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie in [0, 1]")
        for name in ("explain_requests", "max_unrecorded"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")
