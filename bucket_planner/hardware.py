"""What one accelerator type can do and costs: schema and loader of `configs/hardware/*.yaml`.

One file describes one accelerator. Every number is a `Figure`: the value, where it comes from, and
whether it is an assumption (a price we chose) rather than a published or measured fact. `Hardware`
is the plain record the rest of the product computes with: SI units, bytes, FLOP, seconds, dollars.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError

SCHEMA_VERSION = 1

Kind = Literal["tpu", "gpu", "cpu"]
Precision = Literal["fp32", "bf16", "fp8", "int8"]
PriceBasis = Literal["amortised", "list", "three_year"]
Domain = Literal["ici", "nvlink", "none"]


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its provenance."""

    value: float
    source: str
    assumption: bool = False


class PriceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dollars per chip-hour on each basis; `opportunity` per SLO class replaces the amortised."""

    amortised: Figure
    list: Figure | None = None
    three_year: Figure | None = None
    opportunity: dict[str, Figure] = {}


class InterconnectSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Links of one chip: inside its ICI or NVLink domain, and over the data-centre network."""

    domain: Domain
    bytes_per_s: Figure | None = None
    effective_bytes_per_s: Figure | None = None
    dcn_bytes_per_s: Figure | None = None
    dcn_effective_bytes_per_s: Figure | None = None


class TopologySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of the largest domain; `torus_dims` 0 means all-to-all (NVLink) or a single chip."""

    torus_dims: int
    pod_chips: int
    wrap_axis_chips: int | None
    jax_devices_per_chip: int
    source: str


class HardwareFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `configs/hardware/ID.yaml`."""

    schema_version: int
    id: str
    name: str
    vendor: str
    kind: Kind
    jax_device_kind: str | None
    gke_accelerator: str | None
    usd_per_chip_hour: PriceSpec
    peak_flops: dict[Precision, Figure]
    hbm_bytes: Figure
    hbm_bytes_per_s: Figure
    prefill_mfu: Figure
    decode_bandwidth_utilization: Figure
    interconnect: InterconnectSpec
    topology: TopologySpec
    min_tensor_parallel: int
    min_token_bucket: int
    block_sizes_tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """Bandwidths of one chip in bytes per second; None where the link does not exist.

    Attributes:
      domain: what connects chips of one domain.
      bytes_per_s: published peak inside the domain, per chip.
      effective_bytes_per_s: what a KV transfer inside the domain is expected to reach.
      dcn_bytes_per_s: line rate over the data-centre network.
      dcn_effective_bytes_per_s: what a KV transfer over it is expected to reach.
    """

    domain: Domain
    bytes_per_s: float | None
    effective_bytes_per_s: float | None
    dcn_bytes_per_s: float | None
    dcn_effective_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator type, per chip.

    Attributes:
      id: key used everywhere (`v6e`, `tpu7x`, `h100` ...).
      name: name for people.
      vendor: who makes it.
      kind: tpu, gpu or cpu.
      jax_device_kind: `jax.Device.device_kind`, where one exists.
      gke_accelerator: value of the GKE accelerator node label, where one exists.
      usd_per_chip_hour: dollars per chip-hour by price basis (`amortised` always present).
      opportunity_usd_per_chip_hour: by SLO class; what an hour is worth to that class when it
        differs from the amortised price.
      peak_flops: FLOP/s by precision; an absent precision is not native on this chip.
      hbm_bytes: memory capacity.
      hbm_bytes_per_s: memory bandwidth.
      prefill_mfu: fraction of peak FLOP/s a prefill reaches.
      decode_bandwidth_utilization: fraction of the memory bandwidth a decode step reaches.
      interconnect: link bandwidths.
      torus_dims: 2 or 3 on TPUs, 0 otherwise.
      pod_chips: chips in the largest ICI or NVLink domain.
      wrap_axis_chips: a torus axis wraps round when its length is a multiple; None = never.
      jax_devices_per_chip: JAX devices one chip shows.
      min_tensor_parallel: smallest tensor-parallel degree engines support, in JAX devices.
      min_token_bucket: smallest step bucket engines compile, in tokens.
      block_sizes_tokens: KV block sizes engines support, ascending.
      sources: dotted field name -> provenance; assumptions start with `assumption: `.
    """

    id: str
    name: str
    vendor: str
    kind: Kind
    jax_device_kind: str | None
    gke_accelerator: str | None
    usd_per_chip_hour: Mapping[str, float]
    opportunity_usd_per_chip_hour: Mapping[str, float]
    peak_flops: Mapping[str, float]
    hbm_bytes: float
    hbm_bytes_per_s: float
    prefill_mfu: float
    decode_bandwidth_utilization: float
    interconnect: Interconnect
    torus_dims: int
    pod_chips: int
    wrap_axis_chips: int | None
    jax_devices_per_chip: int
    min_tensor_parallel: int
    min_token_bucket: int
    block_sizes_tokens: tuple[int, ...]
    sources: Mapping[str, str] = field(repr=False)

    def usd_per_chip_s(self, *, basis: str = "amortised", slo_class: str | None = None) -> float:
        """Dollars per chip-second.

        Args:
          basis: `amortised`, `list` or `three_year`.
          slo_class: when given and an opportunity rate is configured for it, that rate wins.

        Raises:
          PlannerConfigError: no price on that basis.
        """
        if slo_class is not None and slo_class in self.opportunity_usd_per_chip_hour:
            return self.opportunity_usd_per_chip_hour[slo_class] / 3600.0
        if basis not in self.usd_per_chip_hour:
            known = ", ".join(sorted(self.usd_per_chip_hour))
            raise PlannerConfigError(
                f"{self.id}.usd_per_chip_hour", basis, f"must be one of the bases given: {known}"
            )
        return self.usd_per_chip_hour[basis] / 3600.0


def load_hardware(path: str | Path) -> Hardware:
    """Reads and checks one hardware file.

    Raises:
      PlannerConfigError: names file, field, value and rule (and the nearest key of a typo).
    """
    file = str(path)
    spec = load_yaml(path, HardwareFile)
    try:
        return _resolve(spec)
    except PlannerConfigError as error:
        raise error.in_file(file) from None


def load_hardware_dir(directory: str | Path) -> dict[str, Hardware]:
    """Reads every `*.yaml` of a directory, by id in file order.

    Raises:
      PlannerConfigError: as `load_hardware`; also no file at all, or one id in two files.
    """
    found: dict[str, Hardware] = {}
    for path in sorted(Path(directory).glob("*.yaml")):
        hardware = load_hardware(path)
        if hardware.id in found:
            raise PlannerConfigError(
                "id", hardware.id, "must be unique among the hardware files", file=str(path)
            )
        found[hardware.id] = hardware
    if not found:
        raise PlannerConfigError("hardware_dir", str(directory), "must hold at least one *.yaml")
    return found


def _resolve(spec: HardwareFile) -> Hardware:
    """Checks the rules and drops the provenance into `sources`."""
    if spec.schema_version != SCHEMA_VERSION:
        raise PlannerConfigError("schema_version", spec.schema_version, f"must be {SCHEMA_VERSION}")
    if not spec.id:
        raise PlannerConfigError("id", spec.id, "must not be empty")
    sources: dict[str, str] = {}

    def figure(name: str, item: Figure, high: float = math.inf) -> float:
        if not (math.isfinite(item.value) and 0.0 < item.value <= high):
            limit = f" and <= {high:g}" if math.isfinite(high) else ""
            raise PlannerConfigError(
                f"{name}.value", item.value, f"must be a finite number > 0{limit}"
            )
        if not item.source.strip():
            raise PlannerConfigError(f"{name}.source", item.source, "every figure needs a source")
        sources[name] = ("assumption: " if item.assumption else "") + item.source
        return item.value

    def maybe(name: str, item: Figure | None) -> float | None:
        return None if item is None else figure(name, item)

    def table(name: str, items: Mapping[Any, Figure | None]) -> Mapping[str, float]:
        return MappingProxyType(
            {str(k): figure(f"{name}.{k}", v) for k, v in items.items() if v is not None}
        )

    price, links = spec.usd_per_chip_hour, spec.interconnect
    _check_shape(spec)
    sources["topology"] = spec.topology.source
    bases = {"amortised": price.amortised, "list": price.list, "three_year": price.three_year}
    return Hardware(
        id=spec.id,
        name=spec.name,
        vendor=spec.vendor,
        kind=spec.kind,
        jax_device_kind=spec.jax_device_kind,
        gke_accelerator=spec.gke_accelerator,
        usd_per_chip_hour=table("usd_per_chip_hour", bases),
        opportunity_usd_per_chip_hour=table("usd_per_chip_hour.opportunity", price.opportunity),
        peak_flops=table("peak_flops", spec.peak_flops),
        hbm_bytes=figure("hbm_bytes", spec.hbm_bytes),
        hbm_bytes_per_s=figure("hbm_bytes_per_s", spec.hbm_bytes_per_s),
        prefill_mfu=figure("prefill_mfu", spec.prefill_mfu, 1.0),
        decode_bandwidth_utilization=figure(
            "decode_bandwidth_utilization", spec.decode_bandwidth_utilization, 1.0
        ),
        interconnect=Interconnect(
            domain=links.domain,
            bytes_per_s=maybe("interconnect.bytes_per_s", links.bytes_per_s),
            effective_bytes_per_s=maybe(
                "interconnect.effective_bytes_per_s", links.effective_bytes_per_s
            ),
            dcn_bytes_per_s=maybe("interconnect.dcn_bytes_per_s", links.dcn_bytes_per_s),
            dcn_effective_bytes_per_s=maybe(
                "interconnect.dcn_effective_bytes_per_s", links.dcn_effective_bytes_per_s
            ),
        ),
        torus_dims=spec.topology.torus_dims,
        pod_chips=spec.topology.pod_chips,
        wrap_axis_chips=spec.topology.wrap_axis_chips,
        jax_devices_per_chip=spec.topology.jax_devices_per_chip,
        min_tensor_parallel=spec.min_tensor_parallel,
        min_token_bucket=spec.min_token_bucket,
        block_sizes_tokens=tuple(spec.block_sizes_tokens),
        sources=MappingProxyType(sources),
    )


def _check_shape(spec: HardwareFile) -> None:
    """Rules on the whole numbers, the precisions and the links."""
    wrap = spec.topology.wrap_axis_chips
    positive = {
        "topology.pod_chips": spec.topology.pod_chips,
        "topology.wrap_axis_chips": 1 if wrap is None else wrap,
        "topology.jax_devices_per_chip": spec.topology.jax_devices_per_chip,
        "min_tensor_parallel": spec.min_tensor_parallel,
        "min_token_bucket": spec.min_token_bucket,
    }
    for name, value in positive.items():
        if value < 1:
            raise PlannerConfigError(name, value, "must be a whole number >= 1")
    dims = spec.topology.torus_dims
    if (spec.kind == "tpu") != (dims in (2, 3)) or (spec.kind != "tpu" and dims != 0):
        raise PlannerConfigError(
            "topology.torus_dims", dims, "must be 2 or 3 on a tpu and 0 elsewhere"
        )
    if not spec.peak_flops:
        raise PlannerConfigError("peak_flops", {}, "must give at least one native precision")
    blocks = spec.block_sizes_tokens
    if not blocks or blocks[0] < 1 or any(b <= a for a, b in pairwise(blocks)):
        raise PlannerConfigError("block_sizes_tokens", blocks, "must be positive and ascending")
    links = spec.interconnect
    in_domain = (links.bytes_per_s, links.effective_bytes_per_s)
    if any((item is None) != (links.domain == "none") for item in in_domain):
        raise PlannerConfigError(
            "interconnect.bytes_per_s",
            links.domain,
            "bytes_per_s and effective_bytes_per_s must both be given, except when domain is none",
        )
    if (links.dcn_bytes_per_s is None) != (links.dcn_effective_bytes_per_s is None):
        raise PlannerConfigError(
            "interconnect.dcn_effective_bytes_per_s",
            None,
            "dcn_bytes_per_s and dcn_effective_bytes_per_s must be given together",
        )
