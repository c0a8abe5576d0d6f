"""KV hand-over between cells: which links there are, how long a prompt takes, who is banned.

A matrix over (prefill cell, decode cell) holds setup seconds and bytes per second. It starts from
a prior by the nearest thing the two share (process, ICI or NVLink domain, data-centre network)
and follows measured hand-overs while they are fresh: on TPUs a hand-over between processes goes
through the hosts whatever the mesh could do, so only measurements know.

TPUConnector's rules (tpu-inference): only full blocks move and the last partial one is computed
again by decode; decode pulls the whole prefill even where it holds part of it; a prompt under one
block moves nothing; blocks stay pinned until pulled or 180 s; both sides need equal tensor
parallelism and page size; each new number of blocks compiles once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from bucket_planner.hardware import Hardware
from serving.core.errors import ConfigError
from serving.cost import formulas

PIN_S = 180.0
"""How long TPUConnector keeps prefill blocks for a decode worker that does not pull."""

FRESH_S = 600.0
EWMA_WEIGHT = 0.2
MAX_TTFT_SHARE = 0.2
"""A hand-over may take this share of its class's TTFT target."""

CellPair = tuple[str, str]
"""(prefill cell or pool, decode cell or pool)."""


class LinkDomain(enum.Enum):
    """The nearest thing two workers share."""

    SAME_PROCESS = "same_process"
    ICI = "ici"
    NVLINK = "nvlink"
    DCN = "dcn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast one pair is.

    Attributes:
        setup_s: per hand-over, whatever its size.
        bytes_per_s: bandwidth; inf inside one process, where nothing moves.
    """

    setup_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.setup_s) and self.setup_s >= 0):
            raise ConfigError("link.setup_s", self.setup_s, "must be finite and >= 0")
        if not self.bytes_per_s > 0:
            raise ConfigError("link.bytes_per_s", self.bytes_per_s, "must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """A pair's link as routing uses it.

    Attributes:
        link: what to compute with.
        source: `measured` or `prior`.
        age_s: age of the newest measurement, inf when there is none.
        num_samples: measurements behind it.
    """

    link: Link
    source: str
    age_s: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How a worker keeps KV, as far as a hand-over cares.

    Attributes:
        kv_bytes_per_token: over all layers.
        block_size_tokens: tokens per block (page) that moves.
        tensor_parallel: devices the KV is split over.
        connector: hand-over protocol; `tpu` has TPUConnector's rules.
    """

    kv_bytes_per_token: float
    block_size_tokens: int
    tensor_parallel: int = 1
    connector: str = "tpu"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.kv_bytes_per_token) and self.kv_bytes_per_token > 0):
            raise ConfigError("kv_bytes_per_token", self.kv_bytes_per_token, "must be > 0")
        for name in ("block_size_tokens", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What a hand-over moves.

    Attributes:
        num_blocks: full blocks that move.
        num_bytes: their bytes.
        recomputed_tokens: prompt tokens decode computes again.
        compiles: this number of blocks is new to the pair and compiles first.
    """

    num_blocks: int
    num_bytes: float
    recomputed_tokens: int
    compiles: bool


def prior_link(
    domain: LinkDomain, hardware: Hardware, *, setup_s: float = 0.0, num_chips: int = 1
) -> Link:
    """The prior of a pair.

    Args:
        domain: what the two workers share.
        hardware: the slower side's accelerator.
        setup_s: fixed time per hand-over.
        num_chips: links used side by side; 1 is the careful assumption.

    Raises:
        ConfigError: the hardware has no such link.
    """
    if domain is LinkDomain.SAME_PROCESS:
        return Link(setup_s=0.0, bytes_per_s=math.inf)
    links = hardware.interconnect
    if domain is LinkDomain.DCN:
        rate = links.dcn_effective_bytes_per_s
    else:
        rate = links.effective_bytes_per_s if links.domain == domain.value else None
    if rate is None:
        raise ConfigError("domain", domain.value, f"{hardware.id} has no such link")
    return Link(setup_s=setup_s, bytes_per_s=rate * num_chips)


def mismatch(prefill: KvLayout, decode: KvLayout) -> str:
    """Why KV cannot move between two layouts, "" when it can."""
    if prefill.connector != decode.connector:
        return f"connectors {prefill.connector} and {decode.connector} differ"
    if prefill.block_size_tokens != decode.block_size_tokens:
        return f"page sizes {prefill.block_size_tokens} and {decode.block_size_tokens} differ"
    if prefill.connector == "tpu" and prefill.tensor_parallel != decode.tensor_parallel:
        return f"tensor parallel {prefill.tensor_parallel} and {decode.tensor_parallel} differ"
    return ""


def hand_over(
    prompt_tokens: int,
    layout: KvLayout,
    *,
    cached_tokens: int = 0,
    known_block_counts: frozenset[int] = frozenset(),
) -> HandOver:
    """What moves for a prompt.

    Args:
        prompt_tokens: the whole prompt.
        layout: the prefill worker's KV.
        cached_tokens: what the decode worker holds already; TPUConnector pulls it all the same
            unless the whole prompt is there.
        known_block_counts: numbers of blocks the pair has compiled for.

    Raises:
        ConfigError: a negative count, or more cached than the prompt has.
    """
    if prompt_tokens < 0:
        raise ConfigError("prompt_tokens", prompt_tokens, "must be >= 0")
    if not 0 <= cached_tokens <= prompt_tokens:
        raise ConfigError("cached_tokens", cached_tokens, f"must lie in [0, {prompt_tokens}]")
    block = layout.block_size_tokens
    full = prompt_tokens // block
    held = cached_tokens // block
    moved = 0 if held == full else full if layout.connector == "tpu" else full - held
    return HandOver(
        num_blocks=moved,
        num_bytes=formulas.kv_bytes(moved * block, kv_bytes_per_token=layout.kv_bytes_per_token),
        recomputed_tokens=prompt_tokens - full * block,
        compiles=layout.connector == "tpu" and moved > 0 and moved not in known_block_counts,
    )


def banned(transfer_s: float, ttft_target_s: float, *, max_share: float = MAX_TTFT_SHARE) -> bool:
    """Whether a class forbids a hand-over: it takes more than its share of the TTFT target.

    A class without a TTFT bound (inf) forbids nothing.
    """
    return transfer_s > max_share * ttft_target_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    bytes_per_s: float
    at_s: float
    num_samples: int


_WILD = 1000.0
"""A measured bandwidth further than this factor from the prior counts as this far."""


class TransferMatrix:
    """Links by (prefill cell, decode cell); time comes from the caller."""

    def __init__(
        self,
        priors: Mapping[CellPair, Link],
        *,
        fresh_s: float = FRESH_S,
        compile_s: float = 0.0,
    ) -> None:
        """Args: priors; how old a measurement may be; seconds a new block count compiles."""
        if not fresh_s > 0:
            raise ConfigError("fresh_s", fresh_s, "must be > 0")
        if not (math.isfinite(compile_s) and compile_s >= 0):
            raise ConfigError("compile_s", compile_s, "must be finite and >= 0")
        self._priors = dict(priors)
        self._fresh_s = fresh_s
        self._compile_s = compile_s
        self._measured: dict[CellPair, _Measured] = {}
        self._block_counts: dict[CellPair, frozenset[int]] = {}

    def add(self, priors: Mapping[CellPair, Link]) -> None:
        """More pairs; known ones keep their prior and measurements."""
        self._priors = {**priors, **self._priors}

    def observe(self, pair: CellPair, moved: HandOver, *, seconds: float, now_s: float) -> None:
        """Adds one measured hand-over; a hand-over that compiled only teaches the block count.

        Raises:
            ConfigError: unknown pair, or seconds that are not positive and finite.
        """
        prior = self._prior(pair)
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError("seconds", seconds, "must be a finite number > 0")
        if moved.num_blocks == 0:
            return
        known = self._block_counts.get(pair, frozenset())
        self._block_counts[pair] = known | {moved.num_blocks}
        if moved.compiles:  # the time says more about the compiler than about the wire
            return
        # A hand-over faster than its setup measures the setup, not the wire.
        rate = moved.num_bytes / max(seconds - prior.setup_s, 0.1 * seconds)
        # One wild sample must not close a link, nor make it free.
        if math.isfinite(prior.bytes_per_s):
            rate = min(max(rate, prior.bytes_per_s / _WILD), prior.bytes_per_s * _WILD)
        old = self._measured.get(pair)
        if old is None or now_s - old.at_s > self._fresh_s:
            self._measured[pair] = _Measured(bytes_per_s=rate, at_s=now_s, num_samples=1)
        else:
            # Seconds per byte average, bytes per second do not: one stall must not vanish.
            inverse = (1 - EWMA_WEIGHT) / old.bytes_per_s + EWMA_WEIGHT / rate
            self._measured[pair] = _Measured(
                bytes_per_s=1.0 / inverse,
                at_s=max(old.at_s, now_s),
                num_samples=old.num_samples + 1,
            )

    def observe_moved(
        self,
        pair: CellPair,
        *,
        num_blocks: int,
        num_bytes: float,
        seconds: float,
        now_s: float,
    ) -> None:
        """`observe`, of blocks and bytes that a worker says it moved.

        Raises:
            ConfigError: as `observe`, or counts below 0.
        """
        if num_blocks < 0 or not (math.isfinite(num_bytes) and num_bytes >= 0):
            raise ConfigError("hand-over", (num_blocks, num_bytes), "must be counts >= 0")
        new = num_blocks not in self._block_counts.get(pair, frozenset())
        moved = HandOver(
            num_blocks=num_blocks, num_bytes=num_bytes, recomputed_tokens=0, compiles=new
        )
        self.observe(pair, moved, seconds=seconds, now_s=now_s)

    def estimate(self, pair: CellPair, *, now_s: float) -> LinkEstimate:
        """A pair's link now.

        Raises:
            ConfigError: unknown pair.
        """
        prior = self._prior(pair)
        found = self._measured.get(pair)
        if found is None:
            return LinkEstimate(link=prior, source="prior", age_s=math.inf, num_samples=0)
        age_s = max(0.0, now_s - found.at_s)
        if age_s > self._fresh_s:
            return LinkEstimate(
                link=prior, source="prior", age_s=age_s, num_samples=found.num_samples
            )
        return LinkEstimate(
            link=Link(setup_s=prior.setup_s, bytes_per_s=found.bytes_per_s),
            source="measured",
            age_s=age_s,
            num_samples=found.num_samples,
        )

    def moved(
        self, pair: CellPair, prompt_tokens: int, layout: KvLayout, *, cached_tokens: int = 0
    ) -> HandOver:
        """What a prompt moves between a pair, knowing which block counts it has compiled for."""
        return hand_over(
            prompt_tokens,
            layout,
            cached_tokens=cached_tokens,
            known_block_counts=self._block_counts.get(pair, frozenset()),
        )

    def seconds(self, pair: CellPair, moved: HandOver, *, now_s: float) -> float:
        """Seconds of a hand-over now: setup, bytes over bandwidth, and a compile where due.

        Raises:
            ConfigError: unknown pair.
        """
        link = self.estimate(pair, now_s=now_s).link
        if moved.num_blocks == 0:
            return 0.0
        wire_s = 0.0 if math.isinf(link.bytes_per_s) else moved.num_bytes / link.bytes_per_s
        return link.setup_s + wire_s + (self._compile_s if moved.compiles else 0.0)

    def measured_bytes_per_s(self, *, now_s: float) -> dict[CellPair, float]:
        """Fresh measured bandwidths, as `serving.core.transfer.LinkSpeeds` takes them."""
        return {
            pair: found.bytes_per_s
            for pair, found in self._measured.items()
            if now_s - found.at_s <= self._fresh_s
        }

    def _prior(self, pair: CellPair) -> Link:
        if pair not in self._priors:
            raise ConfigError("cell pair", pair, f"is unknown; known: {sorted(self._priors)}")
        return self._priors[pair]
