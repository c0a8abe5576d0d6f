"""The record says what was true when the choice was made, and what an operator can add up."""

import numpy as np
import pytest

from serving.core.decision import DecisionRecord, TermKind, decode_line, encode_line
from serving.core.recording import NUM_BEST
from serving.core.router_config import RouterConfig
from serving.core.worker import Phase
from serving.policies.registry import make_policy
from tests.serving import decision_parts as parts


def decision(rig, phase, request_id="r"):
    lines = [line for line in rig.router.explain(request_id) if isinstance(line, DecisionRecord)]
    return next(line for line in lines if line.stage.phase == phase.value)


def busy(rig, num=12):
    for i in range(num):
        rig.serve(parts.request(f"busy{i}", num_tokens=60 + i), seed=i, end=False)


@pytest.mark.parametrize("policy", ["expert_cost", "jsq", "eldr_static", "p2c_work"])
def test_winner_runner_up_and_the_eight_best(policy):
    rig = parts.Rig(num_decode=14, decode=policy)
    busy(rig)
    rig.serve(parts.request(), end=False)
    stage = decision(rig, Phase.DECODE).stage
    ids = [candidate.worker_id for candidate in stage.candidates]
    assert ids[:2] == [stage.winner, stage.runner_up]
    assert len(set(ids)) == len(ids)
    assert 2 <= len(ids) <= NUM_BEST + 2
    scores = [candidate.score for candidate in stage.candidates]
    assert scores[0] == min(scores)
    assert scores[1:] == sorted(scores[1:])
    assert stage.delta == pytest.approx(scores[1] - scores[0])
    totals = [candidate.total_usd for candidate in stage.candidates]
    assert stage.delta_usd == pytest.approx(totals[1] - totals[0])
    for candidate in stage.candidates:
        cost = [term.usd for term in candidate.terms if term.kind is TermKind.COST]
        assert candidate.total_usd == pytest.approx(sum(cost))
        assert candidate.terms
        assert candidate.why_not == ""
    assert (stage.num_candidates, stage.num_feasible) == (14, 14)
    assert stage.policy == policy


def test_expert_cost_scores_are_j_plus_its_score_terms():
    rig = parts.Rig()
    rig.fleet.set_profiles({f"d{i}": parts.profiles().profiles[i] for i in range(3)})
    busy(rig)
    rig.serve(parts.request(), end=False)
    for candidate in decision(rig, Phase.DECODE).stage.candidates:
        extra = sum(term.usd for term in candidate.terms if term.kind is TermKind.SCORE)
        assert extra < 0
        assert candidate.score == pytest.approx(candidate.total_usd + extra)


def test_a_sample_is_recorded_with_everybody():
    rig = parts.Rig(num_decode=14, config=RouterConfig(record_everyone=1.0))
    rig.fleet.registry.set_state("d5", parts.worker("x").state.PARKED)
    rig.serve(parts.request(), end=False)
    stage = decision(rig, Phase.DECODE).stage
    assert {c.worker_id for c in stage.candidates} == {f"d{i}" for i in range(14)}
    parked = next(c for c in stage.candidates if c.worker_id == "d5")
    assert (parked.score, parked.why_not) == (None, "state")


def test_the_sample_is_a_share_of_decisions():
    rig = parts.Rig(num_decode=14, config=RouterConfig(record_everyone=0.25))
    for i in range(60):
        rig.serve(parts.request(f"r{i}"))
    sizes = [len(x.stage.candidates) for x in rig.lines if isinstance(x, DecisionRecord)]
    everybody = sizes.count(14)
    assert 15 <= everybody <= 45  # of 120, all prefill stages hold two


def test_a_baselines_terms_are_those_of_the_moment_it_chose():
    # The record is made later, when other requests have changed every survival row.
    late, early = parts.Rig(decode="jsq"), parts.Rig(decode="jsq")
    for rig in (late, early):
        busy(rig)
        asked = parts.request()
        prefill = rig.router.place_prefill(asked)
        placed = rig.router.place_decode(
            asked,
            signature=parts.signature(seed=5),
            prefill_worker_id=prefill.worker.worker_id,
        )
        if rig is early:
            rig.router.record(placed)
        for i in range(6):
            rig.serve(parts.request(f"after{i}"), seed=20 + i, end=False)
        rig.router.record(placed)
    assert decision(late, Phase.DECODE) == decision(early, Phase.DECODE)


def test_a_policy_that_does_not_follow_j_shows_a_negative_delta():
    rig = parts.Rig(decode="jsq", num_decode=2)
    rig.fleet.update("d0", parts_report(num_running=1), rig.clock.now_s)
    rig.fleet.update("d1", parts_report(speed=9.0), rig.clock.now_s)
    rig.serve(parts.request(), end=False)
    stage = decision(rig, Phase.DECODE).stage
    assert stage.winner == "d1"
    assert stage.delta == 1.0
    assert stage.delta_usd < 0


def test_unsampled_workers_are_told_apart_from_infeasible_ones():
    rig = parts.Rig(decode="p2c", num_decode=5, config=RouterConfig(record_everyone=1.0))
    rig.serve(parts.request(), end=False)
    whys = [c.why_not for c in decision(rig, Phase.DECODE).stage.candidates]
    assert sorted(whys) == ["", "", "not_sampled", "not_sampled", "not_sampled"]


def test_the_line_carries_inputs_versions_and_survives_the_log():
    rig = parts.Rig()
    rig.serve(parts.request(product="chat", tenant="t"), end=False)
    line = decision(rig, Phase.DECODE)
    assert line.versions == {
        "signature": "sig-1",
        "regions": "regions-1",
        "experts": "profiles-1",
        "costs": "cell-1",
    }
    assert line.inputs["prompt_tokens"] == 100.0
    assert line.inputs["signature_source"] == "live"
    assert (line.product, line.tenant, line.pool, line.variant) == ("chat", "t", "p", "m")
    assert decode_line(encode_line(line)) == line


def test_uncalibrated_fleets_are_recorded_without_prices():
    rig = parts.Rig(decode="jsq", num_decode=2, experts=False)
    rig.fleet.add(parts.worker("d9", hardware="new"), rig.clock.now_s)
    rig.serve(parts.request(), end=False)
    stage = decision(rig, Phase.DECODE).stage
    assert {c.worker_id for c in stage.candidates} == {"d0", "d1"}
    assert np.isfinite([c.total_usd for c in stage.candidates]).all()


def test_a_sampled_cell_prices_the_sampled_only():
    policy = make_policy("expert_cost", sample_above=8, num_near=3, num_light=3)
    rig = parts.Rig(num_decode=14, decode_policy=policy, config=RouterConfig(record_everyone=1.0))
    busy(rig)
    rig.serve(parts.request(), end=False)
    stage = decision(rig, Phase.DECODE).stage
    assert len(stage.candidates) == 14
    assert stage.num_feasible == 14
    for candidate in stage.candidates:
        sampled = candidate.why_not != "not_sampled"
        assert bool(candidate.terms) == sampled == (candidate.score is not None)
    assert 3 <= sum(bool(c.terms) for c in stage.candidates) <= 6


def parts_report(num_running=0, speed=None):
    from serving.fleet.registry import LoadReport

    return LoadReport(num_running=num_running, num_waiting=0, kv_blocks_used=0, speed_factor=speed)
