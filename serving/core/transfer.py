"""Seconds to move a prompt's KV from the prefill worker to each decode worker.

Bytes over bandwidth plus a latency. The bandwidth between two workers is the measured one of
their (prefill pool, decode pool) where there is one, else the prior of the nearest link they
share: one machine, one ICI or NVLink domain, the data-centre network (FACTS section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
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

    def seconds_per_byte(self, source: WorkerInfo, target: WorkerInfo) -> float:
        """Inverse bandwidth between two different workers."""
        measured = self.measured_bytes_per_s.get((source.pool, target.pool))
        if measured is not None:
            return 1.0 / measured
        if source.host and source.host == target.host:
            return 1.0 / self.host_bytes_per_s
        if source.ici_domain and source.ici_domain == target.ici_domain:
            return 1.0 / self.domain_bytes_per_s
        return 1.0 / self.network_bytes_per_s


class TransferTimes:
    """Hand-over times from one worker to all of a view, links looked up once per fleet."""

    def __init__(self, links: LinkSpeeds, *, max_sources: int = 4096) -> None:
        self.links = links
        self._max_sources = max_sources
        self._workers: tuple[WorkerInfo, ...] | None = None
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def seconds(
        self, num_bytes: float, source: WorkerInfo, workers: tuple[WorkerInfo, ...]
    ) -> np.ndarray:
        """Hand-over time to each worker, float64 [W]; 0 to the source itself."""
        if workers is not self._workers or len(self._rows) >= self._max_sources:
            self._workers, self._rows = workers, {}
        rows = self._rows.get(source.worker_id)
        if rows is None:
            away = np.array([w.worker_id != source.worker_id for w in workers], np.float64)
            per_byte = np.array([self.links.seconds_per_byte(source, w) for w in workers])
            rows = per_byte * away, self.links.latency_s * away
            self._rows[source.worker_id] = rows
        per_byte, latency = rows
        return num_bytes * per_byte + latency
