"""Compiles the TPU kernel for chips that are not there, and estimates its time.

Needs libtpu (`jax[tpu]`); no TPU. The compiler's flags are read once, when libtpu is
loaded, so a process compiles under one dump folder: `bench_main` starts such processes.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from kernels.expert_histogram import pallas_tpu
from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.pallas_tpu_layout import Layout, layout_of
from kernels.expert_histogram.static_time import read_schedule
from kernels.expert_histogram.tuned import LANES, TPU_CONFIGS

_KERNEL_NAME = "expert_histogram"
_FINAL_BUNDLES = re.compile(r"^\d+-(?P<op>.+)-\d\d-final_bundles\.txt$")
_NOT_AN_OP = re.compile(r"^(TLP|<.*>)$")
_PROFILED_CYCLES = re.compile(r"estimated_cycles: (\d+)")
_PROFILE_FOLDER = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipFacts:
    """What turns cycles and bytes into time.

    Attributes:
        topology: name for `jax.experimental.topologies`.
        clock_hz: assumed clock of the core.
        hbm_bytes_per_s: published memory bandwidth of one JAX device.
    """

    topology: str
    clock_hz: float
    hbm_bytes_per_s: float


CHIPS: Mapping[str, ChipFacts] = MappingProxyType(
    {
        "v5e": ChipFacts(topology="v5e:2x2", clock_hz=1.5e9, hbm_bytes_per_s=0.82e12),
        "v6e": ChipFacts(topology="v6e:2x2", clock_hz=1.75e9, hbm_bytes_per_s=1.64e12),
        # A TPU7x chip is two JAX devices, each with half of the chip's bandwidth.
        "tpu7x": ChipFacts(topology="tpu7x:2x2x1", clock_hz=2.2e9, hbm_bytes_per_s=3.685e12),
    }
)
"""Chips by the names of `TPU_CONFIGS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Static time of one call; no chip has run it.

    Attributes:
        kernel_bundles: instruction bundles that the kernel issues.
        other_bundles: bundles of the operations that XLA puts around it, each counted once.
        profile_us: the compiler's own estimate of kernel and surroundings, at the chip's
            clock; None unless asked for. It adds memory traffic instead of overlapping it.
        compute_us: kernel and surroundings by bundles, at the chip's clock.
        floor_us: time to read the ids and write the counts once.
        static_us: the longer of the two, and the first read and last write, which nothing
            overlaps.
    """

    kernel_bundles: int
    other_bundles: int
    profile_us: float | None
    compute_us: float
    floor_us: float
    static_us: float


def has_libtpu() -> bool:
    """Whether the TPU compiler is installed."""
    return find_spec("libtpu") is not None


def set_compiler_environment(
    environment: MutableMapping[str, str], dump_folder: Path, *, profile: bool = False
) -> None:
    """Sets what libtpu reads: no chip to look for, schedules into `dump_folder`.

    Args:
        environment: of the process, before libtpu is loaded.
        dump_folder: existing folder.
        profile: also write the compiler's static profile, which takes the process down for
            some chips and kernels.
    """
    arguments = f"--xla_jf_dump_to={dump_folder} --xla_jf_dump_llo_pass_label_regex=final.*"
    if profile:
        (dump_folder / _PROFILE_FOLDER).mkdir(exist_ok=True)
        arguments += f" --xla_jf_dump_static_llo_profile_to={dump_folder / _PROFILE_FOLDER}"
    environment.update(
        {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v6e-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": arguments,
        }
    )


def compile_and_time(chip: str, spec: HistogramSpec, dump_folder: Path) -> KernelTime:
    """Compiles one call for a chip and reads its schedule.

    Args:
        chip: name in `CHIPS`.
        spec: the call.
        dump_folder: as given to `set_compiler_environment` before libtpu was loaded;
            emptied here.

    Returns:
        Its static time.

    Raises:
        ScheduleError: the schedule is not that of the kernel's source.
    """
    for path in dump_folder.rglob("*"):
        if path.is_file():
            path.unlink()
    compile_for(chip, spec)
    layout = layout_of(spec, TPU_CONFIGS[chip])
    kernel_bundles = other_bundles = 0
    for path in sorted(dump_folder.iterdir()):
        match = _FINAL_BUNDLES.match(path.name)
        if not match or _NOT_AN_OP.match(match["op"]):
            continue
        schedule = read_schedule(path.read_text())
        if match["op"].startswith(_KERNEL_NAME):
            kernel_bundles = schedule.cycles(loop_trip_counts(layout))
        else:
            other_bundles += schedule.num_bundles
    return _time(chip, layout, kernel_bundles, other_bundles, _profiled_cycles(dump_folder))


def _profiled_cycles(dump_folder: Path) -> int | None:
    """Cycles of all operations by the compiler's static profile; None if there is none."""
    texts = [path.read_text() for path in (dump_folder / _PROFILE_FOLDER).glob("*.textproto")]
    found = [_PROFILED_CYCLES.search(text) for text in texts]
    return sum(int(match[1]) for match in found if match) if texts else None


def compile_for(chip: str, spec: HistogramSpec) -> jax.stages.Compiled:
    """Compiles one call for a chip.

    Args:
        chip: name in `CHIPS`.
        spec: the call.

    Returns:
        The executable, which this host cannot run.
    """
    topology = topologies.get_topology_desc(CHIPS[chip].topology, platform="tpu")
    device = topology.devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    ids = jax.ShapeDtypeStruct(
        (spec.num_layers, spec.top_k, spec.num_tokens), jnp.int32, sharding=sharding
    )
    blocks = jax.ShapeDtypeStruct((spec.num_tokens,), jnp.int32, sharding=sharding)

    def histogram(ids: jax.Array, block_of_token: jax.Array) -> jax.Array:
        return pallas_tpu.call_kernel(ids, block_of_token, spec, TPU_CONFIGS[chip])

    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(histogram).lower(ids, blocks).compile()


def loop_trip_counts(layout: Layout) -> list[int]:
    """Runs of the body of each loop of the kernel's schedule, in order.

    Every token is valid and every product needs one window, as with one long request: its
    tiles share but the step at their border, the other steps are skipped. The compiler
    dissolves loops that run once.
    """
    tiles = layout.num_tiles
    steps = layout.num_steps + tiles - 1
    trips = [steps] if steps > 1 else []
    if (clears := layout.accumulator_rows // 64) > 1:
        trips.append(tiles * clears)
    for _ in range(layout.dots_per_step):
        windows = 0 if layout.config.pipelined else layout.num_steps
        trips.append(windows)
        if layout.num_layer_groups > 1:
            trips.append(windows * layout.num_layer_groups)
    rows_per_loop = min(layout.config.rows_per_loop, layout.tile_rows)
    if (writes := -(-layout.tile_rows // rows_per_loop)) > 1:
        trips.append(tiles * writes)
    return trips


def _time(
    chip: str,
    layout: Layout,
    kernel_bundles: int,
    other_bundles: int,
    profiled_cycles: int | None,
) -> KernelTime:
    spec, facts = layout.spec, CHIPS[chip]
    itemsize = spec.dtype.itemsize
    token_bytes = spec.num_layers * spec.top_k * 4 + 4
    row_bytes = spec.num_layers * spec.num_experts * itemsize
    step_tokens = min(spec.num_tokens, layout.columns_per_step * LANES)
    us_per_byte = 1e6 / facts.hbm_bytes_per_s
    floor_us = (spec.num_tokens * token_bytes + spec.num_blocks * row_bytes) * us_per_byte
    exposed_us = (step_tokens * token_bytes + layout.tile_rows * row_bytes) * us_per_byte
    compute_us = (kernel_bundles + other_bundles) / facts.clock_hz * 1e6
    return KernelTime(
        kernel_bundles=kernel_bundles,
        other_bundles=other_bundles,
        profile_us=None if profiled_cycles is None else profiled_cycles / facts.clock_hz * 1e6,
        compute_us=compute_us,
        floor_us=floor_us,
        static_us=max(compute_us, floor_us) + exposed_us if kernel_bundles else float("nan"),
    )


def prepare_process(dump_folder: Path, *, profile: bool = False) -> None:
    """Makes this process compile under `dump_folder`; call before anything touches libtpu."""
    set_compiler_environment(os.environ, dump_folder, profile=profile)
