"""Expert locality, padding and hand-over in one decision over real gRPC, and each deciding alone.

Qwen3-30B-A3B on Ironwood: prefill and decode workers in two slices. The engines behind the doors
are not asked: what is told here is what the Route door decides and what Explain says of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from serving.core.decision import DecisionRecord, decode_line
from serving.core.experts import ExpertProfiles
from serving.core.request import SloClass
from serving.core.signature import Signature, SignatureSource
from serving.core.worker import Role
from serving.engines.relay import Relay, RelayConfig
from serving.fleet.survival import SurvivalRows
from serving.proto import router_pb2 as pb
from serving.proto import router_pb2_grpc
from serving.rpc import router_service
from serving.rpc.binding import bind
from serving.rpc.convert import DoorLimits
from serving.rpc.gate import DrainGate
from serving.rpc.router_service import RouterService
from tests.serving import decision_parts as parts
from tests.serving.surface_parts import SurfaceRig, by_worker, term, winner_without

MODEL = "qwen3_30b_a3b"
LAYERS, MASKED, EXPERTS, TOP_K = 48, 12, 128, 8
SIZE = MASKED * EXPERTS
BUCKETS = (256, 512, 1024, 2048)


def profile(first: int) -> np.ndarray:
    """Chances per token of a domain that uses 32 experts of each layer, from `first` on."""
    of_layer = np.full(EXPERTS, 0.01, np.float32)
    of_layer[first : first + 32] = 0.22
    return np.tile(of_layer, MASKED)


def signature() -> Signature:
    """A prompt of the first domain."""
    counts = np.zeros((MASKED, EXPERTS), np.uint32)
    counts[:, :32] = 512
    flat = counts.reshape(-1).astype(np.float32)
    return Signature(
        counts=counts,
        num_tokens=2048,
        vector=flat / np.linalg.norm(flat),
        source=SignatureSource.TOKEN_TABLE,
        version="sig-1",
    )


class Finder:
    """Predicts the first domain for every prompt."""

    def best(self, sent: object, request: object) -> Signature | None:
        return signature()

    def predicted(self, request: object) -> Signature | None:
        return signature()


def workers(*, pools: tuple[str, str] = ("iron", "iron"), compiled: bool = True):
    out = []
    for side, pool in enumerate(pools):
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            limits = parts.capabilities(
                buckets_tokens=BUCKETS if role is Role.PREFILL and compiled else (),
                max_num_seqs=64,
                num_kv_blocks=1 << 20,
                max_context_tokens=1 << 16,
            )
            out.append(
                parts.worker(
                    f"{name}{side}",
                    role,
                    pool=pool,
                    model=MODEL,
                    hardware="tpu7x",
                    ici_domain=f"slice-{side}",
                    slice_id=f"slice-{side}",
                    capabilities=limits,
                )
            )
    return out


def rig(**changes: Any) -> SurfaceRig:
    profiles = np.stack([profile(0), profile(64)])
    centroids = profiles / np.linalg.norm(profiles, axis=1, keepdims=True)
    return SurfaceRig(
        workers(**changes),
        survival=SurvivalRows(SIZE, layer_scale=LAYERS / MASKED),
        experts=ExpertProfiles(
            version="profiles-1",
            signature_version="sig-1",
            num_layers=LAYERS,
            num_masked_layers=MASKED,
            num_experts=EXPERTS,
            top_k=TOP_K,
            mean_profile=profiles.mean(axis=0),
            centroids=centroids.astype(np.float32),
            profiles=profiles,
        ),
    )


def batch(made: SurfaceRig, worker_id: str, num: int, domain: int) -> None:
    """Requests of one domain decode on a worker."""
    made.decode(worker_id, num, keep=1.0 - profile(64 * domain))


def over_grpc(made: SurfaceRig, num_tokens: int = 2048) -> tuple[DecisionRecord, str, str]:
    """Routes one prompt through the door: prefill record, explain's text, decode worker."""

    async def main() -> tuple[DecisionRecord, str, str]:
        relay = Relay(
            router=made.router,
            engines={},
            clock=made.clock,
            config=RelayConfig(),
            signatures=Finder(),
            on_loss=lambda worker_id: None,
        )
        limits = DoorLimits(
            models=frozenset({MODEL}),
            max_context_tokens=1 << 16,
            vocab_size=0,
            default_max_tokens=600,
            default_slo=SloClass.B,
            allow_restart=True,
        )
        door = RouterService(
            router=made.router, relay=relay, gate=DrainGate(), limits=limits, clock=made.clock
        )
        server = grpc.aio.server()
        bind(server, router_service.SERVICE, door)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = router_pb2_grpc.RouterStub(channel)
                made.clock.advance(0.001)
                request = pb.RouteRequest(
                    request_id="r", token_ids=range(7, 7 + num_tokens), max_tokens=300
                )
                placed = await stub.Route(request)
                said = await stub.Explain(pb.ExplainRequest(request_id="r"))
                line = decode_line(said.lines_json[0])
                assert isinstance(line, DecisionRecord)
                assert line.stage.winner == placed.prefill.worker_id
                return line, said.text, placed.decode.worker_id
        finally:
            await server.stop(0)

    return asyncio.run(main())


def busy(made: SurfaceRig, *, first: int = 8, second: int = 8) -> None:
    """Each decode worker runs the requests of a domain of its own."""
    batch(made, "d0", first, 0)
    batch(made, "d1", second, 1)


def test_one_record_holds_locality_padding_and_hand_over():
    made = rig()
    busy(made)
    made.queue("p0", 900, 700)
    made.queue("p1", 900, 300)
    record, text, decode_worker = over_grpc(made, 1300)
    candidates = by_worker(record)
    assert {c.labels["link"] for c in candidates.values()} == {"ici", "dcn"}
    for candidate in candidates.values():
        assert term(candidate, "padding").usd != 0
        assert term(candidate, "transfer").usd > 0
        assert term(candidate, "expert_locality").usd > 0
        assert candidate.labels["decode_worker"] == "d0" == decode_worker
    for name in ("padding", "transfer", "expert_locality"):
        assert f"  {name} " in text


def test_padding_alone_decides():
    # 1,000 tokens wait at p0, 1,500 at p1: 300 more tip p0 into the bucket of 2,048 while p1 runs
    # in it anyway. By queues p0 is better.
    made = rig()
    busy(made)
    made.queue("p0", 1, 1000)
    made.queue("p1", 1, 1500)
    record, text, _ = over_grpc(made, 300)
    p0, p1 = (by_worker(record)[name] for name in ("p0", "p1"))
    assert (p0.inputs["padded_tokens"], p1.inputs["padded_tokens"]) == (1024, 0)
    assert term(p0, "queue").usd < term(p1, "queue").usd
    assert term(p1, "padding").usd < 0 < term(p0, "padding").usd
    assert record.stage.winner == "p1"
    assert winner_without(record, "padding") == "p0"
    assert "padding" in text
    # The same snapshot where nothing is padded.
    plain = rig(compiled=False)
    busy(plain)
    plain.queue("p0", 1, 1000)
    plain.queue("p1", 1, 1500)
    assert over_grpc(plain, 300)[0].stage.winner == "p0"


def test_the_hand_over_alone_decides():
    # Only d1 has room. p0 would start sooner, and hand over through the data-centre network.
    made = rig()
    batch(made, "d0", 64, 0)
    batch(made, "d1", 8, 0)
    made.queue("p1", 300)
    record, text, decode_worker = over_grpc(made)
    p0, p1 = (by_worker(record)[name] for name in ("p0", "p1"))
    assert decode_worker == "d1"
    assert (p0.labels["link"], p1.labels["link"]) == ("dcn", "ici")
    assert term(p0, "transfer").seconds == pytest.approx(2048 * 98304 / 15e9, rel=0.01)
    assert term(p1, "transfer").seconds == pytest.approx(2048 * 98304 / 200e9, rel=0.01)
    assert term(p0, "queue").usd == 0 < term(p1, "queue").usd
    assert record.stage.winner == "p1"
    assert winner_without(record, "transfer") == "p0"
    assert "dcn" in text
    assert "ici" in text


def test_expert_locality_alone_decides():
    # Two pools, equally busy; d0 runs requests of the prompt's own domain. p1 would start sooner.
    made = rig(pools=("left", "right"))
    busy(made)
    made.queue("p0", 200)
    record, text, decode_worker = over_grpc(made)
    p0, p1 = (by_worker(record)[name] for name in ("p0", "p1"))
    assert term(p0, "expert_locality").usd > term(p1, "expert_locality").usd
    assert term(p1, "queue").usd == 0 < term(p0, "queue").usd
    assert (record.stage.winner, decode_worker) == ("p0", "d0")
    assert winner_without(record, "expert_locality") == "p1"
    assert "expert_locality" in text
    # The same snapshot with signatures and experts switched off.
    blind = rig(pools=("left", "right"))
    busy(blind)
    blind.queue("p0", 200)
    blind.router.set_switch("experts", on=False)
    assert over_grpc(blind)[0].stage.winner == "p1"
