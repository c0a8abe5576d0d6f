"""Embedded reference-model workers of this process: one compiled model, one core at a time.

All workers share a runner (so each bucket compiles once) and a `StepTurn` (so that their
steps do not disturb each other's measurement); each has its own port, KV pool and busy clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from eldr_jax.checkpoint import CheckpointError, load_model_dir
from eldr_jax.config import ConfigError as ModelConfigError
from eldr_jax.runner import PagedRunner
from serving.config import EmbeddedSection
from serving.core.block_hash import ALGORITHM
from serving.core.clock import Clock
from serving.core.errors import ArtefactError, ConfigError
from serving.core.worker import Capabilities, Role, WorkerInfo
from serving.engines.embedded.config import KV_CONNECTOR, EmbeddedWorkerConfig
from serving.engines.embedded.turn import StepTurn
from serving.engines.embedded.worker import EmbeddedWorker
from serving.signatures.model import SignatureModel


class EmbeddedFleet:
    """The workers of one process; `start` makes one.

    Attributes:
        workers: started workers by id.
        runner: the compiled model they share.
    """

    def __init__(
        self,
        section: EmbeddedSection,
        *,
        runner: PagedRunner,
        model_name: str,
        model_dir: str,
        hash_seed: int,
        signature_model: SignatureModel | None,
        clock: Clock,
    ) -> None:
        """Makes the workers; nothing runs before `start`.

        Raises:
            ConfigError: a setting does not fit the model.
        """
        self.runner = runner
        self._section = section
        self._model_name = model_name
        turn = StepTurn()
        self.workers = {
            worker_id: EmbeddedWorker(
                EmbeddedWorkerConfig(
                    worker_id=worker_id,
                    role=role,
                    max_num_seqs=section.max_num_seqs,
                    lease_s=section.lease_s,
                    prefix_cache=section.prefix_cache,
                    hash_seed=hash_seed,
                    model_name=model_name,
                    model_dir=model_dir,
                ),
                runner,
                turn=turn,
                signature_model=signature_model,
                clock=clock,
            )
            for worker_id, role in _roster(section)
        }
        self._emits_signature = signature_model is not None

    async def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every bucket once, then starts all workers.

        Args:
            progress: called with (done, total) buckets, from another thread.

        Raises:
            ConfigError: an address cannot be bound.
        """
        try:
            for number, worker in enumerate(self.workers.values()):
                await worker.start(warm_up=number == 0, progress=progress if number == 0 else None)
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, grace_s: float) -> None:
        """Drains and stops all workers at once."""
        await asyncio.gather(*(worker.stop(grace_s) for worker in self.workers.values()))

    def infos(self) -> list[WorkerInfo]:
        """What the router knows about them; after `start`."""
        section, runner = self._section, self.runner
        size = section.domain_size or len(self.workers)
        return [
            WorkerInfo(
                worker_id=worker.config.worker_id,
                address=worker.address,
                role=worker.config.role,
                pool=section.pool,
                model=self._model_name,
                hardware=section.hardware,
                ici_domain=f"{section.pool}/{number // size}",
                host="localhost",
                capabilities=Capabilities(
                    block_size_tokens=runner.block_size,
                    page_size_tokens=runner.block_size,
                    max_num_seqs=section.max_num_seqs,
                    max_context_tokens=runner.max_context_tokens,
                    num_kv_blocks=runner.num_blocks,
                    buckets_tokens=runner.token_buckets,
                    hash_algorithm=ALGORITHM,
                    kv_connector=KV_CONNECTOR,
                    emits_signature=self._emits_signature,
                ),
            )
            for number, worker in enumerate(self.workers.values())
        ]


def load_runner(section: EmbeddedSection, model_dir: Path) -> PagedRunner:
    """Reads the model and prepares its step program (compiles nothing yet).

    Raises:
        ArtefactError: the model folder is missing or broken.
        ConfigError: a size does not fit the model.
    """
    try:
        model, params = load_model_dir(model_dir)
    except (CheckpointError, ModelConfigError) as error:
        raise ArtefactError(model_dir, str(error)) from error
    try:
        return PagedRunner(
            model,
            params,
            num_blocks=section.num_blocks,
            block_size=section.block_size_tokens,
            token_buckets=section.token_buckets,
            max_blocks_per_seq=section.max_blocks_per_seq,
        )
    except ValueError as error:
        raise ConfigError("embedded", model_dir.name, str(error)) from error


def _roster(section: EmbeddedSection) -> list[tuple[str, Role]]:
    """Worker ids and roles: p0, p1 ..., d0, d1 ..., b0 ..."""
    counts = (
        ("p", Role.PREFILL, section.num_prefill),
        ("d", Role.DECODE, section.num_decode),
        ("b", Role.BOTH, section.num_both),
    )
    return [(f"{letter}{i}", role) for letter, role, num in counts for i in range(num)]
