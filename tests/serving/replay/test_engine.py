from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from serving import assembly
from serving.core.clock import ManualClock
from serving.core.costs import CostBook
from serving.core.errors import ConfigError
from serving.core.request import LengthBand, Request
from serving.core.router import Router
from serving.core.signature import SignatureSource
from serving.core.worker import Phase
from serving.fleet.fleet import Fleet
from serving.fleet.prefix_index import PrefixIndex
from serving.fleet.survival import SurvivalRows
from serving.policies.registry import POLICIES, make_policy
from serving.replay.config import PolicySection
from serving.replay.learned import SignatureSourceOfPrompts, bind_regions, expert_profiles
from serving.replay.metrics import run_metrics, tpot_series
from serving.replay.replica import HARDWARE, MODEL, PrefixCredits, workers_of


def ended(outcome) -> bool:
    return bool((~np.isnan(outcome.tpot_s) | outcome.rejected).all())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_ends_every_request_and_leaks_nothing(rig, make_scenario, policy):
    simulation = rig.simulation(make_scenario(), policy)
    outcome = simulation.run()
    assert ended(outcome)
    assert not outcome.rejected.any()
    assert (outcome.ttft_s > 0).all()
    for replica in simulation.replicas:
        assert replica.router.num_open == 0
        for phase in Phase:
            view = replica.router.view(phase)
            assert view.num_inflight.sum() == 0
            assert view.queued_prefill_tokens.sum() == 0
    assert simulation.decode.workers.kv_blocks.sum() == 0


def test_the_same_seed_gives_the_same_run_and_another_seed_another(rig, make_scenario):
    runs = [rig.run(make_scenario(), "expert_cost", seed) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(runs[0].tpot_s, runs[1].tpot_s)
    np.testing.assert_array_equal(runs[0].decode_worker, runs[1].decode_worker)
    assert not np.array_equal(runs[0].tpot_s, runs[2].tpot_s)


def test_policies_meet_the_same_randomness(rig, make_scenario):
    one, other = rig.simulation(make_scenario(), "jsq"), rig.simulation(make_scenario(), "rr")
    for name in ("prompt", "output_tokens", "key", "signature_of"):
        np.testing.assert_array_equal(getattr(one.workload, name), getattr(other.workload, name))
    np.testing.assert_array_equal(
        one.workload.arrivals.arrival_s, other.workload.arrivals.arrival_s
    )


def test_a_server_side_router_decides_as_the_replays_does(rig, make_scenario):
    """Everything the replay's router was told, told to a router put together as the server does.

    Same workers, reservations, telemetry, signatures, clock and draws: the same snapshot each
    time, so the same decision, score for score.
    """
    given = make_scenario(requests={"num_measured": 60})
    simulation = rig.simulation(given, "expert_cost", seed=5)
    calls = []

    def record(owner, name):
        real = getattr(owner, name)

        def spy(*arguments, **keywords):
            answer = real(*arguments, **keywords)
            calls.append((name, arguments, keywords, answer, simulation.clock.now_s))
            return answer

        setattr(owner, name, spy)

    replica = simulation.replicas[0]
    for name in ("place_prefill", "prefill_done", "place_decode", "first_token", "done"):
        record(replica.router, name)
    record(replica.fleet, "update")
    simulation.run()

    clock, model = ManualClock(), rig.learned.artefact.model
    survival = SurvivalRows(model.size, layer_scale=model.num_layers / model.num_masked_layers)
    fleet, index = Fleet(survival=survival), PrefixIndex()
    prefill, decode = workers_of(given)
    for worker in (*prefill, *decode):
        fleet.add(worker, 0.0)
    for worker in prefill:
        index.add_worker(worker)
    regions = rig.learned.artefact.regions_for([worker.worker_id for worker in decode])
    bind_regions(fleet, regions)
    server = Router(
        fleet,
        costs=CostBook({(MODEL, HARDWARE): rig.machine(given).cost}),
        prefill_policy=make_policy(given.routers.prefill_policy),
        decode_policy=make_policy("expert_cost"),
        config=dataclasses.replace(replica.router.config, record_share=1.0, record_everyone=1.0),
        clock=clock,
        sink=None,
        prefix_index=index,
        experts=expert_profiles(rig.learned.artefact),
        regions=regions,
        observers=(PrefixCredits(index),),
    )
    num_compared = 0
    for name, arguments, keywords, answer, now_s in calls:
        clock.now_s = now_s
        index.advance(now_s)
        owner = fleet if name == "update" else server
        mine = getattr(owner, name)(*arguments, **keywords)
        if name.startswith("place_"):
            assert mine.worker == answer.worker
            assert (mine.score_delta, mine.unit) == (answer.score_delta, answer.unit)
            num_compared += 1
    assert num_compared == 2 * len(simulation.workload)


def test_server_and_replay_read_the_same_profiles_of_an_artefact(rig):
    artefact = rig.learned.artefact
    ours, served = expert_profiles(artefact), assembly.expert_profiles(artefact)
    np.testing.assert_array_equal(ours.layer_scale, artefact.profiles.layer_scale)
    np.testing.assert_array_equal(served.layer_scale, artefact.profiles.layer_scale)
    np.testing.assert_array_equal(served.mean_profile, ours.mean_profile)


@pytest.mark.parametrize("routers", [1, 3])
def test_stale_and_lost_telemetry_and_several_routers(rig, make_scenario, routers):
    given = make_scenario(
        routers={
            "num": routers,
            "telemetry_interval_s": 0.02,
            "telemetry_delay_s": 0.05,
            "telemetry_loss": 0.3,
        }
    )
    outcome = rig.run(given, "expert_cost")
    assert ended(outcome)
    assert not outcome.rejected.any()


def test_a_crashed_decode_worker_costs_retries_but_no_request(rig, make_scenario):
    given = make_scenario(
        events=[{"at_s": 0.05, "kind": "crash", "worker": "d1"}], routers={"lost_after_s": 0.02}
    )
    simulation = rig.simulation(given, "jsq")
    outcome = simulation.run()
    assert ended(outcome)
    assert outcome.num_retries > 0
    late = simulation.workload.arrivals.arrival_s > 0.1
    assert not (outcome.decode_worker[late] == 1).any()


def test_a_crashed_prefill_worker_costs_retries_but_no_request(rig, make_scenario):
    given = make_scenario(
        events=[{"at_s": 0.03, "kind": "crash", "worker": "p0"}], routers={"lost_after_s": 0.02}
    )
    outcome = rig.run(given, "jsq")
    assert ended(outcome)
    assert not outcome.rejected.any()


def test_a_drained_worker_takes_nothing_new_and_a_spare_one_does(rig, make_scenario):
    given = make_scenario(
        fleet={"num_spare": 1},
        events=[
            {"at_s": 0.05, "kind": "leave", "worker": "d0"},
            {"at_s": 0.05, "kind": "join", "worker": "d3"},
        ],
    )
    simulation = rig.simulation(given, "jsq")
    outcome = simulation.run()
    assert ended(outcome)
    late = simulation.workload.arrivals.arrival_s > 0.06
    assert not (outcome.decode_worker[late] == 0).any()
    assert (outcome.decode_worker[late] == 3).any()


def test_a_slow_worker_is_noticed_by_a_rule_that_weighs_speed(rig, make_scenario):
    given = make_scenario(
        requests={"num_measured": 150},
        routers={"telemetry_interval_s": 0.02},
        events=[{"at_s": 0.0, "kind": "slow", "worker": "d0", "factor": 4.0}],
    )
    counts = np.bincount(rig.run(given, "expert_cost").decode_worker, minlength=3)
    assert counts[0] < 0.7 * counts[1:].mean()


def test_a_batch_beyond_the_slots_is_a_wrong_config(rig, make_scenario):
    with pytest.raises(ConfigError, match="mean_batch"):
        rig.workload(make_scenario(load={"mean_batch": 7}))


def test_wrong_signatures_are_wrong_and_paired(rig, make_scenario):
    right = rig.workload(make_scenario())
    wrong = rig.workload(make_scenario(signatures={"wrong_share": 1.0}))
    np.testing.assert_array_equal(right.prompt, wrong.prompt)
    assert (wrong.signature_of != wrong.prompt).all()
    assert (right.signature_of == right.prompt).all()


def test_without_signatures_experts_are_not_told_apart(rig, make_scenario):
    simulation = rig.simulation(make_scenario(signatures={"source": "none"}), "eldr_static")
    assert simulation._signatures.of(0) is None
    assert ended(simulation.run())
    live = rig.simulation(make_scenario())._signatures.of(0)
    assert live.source is SignatureSource.LIVE


def test_one_worker_serves_all(rig, make_scenario):
    given = make_scenario(fleet={"num_prefill": 1, "num_decode": 1})
    assert ended(rig.run(given, "expert_cost"))


def test_nobody_has_room_waits_and_then_gives_up(rig, make_scenario):
    given = make_scenario(
        fleet={"num_decode": 1, "max_num_seqs": 1},
        load={"rate_per_s": 300.0},
        routers={"retry_s": 0.005, "give_up_s": 0.1},
        requests={"num_measured": 60},
    )
    outcome = rig.run(given)
    assert ended(outcome)
    assert outcome.rejected.any()
    assert outcome.num_retries > 0


def test_a_prompt_that_can_never_fit_is_rejected_at_once(rig, make_scenario):
    outcome = rig.run(make_scenario(fleet={"kv_blocks": 1}))
    assert outcome.rejected.all()
    assert outcome.num_retries == 0


def test_realised_experts_can_be_turned_off(rig, make_scenario):
    given = make_scenario(fleet={"realised_experts": False})
    metrics = run_metrics(rig.run(given), rig.workload(given), 0)
    batch = metrics["mean_batch"]
    assert metrics["distinct_experts_per_step"] < 16
    assert batch > 1


def test_expert_parallel_steps_wait_for_the_slowest_rank(rig, make_scenario):
    whole = rig.run(make_scenario())
    parted = rig.run(make_scenario(fleet={"num_ranks": 4}, load={"rate_per_s": 1.0}))
    alone = rig.run(make_scenario(load={"rate_per_s": 1.0}))
    assert np.nanmean(parted.tpot_s) < np.nanmean(alone.tpot_s)
    assert ended(whole)


def test_drift_serves_the_domains_it_names(rig, make_scenario):
    given = make_scenario(drift={"at_share": 0.5, "before": ["domain-0"], "after": ["domain-1"]})
    work = rig.workload(given)
    domains = np.array([work.domain(r) for r in range(len(work))])
    half = round(len(work) * 0.5)
    assert set(domains[:half]) == {"domain-0"}
    assert set(domains[half:]) == {"domain-1"}


def test_phases_are_stretches_of_one_domain_without_repeats(rig, make_scenario):
    given = make_scenario(requests={"phase_requests": 6})
    workload = rig.workload(given)
    domains = rig.bank.domain_of[workload.prompt]
    for begin in range(0, len(domains), 6):
        assert len(set(domains[begin : begin + 6].tolist())) == 1
    assert set(domains.tolist()) == {0, 1}
    first = workload.prompt[domains == 0][:12]
    assert len(set(first.tolist())) == 12
    assert ended(rig.run(given, "expert_cost"))


def test_an_artefact_fitted_from_gates_is_given_gates(rig):
    bank, artefact = rig.bank, rig.learned.artefact
    manifest = msgspec.structs.replace(artefact.manifest, evidence="gates")
    gated = dataclasses.replace(artefact, manifest=manifest)
    gates = bank.prefill[::-1] * np.uint32(256)
    given = dataclasses.replace(bank, gates=gates)
    found = SignatureSourceOfPrompts(gated, given, "live").of(3)
    assert found is not None
    np.testing.assert_array_equal(found.counts, gates[3])
    plain = SignatureSourceOfPrompts(artefact, given, "live").of(3)
    assert plain is not None
    np.testing.assert_array_equal(plain.counts, bank.prefill[3])
    for lacking, source in ((bank, "live"), (given, "token_table")):
        with pytest.raises(ConfigError, match="bank with gate sums"):
            SignatureSourceOfPrompts(gated, lacking, source).of(3)


def test_a_guard_sees_signatures_of_other_prompts_mispredict(rig, make_scenario):
    long = {"num_measured": 160}
    agreements = []
    for wrong_share in (0.0, 1.0):
        given = make_scenario(requests=long, signatures={"wrong_share": wrong_share})
        section = PolicySection(name="expert_cost", guard=True)
        simulation = rig.simulation(given, section=section)
        assert ended(simulation.run())
        guard = simulation.replicas[0].guard
        assert guard is not None
        agreements.append(guard.agreement)
    assert agreements[1] < agreements[0]


def test_a_series_is_the_mean_of_each_stretch(rig, make_scenario):
    simulation = rig.simulation(make_scenario())
    outcome = simulation.run()
    series = tpot_series(outcome, simulation.workload, 16)
    tpot_ms = outcome.tpot_s[simulation.workload.measured] * 1e3
    np.testing.assert_allclose(
        series, [tpot_ms[:16].mean(), tpot_ms[16:32].mean(), tpot_ms[32:].mean()]
    )
    assert tpot_series(outcome, simulation.workload, 0) == ()


def test_the_router_is_told_what_the_scenario_says_of_lengths(rig, make_scenario):
    exact = rig.workload(make_scenario())
    assert exact.length(0) == LengthBand(mean_tokens=12.0, p95_tokens=12.0, source="exact")
    unknown = make_scenario(requests={"known_length": "max_tokens", "max_tokens": 40})
    assert rig.workload(unknown).length(0).mean_tokens == 40.0
    assert ended(rig.run(unknown, "expert_cost"))


def test_trace_prompts_share_the_prefixes_their_hashes_share(rig, make_scenario, tmp_path):
    row = '{{"timestamp": {}, "input_length": {}, "output_length": 4, "hash_ids": {}}}\n'
    rows = [(0, 1024, [5, 6]), (0, 1000, [5, 9]), (3000, 1024, [200000, 6])]
    (tmp_path / "m.jsonl").write_text("".join(row.format(*r) for r in rows))
    given = make_scenario(
        load={"kind": "mooncake", "path": "m.jsonl"},
        requests={"num_measured": 0},
        fleet={"block_tokens": 512, "kv_blocks": 64, "cache_blocks": 16},
    )
    work = rig.workload(given)
    order = np.argsort(work.arrivals.hash_ids[work.arrivals.hash_starts[:-1]], kind="stable")
    a, b, c = (work.token_ids(int(r)) for r in order)
    assert sorted(len(x) for x in (a, b, c)) == [1000, 1024, 1024]
    assert np.array_equal(a[:512], b[:512])
    assert not np.array_equal(a[512:1000], b[512:1000])
    assert not np.array_equal(a[:512], c[:512])
    assert a.max() < 1 << 17
    simulation = rig.simulation(given)
    outcome = simulation.run()
    assert ended(outcome)
    assert outcome.num_cached_tokens in (0, 512)


def test_lines_are_a_sample_of_real_records(rig, make_scenario):
    outcome = rig.run(make_scenario(), "expert_cost", record_share=1.0)
    decisions = [line for line in outcome.lines if hasattr(line, "stage")]
    decode = [line for line in decisions if line.stage.phase == "decode"]
    assert len(decode) == len(outcome.tpot_s)
    assert any(c.terms for line in decode for c in line.stage.candidates)
    assert not [line for line in rig.run(make_scenario()).lines if hasattr(line, "stage")]


def test_requests_carry_the_oracle_label(rig, make_scenario):
    simulation = rig.simulation(make_scenario(fleet={"max_num_seqs": 64}), "domain")
    seen: list[Request] = []
    router = simulation.replicas[0].router
    placed = router.place_prefill
    router.place_prefill = lambda request, **k: (seen.append(request), placed(request, **k))[1]
    outcome = simulation.run()
    groups = {
        label: {int(outcome.decode_worker[int(r.request_id)]) for r in seen if r.product == label}
        for label in rig.bank.header.domains
    }
    assert groups["domain-0"].isdisjoint(groups["domain-1"])
