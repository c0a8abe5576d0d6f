"""Makes what the ELDR replays read: per workload and seed a routing bank and signature fits.

Every seed is a fresh structural draw: other preferences of domains and requests, other expert
permutations, other windows cut from the texts. What is there already is left alone.

    OUT/WORKLOAD-s0/bank.npz           prompts of the serving side
    OUT/WORKLOAD-s0/fit/               artefact of the calibration side
    OUT/WORKLOAD-s0/fit-NAME/          fits with something left out (ablations)
    OUT/reference/, reference-s0/...   the reference model's own routing, see prepare_reference
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from absl import flags

from bucket_planner.config_file import load_yaml
from bucket_planner.errors import PlannerConfigError
from calibration.banks import bank_of, bank_part
from calibration.captures import Capture, capture_in_memory, pack_prompts
from calibration.fit.pipeline import FitConfig, fit_capture
from calibration.fit.variants import FitVariant, fit_folder
from calibration.prepare_reference import NAME as REFERENCE
from calibration.prepare_reference import ReferenceSet, prepare_reference
from calibration.profile.settings import Workload, choose, load_workloads
from calibration.profile.source import ProfileSource, provenance_of
from calibration.progress import progress
from eldr_jax.command_line import run_binary
from eldr_jax.training.data import CorpusError
from serving.core.errors import ArtefactError, ConfigError, EldrError
from serving.replay.bank import write_bank
from serving.signatures.manifest import MANIFEST

SCHEMA_VERSION = 1
_PART_PROMPTS = 256


class PreparedSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload, drawn with several seeds.

    Attributes:
        workload: name in the workloads file.
        seeds: structural draws.
        fits: what is fitted from each.
        token_table: fit the predictor that needs no prefill too.
        num_serve: prompts of the bank; 0 takes the file's.
    """

    workload: str
    seeds: tuple[int, ...]
    fits: tuple[FitVariant, ...] = (FitVariant(),)
    token_table: bool = False
    num_serve: int = 0


class PrepareFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file.

    Attributes:
        workloads: workloads file, from this file's folder.
        num_calibrate, num_serve: prompts per side.
        rows_per_prompt: decode tokens kept per served prompt.
        num_regions: numbers of decode workers to fit regions for.
        sets: what to prepare, in this order.
        reference: a model's own routing, prepared first; None for none.
    """

    schema_version: int
    workloads: str
    num_calibrate: int = 1000
    num_serve: int = 3600
    rows_per_prompt: int = 48
    num_regions: tuple[int, ...] = (16,)
    sets: tuple[PreparedSet, ...]
    reference: ReferenceSet | None = None

    def __post_init__(self) -> None:
        for name in ("num_calibrate", "num_serve", "rows_per_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string("config", "configs/replay/eldr/prepare.yaml", "What to prepare.")
    flags.DEFINE_string("corpora", None, "Folder of the corpora.", required=True)
    flags.DEFINE_string(
        "routing", None, "Folder of the routing tables and their tokenizer.", required=True
    )
    flags.DEFINE_string("out", "out/replay/eldr", "Folder for banks and fits.")
    flags.DEFINE_list("only", [], "Names of workloads to prepare; all when empty.")
    flags.DEFINE_list("seeds", [], "Seeds of the workloads to prepare; all when empty.")
    flags.DEFINE_integer("jobs", 0, "Processes; 0 is one for each core.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What to prepare; see the flags of the same names."""

    config: str
    corpora: str
    routing: str
    out: str
    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise ConfigError("jobs", self.jobs, "must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What one process makes at a time: a set and seed; without a set, the file's reference."""

    file: PrepareFile
    item: PreparedSet | None
    seed: int


def load_prepare(path: str | Path) -> PrepareFile:
    """Reads a prepare file.

    Raises:
        ConfigError: unreadable, unknown key or wrong value; names the field.
    """
    try:
        file = load_yaml(path, PrepareFile)
    except PlannerConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.rule) from error
    if file.schema_version != SCHEMA_VERSION:
        raise ConfigError("schema_version", file.schema_version, f"must be {SCHEMA_VERSION}")
    return file


def run(config: PrepareConfig) -> int:
    """Makes what is missing.

    Args:
        config: what to prepare.

    Returns:
        How many banks and fits were made.

    Raises:
        ConfigError, ArtefactError, CorpusError: bad input, named.
    """
    file = load_prepare(config.config)
    known = {item.workload for item in file.sets} | ({REFERENCE} if file.reference else set())
    if unknown := sorted(set(config.only) - known):
        raise ConfigError("only", unknown[0], f"must be a workload of the file: {sorted(known)}")
    load_workloads(Path(config.config).parent / file.workloads)
    # Seed by seed, so that something can be replayed early; the model's captures take longest.
    seeds = sorted({seed for item in file.sets for seed in item.seeds})
    if unknown := sorted(set(config.seeds) - set(seeds)):
        raise ConfigError("seeds", unknown[0], f"must be one of {seeds}")
    units = [
        _Unit(file=file, item=item, seed=seed)
        for seed in seeds
        for item in file.sets
        if seed in item.seeds
        and (not config.only or item.workload in config.only)
        and (not config.seeds or seed in config.seeds)
    ]
    if file.reference and (not config.only or REFERENCE in config.only):
        units.insert(0, _Unit(file=file, item=None, seed=0))
    jobs = min(config.jobs or len(os.sched_getaffinity(0)), len(units))
    if jobs <= 1:
        source = ProfileSource(config.corpora, config.routing)
        return sum(_made(config, unit, source) for unit in units)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        # What is wrong with a unit is found again here, where it can be raised whole.
        return sum(
            _unit(config, unit) if made is None else made
            for unit, made in zip(
                units, pool.map(_tried, [config] * len(units), units), strict=True
            )
        )


_kept_source = functools.cache(ProfileSource)


def _tried(config: PrepareConfig, unit: _Unit) -> int | None:
    """`_unit`; None when something is wrong with its inputs (such errors do not pickle)."""
    try:
        return _unit(config, unit)
    except (CorpusError, EldrError):
        return None


def _unit(config: PrepareConfig, unit: _Unit) -> int:
    """One set and seed in a process that keeps its tables."""
    return _made(config, unit, _kept_source(config.corpora, config.routing))


def _made(config: PrepareConfig, unit: _Unit, source: ProfileSource) -> int:
    file, folder, out = unit.file, Path(config.config).parent, Path(config.out)
    if unit.item is not None:
        workload = choose(load_workloads(folder / file.workloads), unit.item.workload)
        drawn = msgspec.structs.replace(workload, seed=unit.seed)
        return _prepare(file, unit.item, drawn, source, out)
    if file.reference is None:
        return 0
    began_s = time.monotonic()
    made = prepare_reference(
        file.reference,
        model=folder / file.reference.model,
        corpora=config.corpora,
        out=out,
        num_regions=file.num_regions,
    )
    _say(REFERENCE, made, began_s)
    return made


def _prepare(
    file: PrepareFile, item: PreparedSet, workload: Workload, source: ProfileSource, out: Path
) -> int:
    name = f"{workload.name}-s{workload.seed}"
    folder = out / name
    began_s = time.monotonic()
    made = 0
    missing = [fit for fit in item.fits if not (fit_folder(folder, fit) / MANIFEST).exists()]
    if missing:
        capture = _calibration(file, item, workload, source, name)
        for fit in missing:
            _fit(file, fit, capture, fit_folder(folder, fit), workload.seed)
            made += 1
    if not (folder / "bank.npz").exists():
        _bank(file, item, workload, source, folder, name)
        made += 1
    _say(name, made, began_s)
    return made


def _say(name: str, made: int, began_s: float) -> None:
    state = f"made {made}" if made else "kept from before"
    print(f"prepare: {name}: {state} ({time.monotonic() - began_s:.0f} s)", file=sys.stderr)


def _calibration(
    file: PrepareFile, item: PreparedSet, workload: Workload, source: ProfileSource, name: str
) -> Capture:
    router = source.router(workload)
    prompts = []
    with progress(f"{name} calibrate", file.num_calibrate) as advance:
        for prompt in source.captures(
            router, "calibrate", file.num_calibrate, keep_prefill_experts=item.token_table
        ):
            prompts.append(prompt)
            advance(1)
    return capture_in_memory(
        prompts,
        geometry=workload.geometry,
        model_name=workload.name,
        provenance=provenance_of(router, "calibrate"),
    )


def _fit(file: PrepareFile, fit: FitVariant, capture: Capture, folder: Path, seed: int) -> None:
    if fit.domains:
        capture = capture.of_domains(fit.domains)
    # Ablations differ in the fit alone, so they do without the table.
    if fit.name:
        capture = capture.without_prefill_experts()
    config = FitConfig(
        num_regions=file.num_regions,
        idf=fit.idf,
        layer_mask=fit.layer_mask,
        evidence=fit.evidence,
        seed=seed,
    )
    fit_capture(
        capture,
        folder,
        config,
        provenance={"domains": ", ".join(fit.domains)} if fit.domains else None,
    )


def _bank(
    file: PrepareFile,
    item: PreparedSet,
    workload: Workload,
    source: ProfileSource,
    folder: Path,
    name: str,
) -> None:
    """The serving side; only as many decode tokens are drawn as a bank keeps."""
    drawn = msgspec.structs.replace(workload, decode_tokens=file.rows_per_prompt)
    router = source.router(drawn)
    num_prompts = item.num_serve or file.num_serve
    parts: list[dict[str, np.ndarray]] = []
    pending = []
    with progress(f"{name} serve", num_prompts) as advance:
        for prompt in source.captures(router, "serve", num_prompts):
            pending.append(prompt)
            advance(1)
            if len(pending) == _PART_PROMPTS:
                parts.append(_part(pending, workload, file.rows_per_prompt))
                pending = []
    if pending:
        parts.append(_part(pending, workload, file.rows_per_prompt))
    provenance = provenance_of(router, "serve") | {
        "rows": f"{file.rows_per_prompt} decode tokens per prompt"
    }
    write_bank(folder / "bank.npz", bank_of(parts, workload.geometry, provenance))


def _part(prompts: list, workload: Workload, rows_per_prompt: int) -> dict[str, np.ndarray]:
    arrays = pack_prompts(prompts, workload.geometry)
    return bank_part(arrays, workload.geometry, rows_per_prompt)


def _seeds(texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(text) for text in texts)
    except ValueError as error:
        raise ConfigError("seeds", texts, "must be whole numbers") from error


def main() -> None:
    """Reads the flags, prepares, says how much."""
    values = flags.FLAGS
    made = run(
        PrepareConfig(
            config=values.config,
            corpora=values.corpora,
            routing=values.routing,
            out=values.out,
            only=tuple(values.only),
            seeds=_seeds(values.seeds),
            jobs=values.jobs,
        )
    )
    print(f"prepared {made} banks and fits in {values.out}")


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ArtefactError, ConfigError, CorpusError))


if __name__ == "__main__":
    cli()
