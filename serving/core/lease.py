"""Reservations: what a placed request holds on its worker, and for how long.

A lease is the router's promise to count a request against a worker until it is released or
expires; the ledger (serving/fleet/ledger.py) keeps them. Both ends of a request's life name
it by request_id and phase, so reserving twice is the same reservation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serving.core.worker import Phase


class Lease(NamedTuple):
    """An open reservation.

    Attributes:
        lease_id: unique over the router replica's life.
        request_id, phase, worker_id: what is reserved where.
        expires_at_s: monotonic seconds after which `expire` takes it back.
    """

    lease_id: str
    request_id: str
    phase: Phase
    worker_id: str
    expires_at_s: float


class Reservation(NamedTuple):
    """What a request is counted as on its worker while its lease is open.

    Attributes:
        lease_id, request_id, phase, worker_id: see `Lease`.
        reserved_at_s: monotonic seconds.
        expires_at_s: monotonic seconds.
        prefill_tokens: uncached prompt tokens to compute (prefill; 0 in decode).
        kv_blocks: KV blocks held for the p95 length, >= 0.
        kv_tokens: context tokens, averaged over the request's life.
        decode_tokens: expected output tokens (decode; 0 in prefill).
        tokens_per_s: expected decode speed; the remaining output shrinks with it (0: does not).
        lambda_usd_per_s: price of the request's delay (its class).
        tpot_limit_s: its class's time per output token, seconds; inf for none.
        keep: float32 [M], 1 - q per masked (layer, expert); None without an expert model.
        layer_scale: distinct experts over all layers per one over the masked layers, of requests
            like this one; 0 when not known.
    """

    lease_id: str
    request_id: str
    phase: Phase
    worker_id: str
    reserved_at_s: float
    expires_at_s: float
    prefill_tokens: int = 0
    kv_blocks: int = 0
    kv_tokens: float = 0.0
    decode_tokens: float = 0.0
    tokens_per_s: float = 0.0
    lambda_usd_per_s: float = 0.0
    tpot_limit_s: float = float("inf")
    keep: np.ndarray | None = None
    layer_scale: float = 0.0

    def lease(self) -> Lease:
        """The part a client may see."""
        return Lease(
            lease_id=self.lease_id,
            request_id=self.request_id,
            phase=self.phase,
            worker_id=self.worker_id,
            expires_at_s=self.expires_at_s,
        )
