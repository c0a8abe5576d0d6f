"""Service times: a measured table in fitted form, or a roofline; both end as the same arrays.

A latency file (configs/replay/latency/*.yaml) says what one layer of one model on one machine
takes, with its source. MoE layers: inside `linear.min_tokens..max_tokens` the fitted line
t = c0 + c2 * A + c3 * T, outside the measured table, interpolated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from serving.core.costs import CellCost, PrefillTimeModel, StepTimeModel
from serving.core.errors import ConfigError
from serving.replay.bank import WORD_BITS, BankHeader, num_words
from serving.replay.decode_kernel import Times

SCHEMA_VERSION = 1


class MoeLinear(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """t_us = c0_us + c2_us * distinct experts + c3_us * tokens, per MoE layer."""

    c0_us: float
    c2_us: float
    c3_us: float
    min_tokens: int = 1
    max_tokens: int = 1 << 30

    def __post_init__(self) -> None:
        _require_finite(self, ("c0_us", "c2_us", "c3_us"))
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"{self.min_tokens=} must lie in [1, {self.max_tokens=}]")


class PerLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Microseconds of one layer without its experts.

    Attributes:
        decode_us, decode_token_us, context_token_us: constant, per request, per context token.
        prefill_us, prefill_token_us, prefill_attended_us: constant, per token of the chunk, per
            pair of a token and a token it attends to.
    """

    decode_us: float
    decode_token_us: float
    context_token_us: float
    prefill_us: float
    prefill_token_us: float
    prefill_attended_us: float

    def __post_init__(self) -> None:
        _require_finite(self, self.__struct_fields__)


class LatencyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Service times of one model on one machine.

    Attributes:
        source: where the figures come from.
        num_layers: transformer layers; all of them have experts.
        moe: the line.
        moe_table: rows [tokens, distinct experts, microseconds] for outside the line's range.
        per_layer: everything else in a layer.
        step_us, step_token_us: per step (head, sampler, embedding).
        kv_bytes_per_token: what a hand-over moves.
        usd_per_chip_hour: price of a worker's chip.
    """

    schema_version: int
    source: str
    num_layers: int
    moe: MoeLinear
    moe_table: tuple[tuple[float, float, float], ...] = ()
    per_layer: PerLayer
    step_us: float
    step_token_us: float
    kv_bytes_per_token: float
    usd_per_chip_hour: float

    def __post_init__(self) -> None:
        _require_finite(
            self, ("step_us", "step_token_us", "kv_bytes_per_token", "usd_per_chip_hour")
        )
        if self.num_layers < 1:
            raise ValueError(f"{self.num_layers=} must be >= 1")
        for number, row in enumerate(self.moe_table):
            if not all(math.isfinite(value) and value > 0 for value in row):
                raise ValueError(f"moe_table[{number}]={row} must hold finite numbers > 0")


def _require_finite(section: msgspec.Struct, names: tuple[str, ...]) -> None:
    """A time that is no number would end as a replay that never does."""
    for name in names:
        value = getattr(section, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value!r} must be finite and >= 0")


def load_latency(path: str | Path) -> LatencyFile:
    """Reads a latency file.

    Raises:
        ConfigError: unreadable, unknown key or wrong value; names the field.
    """
    try:
        file = load_yaml(path, LatencyFile)
    except PlannerConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    if file.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", file.schema_version, f"must be {SCHEMA_VERSION}")
    return file


def moe_layer_s(latency: LatencyFile, max_tokens: int, num_experts: int) -> np.ndarray:
    """A MoE layer's seconds, float64 [max_tokens + 1, num_experts + 1], by tokens and experts.

    The line inside its range; outside it the table, linear between its points along both axes
    and constant beyond its ends in tokens. Nothing runs at no token or no expert: 0.
    """
    tokens = np.arange(max_tokens + 1, dtype=np.float64)
    experts = np.arange(num_experts + 1, dtype=np.float64)
    line = latency.moe
    out = line.c0_us + line.c2_us * experts[None, :] + line.c3_us * tokens[:, None]
    if latency.moe_table:
        for count in range(1, max_tokens + 1):
            if not line.min_tokens <= count <= line.max_tokens:
                out[count] = _table_row(latency.moe_table, count, experts)
    out[0] = 0.0
    out[:, 0] = 0.0
    return out * 1e-6


def _table_row(
    table: tuple[tuple[float, float, float], ...], tokens: int, experts: np.ndarray
) -> np.ndarray:
    """Microseconds at some tokens for each number of experts, float64 as `experts`."""
    measured = sorted({row[0] for row in table})
    below = max((t for t in measured if t <= tokens), default=measured[0])
    above = min((t for t in measured if t >= tokens), default=measured[-1])
    rows = []
    for count in (below, above):
        points = sorted((a, us) for t, a, us in table if t == count)
        known, us = np.array(points).T
        row = np.interp(experts, known, us)
        # Beyond the last measured number of experts (few tokens touch few) the slope goes on.
        if len(known) > 1:
            slope = (us[-1] - us[-2]) / (known[-1] - known[-2])
            row = np.where(experts > known[-1], us[-1] + slope * (experts - known[-1]), row)
        row = np.where(experts < known[0], us[0] * experts / known[0], row)
        rows.append(row)
    share = 0.0 if above == below else (tokens - below) / (above - below)
    return (1.0 - share) * rows[0] + share * rows[1]


def decode_times(
    latency: LatencyFile,
    header: BankHeader,
    rows: np.ndarray,
    *,
    max_num_seqs: int,
    block_tokens: int,
    num_ranks: int = 1,
    realised: bool = True,
) -> Times:
    """What decode steps take.

    Args:
        latency: the machine.
        header: the bank's geometry.
        rows: uint64 [R, L, Wd], the bank's.
        max_num_seqs: largest step.
        block_tokens: tokens per KV block.
        num_ranks: expert-parallel ranks, equal shares of experts; a layer waits for the rank
            with the most distinct experts.
        realised: False takes the mean number of experts.

    Raises:
        ConfigError: the bank's layers are not the latency file's, or ranks do not divide E.
    """
    if latency.num_layers != header.num_layers:
        raise ConfigError(
            "latency.num_layers", latency.num_layers, f"must be the bank's {header.num_layers}"
        )
    if num_ranks < 1 or header.num_experts % num_ranks:
        raise ConfigError("num_ranks", num_ranks, f"must divide {header.num_experts} experts")
    counts = np.arange(max_num_seqs + 1, dtype=np.float64)
    moe_s = moe_layer_s(latency, max_num_seqs, header.num_experts)
    miss = 1.0 - header.top_k / header.num_experts
    mean = header.num_experts * (1.0 - miss**counts)
    mean_s = [np.interp(a, np.arange(moe_s.shape[1]), moe_s[n]) for n, a in enumerate(mean)]
    layer = latency.per_layer
    rest = latency.num_layers * (layer.decode_us + layer.decode_token_us * counts)
    rest += latency.step_us + latency.step_token_us * counts
    return Times(
        rows=rows,
        masks=_rank_masks(header.num_experts, num_ranks),
        moe_s=moe_s,
        rest_s=rest * 1e-6,
        mean_s=np.array(mean_s) * latency.num_layers,
        mean_experts=mean * header.num_layers,
        context_s=np.array([latency.num_layers * layer.context_token_us * 1e-6]),
        block_tokens=np.array([block_tokens], np.int64),
        realised=np.array([int(realised)], np.int64),
    )


def _rank_masks(num_experts: int, num_ranks: int) -> np.ndarray:
    """Experts of each rank as bits, uint64 [ranks, Wd]."""
    masks = np.zeros((num_ranks, num_words(num_experts)), np.uint64)
    share = num_experts // num_ranks
    for expert in range(num_experts):
        bit = np.uint64(1) << np.uint64(expert % WORD_BITS)
        masks[expert // share, expert // WORD_BITS] |= bit
    return masks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillTimes:
    """What a prefill step takes.

    Attributes:
        base_s: per step, all layers.
        token_s: per token, MoE apart.
        attended_s: per pair of tokens.
        moe_s: float64 [n], MoE of all layers by tokens of the step; the last entry's slope
            goes on beyond.
    """

    base_s: float
    token_s: float
    attended_s: float
    moe_s: np.ndarray

    def step_s(self, num_tokens: int, attended: float) -> float:
        """Seconds of a step of `num_tokens` tokens and `attended` pairs of tokens."""
        last = len(self.moe_s) - 1
        if num_tokens <= last:
            moe_s = float(self.moe_s[num_tokens])
        else:
            slope = float(self.moe_s[last] - self.moe_s[last // 2]) / (last - last // 2)
            moe_s = float(self.moe_s[last]) + slope * (num_tokens - last)
        return self.base_s + self.token_s * num_tokens + self.attended_s * attended + moe_s


def prefill_times(latency: LatencyFile, header: BankHeader, chunk_tokens: int) -> PrefillTimes:
    """What prefill steps take; experts at their mean number, which a chunk soon saturates."""
    counts = np.arange(chunk_tokens + 1, dtype=np.float64)
    miss = 1.0 - header.top_k / header.num_experts
    experts = header.num_experts * (1.0 - miss**counts)
    grid = np.arange(header.num_experts + 1, dtype=np.float64)
    table = moe_layer_s(latency, chunk_tokens, header.num_experts)
    moe_s = np.array([np.interp(a, grid, table[n]) for n, a in enumerate(experts)])
    layer, layers = latency.per_layer, latency.num_layers
    return PrefillTimes(
        base_s=(layers * layer.prefill_us + latency.step_us) * 1e-6,
        token_s=layers * layer.prefill_token_us * 1e-6,
        attended_s=layers * layer.prefill_attended_us * 1e-6,
        moe_s=moe_s * layers,
    )


def cell_cost(latency: LatencyFile, header: BankHeader, prefill: PrefillTimes) -> CellCost:
    """The coefficients a calibrated router would hold for these service times."""
    layer, layers, moe = latency.per_layer, latency.num_layers, latency.moe
    chunk = len(prefill.moe_s) - 1
    half_s, full_s = (prefill.step_s(n, n * n / 2.0) for n in (chunk // 2, chunk))
    token_s = (full_s - half_s) / (chunk - chunk // 2)
    return CellCost(
        usd_per_chip_hour=latency.usd_per_chip_hour,
        prefill=PrefillTimeModel(chunk_s=max(0.0, full_s - token_s * chunk), token_s=token_s),
        step=StepTimeModel(
            base_s=latency.step_us * 1e-6,
            c0_s=(moe.c0_us + layer.decode_us) * 1e-6,
            c2_s=moe.c2_us * 1e-6,
            c3_s=(moe.c3_us + layer.decode_token_us + latency.step_token_us / layers) * 1e-6,
            attention_s=layers * layer.context_token_us * 1e-6,
            num_moe_layers=header.num_layers,
            num_experts=header.num_experts,
            top_k=header.top_k,
        ),
        kv_bytes_per_token=latency.kv_bytes_per_token,
        version=latency.source.split("\n")[0][:80],
    )
