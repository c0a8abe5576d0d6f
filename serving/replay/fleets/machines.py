"""Workers of a fleet replay and what their steps take: the catalogue's rooflines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serving.core.costs import CellCost
from serving.core.errors import ConfigError
from serving.core.worker import Capabilities, Role, WorkerInfo
from serving.cost.catalogue import Catalogue, Offer
from serving.cost.cells import Cell, build_cell
from serving.cost.coefficients import modelled_cost
from serving.cost.feasibility import max_kv_tokens
from serving.cost.topology import parse_topology
from serving.replay.fleets.config import FleetReplayConfig, PoolSection, TrafficSection

MAX_CONTEXT_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One worker as it is.

    Attributes:
        info: as it registers.
        cost: its roofline, which the router's coefficients are, too.
        pool: its section.
        usd_per_s: price of the powered worker.
    """

    info: WorkerInfo
    cost: CellCost
    pool: PoolSection
    usd_per_s: float


def machines_of(config: FleetReplayConfig, catalogue: Catalogue) -> list[Machine]:
    """Every worker of a fleet.

    Raises:
        ConfigError: a slice does not parse or hold its workers, or a cell cannot exist.
    """
    found: list[Machine] = []
    for row, pool in enumerate(config.pools):
        try:
            found += _pool(pool, catalogue)
        except ConfigError as error:
            raise ConfigError(f"pools[{row}].{error.field}", error.value, error.rule) from None
    return found


def sustainable_rate(
    config: FleetReplayConfig, catalogue: Catalogue, traffic: TrafficSection
) -> float:
    """Requests per second the fleet can sustain: the tighter of prefill and decode.

    Decode: every worker at the largest batch that keeps `capacity_tpot_s`, slots and KV, with
    experts as if requests chose independently. Prefill: every prompt computed whole.
    """
    prefill = decode = 0.0
    context = traffic.prompt_tokens + 0.5 * traffic.output_tokens
    for pool in config.pools:
        cell = _cell(pool, catalogue)
        room = max_kv_tokens(cell.format, cell.hardware, cell.num_chips) / context
        batch = max(1, min(pool.max_num_seqs, int(0.9 * room)))
        while batch > 1 and cell.decode_step_s(batch, context) > config.capacity_tpot_s:
            batch -= 1
        speed = batch / cell.decode_step_s(batch, context)
        decode += pool.num_domains * pool.decode_per_domain * speed / traffic.output_tokens
        speed = cell.prefill_tokens_per_s()
        prefill += pool.num_domains * pool.prefill_per_domain * speed / traffic.prompt_tokens
    return min(prefill, decode)


def _pool(pool: PoolSection, catalogue: Catalogue) -> list[Machine]:
    hardware = catalogue.hardware_of(pool.hardware)
    workers = pool.prefill_per_domain + pool.decode_per_domain
    if (hardware.kind == "tpu") != bool(pool.topology):
        raise ConfigError(
            "topology", pool.topology, f"is for TPUs, {hardware.id} is {hardware.kind}"
        )
    if pool.topology:
        shape = parse_topology(pool.topology, hardware)
        if workers * pool.worker_chips > shape.num_chips:
            raise ConfigError(
                "topology",
                pool.topology,
                f"has {shape.num_chips} chips, {workers} workers of {pool.worker_chips} need more",
            )
    cell = _cell(pool, catalogue)
    cost = modelled_cost(cell)
    tokens = max_kv_tokens(cell.format, cell.hardware, cell.num_chips)
    out = []
    for domain in range(pool.num_domains):
        place = f"{pool.name}-{domain}"
        for number in range(workers):
            role = Role.PREFILL if number < pool.prefill_per_domain else Role.DECODE
            prefill = role is Role.PREFILL
            info = WorkerInfo(
                worker_id=f"{place}-{role.value}-{number}",
                address=f"{place}-{number}:0",
                role=role,
                pool=pool.name,
                model=pool.variant,
                hardware=pool.hardware,
                num_chips=pool.worker_chips,
                ici_domain=place,
                slice_id=place if pool.topology else "",
                capabilities=Capabilities(
                    block_size_tokens=pool.block_tokens,
                    page_size_tokens=pool.block_tokens,
                    max_num_seqs=pool.max_num_seqs,
                    max_context_tokens=MAX_CONTEXT_TOKENS,
                    # Prefill keeps prompts only until they are handed over.
                    num_kv_blocks=1 << 30 if prefill else max(1, tokens // pool.block_tokens),
                    buckets_tokens=pool.buckets_tokens if prefill else (),
                    tensor_parallel=pool.worker_chips * hardware.jax_devices_per_chip,
                ),
            )
            usd_per_s = pool.worker_chips * cost.usd_per_chip_hour / 3600.0
            out.append(Machine(info=info, cost=cost, pool=pool, usd_per_s=usd_per_s))
    return out


def _cell(pool: PoolSection, catalogue: Catalogue) -> Cell:
    key = (pool.variant, pool.hardware, pool.worker_chips)
    offers = {(o.variant, o.hardware, o.num_chips): o for o in catalogue.offers}
    offer = offers.get(key) or Offer(
        variant=pool.variant, hardware=pool.hardware, num_chips=pool.worker_chips
    )
    cell, verdict = build_cell(catalogue, offer)
    if cell is None or math.isnan(cell.usd_per_s()):
        raise ConfigError("worker_chips", key, f"{verdict.rule}: {verdict.detail}")
    return cell
