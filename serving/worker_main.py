"""One embedded worker in a process of its own: the reference model behind VllmEngine.

Prints one line when it serves, "ready worker_id=... role=... address=host:port", and drains on
SIGTERM or SIGINT.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

from absl import app, flags

from eldr_jax.checkpoint import CheckpointError, load_model_dir
from eldr_jax.config import ConfigError as ModelConfigError
from eldr_jax.runner import PagedRunner
from serving.core.errors import ArtefactError, ConfigError
from serving.core.worker import Role
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.engines.embedded.worker import EmbeddedWorker
from serving.signatures.artefact import load_artefact
from serving.signatures.model import SignatureModel
from serving.stop_signals import abandon, ended_first, stop_wanted

_ROLE = flags.DEFINE_enum("role", "both", [r.value for r in Role], "What the worker runs.")
_WORKER_ID = flags.DEFINE_string("worker_id", "", "Unique in the fleet; empty takes role-pid.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to bind.")
_PORT = flags.DEFINE_integer("port", 0, "Port to bind; 0 takes a free one.")
_ADVERTISE_HOST = flags.DEFINE_string(
    "advertise_host", "", "Host that decode workers pull KV from; empty takes --host."
)
_MODEL = flags.DEFINE_string(
    "model", "configs/artefacts/reference_model", "Folder of the model: weights and tokenizer."
)
_MODEL_NAME = flags.DEFINE_string("model_name", "eldr-ref", "Name the model is served under.")
_SIGNATURE = flags.DEFINE_string(
    "signature", "", "Folder of the signature artefact; empty sends no signatures."
)
_NUM_BLOCKS = flags.DEFINE_integer("num_blocks", 512, "KV blocks of the pool.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size_tokens", 16, "Tokens per KV block.")
_MAX_BLOCKS = flags.DEFINE_integer("max_blocks_per_seq", 64, "Longest request, in blocks.")
_BUCKETS = flags.DEFINE_list(
    "token_buckets", "16,32,64,128,256,512", "Compiled step sizes in tokens, ascending."
)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Requests that run at once.")
_MAX_STEP_TOKENS = flags.DEFINE_integer(
    "max_step_tokens", 0, "Tokens of one step; 0 takes the largest bucket."
)
_MAX_WAITING = flags.DEFINE_integer("max_waiting", 256, "Requests that may wait for a place.")
_LEASE_S = flags.DEFINE_float("lease_s", 30.0, "Seconds a finished prefill keeps its KV.")
_PREFIX_CACHE = flags.DEFINE_bool("prefix_cache", True, "Whether prompts reuse cached blocks.")
_DRAIN_S = flags.DEFINE_float("drain_s", 20.0, "Seconds running requests get after SIGTERM.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcessConfig:
    """A worker and the model it loads; see the flags of the same names.

    Raises:
        ConfigError: a field breaks its rule.
    """

    worker: EmbeddedWorkerConfig
    model: str
    signature: str
    num_blocks: int
    block_size_tokens: int
    max_blocks_per_seq: int
    token_buckets: tuple[int, ...]
    drain_s: float

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size_tokens", "max_blocks_per_seq"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be >= 1")
        if not 0 <= self.drain_s < float("inf"):
            raise ConfigError("drain_s", self.drain_s, "must be >= 0 and finite")


async def run(config: WorkerProcessConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    Raises:
        ConfigError, ArtefactError: settings or a learned artefact are wrong, named.
        CheckpointError, ModelConfigError: the model folder is wrong, named.
    """
    wanted = stop_wanted()
    worker = EmbeddedWorker(
        config.worker, _runner(config), signature_model=_signature_model(config.signature)
    )
    starting = asyncio.create_task(worker.start(warm_up=True, progress=_progress))
    if not await ended_first(starting, wanted):
        print("stopped before it was ready", flush=True)
        await abandon(starting)
        return
    await starting
    print(
        f"ready worker_id={config.worker.worker_id} role={config.worker.role.value} "
        f"address={worker.address}",
        flush=True,
    )
    await wanted.wait()
    print(f"draining for at most {config.drain_s:g} s", flush=True)
    await worker.stop(config.drain_s)
    print("stopped", flush=True)


def _runner(config: WorkerProcessConfig) -> PagedRunner:
    model, params = load_model_dir(config.model)
    try:
        return PagedRunner(
            model,
            params,
            num_blocks=config.num_blocks,
            block_size=config.block_size_tokens,
            token_buckets=config.token_buckets,
            max_blocks_per_seq=config.max_blocks_per_seq,
        )
    except ValueError as error:
        raise ConfigError("token_buckets", list(config.token_buckets), str(error)) from error


def _signature_model(folder: str) -> SignatureModel | None:
    return load_artefact(folder).model if folder else None


def _progress(done: int, total: int) -> None:
    print(f"compiled {done} of {total} token buckets", flush=True)


def _buckets(texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise ConfigError("token_buckets", texts, "must be whole numbers") from None


def _config() -> WorkerProcessConfig:
    return WorkerProcessConfig(
        worker=EmbeddedWorkerConfig(
            worker_id=_WORKER_ID.value or f"{_ROLE.value}-{os.getpid()}",
            role=Role(_ROLE.value),
            host=_HOST.value,
            port=_PORT.value,
            advertise_host=_ADVERTISE_HOST.value,
            max_num_seqs=_MAX_NUM_SEQS.value,
            max_step_tokens=_MAX_STEP_TOKENS.value,
            max_waiting=_MAX_WAITING.value,
            lease_s=_LEASE_S.value,
            prefix_cache=_PREFIX_CACHE.value,
            model_name=_MODEL_NAME.value,
            model_dir=_MODEL.value,
        ),
        model=_MODEL.value,
        signature=_SIGNATURE.value,
        num_blocks=_NUM_BLOCKS.value,
        block_size_tokens=_BLOCK_SIZE.value,
        max_blocks_per_seq=_MAX_BLOCKS.value,
        token_buckets=_buckets(_BUCKETS.value),
        drain_s=_DRAIN_S.value,
    )


def _main(argv: list[str]) -> None:
    try:
        if len(argv) > 1:
            raise ConfigError("argument", argv[1], "is unexpected: everything is a --flag")
        asyncio.run(run(_config()))
    except (ArtefactError, ConfigError, CheckpointError, ModelConfigError) as error:
        _fail(error)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _fail(error)
        raise


def _fail(error: Exception) -> None:
    print(f"worker_main: {error}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    app.run(_main, flags_parser=_parse_flags)
