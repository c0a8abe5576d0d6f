"""Names of TPU slices to compile for: "v6e:2x2", "tpu7x:2x2x1", "v6e:1x1".

A target needs no TPU; its devices come from the TPU compiler (`jax[tpu]`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import jax

_GIB = 2**30
_SHAPE = re.compile(r"^[1-9]\d*(x[1-9]\d*){1,2}$")


class TargetError(ValueError):
    """A target that names no slice, or one that cannot be compiled for here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What the fit and the fastest possible run of a program depend on.

    Attributes:
      devices_per_chip: JAX devices of a chip.
      num_dims: dimensions of a slice's shape.
      hbm_bytes: memory of one JAX device.
      hbm_bytes_per_s: peak bandwidth of that memory.
      bf16_flops_per_s: peak of one JAX device.
      compiler_options: what programs for it are compiled with, and should be where they run.
    """

    devices_per_chip: int
    num_dims: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    compiler_options: Mapping[str, bool] = field(default_factory=dict)


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip(
            devices_per_chip=1,
            num_dims=2,
            hbm_bytes=16 * _GIB,
            hbm_bytes_per_s=0.82e12,
            bf16_flops_per_s=197e12,
        ),
        "v6e": Chip(
            devices_per_chip=1,
            num_dims=2,
            hbm_bytes=32 * _GIB,
            hbm_bytes_per_s=1.64e12,
            bf16_flops_per_s=918e12,
        ),
        # A chip is two devices, each with half of what is published for the chip.
        "tpu7x": Chip(
            devices_per_chip=2,
            num_dims=3,
            hbm_bytes=96 * _GIB,
            hbm_bytes_per_s=7.37e12 / 2,
            bf16_flops_per_s=2307e12 / 2,
            # Arguments come in tiles of eight rows. The compiler prefers tiles of sixteen for
            # two-byte types on this chip, and copies all weights into them at every step.
            compiler_options=MappingProxyType(
                {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
            ),
        ),
    }
)
"""Chips by the name that the compiler gives them; figures of Google Cloud's TPU pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A slice to compile for.

    Attributes:
      name: as the user wrote it.
      chip: name in `CHIPS`.
      shape: chips in each dimension.
    """

    name: str
    chip: str
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices of the slice."""
        return self.num_chips * CHIPS[self.chip].devices_per_chip

    @property
    def hbm_bytes(self) -> int:
        """Memory of one JAX device."""
        return CHIPS[self.chip].hbm_bytes


def parse_target(name: str) -> Target:
    """Reads "CHIP:SHAPE".

    Args:
      name: such as "v6e:2x2".

    Returns:
      The slice.

    Raises:
      TargetError: an unknown chip or no shape.
    """
    chip, colon, shape = name.partition(":")
    if chip not in CHIPS:
        raise TargetError(f"target={name!r}: chip {chip!r} must be one of {', '.join(CHIPS)}")
    dims = tuple(int(part) for part in shape.split("x")) if _SHAPE.match(shape) else ()
    if not colon or len(dims) != CHIPS[chip].num_dims:
        example = "x".join("2" * CHIPS[chip].num_dims)
        raise TargetError(
            f"target={name!r}: shape {shape!r} must be chips in {CHIPS[chip].num_dims} dimensions, "
            f"such as {chip}:{example}"
        )
    return Target(name=name, chip=chip, shape=dims)


def set_compiler_environment(environment: MutableMapping[str, str]) -> None:
    """Sets what JAX and the TPU compiler read so that no chip is looked for.

    Args:
      environment: `os.environ`, before anything asks JAX for a device.
    """
    environment.update(
        {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v6e-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_MIN_LOG_LEVEL": "2",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
    )


def devices_of(target: Target) -> Sequence[Any]:
    """Devices of a slice that is not there, to compile for.

    Args:
      target: the slice.

    Returns:
      Its `jax.Device`s; programs for them cannot run in this process.

    Raises:
      TargetError: the compiler is not installed, or refuses the shape.
    """
    if find_spec("libtpu") is None:
        raise TargetError(
            f"target={target.name!r} needs the TPU compiler: pip install 'eldr-router[tpu]'"
        )
    set_compiler_environment(os.environ)
    from jax.experimental import topologies

    # The compiler's hosts have 2 x 2 chips; smaller slices must say how theirs look.
    dims = (*target.shape, 1, 1)[:3]
    bounds = (min(dims[0], 2), min(dims[1], 2), 1)
    try:
        topology = topologies.get_topology_desc(
            target.name, platform="tpu", chips_per_host_bounds=bounds
        )
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise TargetError(
            f"target={target.name!r}: the compiler refuses the shape: {error}"
        ) from error
    if len(topology.devices) != target.num_devices:
        raise TargetError(
            f"target={target.name!r}: the compiler knows {len(topology.devices)} devices of it, "
            f"not {target.num_devices}"
        )
    return topology.devices
