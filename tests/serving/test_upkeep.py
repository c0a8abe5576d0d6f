"""What happens once a beat: lost workers' prefixes, the pushed table, links, parking."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from serving.assembly import cost_book, discover
from serving.config import ServerConfig, check, load_config
from serving.core.block_hash import BlockHasher
from serving.core.clock import ManualClock
from serving.core.errors import ConfigError
from serving.core.worker import Phase, Role, WorkerState
from serving.engines.pulled import Pulled
from serving.fleet.registry import LoadReport
from serving.upkeep import Upkeep
from tests.serving import decision_parts as parts

CONFIGS = Path(__file__).parents[2] / "configs"
SLO = {slo: {"lambda_usd_per_s": price} for slo, price in (("A", 1e-2), ("B", 1e-3), ("C", 1e-5))}


def worker_section(name, role, **changes):
    given = {"worker_id": name, "address": f"{name}:1", "role": role, "hardware": "tpu7x"}
    sizes = {"block_size_tokens": 16, "max_num_seqs": 64, "max_context_tokens": 4096}
    sizes |= {"page_size_tokens": 16, "num_kv_blocks": 1 << 16}
    return {**given, "pool": "iron", "capabilities": sizes, **changes}


def config(**costs) -> ServerConfig:
    plain = {
        "schema_version": 1,
        "model": {"name": "70b_8bit"},
        "slo": SLO,
        "router": {"prefix_index": True},
        "costs": {"hardware_dir": "hardware", "variants": "serving/variants.yaml", **costs},
        "workers": [worker_section("p0", "prefill"), worker_section("d0", "decode")],
        "folder": str(CONFIGS),
    }
    made = msgspec.convert(plain, ServerConfig)
    check(made)
    return made


@pytest.fixture
def rig():
    return parts.Rig(num_prefill=0, num_decode=0, experts=False, regions=None)


def add(rig, name, role, pool="iron", hardware="tpu7x"):
    given = {"pool": pool, "hardware": hardware, "model": "70b_8bit"}
    rig.fleet.add(parts.worker(name, role, **given), rig.clock.now_s)


def test_a_lost_workers_prefixes_are_forgotten_and_it_may_come_back(rig):
    for name in ("p0", "p1"):
        add(rig, name, Role.PREFILL)
    upkeep = Upkeep(config())
    upkeep.fleet_changed(rig.fleet)
    hashes = BlockHasher(16).hashes(parts.request(num_tokens=64).token_ids)
    upkeep.prefix_index.route("p0", hashes, rig.clock.now_s)
    workers = rig.router.view(Phase.PREFILL).workers
    assert upkeep.prefix_index.cached_blocks(hashes, workers).tolist() == [4, 0]
    rig.fleet.set_state("p0", WorkerState.LOST)
    upkeep.fleet_changed(rig.fleet)
    assert upkeep.prefix_index.stats().num_workers == 1
    rig.fleet.set_state("p0", WorkerState.READY)
    rig.fleet.remove("p1")
    upkeep.fleet_changed(rig.fleet)
    assert upkeep.prefix_index.stats().num_workers == 1
    workers = rig.router.view(Phase.PREFILL).workers
    assert upkeep.prefix_index.cached_blocks(hashes, workers).tolist() == [0]


def test_measurements_reach_the_table_every_so_often(rig):
    for pool, hardware in (("iron", "tpu7x"), ("blue", "b200")):
        for role in (Role.PREFILL, Role.DECODE):
            add(rig, f"{pool}-{role.value}", role, pool, hardware)
    upkeep = Upkeep(config(table_every_s=2.0))
    upkeep.push_table(rig.router, rig.fleet, rig.clock.now_s)
    asked = parts.request(model="70b_8bit")
    table = rig.router._live.table(rig.fleet.workers)
    assert table.version == "surface-1"
    best = table.cells(asked)[0].pool
    slow = LoadReport(num_running=0, num_waiting=0, kv_blocks_used=0, speed_factor=3.0)
    for role in ("prefill", "decode"):
        rig.fleet.update(f"{best}-{role}", slow, rig.clock.now_s)
    rig.clock.advance(1.0)
    upkeep.push_table(rig.router, rig.fleet, rig.clock.now_s)
    assert rig.router._live.table(rig.fleet.workers) is table
    rig.clock.advance(1.0)
    upkeep.push_table(rig.router, rig.fleet, rig.clock.now_s)
    after = rig.router._live.table(rig.fleet.workers).cells(asked)
    assert after[-1].pool == best
    assert after[-1].source == "measured"
    assert upkeep.links(rig.clock.now_s).domain_of("tpu7x")[0] == 200e9


def test_the_sweep_parks_idle_workers(rig):
    for name in ("d0", "d1"):
        add(rig, name, Role.DECODE)
    upkeep = Upkeep(config(park_idle_after_s=3.0))
    upkeep.sweep(rig.router, rig.fleet, rig.clock.now_s)
    rig.clock.advance(3.0)
    upkeep.sweep(rig.router, rig.fleet, rig.clock.now_s)
    assert [w.state for w in rig.fleet.workers] == [WorkerState.READY, WorkerState.PARKED]
    assert Upkeep(config()).observers()[-1] is not None


def test_rooflines_price_what_nobody_calibrated(rig):
    made = config()
    add(rig, "d0", Role.DECODE)
    (info,) = rig.fleet.workers
    upkeep = Upkeep(made)
    cost = cost_book(made, upkeep.surface, [info]).get(info)
    assert cost.version == "roofline-70b_8bit-tpu7x-1"
    small = msgspec.structs.replace(made, folder=str(CONFIGS))
    add(rig, "old", Role.DECODE, hardware="v5e")
    with pytest.raises(ConfigError, match=r"workers\.old.*hbm_capacity"):
        cost_book(small, upkeep.surface, rig.fleet.workers)


def test_without_a_catalogue_there_is_no_surface_and_cells_must_be_given():
    with pytest.raises(ConfigError, match=r"costs\.cells has none"):
        config(variants="")


def test_the_fleet_example_becomes_workers_with_slices_and_prices():
    made = load_config(CONFIGS / "serving" / "fleet.yaml")
    infos = asyncio.run(discover(made, ManualClock()))
    by_pool = {info.pool: info for info in infos}
    assert len(infos) == 7
    iron, blue = by_pool["ironwood"], by_pool["b200"]
    assert (iron.slice_id, iron.ici_domain) == ("ironwood-0", "ironwood-0")
    assert (blue.slice_id, blue.ici_domain) == ("", "b200-0")
    upkeep = Upkeep(made)
    costs = cost_book(made, upkeep.surface, infos)
    assert costs.get(iron).needs_equal_tensor_parallel
    table = upkeep.surface.table(infos, made.targets(), now_s=0.0)
    assert {cell.pool for cell in table.cells(parts.request())} == {"ironwood", "b200"}


def test_a_label_that_does_not_parse_names_the_worker():
    made = load_config(CONFIGS / "serving" / "fleet.yaml")
    labels = made.workers[0].labels | {"cloud.google.com/gke-tpu-topology": "2x"}
    worker = msgspec.structs.replace(made.workers[0], labels=labels)
    wrong = msgspec.structs.replace(made, workers=(worker, *made.workers[1:]))
    with pytest.raises(ConfigError, match=r"workers\[0\]\.labels\.cloud.*topology='2x'"):
        asyncio.run(discover(wrong, ManualClock()))


@pytest.mark.parametrize("variants", ["serving/variants.yaml", ""])
def test_measured_hand_overs_reach_the_router_and_grow_stale(rig, variants):
    cell = {
        "model": "70b_8bit",
        "hardware": "tpu7x",
        "version": "test",
        "prefill": {"chunk_s": 1e-3, "token_s": 1e-4},
        "step": {
            **dict.fromkeys(("base_s", "c0_s", "c2_s", "c3_s", "attention_s"), 1e-4),
            "num_moe_layers": 0,
            "num_experts": 1,
            "top_k": 1,
        },
    }
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        add(rig, name, role)
    upkeep = Upkeep(config(variants=variants, cells=[cell]))
    if upkeep.surface is not None:
        upkeep.surface.learn(rig.fleet.workers)
    source, target = rig.fleet.workers
    moved = Pulled(num_blocks=4, num_bytes=4_000_000, seconds=0.1)
    for _ in range(2):  # a new number of blocks compiles first and says nothing of the link
        upkeep.pulled(source, target, moved, rig.clock.now_s)
    upkeep.sweep(rig.router, rig.fleet, rig.clock.now_s)
    links = upkeep.links(rig.clock.now_s).measured_bytes_per_s
    assert links == {("iron", "iron"): pytest.approx(4e7, rel=0.01)}
    assert rig.router._chooser._transfer.links.measured_bytes_per_s == links
    rig.clock.advance(3600.0)
    upkeep.sweep(rig.router, rig.fleet, rig.clock.now_s)
    assert rig.router._chooser._transfer.links.measured_bytes_per_s == {}
