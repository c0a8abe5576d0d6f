import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from serving.core.errors import ConfigError, InvalidRequest
from serving.decision_log import FileDecisionLog
from serving.explain_main import Config, run
from serving.proto import router_pb2, router_pb2_grpc
from tests.serving import decision_parts as parts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path):
    with FileDecisionLog(tmp_path / "decisions.jsonl") as sink:
        rig = parts.Rig(sink=sink)
        for i in range(3):
            rig.serve(parts.request(f"req-{i}"), seed=i)
    return sink.path


def command(*flags):
    return subprocess.run(
        [sys.executable, "-m", "serving.explain_main", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_request_of_a_log(log):
    text = run(Config(log=str(log), request_id="req-1"))
    assert text.startswith("request req-1\n")
    assert "decode by expert_cost" in text
    assert "outcome   ok" in text


def test_an_unknown_request_names_the_nearest(log):
    with pytest.raises(InvalidRequest, match=r"3 requests of .*nearest: req-"):
        run(Config(log=str(log), request_id="req-7"))


def test_the_command(log):
    done = command(f"--log={log}", "--request_id=req-2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "prefill by jsq" in done.stdout
    unknown = command(f"--log={log}", "--request_id=req-9")
    assert unknown.returncode == 2
    assert "nearest: req-" in unknown.stderr
    assert "Traceback" not in unknown.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--request_id=r"], "exactly one of --log and --server"),
        (["--log=nowhere.jsonl", "--request_id=r"], "must be a readable file"),
        (["--log=x"], "must name a request"),
        (["--lg=x"], "lg"),
        (["--server=nonsense", "--request_id=r"], "must be HOST:PORT"),
        (["--server=127.0.0.1:1", "--request_id=r", "--timeout_s=5"], "reachable router"),
    ],
)
def test_wrong_flags_exit_2_and_name_the_rule(flags, told):
    done = command(*flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_exactly_one_source():
    with pytest.raises(ConfigError):
        Config(request_id="r", log="a", server="b:1")


@pytest.fixture
def server():
    """A router that knows one request and refuses the rest as its door does."""

    class Door(router_pb2_grpc.RouterServicer):
        def Explain(self, request, context):
            if request.request_id == "known":
                return router_pb2.ExplainResponse(text="request known\n")
            context.abort(grpc.StatusCode.NOT_FOUND, "request_id='other': no decision is kept")

    door = grpc.server(futures.ThreadPoolExecutor(1))
    router_pb2_grpc.add_RouterServicer_to_server(Door(), door)
    port = door.add_insecure_port("127.0.0.1:0")
    door.start()
    yield f"127.0.0.1:{port}"
    door.stop(None).wait()


def test_a_running_router_is_asked(server):
    assert run(Config(server=server, request_id="known")) == "request known\n"
    with pytest.raises(InvalidRequest, match=r"^request_id='other': no decision is kept$"):
        run(Config(server=server, request_id="other"))
