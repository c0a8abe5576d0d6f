"""Seconds to move a prompt's KV from the prefill worker to each decode worker.

Bytes over bandwidth plus a latency. The bandwidth between two workers is the measured one of
their (prefill pool, decode pool) where there is one, else the prior of the nearest link they
share: one machine, one ICI or NVLink domain, the data-centre network (FACTS section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.core.worker import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeeds:
    """Bandwidth priors.

    Attributes:
        latency_s: per hand-over, whatever its size.
        host_bytes_per_s: between workers of one machine.
        domain_bytes_per_s: inside one ICI or NVLink domain.
        network_bytes_per_s: everything else.
        measured_bytes_per_s: (prefill pool, decode pool) -> bytes/s, beats the priors between
            different workers.
    """

    latency_s: float = 0.0005
    host_bytes_per_s: float = 20.0e9
    domain_bytes_per_s: float = 200.0e9
    network_bytes_per_s: float = 12.5e9
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


class TransferTimes:
    """Hand-over times from one worker to all of a view.

    Which link two workers share follows from where they are, so it is kept per (host, domain,
    pool) of the source until the fleet changes.
    """

    def __init__(self, links: LinkSpeeds, *, max_places: int = 4096) -> None:
        self.links = links
        self._max_places = max_places
        self._workers: tuple[WorkerInfo, ...] | None = None
        self._row_of: dict[str, int] = {}
        self._hosts = self._domains = self._pools = _Names(())
        self._per_byte: dict[tuple[str, str, str], np.ndarray] = {}

    def seconds(
        self, num_bytes: float, source: WorkerInfo, workers: tuple[WorkerInfo, ...]
    ) -> np.ndarray:
        """Hand-over time to each worker, float64 [W]; 0 to the source itself."""
        if workers is not self._workers:
            self._workers = workers
            self._row_of = {worker.worker_id: row for row, worker in enumerate(workers)}
            self._hosts = _Names(worker.host for worker in workers)
            self._domains = _Names(worker.ici_domain for worker in workers)
            self._pools = _Names(worker.pool for worker in workers)
            self._per_byte = {}
        place = (source.host, source.ici_domain, source.pool)
        per_byte = self._per_byte.get(place)
        if per_byte is None:
            if len(self._per_byte) >= self._max_places:
                self._per_byte.clear()
            per_byte = self._per_byte[place] = self._seconds_per_byte(source, len(workers))
        seconds = per_byte * num_bytes
        seconds += self.links.latency_s
        row = self._row_of.get(source.worker_id)
        if row is not None:
            seconds[row] = 0.0
        return seconds

    def _seconds_per_byte(self, source: WorkerInfo, num: int) -> np.ndarray:
        """Inverse bandwidths, slowest link first so that nearer ones overwrite it."""
        links = self.links
        per_byte = np.full(num, 1.0 / links.network_bytes_per_s)
        if source.ici_domain:
            per_byte[self._domains.equal(source.ici_domain)] = 1.0 / links.domain_bytes_per_s
        if source.host:
            per_byte[self._hosts.equal(source.host)] = 1.0 / links.host_bytes_per_s
        for (prefill, decode), bytes_per_s in links.measured_bytes_per_s.items():
            if prefill == source.pool:
                per_byte[self._pools.equal(decode)] = 1.0 / bytes_per_s
        return per_byte


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
