"""Slices: the shape a node's labels give, ICI coordinates and hops, and who fails together.

An ICI domain is one slice; two slices talk over the data-centre network even inside one pod. On
TPU7x `tpu7x-N` counts JAX devices, two per chip, so the shape comes from the topology string,
never from a suffix. A slice fails and drains as one unit: losing a chip of it loses the mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from bucket_planner.hardware import Hardware
from serving.core.errors import ConfigError

ACCELERATOR_LABEL = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
NODEPOOL_LABEL = "cloud.google.com/gke-nodepool"
SLICE_ID_LABEL = "cloud.google.com/gke-tpu-slice-{topology}-id"
PARTITION_ID_LABEL = "cloud.google.com/gke-tpu-partition-{topology}-id"
_PARTITION = re.compile(r"cloud\.google\.com/gke-tpu-partition-(?P<topology>[0-9x]+)-id")

_DIMS = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")

Coordinates = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceShape:
    """Chips of one slice as a mesh or torus.

    Attributes:
        hardware_id: accelerator type.
        dims: chips along each axis, 2 on v5e and v6e, 3 on TPU7x.
        wraps: whether each axis closes into a ring.
        jax_devices_per_chip: devices one chip shows.
    """

    hardware_id: str
    dims: Coordinates
    wraps: tuple[bool, ...]
    jax_devices_per_chip: int

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.dims)

    @property
    def num_jax_devices(self) -> int:
        """JAX devices of the slice; the number in `tpu7x-N`."""
        return self.num_chips * self.jax_devices_per_chip

    def coordinates(self) -> Iterator[Coordinates]:
        """Every chip, last axis fastest."""
        return product(*(range(length) for length in self.dims))

    def coordinates_of(self, chip: int) -> Coordinates:
        """Coordinates of the chip with a row-major index.

        Raises:
            ConfigError: no such chip.
        """
        if not 0 <= chip < self.num_chips:
            raise ConfigError("chip", chip, f"must lie in [0, {self.num_chips})")
        out: list[int] = []
        for length in reversed(self.dims):
            chip, at = divmod(chip, length)
            out.append(at)
        return tuple(reversed(out))

    def hops(self, one: Coordinates, other: Coordinates) -> int:
        """ICI hops between two chips, the shorter way round on axes that wrap.

        Raises:
            ConfigError: coordinates outside the slice.
        """
        for point in (one, other):
            inside = len(point) == len(self.dims) and all(
                0 <= at < length for at, length in zip(point, self.dims, strict=True)
            )
            if not inside:
                raise ConfigError("coordinates", point, f"must lie inside {self.dims}")
        total = 0
        for a, b, length, wraps in zip(one, other, self.dims, self.wraps, strict=True):
            way = abs(a - b)
            total += min(way, length - way) if wraps else way
        return total

    def diameter(self) -> int:
        """Hops between the two chips farthest apart."""
        return sum(
            length // 2 if wraps else length - 1
            for length, wraps in zip(self.dims, self.wraps, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMembership:
    """Where a node belongs.

    Attributes:
        slice_id: ICI domain; equal ids share ICI, fail and drain together.
        shape: the slice's shape.
    """

    slice_id: str
    shape: SliceShape


def parse_topology(topology: str, hardware: Hardware) -> SliceShape:
    """The slice a topology string such as `2x4` or `2x2x1` describes.

    Raises:
        ConfigError: not a TPU, the string does not parse, the wrong number of axes, or more
            chips than a pod has.
    """
    if hardware.torus_dims == 0:
        raise ConfigError("topology", topology, f"{hardware.id} has no torus")
    if not _DIMS.fullmatch(topology):
        raise ConfigError("topology", topology, "must look like 2x2 or 2x2x1")
    dims = tuple(int(text) for text in topology.split("x"))
    if len(dims) != hardware.torus_dims:
        raise ConfigError(
            "topology", topology, f"must have {hardware.torus_dims} axes on {hardware.id}"
        )
    if math.prod(dims) > hardware.pod_chips:
        raise ConfigError(
            "topology", topology, f"must have at most {hardware.pod_chips} chips on {hardware.id}"
        )
    ring = hardware.wrap_axis_chips
    return SliceShape(
        hardware_id=hardware.id,
        dims=dims,
        wraps=tuple(ring is not None and length % ring == 0 for length in dims),
        jax_devices_per_chip=hardware.jax_devices_per_chip,
    )


def slice_of_labels(labels: Mapping[str, str], hardware: Mapping[str, Hardware]) -> SliceMembership:
    """The slice a node's GKE labels put it in.

    The id is the slice label of the node's topology where a dynamic slicer set one, else the
    partition of that shape, else the node pool (a multi-host pool is one slice).

    Args:
        labels: node labels.
        hardware: hardware types by id.

    Raises:
        ConfigError: a label is missing or unknown, or the topology does not parse.
    """
    accelerator = _label(labels, ACCELERATOR_LABEL)
    chip = next((h for h in hardware.values() if h.gke_accelerator == accelerator), None)
    if chip is None:
        known = sorted(h.gke_accelerator for h in hardware.values() if h.gke_accelerator)
        raise ConfigError(ACCELERATOR_LABEL, accelerator, f"is unknown; known: {', '.join(known)}")
    topology = _label(labels, TOPOLOGY_LABEL)
    try:
        shape = parse_topology(topology, chip)
    except ConfigError as error:
        raise ConfigError(TOPOLOGY_LABEL, error.value, error.rule) from None
    for key in (SLICE_ID_LABEL, PARTITION_ID_LABEL):
        if slice_id := labels.get(key.format(topology=topology)):
            return SliceMembership(slice_id=slice_id, shape=shape)
    return SliceMembership(slice_id=_label(labels, NODEPOOL_LABEL), shape=shape)


def partition_ids(labels: Mapping[str, str]) -> dict[str, str]:
    """Partition id of each sub-slice shape a node belongs to, by topology string."""
    found: dict[str, str] = {}
    for key, value in labels.items():
        if match := _PARTITION.fullmatch(key):
            found[match["topology"]] = value
    return found


def failure_units(slice_of_worker: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Groups workers that fail and drain together.

    Args:
        slice_of_worker: worker id -> slice id ("" for a worker that stands alone).

    Returns:
        worker id -> all workers of its unit, itself included, in the order given.
    """
    members: dict[str, list[str]] = {}
    for worker, slice_id in slice_of_worker.items():
        if slice_id:
            members.setdefault(slice_id, []).append(worker)
    return {
        worker: tuple(members[slice_id]) if slice_id else (worker,)
        for worker, slice_id in slice_of_worker.items()
    }


def lost_with(workers: Iterable[str], units: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Every worker that goes when `workers` go, sorted.

    Raises:
        ConfigError: a worker no unit holds.
    """
    gone: set[str] = set()
    for worker in workers:
        if worker not in units:
            raise ConfigError("worker", worker, "must belong to a failure unit")
        gone.update(units[worker])
    return tuple(sorted(gone))


def _label(labels: Mapping[str, str], key: str) -> str:
    value = labels.get(key, "")
    if not value:
        raise ConfigError(key, None, "the node has no such label")
    return value
