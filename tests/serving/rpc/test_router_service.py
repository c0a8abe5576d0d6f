"""The Router door: placements as leases, over real loopback gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import grpc
import pytest

from serving.core import metadata as keys
from serving.core.worker import WorkerState
from serving.proto import router_pb2 as pb

Scenario = Callable[..., None]
Code = grpc.StatusCode
PREFILL = pb.RouteRequest.STAGE_PREFILL


def _route(request_id: str, ids: list[int], **fields: object) -> pb.RouteRequest:
    fields.setdefault("max_tokens", 8)
    return pb.RouteRequest(request_id=request_id, token_ids=ids, **fields)


def _report(request_id: str, lease_id: str, **event: object) -> pb.ReportRequest:
    return pb.ReportRequest(request_id=request_id, lease_id=lease_id, **event)


def test_a_route_lives_until_it_is_reported(scenario: Scenario) -> None:
    async def body(rig) -> None:
        placed = await rig.router.Route(_route("r1", rig.prompt(1, 9)))
        assert placed.model == "tiny"
        assert placed.pool == "embedded"
        assert placed.prefill.worker_id in ("p0", "p1")
        assert placed.decode.worker_id in ("d0", "d1")
        assert placed.decode.address == rig.app.embedded.workers[placed.decode.worker_id].address
        assert 50 < placed.decode.lease_expires_in_s <= 60
        assert placed.decode.runner_up_worker_id in ("d0", "d1")
        assert len(rig.app.fleet.ledger) == 2
        await rig.router.Report(
            _report("r1", placed.prefill.lease_id, prefill_done=pb.PrefillDone())
        )
        assert len(rig.app.fleet.ledger) == 1
        await rig.router.Report(_report("r1", placed.decode.lease_id, first_token=pb.FirstToken()))
        done = pb.Done(num_output_tokens=8, ttft_s=0.1, tpot_s=0.01)
        await rig.router.Report(_report("r1", placed.decode.lease_id, done=done))
        *_, outcome = rig.app.router.explain("r1")
        assert (outcome.status.value, outcome.num_output_tokens) == ("ok", 8)
        assert (outcome.ttft_s, outcome.tpot_s) == (0.1, 0.01)
        failure = await rig.failure(
            rig.router.Report(_report("r1", placed.decode.lease_id, done=done))
        )
        assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "LEASE")

    scenario(body)


def test_the_same_id_and_prompt_answer_the_same_placement(scenario: Scenario) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(2, 9)
        first = await rig.router.Route(_route("r1", prompt))
        again = await rig.router.Route(_route("r1", prompt))
        assert again.prefill.lease_id == first.prefill.lease_id
        assert again.decode.lease_id == first.decode.lease_id
        assert len(rig.app.fleet.ledger) == 2
        for other in (_route("r1", [*prompt, 1]), _route("r1", prompt, max_tokens=9)):
            failure = await rig.failure(rig.router.Route(other))
            assert (failure.code, failure.facts["field"]) == (Code.INVALID_ARGUMENT, "request_id")
        failed = pb.Failed(reason="CLIENT_GONE", num_output_tokens=2)
        await rig.router.Report(_report("r1", first.decode.lease_id, failed=failed))
        outcome = rig.app.router.explain("r1")[-1]
        assert (outcome.status.value, outcome.error) == ("failed", "CLIENT_GONE")

    scenario(body)


def test_decode_is_placed_when_prefill_is_done(scenario: Scenario) -> None:
    async def body(rig) -> None:
        placed = await rig.router.Route(_route("r1", rig.prompt(3, 9), stage=PREFILL))
        assert not placed.HasField("decode")
        params = json.dumps({"remote_host": "x", "eldr_sig": {"version": 7}})
        done = pb.PrefillDone(kv_transfer_params_json=params)
        answer = await rig.router.Report(_report("r1", placed.prefill.lease_id, prefill_done=done))
        assert answer.decode.worker_id in ("d0", "d1")
        # A signature that breaks its rules is the engine's fault; the request goes on without.
        assert rig.app.relay.signatures.num_ignored == 1
        await rig.router.Report(
            _report("r1", answer.decode.lease_id, done=pb.Done(num_output_tokens=1))
        )

    scenario(body)


def test_a_lease_nobody_reports_expires(scenario: Scenario) -> None:
    async def body(rig) -> None:
        await rig.router.Route(_route("r1", rig.prompt(4, 9)))
        kept = await rig.router.Route(_route("r2", rig.prompt(4, 9)))
        renewed = await rig.router.Renew(
            pb.RenewRequest(lease_id=kept.decode.lease_id, extend_s=500)
        )
        assert renewed.lease_expires_in_s > 400
        for _ in range(500):
            if len(rig.app.router.explain("r1")) == 3:
                break
            await asyncio.sleep(0.02)
        outcome = rig.app.router.explain("r1")[-1]
        assert (outcome.status.value, outcome.error) == ("lease_expired", "LEASE_EXPIRED")
        # Only the renewed decode lease stays; r2's own prefill lease ends a moment after r1's.
        for _ in range(500):
            if len(rig.app.fleet.ledger) == 1:
                break
            await asyncio.sleep(0.02)
        assert len(rig.app.fleet.ledger) == 1
        # Expired is forgotten: the id may be used again, the lease may not.
        failure = await rig.failure(rig.router.Renew(pb.RenewRequest(lease_id="x", extend_s=1)))
        assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "LEASE")
        failure = await rig.failure(
            rig.router.Renew(pb.RenewRequest(lease_id=kept.decode.lease_id, extend_s=-1))
        )
        assert (failure.code, failure.facts["field"]) == (Code.INVALID_ARGUMENT, "extend_s")
        done = pb.Done(num_output_tokens=1)
        await rig.router.Report(_report("r2", kept.decode.lease_id, done=done))

    scenario(body, router={"lease_s": 1.0, "decode_wait_s": 0.5})


def test_an_error_keeps_the_stream_open(scenario: Scenario) -> None:
    async def body(rig) -> None:
        stream = rig.router.RouteStream()
        bad = _route("bad", [])
        unknown = _route("unknown", [1, 2], model="gpt")
        for message in (_route("r1", [1, 2, 3]), bad, unknown, _route("r2", [4, 5, 6])):
            await stream.write(message)
        answers = [await stream.read() for _ in range(4)]
        assert [answer.request_id for answer in answers] == ["r1", "bad", "unknown", "r2"]
        assert [answer.error.reason for answer in answers] == [
            "",
            "INVALID_REQUEST",
            "UNKNOWN_MODEL",
            "",
        ]
        assert answers[1].error.facts["field"] == "token_ids"
        assert not answers[1].error.retryable
        await stream.done_writing()
        for answer in (answers[0], answers[3]):
            failed = pb.Failed(reason="TEST")
            await rig.router.Report(
                _report(answer.request_id, answer.decode.lease_id, failed=failed)
            )

    scenario(body)


def test_garbage_in_a_stream_is_answered_and_the_stream_goes_on(scenario: Scenario) -> None:
    async def body(rig) -> None:
        stream = rig.channel.stream_stream(
            "/eldr.router.v1.Router/RouteStream",
            response_deserializer=pb.RouteResponse.FromString,
        )()
        await stream.write(b"\xff\xff\xff")
        first = await stream.read()
        assert (first.error.reason, first.error.facts["field"]) == ("INVALID_REQUEST", "message")
        await stream.write(_route("r1", [1, 2]).SerializeToString())
        second = await stream.read()
        assert second.decode.worker_id
        await stream.done_writing()
        failed = pb.Failed(reason="TEST")
        await rig.router.Report(_report("r1", second.decode.lease_id, failed=failed))

    scenario(body)


@pytest.mark.parametrize(
    ("message", "given", "code", "field"),
    [
        (_route("r", []), (), Code.INVALID_ARGUMENT, "token_ids"),
        (_route("", [1]), (), Code.INVALID_ARGUMENT, "request_id"),
        (_route("r", [1], max_tokens=0), (), Code.INVALID_ARGUMENT, "max_tokens"),
        (_route("r", [1], max_tokens=500), (), Code.INVALID_ARGUMENT, "max_tokens"),
        (_route("r", [1] * 200), (), Code.INVALID_ARGUMENT, "token_ids"),
        (_route("r", [2**31]), (), Code.INVALID_ARGUMENT, "token_ids[0]"),
        (_route("r", [1], model="gpt"), (), Code.NOT_FOUND, "model"),
        (_route("r", [1]), ((keys.SLO_CLASS, "?"),), Code.INVALID_ARGUMENT, keys.SLO_CLASS),
        (_route("r", [1]), ((keys.DEADLINE_MS, "x"),), Code.INVALID_ARGUMENT, keys.DEADLINE_MS),
    ],
)
def test_bad_routes_are_named(
    scenario: Scenario,
    message: pb.RouteRequest,
    given: tuple[tuple[str, str], ...],
    code: grpc.StatusCode,
    field: str,
) -> None:
    async def body(rig) -> None:
        failure = await rig.failure(rig.router.Route(message, metadata=given))
        assert (failure.code, failure.facts["field"]) == (code, field)
        assert failure.facts["rule"]

    scenario(body)


def test_bad_reports_are_named(scenario: Scenario) -> None:
    async def body(rig) -> None:
        placed = await rig.router.Route(_route("r1", [1, 2]))
        failure = await rig.failure(rig.router.Report(_report("r1", placed.decode.lease_id)))
        assert failure.facts["field"] == "event"
        failure = await rig.failure(rig.router.Report(_report("r1", "x", done=pb.Done())))
        assert failure.facts == {"lease_id": "x", "problem": "is not a lease of request 'r1'"}
        done = pb.Done(ttft_s=-1.0)
        failure = await rig.failure(
            rig.router.Report(_report("r1", placed.decode.lease_id, done=done))
        )
        assert failure.facts["field"] == "done.ttft_s"
        broken = pb.PrefillDone(kv_transfer_params_json="[")
        prefill = await rig.router.Route(_route("r2", [1, 2], stage=PREFILL))
        failure = await rig.failure(
            rig.router.Report(_report("r2", prefill.prefill.lease_id, prefill_done=broken))
        )
        assert failure.facts["field"] == "kv_transfer_params_json"
        for request_id, lease in (("r1", placed.decode), ("r2", prefill.prefill)):
            failed = pb.Failed(reason="TEST")
            await rig.router.Report(_report(request_id, lease.lease_id, failed=failed))

    scenario(body)


def test_an_id_has_one_door_at_a_time(scenario: Scenario) -> None:
    async def body(rig) -> None:
        prompt = rig.prompt(5, 9)
        call = rig.engine.Generate(rig.message("r1", prompt, 80))
        await call.read()
        failure = await rig.failure(rig.router.Route(_route("r1", prompt)))
        assert failure.facts["field"] == "request_id"
        call.cancel()
        placed = await rig.router.Route(_route("r2", prompt))
        answer = await rig.generate(rig.message("r2", prompt, 8))
        assert (answer.failure.code, answer.failure.facts["field"]) == (
            Code.INVALID_ARGUMENT,
            "request_id",
        )
        failed = pb.Failed(reason="TEST")
        await rig.router.Report(_report("r2", placed.decode.lease_id, failed=failed))

    scenario(body)


def test_explain_and_list_workers(scenario: Scenario) -> None:
    async def body(rig) -> None:
        await rig.generate(rig.message("r1", rig.prompt(6, 9), 4))
        answer = await rig.router.Explain(pb.ExplainRequest(request_id="r1"))
        lines = [json.loads(line) for line in answer.lines_json]
        assert [line["kind"] for line in lines] == ["decision", "decision", "outcome"]
        assert lines[1]["stage"]["winner"] in answer.text
        failure = await rig.failure(rig.router.Explain(pb.ExplainRequest(request_id="r2")))
        assert (failure.code, failure.facts["value"]) == (Code.NOT_FOUND, "'r2'")
        assert "nearest known: r1" in failure.facts["rule"]
        rig.app.fleet.set_state("d1", WorkerState.PARKED)
        workers = (await rig.router.ListWorkers(pb.ListWorkersRequest())).workers
        rows = {worker.worker_id: worker for worker in workers}
        assert list(rows) == ["p0", "p1", "d0", "d1"]
        assert (rows["d0"].role, rows["d0"].state, rows["d0"].accepts) == ("decode", "ready", True)
        assert not rows["d1"].accepts
        assert rows["d0"].kv_blocks_free == 96
        assert 0 <= rows["d0"].telemetry_age_s < 60

    scenario(body, telemetry={"poll_interval_s": 50.0})
