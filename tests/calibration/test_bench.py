import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from calibration.bench import peer_radix
from calibration.bench.peer import Peer
from calibration.bench.registry import SUITES, load_suite
from calibration.bench.report import BenchOptions, BenchReport, Table, render
from calibration.bench_main import run
from serving.core.errors import ConfigError

OPTIONS = BenchOptions(quick=True, seed=0, peer_python="", say=lambda line: None)

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"got": json.loads(line)}), flush=True)
"""


def test_every_suite_has_its_module():
    """Found, not imported: some suites need jax."""
    for module in SUITES.values():
        assert importlib.util.find_spec(module) is not None
    assert callable(load_suite("index"))


def test_unknown_suite_lists_the_known():
    with pytest.raises(ConfigError, match=r"suite='nope': must be one of \[.*'index'"):
        run("nope", OPTIONS, None)


def test_render_aligns_and_marks_what_is_missing():
    table = Table(name="t", columns=("case", "p50_us"), rows=(("a", 1.234), ("long", None)))
    text = render(
        BenchReport(suite="s", facts={"n": 3}, tables=(table,), missed=("x",), skipped=("y",))
    )
    assert text.splitlines() == [
        "suite s",
        "  n: 3",
        "",
        "t",
        "  case  p50_us",
        "  a       1.23",
        "  long       -",
        "",
        "skipped: y",
        "missed: x",
    ]


def test_peer_answers_line_by_line(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    peer, why = Peer.start(script, sys.executable)
    assert (why, peer.hello) == ("", {"got": {"op": "hello"}})
    assert peer.ask(op="find", prompts=[[1 << 63]]) == {
        "got": {"op": "find", "prompts": [[1 << 63]]}
    }
    peer.close()


def test_absent_peer_is_skipped_unless_it_was_asked_for(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import no_such_package_here")
    peer, why = Peer.start(script, "")
    assert peer is None
    assert "no_such_package_here" in why
    with pytest.raises(ConfigError, match=r"peer_python=.*no_such_package_here"):
        Peer.start(script, sys.executable)
    with pytest.raises(ConfigError, match="peer_python='/no/such/python'"):
        Peer.start(script, "/no/such/python")


class FakeTree:
    def __init__(self):
        self.events = []

    def apply_event(self, worker, payload):
        self.events.append((worker, msgspec.json.decode(payload)))

    def find_matches(self, hashes):
        self.asked = hashes
        return self

    scores = property(lambda self: {(3, 0): 2})


def test_peer_script_sends_events_the_peer_understands():
    tree = FakeTree()
    answer = peer_radix._store(tree, {"events": [[7, 5, [8, 9]]]})
    assert len(answer["ns"]) == 1
    ((worker, event),) = tree.events
    assert worker == 7
    assert event["data"]["stored"] == {
        "parent_hash": 5,
        "blocks": [{"block_hash": 8, "tokens_hash": 8}, {"block_hash": 9, "tokens_hash": 9}],
    }
    assert len(peer_radix._find(tree, {"prompts": [[1], [2]], "calls": 3})["ns"]) == 3


def test_index_suite_measures_everything_it_names(tmp_path):
    out = tmp_path / "deep" / "index.json"
    report = run("index", OPTIONS, str(out))
    assert msgspec.json.decode(out.read_bytes(), type=BenchReport) == report
    lookups, stored, updates, capped = report.tables
    assert [row[0] for row in lookups.rows][:6] == [
        f"depth {depth}, {holders} hold it" for depth in (8, 128) for holders in (1, 16, 256)
    ]
    for table in (lookups, stored, updates, capped):
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all(row[1] > 0 for row in table.rows)
    most_blocks, newest_kept_pct = capped.rows[1][3:]
    assert most_blocks <= 1 << 14
    assert newest_kept_pct > 99.0
    assert Path(out).stat().st_size > 0
