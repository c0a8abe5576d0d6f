from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.replay.bank import RoutingBank, synthetic_bank
from serving.replay.config import PolicySection, ReplayConfig, Scenario
from serving.replay.engine import Machine, Simulation
from serving.replay.learned import Learned
from serving.replay.outcome import Outcome
from serving.replay.service import cell_cost, decode_times, load_latency, prefill_times
from serving.replay.workload import Workload, build_workload
from serving.signatures.artefact import CalibrationSet, SignatureArtefact
from serving.signatures.manifest import Manifest
from serving.signatures.model import SignatureModel, idf_weights, mask_version_of
from serving.signatures.profiles import DecodeProfiles

LATENCY = """
schema_version: 1
source: drawn for tests
num_layers: 3
moe: {c0_us: 20.0, c2_us: 50.0, c3_us: 1.0}
per_layer:
  decode_us: 10.0
  decode_token_us: 1.0
  context_token_us: 0.01
  prefill_us: 40.0
  prefill_token_us: 10.0
  prefill_attended_us: 0.001
step_us: 100.0
step_token_us: 1.0
kv_bytes_per_token: 1000.0
usd_per_chip_hour: 3.6
"""


def scenario(**changes: Any) -> Scenario:
    given: dict[str, Any] = {
        "bank": "unused.npz",
        "latency": "latency.yaml",
        "fleet": {
            "num_prefill": 2,
            "num_decode": 3,
            "max_num_seqs": 6,
            "kv_blocks": 64,
            "chunk_tokens": 64,
            "cache_blocks": 64,
        },
        "load": {"mean_batch": 3},
        "requests": {"num_measured": 40, "output_tokens": 12},
    }
    for name, value in changes.items():
        both = isinstance(value, dict) and name in given
        given[name] = {**given[name], **value} if both else value
    return msgspec.convert(given, Scenario)


def bank(**changes: Any) -> RoutingBank:
    given: dict[str, Any] = {
        "num_prompts": 24,
        "num_layers": 3,
        "num_experts": 16,
        "top_k": 2,
        "rows_per_prompt": 5,
    }
    return synthetic_bank(**(given | changes))


class Rig:
    """A small replay without files: bank, machine, artefact."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "latency.yaml").write_text(LATENCY)
        self.bank = bank()
        self.learned = Learned(artefact_of(self.bank))
        self.config = ReplayConfig(
            name="test", cells=(), baselines=(), seeds=(0,), folder=str(folder)
        )

    def machine(self, given: Scenario) -> Machine:
        latency = load_latency(self.folder / "latency.yaml")
        prefill = prefill_times(latency, self.bank.header, given.fleet.chunk_tokens)
        decode = decode_times(
            latency,
            self.bank.header,
            self.bank.rows,
            max_num_seqs=given.fleet.max_num_seqs,
            block_tokens=given.fleet.block_tokens,
            num_ranks=given.fleet.num_ranks,
            realised=given.fleet.realised_experts,
        )
        return Machine(
            decode=decode, prefill=prefill, cost=cell_cost(latency, self.bank.header, prefill)
        )

    def workload(self, given: Scenario, seed: int = 0) -> Workload:
        times = self.machine(given).decode
        return build_workload(self.config, given, self.bank, times, seed)

    def simulation(
        self, given: Scenario, policy: str = "jsq", seed: int = 0, **options: Any
    ) -> Simulation:
        section = options.pop("section", None) or PolicySection(name=policy)
        return Simulation(
            given,
            section,
            self.workload(given, seed),
            self.machine(given),
            self.learned,
            seed=seed,
            **options,
        )

    def run(self, given: Scenario, policy: str = "jsq", seed: int = 0, **options: Any) -> Outcome:
        return self.simulation(given, policy, seed, **options).run()


def artefact_of(given: RoutingBank) -> SignatureArtefact:
    """An artefact as a fit would leave it: all layers, one cluster per domain."""
    header = given.header
    layers = np.arange(header.num_layers, dtype=np.int32)
    shape = (header.num_layers, header.num_experts)
    decode = np.zeros((given.num_prompts, *shape), np.uint32)
    num_tokens = np.diff(given.row_starts).astype(np.int32)
    for prompt in range(given.num_prompts):
        rows = given.rows[given.row_starts[prompt] : given.row_starts[prompt + 1], :, 0]
        for expert in range(header.num_experts):
            decode[prompt, :, expert] = ((rows >> np.uint64(expert)) & np.uint64(1)).sum(axis=0)
    model = SignatureModel(
        version="sig-1",
        mask_version=mask_version_of(
            layers,
            num_layers=header.num_layers,
            num_experts=header.num_experts,
            top_k=header.top_k,
        ),
        layers=layers,
        num_layers=header.num_layers,
        num_experts=header.num_experts,
        top_k=header.top_k,
        idf=idf_weights((given.prefill > 0).sum(axis=0), given.num_prompts) + np.float32(0.1),
    )
    vectors = model.vectors(given.prefill)
    members = [given.domain_of == d for d in range(len(header.domains))]
    centroids = np.stack([vectors[m].mean(axis=0) for m in members])
    profiles = [decode[m].sum(axis=0).ravel() / num_tokens[m].sum() for m in members]
    fitted = DecodeProfiles(
        centroids=centroids.astype(np.float32),
        profiles=np.array(profiles, np.float32),
        sizes=np.array([m.sum() for m in members], np.int32),
        layer_scale=np.ones(len(members), np.float32),
        shrink_tokens=32.0,
    )
    manifest = Manifest(
        schema_version=1,
        kind="expert_signatures",
        version="sig-1",
        mask_version=model.mask_version,
        model_name="test",
        num_layers=header.num_layers,
        num_experts=header.num_experts,
        top_k=header.top_k,
        shrink_tokens=32.0,
        prior_tokens=0.0,
        table_confidence=0.0,
        regions_seed=0,
        fitted_regions=(),
        step_time=None,
        metrics={},
        provenance={},
        files={},
    )
    return SignatureArtefact(
        model=model,
        profiles=fitted,
        calibration=CalibrationSet(
            prefill=given.prefill, decode=decode, num_decode_tokens=num_tokens
        ),
        token_table=None,
        prefitted={},
        manifest=manifest,
    )


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def make_scenario():
    return scenario


@pytest.fixture
def make_bank():
    return bank


@pytest.fixture
def latency_text() -> str:
    return LATENCY
