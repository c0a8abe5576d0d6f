"""What a running router's surroundings need once a beat: prefixes, pools, parking.

The composition root calls `sweep` every second or so and `fleet_changed` when somebody joins,
leaves or changes state; nothing here is on the way of a request.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from serving import assembly
from serving.config import ServerConfig
from serving.core.placed import PlacementObserver
from serving.core.router import Router
from serving.core.transfer import LinkSpeeds
from serving.core.worker import Phase, WorkerInfo, WorkerState
from serving.cost.surface import CostSurface
from serving.cost.transfer import Link, TransferMatrix
from serving.engines.pulled import Pulled
from serving.fleet.fleet import Fleet
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.replicas import PrefixReplicas

_log = logging.getLogger(__name__)


class Upkeep:
    """Prefix index, cost surface and parking of one server.

    Attributes:
        prefix_index: who holds which prefix, None without.
        replicas: copies of hot prefixes, None without an index.
        surface: priors and measurements of cells, None where the config names no catalogue.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError: a file of the catalogue is wrong."""
        self.prefix_index = PrefixIndex() if config.router.prefix_index else None
        self.replicas = None if self.prefix_index is None else PrefixReplicas(self.prefix_index)
        self.surface: CostSurface | None = assembly.cost_surface(config)
        self._config = config
        self._parking = assembly.parking(config)
        # Without a catalogue: hand-overs as measured, over the config's links.
        self._matrix = TransferMatrix({})
        self._has_pulled = False
        self._indexed: set[str] = set()
        self._next_table_s = 0.0

    def observers(self) -> tuple[PlacementObserver, ...]:
        """Who learns from placements."""
        found: list[PlacementObserver] = []
        if self.prefix_index is not None and self.replicas is not None:
            found += [assembly.PrefixCredits(self.prefix_index), self.replicas]
        if self._parking is not None:
            found.append(self._parking)
        return tuple(found)

    def links(self, now_s: float) -> LinkSpeeds:
        """Hand-over bandwidths: the config's, the catalogue's priors, fresh measurements."""
        given = self._config.costs.links.speeds()
        if self.surface is not None:
            return self.surface.links(given, now_s=now_s)
        measured = self._matrix.measured_bytes_per_s(now_s=now_s)
        return replace(given, measured_bytes_per_s={**given.measured_bytes_per_s, **measured})

    def pulled(self, source: WorkerInfo, target: WorkerInfo, pulled: Pulled, now_s: float) -> None:
        """A decode worker told how long a hand-over took; the router hears of it at the sweep."""
        pair = source.pool, target.pool
        facts = {"num_blocks": pulled.num_blocks, "num_bytes": float(pulled.num_bytes)}
        if self.surface is not None:
            self.surface.observe_hand_over(pair, **facts, seconds=pulled.seconds, now_s=now_s)
        else:
            given = self._config.costs.links.speeds()
            prior = Link(setup_s=given.latency_s, bytes_per_s=given.network_bytes_per_s)
            self._matrix.add({pair: prior})
            self._matrix.observe_moved(pair, **facts, seconds=pulled.seconds, now_s=now_s)
        self._has_pulled = True

    def fleet_changed(self, fleet: Fleet) -> None:
        """Workers joined, restarted, changed state or left: lost KV is never credited."""
        index = self.prefix_index
        if index is None:
            return
        there = {w.worker_id for w in fleet.workers if w.state is not WorkerState.LOST}
        for worker_id in self._indexed - there:
            index.remove_worker(worker_id)
        for info in fleet.workers:
            if info.worker_id in there:
                index.add_worker(info)
        self._indexed = there

    def sweep(self, router: Router, fleet: Fleet, now_s: float) -> None:
        """Pushes what changed into the router, parks and wakes, takes unused copies back."""
        self.push_table(router, fleet, now_s)
        if self._has_pulled:  # from now on at every beat: measurements also grow stale
            router.set_links(self.links(now_s))
        if self._parking is not None:
            for worker_id, state in self._parking.decide(fleet, now_s):
                fleet.set_state(worker_id, state)
                _log.info("worker %s: %s", worker_id, state.value)
        if self.replicas is not None and (num := self.replicas.sweep(now_s)):
            _log.info("%d unused copies of prefixes taken back", num)

    def push_table(self, router: Router, fleet: Fleet, now_s: float) -> None:
        """Measurements into the surface, its order of pools and its links into the router."""
        surface = self.surface
        if surface is None or now_s < self._next_table_s:
            return
        self._next_table_s = now_s + self._config.costs.table_every_s
        for phase in Phase:
            view = fleet.view(phase, now_s)
            for info, factor in zip(view.workers, view.speed_factor.tolist(), strict=True):
                if factor != 1.0:  # exactly as modelled is what an unmeasured worker says
                    surface.observe_speed(info, factor, now_s=now_s)
        router.set_table(surface.table(fleet.workers, self._config.targets(), now_s=now_s))
        router.set_links(self.links(now_s))
