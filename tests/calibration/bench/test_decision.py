"""The decision suite: what it sends the peer, and that it measures what it names."""

import asyncio

from calibration.bench import decision_suite, peer_selection
from calibration.bench.registry import load_suite
from calibration.bench.report import BenchOptions


class FakeService:
    def __init__(self):
        self.asked, self.freed = [], []

    async def select_and_reserve(self, request):
        self.asked.append(request)

    async def free_reservation(self, name):
        self.freed.append(name)


def test_peer_script_asks_what_the_peer_understands_and_keeps_a_fleet_full():
    service = FakeService()
    other = FakeService()
    fleet = peer_selection._Fleet([service, other], keep=2)
    answer = asyncio.run(fleet.decide([[1, 2], [3], [4]]))
    assert len(answer["wall_ns"]) == len(answer["cpu_ns"]) == 3
    assert service.asked[0] == {
        "model_name": "model",
        "token_ids": [1, 2],
        "selection_id": "selection-1",
    }
    assert service.freed == ["selection-1"]
    assert (other.asked, other.freed) == (service.asked, service.freed)


def test_decision_suite_measures_every_way_and_says_what_it_could_not():
    said = []
    options = BenchOptions(quick=True, seed=0, peer_python="", say=said.append)
    report = load_suite("decision")(options)
    (table,) = report.tables
    assert [(row[0], row[1]) for row in table.rows if "ours" in str(row[1])] == [
        (num, f"ours, {way}") for num in (8, 64) for way in decision_suite._WAYS
    ]
    assert all(row[2] > 0 and row[3] >= row[2] for row in table.rows)
    assert bool(report.skipped) == (report.facts["peer"] == "none")
