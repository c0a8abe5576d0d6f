"""Seconds to move a prompt's KV from the prefill worker to each decode worker.

Bytes over bandwidth plus a latency. The bandwidth between two workers is the measured one of
their (prefill pool, decode pool) where there is one, else the prior of the nearest link they
share: one machine, one ICI or NVLink domain, the data-centre network (FACTS section 3); a prior
is the slower side's, by its hardware where the catalogue knows it.

On TPUs only full pages move and decode computes the last partial one again; a prompt below one
page moves nothing (FACTS section 3, TPUConnector).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from serving.core.worker import WorkerInfo

LINKS = ("dcn", "ici", "nvlink", "domain", "host", "measured", "same_process")
"""Names of links; a domain is "ici" or "nvlink" where the hardware says which it is."""

_DCN, _ICI, _NVLINK, _DOMAIN, _HOST, _MEASURED, _SAME = range(len(LINKS))
_DOMAIN_CODES = {"ici": _ICI, "nvlink": _NVLINK}


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareLinks:
    """Priors of one hardware type.

    Attributes:
        domain: "ici", "nvlink", or "none".
        domain_bytes_per_s: inside a domain, None where there is none.
        network_bytes_per_s: data-centre network, None where the catalogue gives none.
    """

    domain: str
    domain_bytes_per_s: float | None
    network_bytes_per_s: float | None

    def __post_init__(self) -> None:
        for name in ("domain_bytes_per_s", "network_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be > 0 bytes/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Bandwidths.

    Attributes:
        latency_s: per hand-over, whatever its size.
        host_bytes_per_s: between workers of one machine.
        domain_bytes_per_s: inside one ICI or NVLink domain.
        network_bytes_per_s: everything else.
        by_hardware: hardware id -> its own priors, which beat the two above.
        measured_bytes_per_s: (prefill pool, decode pool) -> bytes/s, beats the priors between
            different workers.
    """

    latency_s: float = 0.0005
    host_bytes_per_s: float = 20.0e9
    domain_bytes_per_s: float = 200.0e9
    network_bytes_per_s: float = 12.5e9
    by_hardware: Mapping[str, HardwareLinks] = field(default_factory=dict)
    measured_bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise ValueError(f"{self.latency_s=} must be >= 0")
        named = {
            name: getattr(self, name)
            for name in ("host_bytes_per_s", "domain_bytes_per_s", "network_bytes_per_s")
        }
        for name, value in {**named, **self.measured_bytes_per_s}.items():
            if not value > 0:
                raise ValueError(f"bandwidth {name!r}={value!r} must be > 0 bytes/s")

    def domain_of(self, hardware: str) -> tuple[float, int]:
        """Bandwidth inside a domain of some hardware, and which link that is."""
        own = self.by_hardware.get(hardware)
        if own is None or own.domain_bytes_per_s is None:
            return self.domain_bytes_per_s, _DOMAIN
        return own.domain_bytes_per_s, _DOMAIN_CODES.get(own.domain, _DOMAIN)

    def network_of(self, hardware: str) -> float:
        """Network bandwidth of a worker of some hardware."""
        own = self.by_hardware.get(hardware)
        if own is None or own.network_bytes_per_s is None:
            return self.network_bytes_per_s
        return own.network_bytes_per_s


class LinkRow(NamedTuple):
    """Links from one place to W workers.

    Attributes:
        seconds_per_byte: float64 [W].
        kinds: int8 [W], index into `LINKS`.
    """

    seconds_per_byte: np.ndarray
    kinds: np.ndarray


class TransferTimes:
    """Hand-over times from one worker to all of a view.

    Which link two workers share follows from where they are, so it is kept per (host, domain,
    pool, hardware) of the source until the fleet changes.
    """

    def __init__(self, links: LinkSpeeds, *, max_places: int = 4096) -> None:
        self.links = links
        self._max_places = max_places
        self._workers: tuple[WorkerInfo, ...] | None = None
        self._row_of: dict[str, int] = {}
        self._hosts = self._domains = self._pools = _Names(())
        self._network = self._domain = np.zeros(0)
        self._domain_kinds = np.zeros(0, np.int8)
        self._places: dict[tuple[str, str, str, str], LinkRow] = {}

    def seconds(
        self, num_bytes: float, source: WorkerInfo, workers: tuple[WorkerInfo, ...]
    ) -> np.ndarray:
        """Hand-over time to each worker, float64 [W]; 0 to the source itself."""
        seconds = self.row(source, workers).seconds_per_byte * num_bytes
        if num_bytes > 0:
            seconds += self.links.latency_s
        row = self._row_of.get(source.worker_id)
        if row is not None:
            seconds[row] = 0.0
        return seconds

    def kinds(self, source: WorkerInfo, workers: tuple[WorkerInfo, ...]) -> np.ndarray:
        """Which link leads to each worker, int8 [W], index into `LINKS`."""
        kinds = self.row(source, workers).kinds
        row = self._row_of.get(source.worker_id)
        if row is not None:
            kinds = kinds.copy()
            kinds[row] = _SAME
        return kinds

    def row(self, source: WorkerInfo, workers: tuple[WorkerInfo, ...]) -> LinkRow:
        """Links from a worker's place to each worker, itself not told apart."""
        if workers is not self._workers:
            self._learn(workers)
        place = (source.host, source.ici_domain, source.pool, source.hardware)
        found = self._places.get(place)
        if found is None:
            if len(self._places) >= self._max_places:
                self._places.clear()
            found = self._places[place] = self._links_from(source)
        return found

    def _learn(self, workers: tuple[WorkerInfo, ...]) -> None:
        links = self.links
        self._workers = workers
        self._row_of = {worker.worker_id: row for row, worker in enumerate(workers)}
        self._hosts = _Names(worker.host for worker in workers)
        self._domains = _Names(worker.ici_domain for worker in workers)
        self._pools = _Names(worker.pool for worker in workers)
        domains = [links.domain_of(worker.hardware) for worker in workers]
        self._network = np.array([links.network_of(worker.hardware) for worker in workers])
        self._domain = np.array([rate for rate, _ in domains])
        self._domain_kinds = np.array([kind for _, kind in domains], np.int8)
        self._places = {}

    def _links_from(self, source: WorkerInfo) -> LinkRow:
        """Inverse bandwidths, slowest link first so that nearer ones overwrite it."""
        links = self.links
        rate = np.minimum(links.network_of(source.hardware), self._network)
        kinds = np.full(len(rate), _DCN, np.int8)
        if source.ici_domain:
            near = self._domains.equal(source.ici_domain)
            rate[near] = np.minimum(links.domain_of(source.hardware)[0], self._domain[near])
            kinds[near] = self._domain_kinds[near]
        if source.host:
            near = self._hosts.equal(source.host)
            rate[near] = links.host_bytes_per_s
            kinds[near] = _HOST
        for (prefill, decode), bytes_per_s in links.measured_bytes_per_s.items():
            if prefill == source.pool:
                near = self._pools.equal(decode)
                rate[near] = bytes_per_s
                kinds[near] = _MEASURED
        return LinkRow(1.0 / rate, kinds)


class _Names:
    """Strings as small numbers, so that comparing a fleet's is one array operation."""

    def __init__(self, names: Iterable[str]) -> None:
        self._codes: dict[str, int] = {}
        self._rows = np.array(
            [self._codes.setdefault(name, len(self._codes)) for name in names], np.int64
        )

    def equal(self, name: str) -> np.ndarray:
        """Which rows have this name, bool [W]."""
        return self._rows == self._codes.get(name, -1)
