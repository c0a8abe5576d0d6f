"""One request inside the engine: its tokens, its blocks, how far it is, and what it tells.

The engine's lock guards a `Sequence`; events leave it as plain values for the event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serving.core.errors import EldrError
from serving.engines.embedded.generate_request import GenerateSpec
from serving.engines.embedded.leases import Lease
from serving.engines.embedded.sampling import TokenLogprobs


class State(enum.Enum):
    """Where a request stands.

    WAITING has no blocks; PULLING has blocks and its handler fetches their KV; LANDING's KV is
    here and waits to be written; READY lacks only a place among the running; RUNNING takes part
    in steps; FINISHED holds nothing.
    """

    WAITING = "waiting"
    PULLING = "pulling"
    LANDING = "landing"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended; the value is VllmEngine's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullWanted:
    """Blocks are reserved: fetch the KV of the prompt from block `first_block` on."""

    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMade:
    """One output token."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ended:
    """The request is over and holds nothing any more, except through `lease`.

    Attributes:
        reason: why.
        matched_stop: the stop token that ended it; None when another rule did.
        lease: open lease of a hand-over.
        counts: uint32 [L, E], the prompt's expert counts (hand-overs only).
    """

    reason: FinishReason
    matched_stop: int | None = None
    lease: Lease | None = None
    counts: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The request failed and holds nothing any more."""

    error: EldrError


Event = PullWanted | TokenMade | Ended | Broken
Sink = Callable[[Event], None]


class Sequence:
    """State of one request.

    Attributes:
        spec: the request.
        sink: takes its events, called on the event loop.
        state: see `State`.
        cancelled: its client is gone or aborted it; it ends at the next safe moment.
        token_ids: int32 [P + max_tokens], the first `num_tokens` are valid.
        num_tokens: prompt and output tokens so far.
        num_computed: positions whose KV is in the pool.
        num_counted: positions whose experts are in the block rows; above `num_computed` only
            while the last prompt token of a pulled prompt is run again for its logits.
        block_ids: int32, all blocks it will ever need; empty while WAITING.
        hashes: chained hashes of its full blocks, as far as they are known.
        num_published: leading blocks that can be found in the prefix cache.
        num_cached_tokens: prompt tokens found in the local cache.
        arrived_busy_s: busy clock at arrival.
        first_token_busy_s: busy clock when its first token was made; None before.
        last_token_busy_s: the same for the latest token.
        lease: holds its blocks since it ended as a hand-over; None otherwise.
    """

    __slots__ = (
        "arrived_busy_s",
        "block_ids",
        "cancelled",
        "first_token_busy_s",
        "hashes",
        "last_token_busy_s",
        "lease",
        "num_cached_tokens",
        "num_computed",
        "num_counted",
        "num_published",
        "num_tokens",
        "sink",
        "spec",
        "state",
        "token_ids",
    )

    def __init__(self, spec: GenerateSpec, sink: Sink, *, arrived_busy_s: float) -> None:
        num_prompt = len(spec.token_ids)
        self.spec = spec
        self.sink = sink
        self.state = State.WAITING
        self.cancelled = False
        self.token_ids = np.zeros(num_prompt + spec.max_tokens, np.int32)
        self.token_ids[:num_prompt] = spec.token_ids
        self.num_tokens = num_prompt
        self.num_computed = 0
        self.num_counted = 0
        self.block_ids = np.empty(0, np.int32)
        self.hashes: list[int] = []
        self.num_published = 0
        self.num_cached_tokens = 0
        self.arrived_busy_s = arrived_busy_s
        self.first_token_busy_s: float | None = None
        self.last_token_busy_s: float | None = None
        self.lease: Lease | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length."""
        return len(self.spec.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not computed yet; 1 in decode."""
        return self.num_tokens - self.num_computed

    def append(self, token_id: int, busy_s: float) -> None:
        """Adds an output token made at `busy_s` on the busy clock."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.first_token_busy_s is None:
            self.first_token_busy_s = busy_s
        self.last_token_busy_s = busy_s

    def finish_reason(self) -> tuple[FinishReason, int | None] | None:
        """Whether the latest token ends it: the reason and the stop token matched, if any."""
        token_id = int(self.token_ids[self.num_tokens - 1])
        if self.num_output_tokens >= self.spec.min_tokens:
            if token_id in self.spec.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in self.spec.stop_token_ids:
                return FinishReason.STOP, token_id
        if self.num_output_tokens >= self.spec.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def banned(self) -> frozenset[int]:
        """Tokens that must not come next (`min_tokens`)."""
        if self.num_output_tokens >= self.spec.min_tokens:
            return frozenset()
        return self.spec.eos_token_ids | self.spec.stop_token_ids
