"""A client of both doors: generates through the router, then asks it why.

    python -m serving.examples.route_client_main --server=127.0.0.1:50051 \
        --text="def quicksort(items):" --max_tokens=32 --slo_class=A

Against --route_only it asks only for a placement, as a client that talks to engines itself
does, and gives the reservation back.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from absl import app, flags
from google.rpc import error_details_pb2
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from serving.core import metadata as keys
from serving.engines.grpc_errors import rich_details
from serving.proto import router_pb2, router_pb2_grpc

_MAX_INT32 = 2**31 - 1


def define_flags() -> None:
    """Declares the flags; done when run, so that importing this module declares none."""
    flags.DEFINE_string("server", "127.0.0.1:50051", "host:port of the router.")
    flags.DEFINE_string("text", "", "The prompt.")
    flags.DEFINE_integer(
        "max_tokens", 32, "Output tokens at most.", lower_bound=1, upper_bound=_MAX_INT32
    )
    flags.DEFINE_enum("slo_class", "B", ["A", "B", "C"], "Service class.")
    flags.DEFINE_list("route_only", [], "Token ids to place without generating.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What the flags say.

    Attributes:
        server: host:port.
        text: prompt of the generation, "" with token_ids.
        token_ids: prompt to place without generating.
        max_tokens: output limit.
        slo_class: A, B or C.
    """

    server: str
    text: str
    token_ids: tuple[int, ...]
    max_tokens: int
    slo_class: str


async def run(config: ClientConfig) -> int:
    """Talks to the router; the exit status."""
    call_metadata = ((keys.SLO_CLASS, config.slo_class), (keys.TENANT, "example"))
    request_id = f"example-{uuid.uuid4().hex[:12]}"
    async with grpc.aio.insecure_channel(config.server) as channel:
        router = router_pb2_grpc.RouterStub(channel)
        try:
            if config.token_ids:
                await _place(router, config, request_id, call_metadata)
            else:
                await _generate(channel, config, request_id, call_metadata)
            answer = await router.Explain(router_pb2.ExplainRequest(request_id=request_id))
        except grpc.aio.AioRpcError as error:
            _show(error)
            return 1
    print(answer.text)
    return 0


async def _generate(
    channel: grpc.aio.Channel,
    config: ClientConfig,
    request_id: str,
    call_metadata: tuple[tuple[str, str], ...],
) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    request = vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        text=config.text,
        stream=True,
        sampling_params=vllm_engine_pb2.SamplingParams(
            temperature=0.0, max_tokens=config.max_tokens
        ),
    )
    async for answer in stub.Generate(request, metadata=call_metadata):
        if answer.HasField("chunk"):
            print(*answer.chunk.token_ids, end=" ", flush=True)
        else:
            done = answer.complete
            print(f"\n{done.finish_reason}: {done.completion_tokens} tokens")


async def _place(
    router: router_pb2_grpc.RouterStub,
    config: ClientConfig,
    request_id: str,
    call_metadata: tuple[tuple[str, str], ...],
) -> None:
    placed = await router.Route(
        router_pb2.RouteRequest(
            request_id=request_id, token_ids=config.token_ids, max_tokens=config.max_tokens
        ),
        metadata=call_metadata,
    )
    print(f"prefill on {placed.prefill.worker_id} at {placed.prefill.address}")
    print(f"decode  on {placed.decode.worker_id} at {placed.decode.address}")
    # A client that drives the engines reports as it goes; this one gives everything back.
    await router.Report(
        router_pb2.ReportRequest(
            request_id=request_id,
            lease_id=placed.decode.lease_id,
            failed=router_pb2.Failed(reason="EXAMPLE_ONLY"),
        )
    )


def _show(error: grpc.aio.AioRpcError) -> None:
    """Prints what the status says and, where it says so, when to try again."""
    print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in rich_details(error).details:
        if detail.Unpack(info):
            print(f"  reason {info.reason}, {dict(info.metadata)}", file=sys.stderr)
        if detail.Unpack(retry):
            delay_s = retry.retry_delay.ToMilliseconds() / 1000
            print(f"  try again after {delay_s:g} s", file=sys.stderr)


def main(argv: Sequence[str]) -> None:
    """Flags to config to `run`."""
    if len(argv) > 1:
        _refuse("argument", argv[1], "is unexpected: everything is a --flag")
    given = flags.FLAGS
    if bool(given.text) == bool(given.route_only):
        _refuse("text", given.text, "give exactly one of --text and --route_only")
    if _number(given.server.rpartition(":")[2], 65535) is None:
        _refuse("server", given.server, "must be HOST:PORT")
    token_ids = [_number(item, _MAX_INT32) for item in given.route_only]
    if None in token_ids:
        _refuse("route_only", ",".join(given.route_only), "must be comma-separated token ids")
    config = ClientConfig(
        server=given.server,
        text=given.text,
        token_ids=tuple(token for token in token_ids if token is not None),
        max_tokens=given.max_tokens,
        slo_class=given.slo_class,
    )
    sys.exit(asyncio.run(run(config)))


def _number(text: str, largest: int) -> int | None:
    """A number in [0, largest], or None."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(largest))):
        return None
    return int(text) if int(text) <= largest else None


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _refuse(flag: str, value: str, rule: str) -> None:
    print(f"--{flag}={value!r}: {rule}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=_parse_flags)
