"""Which model variants exist, on which hardware they are offered, and what one chip costs.

A variant is what a client can be served: a model at a weight width. It may come in several
formats (8-bit as fp8, or as an INT8 stand-in where fp8 is not native), each with its own quality
id, because quality evidence never carries over from one format to another.

The hardware comes from `configs/hardware`, variants and cells from `configs/serving/variants.yaml`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import Hardware, Precision, load_hardware_dir
from serving.core.errors import ConfigError

SCHEMA_VERSION = 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A variant's experts.

    Attributes:
        num_layers: MoE layers.
        num_experts: experts per layer.
        top_k: experts per token and layer.
        params_per_expert: parameters of one expert of one layer.
    """

    num_layers: int
    num_experts: int
    top_k: int
    params_per_expert: float

    @property
    def num_expert_params(self) -> float:
        """Parameters of all experts of all layers."""
        return self.num_layers * self.num_experts * self.params_per_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to store and compute a variant.

    Attributes:
        precision: arithmetic of its matrix products; must be native on the hardware.
        dense_bytes: weights every decode step loads.
        expert_bytes: one expert of one layer; 0 for a dense model.
        weight_bytes: all weights, what memory must hold.
        kv_bytes_per_token: KV of one token over all layers.
        quality_id: what quality evidence is filed under.
        stand_in_for: quality id of the format it replaces, "" for an original.
    """

    precision: Precision
    dense_bytes: float
    expert_bytes: float
    weight_bytes: float
    kv_bytes_per_token: float
    quality_id: str
    stand_in_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model at a weight width.

    Attributes:
        id: key in tables, pools and records.
        num_params: all parameters.
        num_active_params: parameters one token uses.
        formats: in order of preference.
        moe: experts, None for a dense model.
        source: provenance of the figures.
    """

    id: str
    num_params: float
    num_active_params: float
    formats: tuple[Format, ...]
    moe: Moe | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A variant offered on a worker of `num_chips` of one hardware type.

    Attributes:
        variant, hardware: ids.
        num_chips: chips of one worker.
        prefill_precision: prices prefill at another precision's peak; "" = the format's own.
        note: why the offer departs from the rule, for the table.
    """

    variant: str
    hardware: str
    num_chips: int
    prefill_precision: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Everything that can be priced.

    Attributes:
        hardware, variants: by id.
        offers: cells to price, in file order.
        reference_batch: requests per decode step the table is computed at.
        reference_context_tokens: their mean context.
    """

    hardware: Mapping[str, Hardware]
    variants: Mapping[str, Variant]
    offers: tuple[Offer, ...]
    reference_batch: int
    reference_context_tokens: int

    def variant(self, variant_id: str) -> Variant:
        """A variant by id.

        Raises:
            ConfigError: unknown; names the nearest known one.
        """
        return _known("variant", variant_id, self.variants)

    def hardware_of(self, hardware_id: str) -> Hardware:
        """A hardware type by id.

        Raises:
            ConfigError: unknown; names the nearest known one.
        """
        return _known("hardware", hardware_id, self.hardware)


class _MoeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_layers: int
    num_experts: int
    top_k: int
    params_per_expert: float


class _FormatSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    precision: Precision
    bytes_per_param: float
    kv_bytes_per_token: float
    quality_id: str
    bytes_per_expert_param: float | None = None
    stand_in_for: str = ""


class _VariantSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    source: str
    num_params: float
    formats: list[_FormatSpec]
    num_active_params: float | None = None
    moe: _MoeSpec | None = None


class _CellSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    variant: str
    hardware: str
    chips: int
    prefill_precision: str = ""
    note: str = ""


class _ReferenceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    batch: int
    context_tokens: int


class _CatalogueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    reference: _ReferenceSpec
    variants: list[_VariantSpec]
    cells: list[_CellSpec]


def load_catalogue(variants_file: str | Path, hardware_dir: str | Path) -> Catalogue:
    """Reads the catalogue.

    Raises:
        ConfigError: names file and field, value and rule; an unknown variant or hardware in a
            cell names the nearest known one.
    """
    try:
        spec = load_yaml(variants_file, _CatalogueSpec)
        hardware = load_hardware_dir(hardware_dir)
    except PlannerConfigError as error:
        where = f"{error.file}: {error.field}" if error.file else error.field
        raise ConfigError(where, error.value, error.rule) from error
    try:
        return _catalogue(spec, hardware)
    except ConfigError as error:
        raise ConfigError(f"{variants_file}: {error.field}", error.value, error.rule) from None


def _catalogue(spec: _CatalogueSpec, hardware: Mapping[str, Hardware]) -> Catalogue:
    if spec.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", spec.schema_version, f"must be {SCHEMA_VERSION}")
    for name, value in (
        ("reference.batch", spec.reference.batch),
        ("reference.context_tokens", spec.reference.context_tokens),
    ):
        if value < 1:
            raise ConfigError(name, value, "must be >= 1")
    variants: dict[str, Variant] = {}
    for index, item in enumerate(spec.variants):
        if item.id in variants:
            raise ConfigError(f"variants[{index}].id", item.id, "must be unique")
        variants[item.id] = _variant(item)
    offers: dict[tuple[str, str, int], Offer] = {}
    for index, cell in enumerate(spec.cells):
        field = f"cells[{index}]"
        _known(f"{field}.variant", cell.variant, variants)
        _known(f"{field}.hardware", cell.hardware, hardware)
        if cell.chips < 1:
            raise ConfigError(f"{field}.chips", cell.chips, "must be >= 1")
        key = (cell.variant, cell.hardware, cell.chips)
        if key in offers:
            raise ConfigError(field, key, "must be unique")
        offers[key] = Offer(
            variant=cell.variant,
            hardware=cell.hardware,
            num_chips=cell.chips,
            prefill_precision=cell.prefill_precision,
            note=cell.note,
        )
    return Catalogue(
        hardware=hardware,
        variants=variants,
        offers=tuple(offers.values()),
        reference_batch=spec.reference.batch,
        reference_context_tokens=spec.reference.context_tokens,
    )


def _variant(spec: _VariantSpec) -> Variant:
    field = f"variants.{spec.id}"
    active = spec.num_params if spec.num_active_params is None else spec.num_active_params
    _positive(f"{field}.num_params", spec.num_params)
    _positive(f"{field}.num_active_params", active)
    if active > spec.num_params:
        raise ConfigError(f"{field}.num_active_params", active, f"must be <= {spec.num_params:g}")
    if not spec.formats:
        raise ConfigError(f"{field}.formats", [], "must hold at least one format")
    moe = _moe(f"{field}.moe", spec.moe, spec.num_params) if spec.moe else None
    quality_ids = [item.quality_id for item in spec.formats]
    if len(set(quality_ids)) != len(quality_ids) or not all(quality_ids):
        raise ConfigError(f"{field}.formats", quality_ids, "each needs a quality_id of its own")
    return Variant(
        id=spec.id,
        num_params=spec.num_params,
        num_active_params=active,
        formats=tuple(
            _format(f"{field}.formats[{index}]", item, spec.num_params, moe)
            for index, item in enumerate(spec.formats)
        ),
        moe=moe,
        source=spec.source,
    )


def _moe(field: str, spec: _MoeSpec, num_params: float) -> Moe:
    for name in ("num_layers", "num_experts", "top_k", "params_per_expert"):
        _positive(f"{field}.{name}", getattr(spec, name))
    if spec.top_k > spec.num_experts:
        raise ConfigError(f"{field}.top_k", spec.top_k, f"must be <= {spec.num_experts}")
    moe = Moe(
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        params_per_expert=spec.params_per_expert,
    )
    if moe.num_expert_params > num_params:
        raise ConfigError(
            f"{field}.params_per_expert",
            spec.params_per_expert,
            f"all experts together must be <= num_params, {num_params:g}",
        )
    return moe


def _format(field: str, spec: _FormatSpec, num_params: float, moe: Moe | None) -> Format:
    expert_width = (
        spec.bytes_per_param if spec.bytes_per_expert_param is None else spec.bytes_per_expert_param
    )
    _positive(f"{field}.bytes_per_param", spec.bytes_per_param)
    _positive(f"{field}.bytes_per_expert_param", expert_width)
    _positive(f"{field}.kv_bytes_per_token", spec.kv_bytes_per_token)
    num_expert_params = moe.num_expert_params if moe else 0.0
    dense_bytes = (num_params - num_expert_params) * spec.bytes_per_param
    return Format(
        precision=spec.precision,
        dense_bytes=dense_bytes,
        expert_bytes=moe.params_per_expert * expert_width if moe else 0.0,
        weight_bytes=dense_bytes + num_expert_params * expert_width,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        quality_id=spec.quality_id,
        stand_in_for=spec.stand_in_for,
    )


def _positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(field, value, "must be a finite number > 0")


def _known(field: str, key: str, known: Mapping[str, _T]) -> _T:
    if key not in known:
        raise ConfigError(field, key, _nearest(key, known))
    return known[key]


def _nearest(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return f"is unknown; nearest is {near[0]!r}, known: {', '.join(names)}" if near else "unknown"
