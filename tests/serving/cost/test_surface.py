"""The cost surface: estimates by hand, measured over prior, holes, opportunity, slices."""

import dataclasses
import math
from pathlib import Path

import pytest

from serving.core.costs import CostBook
from serving.core.errors import ConfigError
from serving.core.request import SloClass
from serving.core.router_config import DEFAULT_TARGETS
from serving.core.transfer import LinkSpeeds
from serving.core.worker import Role, WorkerState
from serving.cost.catalogue import load_catalogue
from serving.cost.surface import CostSurface, MeanRequest
from tests.serving import decision_parts as parts

CONFIGS = Path(__file__).parents[3] / "configs"
MEAN = MeanRequest(prompt_tokens=2048, output_tokens=300)
LIMITS = parts.capabilities(buckets_tokens=(), max_num_seqs=256)


@pytest.fixture(scope="module")
def catalogue():
    return load_catalogue(CONFIGS / "serving" / "variants.yaml", CONFIGS / "hardware")


@pytest.fixture
def surface(catalogue):
    return CostSurface(catalogue, mean_request=MEAN)


def pool(name, hardware, model="70b_8bit", chips=1, **changes):
    """A prefill and a decode worker."""
    given = {"pool": name, "hardware": hardware, "model": model, "num_chips": chips}
    return [
        parts.worker(f"{name}-{role.value}", role, capabilities=LIMITS, **(given | changes))
        for role in (Role.PREFILL, Role.DECODE)
    ]


def estimates(surface, workers, slo=SloClass.B, now_s=0.0):
    surface.learn(workers)
    return surface.estimates(workers, slo, DEFAULT_TARGETS[slo], now_s=now_s)


def test_an_estimate_by_hand(surface):
    (found,) = estimates(surface, pool("iron", "tpu7x"))
    # FACTS section 2: prefill 18.1K tok/s; a step loads 70 GB and each context 2,198 tokens.
    token_s = 2 * 70e9 / (4614e12 * 0.55)
    step_s = (70e9 + found.batch * 2198 * 163840) / (7.37e12 * 0.65)
    rate, price = 6 / 3600, DEFAULT_TARGETS[SloClass.B].lambda_usd_per_s
    compute = rate * (2048 * token_s + 300 * step_s / found.batch)
    assert found.tpot_s == pytest.approx(step_s)
    assert found.ttft_s == pytest.approx(2048 * token_s)
    assert found.usd == pytest.approx(compute + price * (2048 * token_s + 300 * step_s))
    assert found.keeps_target
    assert not found.measured


def test_classes_pack_differently(surface):
    batch = {slo: estimates(surface, pool("iron", "tpu7x"), slo)[0].batch for slo in SloClass}
    # The dearer a class's delay, the emptier the steps it is served in.
    assert batch[SloClass.A] < batch[SloClass.B] < batch[SloClass.C]
    assert estimates(surface, pool("iron", "tpu7x"), SloClass.A)[0].tpot_s <= 0.03


def test_a_measurement_beats_the_prior_while_it_is_fresh(surface):
    workers = pool("iron", "tpu7x") + pool("blue", "b200")
    before = [item.pool for item in estimates(surface, workers)]
    slow = next(worker for worker in workers if worker.pool == before[0])
    for at in range(30):
        surface.observe_speed(slow, 2.0, now_s=float(at))
    after = estimates(surface, workers, now_s=30.0)
    assert [item.pool for item in after] == before[::-1]
    assert [item.measured for item in after] == [False, True]
    assert [item.flagged for item in after] == [False, True]
    stale = estimates(surface, workers, now_s=5000.0)
    assert [item.pool for item in stale] == before
    assert not any(item.measured for item in stale)


def test_the_table_orders_pools_and_says_what_it_rests_on(surface):
    workers = pool("iron", "tpu7x") + pool("blue", "b200") + pool("hopper", "h100", chips=2)
    table = surface.table(workers, DEFAULT_TARGETS, now_s=0.0)
    asked = parts.request(model="70b_8bit")
    cells = table.cells(asked)
    assert [cell.pool for cell in cells] == [i.pool for i in estimates(surface, workers)]
    assert [cell.usd_per_request for cell in cells] == sorted(c.usd_per_request for c in cells)
    assert {cell.source for cell in cells} == {"prior"}
    assert table.choices(asked)[0] == cells
    assert table.choices(parts.request()) == table.choices(asked)
    assert table.version == "surface-1"
    assert surface.table(workers, DEFAULT_TARGETS, now_s=10.0).version == "surface-2"


def test_a_pool_that_breaks_the_class_is_tried_last(surface):
    # Eight v5e prefill 2,048 tokens in 165 ms, one Ironwood in 113 ms.
    strict = dataclasses.replace(DEFAULT_TARGETS[SloClass.A], ttft_p99_s=0.14)
    workers = pool("old", "v5e", chips=8) + pool("iron", "tpu7x")
    surface.learn(workers)
    found = surface.estimates(workers, SloClass.A, strict, now_s=0.0)
    assert [item.pool for item in found] == ["iron", "old"]
    assert [item.keeps_target for item in found] == [True, False]
    table = surface.table(workers, {SloClass.A: strict}, now_s=0.0)
    choices = table.choices(parts.request(slo=SloClass.A))
    assert [[cell.pool for cell in group] for group in choices] == [["iron"], ["old"]]


def test_pools_without_live_workers_and_impossible_cells_are_holes(surface):
    dead = [dataclasses.replace(w, state=WorkerState.LOST) for w in pool("dead", "b200")]
    small = pool("small", "v5e", chips=1)
    half = pool("half", "tpu7x")[:1]
    assert estimates(surface, [*dead, *small, *half]) == []
    assert surface.holes[("70b_8bit", "v5e", 1)].startswith("hbm_capacity")
    assert surface.table([*dead, *small, *half], DEFAULT_TARGETS, now_s=0.0) is None


@pytest.mark.parametrize(("field", "value"), [("hardware", "tpu9"), ("model", "gpt-9")])
def test_what_the_catalogue_does_not_know_is_named(surface, field, value):
    with pytest.raises(ConfigError, match=value):
        surface.learn(
            pool("x", "tpu7x", model="70b_8bit")
            and [dataclasses.replace(pool("x", "tpu7x")[0], **{field: value})]
        )


def test_batch_work_pays_the_opportunity_rate_of_old_chips(surface):
    workers = pool("old", "v5e", model="8b_8bit", chips=2)
    costs = CostBook(surface.coefficients(workers)).rows(tuple(workers))
    assert costs.rate_for(SloClass.B)[0] == pytest.approx(2 * 0.80 / 3600)
    assert costs.rate_for(SloClass.C)[0] == pytest.approx(2 * 0.40 / 3600)
    # For work nobody waits for the old pool is the cheapest, at its list price it is not:
    # Ironwood stays free for those who need it.
    both = workers + pool("iron", "tpu7x", model="8b_8bit")
    surface.learn(both)
    patient = dataclasses.replace(DEFAULT_TARGETS[SloClass.C], lambda_usd_per_s=1e-7)
    assert surface.estimates(both, SloClass.C, patient, now_s=0.0)[0].pool == "old"
    assert surface.estimates(both, SloClass.B, patient, now_s=0.0)[0].pool == "iron"


def test_links_take_the_hardwares_priors_and_fresh_measurements(surface):
    workers = pool("iron", "tpu7x") + pool("blue", "b200")
    surface.learn(workers)
    links = surface.links(LinkSpeeds(), now_s=0.0)
    assert links.domain_of("tpu7x")[0] == 200e9
    assert links.network_of("tpu7x") == 15e9
    pair, moved = ("iron", "blue"), {"num_blocks": 128, "num_bytes": 2048 * 163840}
    surface.observe_hand_over(pair, **moved, seconds=0.1, now_s=0.0)
    surface.observe_hand_over(pair, **moved, seconds=0.05, now_s=1.0)
    surface.observe_hand_over(("iron", "nowhere"), **moved, seconds=0.05, now_s=1.0)
    measured = surface.links(LinkSpeeds(), now_s=2.0).measured_bytes_per_s
    # The first compiled for a new number of blocks, which says nothing of the wire.
    assert measured == {pair: pytest.approx(2048 * 163840 / 0.05)}
    assert surface.links(LinkSpeeds(), now_s=9999.0).measured_bytes_per_s == {}
    # One wild sample neither closes a link nor makes it free.
    for seconds in (1e-6, 600.0):
        surface.observe_hand_over(pair, num_blocks=128, num_bytes=1, seconds=seconds, now_s=1e5)
        (rate,) = surface.links(LinkSpeeds(), now_s=1e5).measured_bytes_per_s.values()
        assert 1e6 < rate < 1e13


def test_a_mean_request_is_checked():
    with pytest.raises(ConfigError, match="prompt_tokens"):
        MeanRequest(prompt_tokens=math.nan)
