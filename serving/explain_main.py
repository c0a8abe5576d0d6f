"""Why a request went where it went, from a decision log or a running router.

python -m serving.explain_main --log=out/demo/decisions.jsonl --request_id=r-17
python -m serving.explain_main --server=127.0.0.1:50051 --request_id=r-17
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from absl import app, flags

from serving.core.decision import LogLine
from serving.core.errors import ConfigError, EldrError, InvalidRequest
from serving.decision_log import ReadCounters, read_lines
from serving.explain import explain_text, nearest_ids

_LOG = flags.DEFINE_string("log", None, "Decision log (JSON lines) to read.")
_SERVER = flags.DEFINE_string("server", None, "HOST:PORT of a running router to ask.")
_REQUEST_ID = flags.DEFINE_string("request_id", None, "The request to explain.")
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 10.0, "Seconds to wait for --server.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What to explain, and from where (exactly one of `log` and `server`)."""

    request_id: str
    log: str | None = None
    server: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.request_id:
            raise ConfigError("--request_id", self.request_id, "must name a request")
        if bool(self.log) == bool(self.server):
            raise ConfigError(
                "--log", self.log, f"exactly one of --log and --server (now {self.server!r})"
            )
        if self.server and not self.server.rpartition(":")[2].isdecimal():
            raise ConfigError("--server", self.server, "must be HOST:PORT")
        if not self.timeout_s > 0:
            raise ConfigError("--timeout_s", self.timeout_s, "must be > 0")


def run(config: Config) -> str:
    """The explanation as text.

    Raises:
        ConfigError: the log cannot be read, or the server cannot be reached.
        InvalidRequest: the request is unknown; the message names the nearest known ids.
    """
    if config.server:
        return _from_server(config, config.server)
    return _from_log(config, config.log or "")


def _from_log(config: Config, log: str) -> str:
    counters = ReadCounters()
    lines: list[LogLine] = []
    known: dict[str, None] = {}
    for line in read_lines(log, counters):
        known[line.request_id] = None
        if line.request_id == config.request_id:
            lines.append(line)
    if lines:
        return explain_text(lines)
    skipped = f", {counters.num_skipped} lines not understood" if counters.num_skipped else ""
    rule = f"not among the {len(known)} requests of {log}{skipped}"
    nearest = nearest_ids(config.request_id, known)
    if nearest:
        rule += f"; nearest: {', '.join(nearest)}"
    raise InvalidRequest("request_id", config.request_id, rule)


def _from_server(config: Config, server: str) -> str:
    # Reading a log needs no gRPC; only this way in does.
    import grpc

    from serving.proto import router_pb2, router_pb2_grpc

    with grpc.insecure_channel(server) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        try:
            answer = stub.Explain(
                router_pb2.ExplainRequest(request_id=config.request_id), timeout=config.timeout_s
            )
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                details = error.details() or code.name
                rule = details.partition(": ")[2] or details  # the door has named field and value
                raise InvalidRequest("request_id", config.request_id, rule) from error
            rule = f"must be a reachable router ({code.name}: {error.details()})"
            raise ConfigError("--server", server, rule) from error
    return answer.text


def main(argv: Sequence[str]) -> None:
    """Flags -> config -> run."""
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "takes flags only")
        config = Config(
            request_id=_REQUEST_ID.value or "",
            log=_LOG.value,
            server=_SERVER.value,
            timeout_s=_TIMEOUT_S.value,
        )
        print(run(config), end="")
    except EldrError as error:
        print(f"explain: {error}", file=sys.stderr)
        sys.exit(2)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"explain: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
