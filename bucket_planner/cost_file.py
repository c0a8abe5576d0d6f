"""Readers of `--cost` and `--compiler_report` files.

A cost file is JSON in one of three forms:

* ours, `{"schema_version": 1, "kind": "measured" | "roofline", "source": ..., ...}`;
* a MaxText inference microbenchmark, `{"Prefill": {"128": {"prefill_time_in_ms": 11.1}}}`;
* a bare map, `{"128": 11.1, "256": 18.5}` in milliseconds.

A compiler report is what `eldr_jax.compile_main` writes: `buckets`, a list of objects with
`tokens` and, where the compiler gave them, `flops`, `compile_s`, `program_bytes`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from bucket_planner.config_file import convert
from bucket_planner.cost_curve import (
    CompileCost,
    CostCurve,
    MeasuredCost,
    RooflineCost,
    roofline_on,
)
from bucket_planner.errors import PlannerConfigError
from bucket_planner.hardware import Hardware

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """A decoded cost file.

    Attributes:
      curve: cost of running a bucket.
      compile_cost: cost of compiling one, or None where the file does not say.
      source: provenance for the plan.
    """

    curve: CostCurve
    compile_cost: CompileCost | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerReport:
    """What a compiler says about each bucket.

    Attributes:
      flops: bucket tokens -> FLOPs.
      compile_cost: compile seconds and program bytes, or None where it gave neither.
    """

    flops: dict[int, float]
    compile_cost: CompileCost | None


class _Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int
    ms: float | None = None
    compile_s: float | None = None
    program_bytes: float | None = None


class _MeasuredSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    kind: Literal["measured"]
    source: str
    buckets: list[_Bucket]


class _RooflineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    kind: Literal["roofline"]
    source: str
    hardware: str
    chips: int
    precision: str
    num_active_params: float
    dense_bytes: float
    expert_bytes: float = 0.0
    num_experts: int = 1
    top_k: int = 1
    attention_flops_per_pair: float = 0.0
    buckets: list[_Bucket] = []


class _CompiledBucket(msgspec.Struct, frozen=True):
    tokens: int
    flops: float | None = None
    compile_s: float | None = None
    program_bytes: float | None = None


class _CompilerSpec(msgspec.Struct, frozen=True):
    buckets: list[_CompiledBucket]


def load_cost_file(path: str | Path, find_hardware: Callable[[str], Hardware]) -> CostFile:
    """Reads a cost file.

    Args:
      path: the JSON file.
      find_hardware: hardware by id, called only for a roofline.

    Raises:
      PlannerConfigError: names file, field, value and rule.
    """
    file = str(path)
    raw = _read_json(path)
    try:
        if not isinstance(raw, dict):
            raise PlannerConfigError("(root)", raw, "must be a JSON object")
        if raw.get("kind") == "roofline":
            return _roofline(convert(raw, _RooflineSpec, file=file), find_hardware)
        if "kind" in raw or "schema_version" in raw:
            return _measured(convert(raw, _MeasuredSpec, file=file))
        if "Prefill" in raw:
            times = {k: _field(v, "prefill_time_in_ms", k) for k, v in raw["Prefill"].items()}
            return _bare_map(times, source="MaxText inference microbenchmark")
        return _bare_map(raw, source="bucket -> ms map")
    except PlannerConfigError as error:
        raise error if error.file else error.in_file(file) from None


def load_compiler_report(path: str | Path) -> CompilerReport:
    """Reads a compiler report; fields beyond the four used are ignored.

    Raises:
      PlannerConfigError: names file, field, value and rule.
    """
    spec = convert(_read_json(path), _CompilerSpec, file=str(path))
    buckets = sorted(spec.buckets, key=lambda bucket: bucket.tokens)
    rows = [
        _Bucket(tokens=b.tokens, compile_s=b.compile_s, program_bytes=b.program_bytes)
        for b in buckets
    ]
    return CompilerReport(
        flops={b.tokens: b.flops for b in buckets if b.flops is not None},
        compile_cost=_compile_cost(rows),
    )


def _measured(spec: _MeasuredSpec) -> CostFile:
    _check_version(spec.schema_version)
    for bucket in spec.buckets:
        if bucket.ms is None:
            raise PlannerConfigError(f"buckets[{bucket.tokens}].ms", None, "is required")
    curve = MeasuredCost(
        tokens=tuple(b.tokens for b in spec.buckets),
        ms=tuple(b.ms for b in spec.buckets if b.ms is not None),
    )
    return CostFile(curve=curve, compile_cost=_compile_cost(spec.buckets), source=spec.source)


def _roofline(spec: _RooflineSpec, find_hardware: Callable[[str], Hardware]) -> CostFile:
    _check_version(spec.schema_version)
    curve: RooflineCost = roofline_on(
        find_hardware(spec.hardware),
        num_chips=spec.chips,
        precision=spec.precision,
        num_active_params=spec.num_active_params,
        dense_bytes=spec.dense_bytes,
        expert_bytes=spec.expert_bytes,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        attention_flops_per_pair=spec.attention_flops_per_pair,
    )
    return CostFile(curve=curve, compile_cost=_compile_cost(spec.buckets), source=spec.source)


def _bare_map(raw: dict[str, Any], *, source: str) -> CostFile:
    points: list[tuple[int, float]] = []
    for key, value in raw.items():
        if not (key.isascii() and key.isdigit()):
            raise PlannerConfigError(key, value, "a bucket map's keys must be token counts")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlannerConfigError(key, value, "must be a number of milliseconds")
        points.append((int(key), float(value)))
    points.sort()
    curve = MeasuredCost(tokens=tuple(p[0] for p in points), ms=tuple(p[1] for p in points))
    return CostFile(curve=curve, compile_cost=None, source=source)


def _compile_cost(buckets: list[_Bucket]) -> CompileCost | None:
    """Compile figures where every bucket has them; partly given is an error."""
    columns: dict[str, tuple[float, ...] | None] = {}
    for name in ("compile_s", "program_bytes"):
        values = [getattr(bucket, name) for bucket in buckets]
        given = [value for value in values if value is not None]
        if given and len(given) != len(values):
            missing = buckets[values.index(None)].tokens
            raise PlannerConfigError(f"buckets[{missing}].{name}", None, "give it for all or none")
        columns[name] = tuple(given) or None
    if columns["compile_s"] is None and columns["program_bytes"] is None:
        return None
    return CompileCost(
        tokens=tuple(bucket.tokens for bucket in buckets),
        compile_s=columns["compile_s"],
        program_bytes=columns["program_bytes"],
    )


def _check_version(version: int) -> None:
    if version != SCHEMA_VERSION:
        raise PlannerConfigError("schema_version", version, f"must be {SCHEMA_VERSION}")


def _field(row: Any, name: str, key: str) -> Any:
    if not isinstance(row, dict) or name not in row:
        raise PlannerConfigError(f"Prefill.{key}.{name}", row, "is required")
    return row[name]


def _read_json(path: str | Path) -> Any:
    try:
        return msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise PlannerConfigError("file", str(path), f"must be readable JSON ({error})") from error
