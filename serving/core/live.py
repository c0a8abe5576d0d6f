"""What operators, pushes and learners change while a router runs.

A change holds from the next decision on. Every learned or pushed part has a kill switch; a part
switched off is simply not there for the decision, which then falls back and says so.
"""

from __future__ import annotations

from dataclasses import replace

from serving.core.errors import InvalidRequest
from serving.core.experts import ExpertProfiles
from serving.core.guard import SignatureGuard
from serving.core.placement import Policy, Regions, looks_ahead
from serving.core.router_config import SWITCHES
from serving.core.routing_table import RoutingTable, static_table
from serving.core.stage import Learned
from serving.core.worker import Phase, WorkerInfo


class LiveParts:
    """Policies, tables, learned parts and their switches.

    Args:
        policies: rule per phase.
        fallback_policy: decides while "policy" is off; None keeps the rules.
        parts: learned parts as they are when nothing is switched off.
        table: pushed routing table, None for the static fallback.
        guard: lowers trust in signatures; None trusts them.

    Attributes:
        learned: the parts as the next decision sees them.
        off: switches that are off, sorted.
    """

    def __init__(
        self,
        *,
        policies: dict[Phase, Policy],
        fallback_policy: Policy | None,
        parts: Learned,
        table: RoutingTable | None,
        guard: SignatureGuard | None,
    ) -> None:
        self.learned = parts
        self.off: tuple[str, ...] = ()
        self._policies = policies
        self._fallback_policy = fallback_policy
        self._parts = parts
        self._table = table
        self._static: tuple[tuple[WorkerInfo, ...], RoutingTable] | None = None
        self._guard = guard

    def policy(self, phase: Phase) -> Policy:
        """The rule that decides a phase now."""
        if self._fallback_policy is not None and "policy" in self.off:
            return self._fallback_policy
        return self._policies[phase]

    def table(self, workers: tuple[WorkerInfo, ...]) -> RoutingTable:
        """The routing table in force: the pushed one, else every pool of `workers`."""
        if self._table is not None and "routing_table" not in self.off:
            return self._table
        if self._static is None or self._static[0] is not workers:
            self._static = (workers, static_table(workers))
        return self._static[1]

    def set_policy(self, phase: Phase, policy: Policy) -> None:
        """Replaces a phase's rule."""
        self._policies[phase] = policy

    def set_table(self, table: RoutingTable | None) -> None:
        """Replaces the pushed table; None returns to the static fallback."""
        self._table = table

    def set_parts(self, **changes: object) -> None:
        """Replaces learned parts (fields of `Learned`)."""
        self._parts = replace(self._parts, **changes)
        self.refresh()

    def set_switch(self, name: str, on: bool) -> None:
        """Turns a part on or off.

        Raises:
            InvalidRequest: no such switch.
        """
        if name not in SWITCHES:
            raise InvalidRequest("switch", name, f"must be one of {list(SWITCHES)}")
        off = set(self.off) - {name} if on else set(self.off) | {name}
        self.off = tuple(sorted(off))
        self.refresh()

    def refresh(self) -> None:
        """Brings `learned` up to date with the parts, the switches and the guard."""
        parts, off = self._parts, self.off
        trust = 1.0 if self._guard is None else self._guard.weight
        self.learned = Learned(
            experts=None if "experts" in off else parts.experts,
            regions=None if "regions" in off else parts.regions,
            prefix_index=None if "prefix_index" in off else parts.prefix_index,
            signature_weight=parts.signature_weight * trust,
        )


class LiveControls:
    """What operators and learners change on a router; it holds from the next decision on."""

    _live: LiveParts

    def set_table(self, table: RoutingTable | None) -> None:
        """A pushed routing table; None returns to the static fallback."""
        self._live.set_table(table)

    def set_regions(self, regions: Regions | None) -> None:
        """Fitted regions."""
        self._live.set_parts(regions=regions)

    def set_experts(self, experts: ExpertProfiles | None) -> None:
        """Decode profiles."""
        self._live.set_parts(experts=experts)

    def set_signature_weight(self, weight: float) -> None:
        """Trust in signatures, in [0, 1]; a guard may lower it further."""
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"{weight=} must lie in [0, 1]")
        self._live.set_parts(signature_weight=weight)

    def policy(self, phase: Phase) -> Policy:
        """The rule that decides a phase now."""
        return self._live.policy(phase)

    @property
    def looks_ahead(self) -> bool:
        """Whether the prefill rule prices decode too, and so wants a predicted signature."""
        return looks_ahead(self._live.policy(Phase.PREFILL))

    def set_policy(self, phase: Phase, policy: Policy) -> None:
        """The rule of a phase."""
        self._live.set_policy(phase, policy)

    def set_switch(self, name: str, on: bool) -> None:
        """Turns a part on or off.

        Raises:
            InvalidRequest: no such switch.
        """
        self._live.set_switch(name, on)

    @property
    def switches_off(self) -> tuple[str, ...]:
        """Kill switches that are off, sorted."""
        return self._live.off
