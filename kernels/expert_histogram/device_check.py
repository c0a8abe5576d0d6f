"""Parity and speed of the platform's own backend on a real accelerator.

Every figure is measured here and now on the device at hand; nothing is estimated.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from kernels.expert_histogram import reference
from kernels.expert_histogram.api import expert_histogram
from kernels.expert_histogram.arg_specs import HistogramSpec, default_out_dtype
from kernels.expert_histogram.blocks import max_num_blocks, pack_blocks

_CALLS_PER_PROGRAM = 20
_ROUNDS = 7
_BANDWIDTH_BYTES = 2**29

Inputs = tuple[jax.Array, jax.Array]
"""(ids [L, K, T], block_of_token [T])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A packed step: requests of `chunk_tokens`, beginning at `offset` in a block."""

    name: str
    num_layers: int
    top_k: int
    num_experts: int
    block_size: int
    chunk_tokens: int
    num_requests: int
    offset: int

    def spec(self) -> HistogramSpec:
        """Sizes of the call."""
        num_tokens = self.chunk_tokens * self.num_requests
        return HistogramSpec(
            num_layers=self.num_layers,
            top_k=self.top_k,
            num_tokens=num_tokens,
            num_blocks=max_num_blocks(
                num_tokens=num_tokens, num_requests=self.num_requests, block_size=self.block_size
            ),
            num_experts=self.num_experts,
            block_size=self.block_size,
            out_dtype=default_out_dtype(self.block_size).name,
        )

    def inputs(self, rng: np.random.Generator) -> Inputs:
        """Random distinct ids, some left out; on the device."""
        spec = self.spec()
        scores = rng.random((spec.num_layers, spec.num_experts, spec.num_tokens), np.float32)
        ids = np.argpartition(scores, spec.top_k - 1, axis=1)[:, : spec.top_k].astype(np.int32)
        ids[rng.random(ids.shape) < 0.01] = -1
        starts = jnp.full(self.num_requests, self.offset, jnp.int32)
        lengths = jnp.full(self.num_requests, self.chunk_tokens, jnp.int32)
        packed = pack_blocks(
            starts, lengths, num_tokens=spec.num_tokens, block_size=self.block_size
        )
        return jnp.asarray(ids), packed.block_of_token


_PREFILL = Case(
    name="prefill 8192, one request",
    num_layers=48,
    top_k=8,
    num_experts=128,
    block_size=128,
    chunk_tokens=8192,
    num_requests=1,
    offset=5,
)
CASES = (
    _PREFILL,
    Case(
        name="prefill 2048, blocks of 16",
        num_layers=48,
        top_k=8,
        num_experts=128,
        block_size=16,
        chunk_tokens=2048,
        num_requests=1,
        offset=3,
    ),
    Case(
        name="chunked prefill, 16 requests",
        num_layers=36,
        top_k=4,
        num_experts=128,
        block_size=64,
        chunk_tokens=131,
        num_requests=16,
        offset=61,
    ),
    Case(
        name="decode, 256 requests",
        num_layers=48,
        top_k=8,
        num_experts=128,
        block_size=128,
        chunk_tokens=1,
        num_requests=256,
        offset=7,
    ),
    Case(
        name="512 experts, blocks of 1024",
        num_layers=16,
        top_k=10,
        num_experts=512,
        block_size=1024,
        chunk_tokens=2048,
        num_requests=1,
        offset=1000,
    ),
    Case(
        name="64 experts",
        num_layers=6,
        top_k=4,
        num_experts=64,
        block_size=16,
        chunk_tokens=512,
        num_requests=1,
        offset=0,
    ),
)
"""What is checked and timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case on the device.

    Attributes:
        case: its name.
        agrees: the kernel's counts equal NumPy's.
        kernel_us: median time of a call, back to back with others.
        xla_us: the same of the plain JAX backend.
        torch_us: of torch's ways, by name; empty where torch or its CUDA is missing.
        floor_us: ids read and counts written once, at the bandwidth measured here.
    """

    case: str
    agrees: bool
    kernel_us: float
    xla_us: float
    torch_us: dict[str, float]
    floor_us: float


def check_device(seed: int, report: Callable[[str], None]) -> dict:
    """Runs every case.

    Args:
        seed: of the random ids.
        report: called with a line per finished case.

    Returns:
        {"device", "bandwidth_bytes_per_s", "cases": [CaseResult fields]}.
    """
    rng = np.random.default_rng(seed)
    bandwidth = measured_bandwidth()
    results = []
    for case in CASES:
        result = _check_case(case, case.inputs(rng), bandwidth)
        results.append(result)
        report(
            f"{case.name}: agrees={result.agrees} kernel {result.kernel_us:.1f} us, "
            f"floor {result.floor_us:.1f} us, xla {result.xla_us:.1f} us, "
            + (
                ", ".join(f"{name} {us:.1f} us" for name, us in result.torch_us.items())
                or "no torch"
            )
        )
    return {
        "device": jax.devices()[0].device_kind,
        "bandwidth_bytes_per_s": bandwidth,
        "cases": [asdict(result) for result in results],
    }


def _check_case(case: Case, inputs: Inputs, bandwidth: float) -> CaseResult:
    spec = case.spec()
    want = reference.expert_histogram(np.asarray(inputs[0]), np.asarray(inputs[1]), spec)
    got = np.asarray(_histogram(spec, None)(*inputs))
    moved_bytes = inputs[0].nbytes + inputs[1].nbytes + want.nbytes
    return CaseResult(
        case=case.name,
        agrees=bool(np.array_equal(got, want)),
        kernel_us=_time_us(_histogram(spec, None), inputs),
        xla_us=_time_us(_histogram(spec, "xla"), inputs),
        torch_us=_torch_times_us(inputs, spec),
        floor_us=moved_bytes / bandwidth * 1e6,
    )


def _histogram(spec: HistogramSpec, backend: str | None) -> Callable[..., jax.Array]:
    def histogram(ids: jax.Array, block_of_token: jax.Array) -> jax.Array:
        return expert_histogram(
            ids,
            block_of_token,
            num_blocks=spec.num_blocks,
            num_experts=spec.num_experts,
            block_size=spec.block_size,
            out_dtype=spec.dtype,
            backend=backend,
        )

    return histogram


def _time_us(histogram: Callable[..., jax.Array], inputs: Inputs) -> float:
    """Median time of one call among several in one program, so that launches overlap."""

    @jax.jit
    def program(ids: jax.Array, block_of_token: jax.Array) -> jax.Array:
        counts = histogram(ids, block_of_token)
        for _ in range(_CALLS_PER_PROGRAM - 1):
            # The barrier makes each call wait for the last and keeps it from being shared.
            block_of_token, counts = jax.lax.optimization_barrier((block_of_token, counts))
            counts = histogram(ids, block_of_token)
        return counts

    program(*inputs).block_until_ready()
    times_s = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        program(*inputs).block_until_ready()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s) / _CALLS_PER_PROGRAM * 1e6


def measured_bandwidth() -> float:
    """Bytes a second of reading and writing a large array on the device."""
    data = jnp.zeros(_BANDWIDTH_BYTES // 4, jnp.int32)

    @jax.jit
    def copy(data: jax.Array) -> jax.Array:
        for _ in range(_CALLS_PER_PROGRAM):
            data = jax.lax.optimization_barrier(data + 1)
        return data

    copy(data).block_until_ready()
    times_s = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        copy(data).block_until_ready()
        times_s.append(time.perf_counter() - start_s)
    return 2 * data.nbytes * _CALLS_PER_PROGRAM / statistics.median(times_s)


def _torch_times_us(inputs: Inputs, spec: HistogramSpec) -> dict[str, float]:
    """torch.bincount and scatter_add over the flat index of every id, index included."""
    if find_spec("torch") is None:
        return {}
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available():
        return {}
    ids = torch.from_numpy(np.array(inputs[0])).cuda()
    block = torch.from_numpy(np.array(inputs[1])).cuda()
    layer = torch.arange(spec.num_layers, device="cuda")[:, None, None]
    num_counts = spec.num_blocks * spec.num_layers * spec.num_experts

    def index() -> "torch.Tensor":
        countable = (ids >= 0) & (block >= 0)
        flat = (block.long() * spec.num_layers + layer) * spec.num_experts + ids
        return torch.where(countable, flat, num_counts).reshape(-1)

    def bincount() -> None:
        torch.bincount(index(), minlength=num_counts + 1)

    def scatter_add() -> None:
        at = index()
        counts = torch.zeros(num_counts + 1, dtype=torch.int32, device="cuda")
        counts.scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    times_us = {}
    for name, call in (("torch.bincount", bincount), ("torch.scatter_add", scatter_add)):
        call()
        rounds_us = []
        for _ in range(_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(_CALLS_PER_PROGRAM):
                call()
            end.record()
            torch.cuda.synchronize()
            rounds_us.append(begin.elapsed_time(end) * 1e3 / _CALLS_PER_PROGRAM)
        times_us[name] = statistics.median(rounds_us)
    return times_us
