"""The explanation shows every number the decision rests on, and they add up."""

import re

import pytest

from serving.core.decision import DecisionRecord, OutcomeStatus, TermKind
from serving.explain import explain_text, nearest_ids
from tests.serving import decision_parts as parts


@pytest.fixture
def rig():
    made = parts.Rig()
    made.fleet.set_profiles({f"d{i}": parts.profiles().profiles[i] for i in range(3)})
    for i in range(6):
        made.serve(parts.request(f"busy{i}"), seed=i, end=False)
    return made


def section(text, title):
    return next(part for part in text.split("\n\n") if part.startswith(title))


def test_a_whole_request(rig):
    rig.serve(parts.request("r17", tenant="t9"), end=False)
    rig.router.first_token("r17")
    rig.router.done("r17", 20, 0.1234, 0.0125)
    lines = rig.router.explain("r17")
    text = explain_text(lines)
    stage = next(
        x.stage for x in lines if isinstance(x, DecisionRecord) and x.stage.phase == "decode"
    )
    assert text.startswith("request r17\n\nprefill by jsq: ")
    assert f"decode by expert_cost: {stage.winner}" in text
    assert f"runner-up {stage.runner_up}, worse by {stage.delta:.4g} usd" in text
    assert "tenant t9" in text
    assert "experts=profiles-1" in text
    assert "outcome   ok" in text
    assert "TTFT 123.4 ms, TPOT 12.50 ms" in text
    for candidate in stage.candidates:
        assert candidate.worker_id in text
    winner = stage.candidates[0]
    terms = text.split(f"terms of {winner.worker_id}\n")[-1].split("\n\n")[0]
    for term in winner.terms:
        row = re.search(rf"^  {term.name} .*$", terms, re.M).group()
        assert f"{term.seconds:.4g}" in row
        assert f"{term.usd:.4g}" in row
        place = {TermKind.COST: "J", TermKind.SCORE: "score only", TermKind.INFO: "no sum"}
        assert row.endswith(place[term.kind])
    total = re.search(r"^  J .*$", terms, re.M).group()
    assert f"{winner.total_usd:.4g}" in total


def test_columns_line_up(rig):
    rig.serve(parts.request("r"), end=False)
    for part in explain_text(rig.router.explain("r")).split("\n\n"):
        if part.startswith("terms of"):
            head, *rows = part.splitlines()[1:]
            ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", head)][1:4]
            for row in rows[:-1]:
                assert all(row[end - 1] != " " for end in ends)


def test_fallbacks_switches_retries_and_rejections_show():
    rig = parts.Rig(decode="eldr_static")
    rig.router.set_switch("regions", False)
    asked = parts.request("r")
    rig.serve(asked, end=False)
    lost = rig.router.explain("r")[-1].stage.winner
    rig.router.place_decode(
        asked, signature=None, prefill_worker_id=None, exclude=frozenset({lost})
    )
    rig.router.failed("r", OutcomeStatus.FAILED, "WORKER_LOST", num_output_tokens=3)
    text = explain_text(rig.router.explain("r"))
    assert "(fell back: no_regions)" in text
    assert "off       regions" in text
    assert "outcome   failed" in text
    assert "3 output tokens, 1 retries, error WORKER_LOST" in text
    rig.router.failed("r2", OutcomeStatus.REJECTED, "NO_CAPACITY")
    assert "error NO_CAPACITY" in explain_text(rig.router.explain("r2"))


def test_a_running_request_says_so(rig):
    rig.serve(parts.request("r"), end=False)
    assert "still running" in explain_text(rig.router.explain("r"))


def test_a_baseline_that_ignores_j_is_pointed_out():
    rig = parts.Rig(decode="jsq", num_decode=2)
    rig.fleet.registry.reported[rig.fleet.registry.SPEED, rig.fleet.registry.slot("d0")] = 9.0
    rig.fleet.registry.reported[rig.fleet.registry.OTHERS, rig.fleet.registry.slot("d1")] = 1
    rig.serve(parts.request("r"), end=False)
    assert "the policy did not follow J" in explain_text(rig.router.explain("r"))


def test_a_lone_worker_has_no_runner_up():
    rig = parts.Rig(num_decode=1)
    rig.serve(parts.request("r"), end=False)
    assert "runner-up none" in explain_text(rig.router.explain("r"))


def test_nearest_ids():
    known = ["req-17", "req-18", "other", "req-170"]
    assert nearest_ids("req-17", known)[:2] == ["req-17", "req-170"]
    assert nearest_ids("reg-18", known)[0] == "req-18"
    assert nearest_ids("zzzz", known) == []
