import numpy as np
import pytest

from serving.core.costs import CellCost, CostBook, PrefillTimeModel, StepTimeModel
from serving.core.errors import ConfigError
from serving.core.placement import PlacementContext
from serving.core.request import LengthBand, Request, SloTarget
from serving.core.worker import Capabilities, FleetView, Phase, Role, WorkerInfo
from serving.policies.registry import make_policy

TOKEN_S, TARGET = (
    1e-3,
    SloTarget(ttft_p99_s=1.0, tpot_p99_s=0.1, deadline_s=float("inf"), lambda_usd_per_s=1e-3),
)
CELL = CellCost(
    usd_per_chip_hour=1.0,
    prefill=PrefillTimeModel(chunk_s=0.0, token_s=TOKEN_S),
    step=StepTimeModel(
        base_s=1e-3,
        c0_s=0.0,
        c2_s=1e-5,
        c3_s=1e-5,
        attention_s=1e-7,
        num_moe_layers=4,
        num_experts=8,
        top_k=2,
    ),
)


def context(phase, *, cached=(0, 0, 0), queued=(0, 0, 0), feasible=None, priced=True, **fields):
    num = len(cached)
    workers = tuple(
        WorkerInfo(
            worker_id=f"w{n}",
            address="a",
            role=Role.BOTH,
            pool="p",
            model="m",
            hardware="h",
            capabilities=Capabilities(
                block_size_tokens=16,
                page_size_tokens=16,
                max_num_seqs=8,
                max_context_tokens=4096,
                num_kv_blocks=100,
            ),
        )
        for n in range(num)
    )
    columns = dict.fromkeys(
        ("age_s", "num_running", "num_waiting", "num_inflight", "kv_tokens", "kv_blocks_free"),
        np.zeros(num),
    )
    columns |= {k: np.array(v, float) for k, v in fields.items() if k in columns}
    view = FleetView(
        workers=workers,
        taken_at_s=0.0,
        accepts=np.ones(num, bool),
        queued_prefill_tokens=np.array(queued, float),
        speed_factor=np.array(fields.get("speed_factor", [1.0] * num)),
        tpot_limit_s=np.full(num, np.inf),
        **columns,
    )
    return PlacementContext(
        request=Request(
            request_id="r",
            token_ids=np.ones(200, np.int32),
            max_tokens=50,
            arrival_s=0.0,
            length=LengthBand(mean_tokens=50.0, p95_tokens=50.0),
        ),
        phase=phase,
        target=TARGET,
        view=view,
        feasible=np.ones(num, bool) if feasible is None else np.array(feasible),
        cached_tokens=np.array(cached, np.int32),
        transfer_s=np.array(fields.get("transfer_s", [0.0] * num)),
        sequence=0,
        costs=CostBook({("m", "h"): CELL}).rows(workers) if priced else None,
    )


def rank(ctx, seed=0, **options):
    return make_policy("kv_aware", **options).rank(ctx, np.random.default_rng(seed))


@pytest.mark.parametrize("priced", [True, False])
def test_prefix_wins_until_the_queue_costs_more_than_it_saves(priced):
    def chosen(queue):
        ctx = context(Phase.PREFILL, cached=(0, 160, 0), queued=(10, queue, 20), priced=priced)
        return rank(ctx).chosen

    assert [chosen(q) for q in (0, 100, 169, 171, 1000)] == [1, 1, 1, 0, 0]


def test_prefill_score_is_seconds_to_the_first_token():
    ctx = context(Phase.PREFILL, cached=(0, 160, 500), queued=(10, 0, 0), speed_factor=[1, 2, 1])
    ranking = rank(ctx)
    assert ranking.unit == "s"
    np.testing.assert_allclose(ranking.score, [0.210, 0.080, 0.001])
    assert (ranking.chosen, ranking.runner_up) == (2, 1)


def test_decode_moves_only_what_is_missing():
    ctx = context(Phase.DECODE, cached=(0, 100, 0), transfer_s=[0.2, 0.2, 0.0])
    score = rank(ctx).score
    assert score[0] - score[1] == pytest.approx(0.1)
    assert score[0] - score[2] == pytest.approx(0.2)


def test_decode_avoids_company_and_context():
    assert rank(context(Phase.DECODE, num_inflight=(3, 0, 2))).chosen == 1
    assert rank(context(Phase.DECODE, kv_tokens=(900, 500, 100))).chosen == 2
    assert rank(context(Phase.DECODE, kv_tokens=(900, 500, 100), priced=False)).chosen == 2


def test_infeasible_worker_is_not_chosen_however_much_it_holds():
    ctx = context(Phase.PREFILL, cached=(199, 0, 0), feasible=[False, True, True])
    assert rank(ctx).chosen != 0


def test_one_hot_prefix_does_not_take_the_whole_fleet():
    """Equal workers, the prefix on one: its neighbours get work once it queues."""
    queued, count = [0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]
    for seed in range(100):
        ctx = context(Phase.PREFILL, cached=(160, 0, 0, 0), queued=queued)
        chosen = rank(ctx, seed).chosen
        queued[chosen] += 40.0 if chosen == 0 else 200.0
        count[chosen] += 1
    assert min(count) >= 8


def test_ties_are_drawn():
    assert {rank(context(Phase.PREFILL), seed).chosen for seed in range(30)} == {0, 1, 2}


def test_prefix_weight():
    ctx = context(Phase.PREFILL, cached=(0, 160, 0), queued=(0, 100, 200))
    assert rank(ctx).chosen == 1
    assert rank(ctx, prefix_weight=0.5).chosen == 0
    with pytest.raises(ConfigError, match=r"prefix_weight=1.5 must be in \[0, 1\]"):
        make_policy("kv_aware", prefix_weight=1.5)
