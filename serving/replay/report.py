"""A whole replay: every cell, seed and policy; finished runs are kept on disk and skipped.

Seeds are the outer loop, so that a replay that is stopped early has whole seeds of every cell.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from serving import native_kernels
from serving.core.decision import encode_line
from serving.core.errors import ConfigError
from serving.replay.bank import RoutingBank, read_bank, read_header, synthetic_bank
from serving.replay.compare import BEST, Comparison, RunResult, compare
from serving.replay.config import Cell, PolicySection, ReplayConfig, Scenario, SyntheticBank
from serving.replay.decode_kernel import Times
from serving.replay.engine import Machine, Simulation
from serving.replay.learned import Learned, check_geometry
from serving.replay.metrics import run_metrics, tpot_series
from serving.replay.service import cell_cost, decode_times, load_latency, prefill_times
from serving.replay.workload import Workload, build_workload
from serving.signatures.artefact import load_artefact
from serving.signatures.manifest import MANIFEST, read_manifest

SCHEMA_VERSION = 1
# A run that is kept is a function of what it is keyed by and of this code.
_RUN_VERSION = "4"
_RECORD_SHARE = 0.002
_REFERENCES = ("eldr_online", "eldr_static", "expert_cost")
_MAX_LEARNED = 8
# What a fit measured of its workload that goes into the report.
_METRICS = ("spearman", "prefill_decode_correlation", "union_reduction_")

Told = Callable[[str, int], None]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`report.json`.

    Attributes:
        num_missing: runs that a limited time left undone; comparisons are over the others.
    """

    schema_version: int
    name: str
    seeds: tuple[int, ...]
    num_missing: int
    sources: dict[str, dict[str, str]]
    cells: tuple[RunResult, ...]
    comparisons: tuple[Comparison, ...]


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run on disk."""

    result: RunResult
    lines: tuple[str, ...]


class ReplayRunner:
    """Runs a replay into a folder.

    Args:
        config: what to run.
        out: folder for the report.
        runs: folder of finished runs, which several replays may share; None is `out`/runs.
        may_begin: asked before each run that is missing; False leaves it out.
    """

    def __init__(
        self,
        config: ReplayConfig,
        out: str | Path,
        *,
        runs: str | Path | None = None,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        self.out = Path(out)
        self._runs = self.out / "runs" if runs is None else Path(runs)
        self._may_begin = may_begin
        self._num_missing = 0
        self._told: Told = lambda name, num_requests: None
        self._banks: dict[str, RoutingBank] = {}
        self._learned: dict[str, Learned] = {}
        self._sources: dict[str, dict[str, str]] = {}

    def on_run(self, told: Told) -> None:
        """Who is told the name of each run and its requests (0 when it was kept)."""
        self._told = told

    def run(self) -> Report:
        """Runs what is missing and writes `report.json` and `decisions.jsonl`.

        Raises:
            ConfigError, ArtefactError: an input is wrong, named.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        self._runs.mkdir(parents=True, exist_ok=True)
        done: dict[tuple[str, int], list[_Kept]] = {}
        self._num_missing = 0
        for seed in self.config.seeds:
            for cell in self.config.cells:
                done[cell.name, seed] = self._cell(cell, seed) if seed in cell.seeds else []
        kept = [
            item
            for cell in self.config.cells
            for seed in self.config.seeds
            for item in done[cell.name, seed]
        ]
        results = [item.result for item in kept]
        report = Report(
            schema_version=SCHEMA_VERSION,
            name=self.config.name,
            seeds=self.config.seeds,
            num_missing=self._num_missing,
            sources=self._sources,
            cells=tuple(results),
            comparisons=tuple(
                compare(
                    results,
                    groups={cell.name: cell.group for cell in self.config.cells},
                    baselines=self.config.baselines,
                    references=_REFERENCES,
                )
            ),
        )
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        _write(self.out / "report.json", text + b"\n")
        lines = "".join(line for item in kept for line in item.lines)
        _write(self.out / "decisions.jsonl", lines.encode())
        return report

    def fill(self, cell_name: str, seed: int) -> None:
        """Makes the missing runs of one cell and seed, and no report: for several processes.

        Raises:
            ConfigError, ArtefactError: an input is wrong, named.
        """
        self._runs.mkdir(parents=True, exist_ok=True)
        for cell in self.config.cells:
            if cell.name == cell_name:
                self._cell(cell, seed)

    def _cell(self, cell: Cell, seed: int) -> list[_Kept]:
        scenario = seeded(cell.scenario, seed)
        machine: Machine | None = None
        workload: Workload | None = None
        out = []
        for policy in cell.policies:
            own = policy.artefact.replace("{artefact}", scenario.artefact)
            policy = msgspec.structs.replace(policy, artefact=_of_seed(own, seed))
            file = self._runs / f"{self._key(cell.name, scenario, policy, seed)}.json"
            name = f"{cell.name} {policy.title} seed {seed}"
            if file.exists():
                out.append(msgspec.json.decode(file.read_bytes(), type=_Kept))
                self._told(name, 0)
                continue
            if not self._may_begin():
                self._num_missing += 1
                continue
            if machine is None or workload is None:
                bank = self._bank(scenario)
                machine = self._machine(scenario, bank)
                workload = build_workload(self.config, scenario, bank, machine.decode, seed)
            learned = self._artefact(policy.artefact or scenario.artefact)
            if learned is not None:
                check_geometry(learned.artefact, workload.bank)
            kept = self._run(cell.name, scenario, policy, seed, workload, machine, learned)
            _write(file, msgspec.json.encode(kept))
            out.append(kept)
            self._told(name, len(workload))
        return out

    def _run(
        self,
        cell: str,
        scenario: Scenario,
        policy: PolicySection,
        seed: int,
        workload: Workload,
        machine: Machine,
        learned: Learned | None,
    ) -> _Kept:
        native_kernels.load()
        outcome = Simulation(
            scenario,
            policy,
            workload,
            machine,
            learned,
            seed=seed,
            record_share=_RECORD_SHARE,
        ).run()
        decided = {line.request_id for line in outcome.lines if not hasattr(line, "status")}
        lines = tuple(
            encode_line(line).decode() for line in outcome.lines if line.request_id in decided
        )
        result = RunResult(
            cell=cell,
            policy=policy.title,
            seed=seed,
            metrics=run_metrics(outcome, workload, seed),
            series=tpot_series(outcome, workload, scenario.drift.window_requests),
        )
        return _Kept(result=result, lines=lines)

    def _key(self, cell: str, scenario: Scenario, policy: PolicySection, seed: int) -> str:
        """Name of a kept run: everything it depends on, hashed."""
        parts = [
            _RUN_VERSION.encode(),
            msgspec.json.encode(scenario),
            cell.encode(),
            msgspec.json.encode(policy),
            str(seed).encode(),
        ]
        parts += [self._stamp(name).encode() for name in self._inputs(scenario, policy)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]

    def _inputs(self, scenario: Scenario, policy: PolicySection) -> list[str]:
        names = [scenario.latency, scenario.load.path, scenario.requests.lengths_path]
        if isinstance(scenario.bank, str):
            names.append(scenario.bank)
        if artefact := policy.artefact or scenario.artefact:
            names.append(f"{artefact}/{MANIFEST}")
        return [name for name in names if name]

    def _stamp(self, name: str) -> str:
        """Content hash of an input file."""
        found = self._sources.get(name)
        if found is None:
            file = self.config.path(name)
            try:
                with file.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise ConfigError("path", name, f"must be readable ({error.strerror})") from error
            found = self._sources[name] = {"sha256": digest}
            if file.suffix == ".npz":
                found |= read_header(file).provenance
            elif file.name == MANIFEST:
                metrics = read_manifest(file.parent).metrics
                found |= {
                    f"metric {name}": f"{value:.4f}"
                    for name, value in metrics.items()
                    if name.startswith(_METRICS)
                }
        return found["sha256"]

    def _machine(self, scenario: Scenario, bank: RoutingBank) -> Machine:
        fleet = scenario.fleet
        latency = load_latency(self.config.path(scenario.latency))
        prefill = prefill_times(latency, bank.header, fleet.chunk_tokens)
        return Machine(
            decode=self._decode_times(scenario, bank),
            prefill=prefill,
            cost=cell_cost(latency, bank.header, prefill),
        )

    def _decode_times(self, scenario: Scenario, bank: RoutingBank) -> Times:
        fleet = scenario.fleet
        return decode_times(
            load_latency(self.config.path(scenario.latency)),
            bank.header,
            bank.rows,
            max_num_seqs=fleet.max_num_seqs,
            block_tokens=fleet.block_tokens,
            num_ranks=fleet.num_ranks,
            realised=fleet.realised_experts,
        )

    def _bank(self, scenario: Scenario) -> RoutingBank:
        source = scenario.bank
        key = source if isinstance(source, str) else msgspec.json.encode(source).decode()
        if key not in self._banks:
            # One at a time: a bank of real prompts is the largest thing in memory.
            self._banks.clear()
            self._banks[key] = self._load_bank(source)
        return self._banks[key]

    def _load_bank(self, source: str | SyntheticBank) -> RoutingBank:
        if isinstance(source, str):
            return read_bank(self.config.path(source))
        return synthetic_bank(**msgspec.structs.asdict(source))

    def _artefact(self, name: str) -> Learned | None:
        if not name:
            return None
        if name not in self._learned:
            if len(self._learned) >= _MAX_LEARNED:
                self._learned.clear()
            self._learned[name] = Learned(load_artefact(self.config.path(name)))
        return self._learned[name]


def seeded(scenario: Scenario, seed: int) -> Scenario:
    """The scenario with the files of one seed."""
    bank = scenario.bank
    return msgspec.structs.replace(
        scenario,
        bank=_of_seed(bank, seed) if isinstance(bank, str) else bank,
        artefact=_of_seed(scenario.artefact, seed),
    )


def _of_seed(path: str, seed: int) -> str:
    return path.replace("{seed}", str(seed))


def summary(report: Report) -> list[str]:
    """The comparisons with the best baseline, as plain lines."""
    lines = [f"{'cell':34s} {'policy':16s} {'metric':26s} {'vs best':>8s}  95% interval"]
    for item in report.comparisons:
        if item.against == BEST and item.metric in ("tpot_ms_p50", "tpot_ms_p99"):
            lines.append(
                f"{item.cell:34s} {item.policy:16s} {item.metric:26s} {item.mean_pct:+7.2f}%  "
                f"[{item.ci_low_pct:+.2f}, {item.ci_high_pct:+.2f}] {item.baseline}"
            )
    return lines


def _write(file: Path, data: bytes) -> None:
    """Writes whole files only: a run that was cut short leaves none."""
    part = file.with_suffix(f"{file.suffix}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(file)
