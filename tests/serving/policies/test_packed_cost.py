"""Packing: what is filled, what is left alone, and when J decides after all."""

import numpy as np
import pytest

from serving.core.draws import KeyedDraws
from serving.core.errors import ConfigError
from serving.core.request import SloTarget
from serving.core.worker import Phase, Role
from serving.policies.registry import make_policy
from tests.serving import decision_parts as parts

EASY = SloTarget(ttft_p99_s=10.0, tpot_p99_s=1.0, deadline_s=np.inf, lambda_usd_per_s=2e-3)


def rank(context, **options):
    return make_policy("packed_cost", **options).rank(context, KeyedDraws(0).at(0))


def test_a_busy_worker_is_filled_before_an_idle_one_is_touched():
    # By J an idle worker is the cheaper one: the request's own delay is shorter there.
    seen = parts.view(3, num_inflight=[3.0, 0.0, 0.0], kv_blocks_free=[970, 1000, 1000])
    context = parts.context(seen)
    assert make_policy("expert_cost").rank(context, KeyedDraws(0).at(0)).chosen != 0
    assert rank(context).chosen == 0


def test_only_as_many_workers_are_open_as_the_work_fills():
    # Eleven requests on workers of eight slots, at most 85% full: two stay open, the third drains.
    seen = parts.view(3, num_inflight=[5.0, 2.0, 4.0])
    ranking = rank(parts.context(seen))
    assert ranking.chosen in (0, 1)
    assert np.isfinite(ranking.score).tolist() == [True, True, False]


def test_the_allowance_bounds_the_filling():
    # Seven of eight slots: beyond 85% for class B's share of .8, so the next one is opened.
    seen = parts.view(2, num_inflight=[7.0, 0.0])
    assert rank(parts.context(seen), share_b=0.8).chosen == 1
    # A member that was promised short steps keeps others out.
    strict = parts.view(2, num_inflight=[3.0, 0.0], tpot_limit_s=[0.005, np.inf])
    assert rank(parts.context(strict)).chosen == 1


def test_without_room_inside_the_allowances_j_decides_and_says_so():
    seen = parts.view(2, num_inflight=[6.0, 7.0])
    ranking = rank(parts.context(seen), share_b=0.5)
    assert ranking.fallback == "over_packing_limit"
    assert ranking.chosen == 0


def test_prefill_takes_the_first_worker_while_its_queue_is_short():
    seen = parts.view(3, phase=Phase.PREFILL, queued_prefill_tokens=[400.0, 0.0, 0.0])
    assert rank(parts.context(seen, phase=Phase.PREFILL, target=EASY)).chosen == 0
    late = parts.view(3, phase=Phase.PREFILL, queued_prefill_tokens=[60000.0, 0.0, 0.0])
    assert rank(parts.context(late, phase=Phase.PREFILL, target=EASY)).chosen == 1


def test_a_cached_prefix_is_cheaper_compute():
    seen = parts.view(2, phase=Phase.PREFILL, queued_prefill_tokens=[20000.0, 300.0])
    cached = np.array([0, 96], np.int32)
    context = parts.context(seen, phase=Phase.PREFILL, cached_tokens=cached, target=EASY)
    assert rank(context).chosen == 1


def test_the_router_packs_both_phases_and_prices_the_pair():
    rig = parts.Rig(num_prefill=3, num_decode=3, prefill="packed_cost", decode="packed_cost")
    placed = [
        rig.serve(parts.request(str(n), arrival_s=rig.clock.now_s), end=False) for n in range(5)
    ]
    assert {prefill.worker.worker_id for prefill, _ in placed} == {"p0"}
    assert {decode.worker.worker_id for _, decode in placed} == {"d0"}
    rig.router.record(placed[0][0])
    names = {term.name for term in rig.router.explain("0")[0].stage.candidates[0].terms}
    assert {"prefill_compute", "transfer", "decode_compute"} <= names
    assert rig.fleet.workers[0].role is Role.PREFILL


def test_when_j_decides_partners_are_compared_by_j_too():
    rig = parts.Rig(num_prefill=2, num_decode=2, prefill="packed_cost", decode="packed_cost")
    for number in range(16):  # every decode slot is taken, beyond every allowance
        asked = parts.request(f"o{number}", arrival_s=rig.clock.now_s)
        if number < 15:
            rig.router.place_decode(asked, signature=None, prefill_worker_id=None)
    asked = parts.request("late", arrival_s=rig.clock.now_s)
    placed = rig.router.place_prefill(asked)
    assert placed.fallback == "over_packing_limit"
    rig.router.record(placed)
    for candidate in rig.router.explain("late")[0].stage.candidates:
        if candidate.score is not None:
            assert candidate.score == pytest.approx(candidate.total_usd)


@pytest.mark.parametrize("field", ["share_a", "ttft_share", "fill"])
def test_shares_are_checked(field):
    with pytest.raises(ConfigError, match=field):
        make_policy("packed_cost", **{field: 0.0})
