"""The brief's worked example (FACTS section 2) through the router and `explain`."""

import numpy as np
import pytest

from serving.core.worker import Role
from serving.explain import explain_text
from tests.serving import decision_parts as parts
from tests.serving import surface_parts
from tests.serving.surface_parts import term

UNPADDED = parts.capabilities(
    buckets_tokens=(), max_num_seqs=128, num_kv_blocks=1 << 20, max_context_tokens=1 << 16
)


def pool(name: str, hardware: str):
    given = {"pool": name, "hardware": hardware, "model": "70b_8bit", "capabilities": UNPADDED}
    given |= {"ici_domain": name}
    return [
        parts.worker(f"{name}-prefill", Role.PREFILL, **given),
        parts.worker(f"{name}-decode", Role.DECODE, **given),
    ]


@pytest.fixture
def record_and_text():
    rig = surface_parts.SurfaceRig([*pool("ironwood", "tpu7x"), *pool("blackwell", "b200")])
    # 120 and 20 ms of queue, 63 others decoding at a context of 2,048 in both pools.
    for name, queue_s in (("ironwood", 0.120), ("blackwell", 0.020)):
        worker = f"{name}-prefill"
        rig.queue(worker, round(queue_s / rig.token_s(worker)))
        rig.decode(f"{name}-decode", 63)
    asked = rig.ask()
    rig.hold("ironwood-prefill", asked.token_ids[:1600])
    record = rig.prefill(asked)
    return record, explain_text(rig.router.explain(asked.request_id))


def test_ironwood_with_the_prefix_beats_a_cold_b200(record_and_text):
    record, _ = record_and_text
    assert record.stage.winner == "ironwood-prefill"
    assert record.stage.runner_up == "blackwell-prefill"
    warm, cold = (
        surface_parts.by_worker(record)[f"{n}-prefill"] for n in ("ironwood", "blackwell")
    )
    assert (warm.inputs["uncached_tokens"], cold.inputs["uncached_tokens"]) == (448, 2048)
    assert term(warm, "prefill_compute").usd == pytest.approx(4.1e-5, rel=0.01)
    assert term(cold, "prefill_compute").usd == pytest.approx(1.76e-4, rel=0.01)
    ratio = term(cold, "prefill_compute").usd / term(warm, "prefill_compute").usd
    assert ratio == pytest.approx(4.3, rel=0.01)
    assert [round(term(c, "ttft").seconds * 1e3) for c in (warm, cold)] == [145, 147]


def test_explain_prints_the_figures_with_decode_and_delay_beside(record_and_text):
    record, text = record_and_text
    assert "prefill   ironwood-prefill: compute $4.119e-05, TTFT 144.7 ms" in text
    assert "prefill   blackwell-prefill: compute $0.000177, TTFT 147.4 ms" in text
    rows = {
        line.split()[0]: line.split()
        for line in text.split("terms of ")[1].splitlines()[2:]
        if line
    }
    assert rows["prefill_compute"][3] == "4.119e-05"
    assert rows["ttft"][1] == "0.1447"
    for name in ("queue", "prefill_delay", "transfer", "decode_delay", "decode_compute"):
        assert float(rows[name][3]) > 0
    # The sum an operator does by hand: every J row, in dollars.
    summed = sum(float(row[3]) for row in rows.values() if row[-1] == "J" and row[0] != "J")
    assert summed == pytest.approx(record.stage.candidates[0].total_usd, rel=1e-3)


def test_the_prefix_is_worth_its_tokens_at_the_live_rate(record_and_text):
    record, _ = record_and_text
    warm = surface_parts.by_worker(record)["ironwood-prefill"]
    saving = term(warm, "prefix_saving")
    rate, price = 6 / 3600, record.inputs["lambda_usd_per_s"]
    assert saving.seconds == pytest.approx(1600 / warm.inputs["prefill_tokens_per_s"])
    assert saving.usd == pytest.approx(saving.seconds * (rate + price))
    # Without it the cold worker would have won.
    assert surface_parts.winner_without(record, "prefix_saving") == "blackwell-prefill"


def test_the_table_says_what_the_pools_cost(record_and_text):
    record, _ = record_and_text
    assert record.table_version == "surface-1"
    assert record.inputs["table_source"] == "prior"
    assert np.isfinite(record.inputs["table_usd_per_request"])
