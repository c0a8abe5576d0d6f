"""Short uncached prompts may prefill where they decode; long ones go to a prefill worker.

No threshold says which is which: a prefill step on an aggregated worker holds up those who decode
there (`interference`), a prefill worker costs a queue and a hand-over (`transfer`).
"""

import pytest

from serving.core.decision import OutcomeStatus
from serving.core.worker import Role
from tests.serving import decision_parts as parts
from tests.serving.surface_parts import SurfaceRig, by_worker, term

MODEL = "qwen3_30b_a3b"


@pytest.fixture
def rig():
    given = {"pool": "iron", "model": MODEL, "hardware": "tpu7x"}
    workers = []
    for name, role, slice_id in (("p0", Role.PREFILL, "s0"), ("b0", Role.BOTH, "s1")):
        limits = parts.capabilities(
            buckets_tokens=(64, 256, 1024, 2048, 4096),
            max_num_seqs=64,
            num_kv_blocks=1 << 20,
            max_context_tokens=1 << 16,
        )
        workers.append(parts.worker(name, role, ici_domain=slice_id, capabilities=limits, **given))
    made = SurfaceRig(workers)
    made.decode("b0", 24)
    return made


def test_a_prompt_that_is_cached_where_it_decodes_stays_there(rig):
    asked = rig.ask(2048)
    rig.hold("b0", asked.token_ids[:2032])
    record = rig.prefill(asked)
    aggregated, apart = (by_worker(record)[name] for name in ("b0", "p0"))
    assert record.stage.winner == "b0"
    assert term(aggregated, "transfer").usd == 0.0
    assert aggregated.labels["link"] == "same_process"
    assert term(aggregated, "interference").usd > 0
    assert term(apart, "transfer").usd > 0
    # The decode that follows is on the same worker: nothing moves.
    decode = rig.router.place_decode(asked, signature=None, prefill_worker_id="b0", only="b0")
    assert decode.worker.worker_id == "b0"


def test_a_short_prompt_stays_and_a_long_one_goes_to_the_prefill_worker(rig):
    rig.queue("p0", 5000)
    winners = {}
    for num_tokens in (48, 256, 1024, 2048, 4096):
        record = rig.prefill(rig.ask(num_tokens))
        winners[num_tokens] = record.stage.winner
        rig.router.failed(record.request_id, OutcomeStatus.CANCELLED, "test")
    assert winners[48] == "b0"
    assert winners[4096] == "p0"
    # Once it leaves it does not come back.
    order = [winners[num] for num in sorted(winners)]
    assert order == sorted(order)


def test_a_long_prompt_would_hold_up_everybody_who_decodes(rig):
    record = rig.prefill(rig.ask(4096))
    aggregated = by_worker(record)["b0"]
    held_up = term(aggregated, "interference")
    assert held_up.usd == pytest.approx(held_up.seconds * 24 * record.inputs["lambda_usd_per_s"])
    assert held_up.usd > term(by_worker(record)["p0"], "transfer").usd
