"""The KV bytes of a hand-over: `eldr.embedded.v1.Kv` served by prefill, pulled by decode.

The decode worker gets the ORIGINAL prompt and the prefill's answer. It pulls what it lacks of
the prompt's blocks (keys, values and expert counts), then runs the last prompt token again to
have its logits, as vLLM's NIXL connector does: every output token, the first included, is made
by the decode worker, with its own sampling, and equals what one worker alone would have made.
That token's experts are in the pulled counts already and are not counted twice.

Parameters are bound to their prompt: the lease carries its digest, so another request's are
refused before anything is pulled, and what comes is checked to the byte.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable

import grpc
import numpy as np

from serving.core.errors import InvalidRequest, LeaseError
from serving.engines.embedded.engine import Engine
from serving.engines.embedded.generate_request import GenerateSpec
from serving.engines.embedded.hand_over import HandOver
from serving.engines.embedded.leases import KvUnavailable, Lease, check_binding
from serving.engines.embedded.work import KvBlocks
from serving.proto import embedded_pb2 as pb
from serving.proto import embedded_pb2_grpc

# One message is one block; large models and large blocks exceed gRPC's default of 4 MiB.
MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# A prefill worker that came back is found again within seconds, not minutes.
_PULL_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)
_MAX_CHANNELS = 64
_KEYS_DTYPE = np.dtype("<f4")
_COUNTS_DTYPE = np.dtype("<u2")


class KvServicer:
    """`eldr.embedded.v1.Kv` of one worker."""

    def __init__(self, engine: Engine, block_size: int) -> None:
        self._engine = engine
        self._block_size = block_size

    async def Pull(
        self, request: pb.PullRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.KvBlock]:
        """Streams the asked blocks of a lease; a stream sent to its end ends the lease."""
        lease = self._engine.begin_pull(request.lease, request.remote_request_id)
        completed = False
        try:
            indices = _indices_of(request.block_ids, lease)
            wanted = np.asarray([lease.block_ids[i] for i in indices], np.int32)
            blocks = await asyncio.wrap_future(self._engine.read(wanted))
            for row, index in enumerate(indices):
                yield pb.KvBlock(
                    index=index,
                    keys=blocks.keys[row].astype(_KEYS_DTYPE, copy=False).tobytes(),
                    values=blocks.values[row].astype(_KEYS_DTYPE, copy=False).tobytes(),
                    expert_counts=blocks.counts[row].astype(_COUNTS_DTYPE, copy=False).tobytes(),
                    num_tokens=_num_tokens_in(index, lease.num_tokens, self._block_size),
                )
            completed = True
        finally:
            self._engine.end_pull(lease, completed=completed)

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseResponse:
        """Ends a lease unpulled."""
        self._engine.release_lease(request.lease, request.remote_request_id)
        return pb.ReleaseResponse()


class KvPuller:
    """Fetches prompts' KV from prefill workers; keeps one channel per worker.

    Attributes:
        timeout_s: seconds given to one pull.
    """

    def __init__(
        self,
        *,
        block_size: int,
        block_shape: tuple[int, int, int, int],
        counts_shape: tuple[int, int],
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self._block_size = block_size
        self._block_shape = block_shape
        self._counts_shape = counts_shape
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._num_pulling: dict[str, int] = {}

    def check(self, spec: GenerateSpec) -> None:
        """Refuses transfer parameters that are not this request's.

        Raises:
            KvUnavailable: another prompt's, or the wrong number of blocks.
        """
        source = _source(spec)
        check_binding(source.lease, spec.token_ids, spec.cache_salt)
        num_blocks = -(-len(spec.token_ids) // self._block_size)
        if len(source.remote_block_ids) != num_blocks:
            raise KvUnavailable(
                source.lease,
                f"names {len(source.remote_block_ids)} blocks, {len(spec.token_ids)} prompt "
                f"tokens fill {num_blocks} of {self._block_size} tokens",
            )

    async def pull(self, spec: GenerateSpec, first_block: int) -> KvBlocks:
        """Fetches the prompt's blocks from `first_block` on.

        Raises:
            KvUnavailable: the prefill worker refuses, cannot be reached, or sends something else.
        """
        source = _source(spec)
        indices = range(first_block, len(source.remote_block_ids))
        request = pb.PullRequest(
            remote_request_id=source.remote_request_id,
            lease=source.lease,
            block_ids=[source.remote_block_ids[i] for i in indices],
        )
        received: list[pb.KvBlock] = []
        self._num_pulling[source.address] = self._num_pulling.get(source.address, 0) + 1
        try:
            stub = embedded_pb2_grpc.KvStub(await self._channel(source.address))
            async for block in stub.Pull(request, timeout=self.timeout_s):
                received.append(block)
        except grpc.aio.AioRpcError as error:
            raise KvUnavailable(
                source.lease,
                f"cannot be pulled from {source.address}: {error.code().name}: {error.details()}",
            ) from error
        finally:
            self._num_pulling[source.address] -= 1
        return self._checked(received, list(indices), spec, source.lease)

    async def close(self) -> None:
        """Closes the channels; pulls under way fail."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if (channel := self._channels.get(address)) is None:
            channel = grpc.aio.insecure_channel(address, options=_PULL_OPTIONS)
            self._channels[address] = channel
        self._channels.move_to_end(address)
        for idle in [a for a in self._channels if not self._num_pulling.get(a)]:
            if len(self._channels) <= _MAX_CHANNELS:
                break
            self._num_pulling.pop(idle, None)
            await self._channels.pop(idle).close()
        return channel

    def _checked(
        self, received: list[pb.KvBlock], indices: list[int], spec: GenerateSpec, lease: str
    ) -> KvBlocks:
        if [block.index for block in received] != indices:
            problem = f"sent blocks {[b.index for b in received]}, must be {indices}"
            raise KvUnavailable(lease, problem)
        kv_bytes = int(np.prod(self._block_shape)) * _KEYS_DTYPE.itemsize
        counts_bytes = int(np.prod(self._counts_shape)) * _COUNTS_DTYPE.itemsize
        for block in received:
            num_tokens = _num_tokens_in(block.index, len(spec.token_ids), self._block_size)
            for name, got, wanted in (
                ("keys bytes", len(block.keys), kv_bytes),
                ("values bytes", len(block.values), kv_bytes),
                ("expert_counts bytes", len(block.expert_counts), counts_bytes),
                ("num_tokens", block.num_tokens, num_tokens),
            ):
                if got != wanted:
                    raise KvUnavailable(
                        lease, f"block {block.index}: {name}={got} must be {wanted}"
                    )
        return KvBlocks(
            keys=_stacked((b.keys for b in received), _KEYS_DTYPE, self._block_shape),
            values=_stacked((b.values for b in received), _KEYS_DTYPE, self._block_shape),
            counts=_stacked((b.expert_counts for b in received), _COUNTS_DTYPE, self._counts_shape),
        )


def _source(spec: GenerateSpec) -> HandOver:
    if spec.pull is None:
        raise ValueError(f"request {spec.request_id!r} has nothing to pull")
    return spec.pull


def _indices_of(block_ids: Iterable[int], lease: Lease) -> list[int]:
    """Positions of the asked blocks in the prompt, rising."""
    place = {block: index for index, block in enumerate(lease.block_ids)}
    indices: list[int] = []
    for block in block_ids:
        if block not in place:
            raise LeaseError(lease.lease_id, f"does not hold block {block}")
        indices.append(place[block])
    if not indices or indices != sorted(set(indices)):
        rule = "must name at least one block of the lease, in its order, each once"
        raise InvalidRequest("block_ids", list(block_ids), rule)
    return indices


def _num_tokens_in(index: int, num_tokens: int, block_size: int) -> int:
    """Tokens of a prompt of `num_tokens` in its block `index`."""
    return min(block_size, num_tokens - index * block_size)


def _stacked(parts: Iterable[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    raw = np.frombuffer(b"".join(parts), dtype)
    return raw.reshape(-1, *shape).astype(dtype.newbyteorder("="), copy=False)
