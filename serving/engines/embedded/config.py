"""What one embedded worker is told: its role, its door and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from eldr_jax.runner import MAX_CHUNKS, PagedRunner
from serving.core.errors import ConfigError
from serving.core.worker import Role

KV_CONNECTOR = "eldr_embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedWorkerConfig:
    """Settings of one worker.

    Attributes:
        worker_id: unique in the fleet; also the KV engine id.
        role: prefill, decode or both.
        host: address to bind.
        port: port to bind; 0 takes a free one.
        advertise_host: host that decode workers pull from; "" is `host`.
        max_num_seqs: requests that run at once.
        max_step_tokens: tokens of one step; 0 takes the runner's largest bucket.
        max_waiting: requests that may wait for blocks or for a place.
        lease_s: seconds a finished prefill keeps its blocks for decode.
        pull_timeout_s: seconds a decode worker gives one KV pull.
        prefix_cache: whether finished blocks can be found by later requests.
        hash_seed: seed of the block hash (a deployment's secret).
        max_step_failures: consecutive failed steps after which the worker is unhealthy.
        model_name: name it serves the model under.
        model_dir: folder of the checkpoint and tokenizer; "" when there is none.
    """

    worker_id: str
    role: Role
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    max_num_seqs: int = MAX_CHUNKS
    max_step_tokens: int = 0
    max_waiting: int = 256
    lease_s: float = 30.0
    pull_timeout_s: float = 10.0
    prefix_cache: bool = True
    hash_seed: int = 0
    max_step_failures: int = 3
    model_name: str = "eldr-ref"
    model_dir: str = ""

    def __post_init__(self) -> None:
        if not self.worker_id:
            raise ConfigError("worker_id", self.worker_id, "must not be empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "must lie in [0, 65535]")
        if not 1 <= self.max_num_seqs <= MAX_CHUNKS:
            rule = f"must lie in [1, {MAX_CHUNKS}], the rows of one tile"
            raise ConfigError("max_num_seqs", self.max_num_seqs, rule)
        if self.max_step_tokens < 0:
            raise ConfigError("max_step_tokens", self.max_step_tokens, "must be >= 0")
        if self.max_waiting < 0:
            raise ConfigError("max_waiting", self.max_waiting, "must be >= 0")
        if self.max_step_failures < 1:
            raise ConfigError("max_step_failures", self.max_step_failures, "must be >= 1")
        for name in ("lease_s", "pull_timeout_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(name, value, "must be positive and finite")

    def step_tokens(self, runner: PagedRunner) -> int:
        """Tokens of one step on `runner`.

        Raises:
            ConfigError: the setting does not fit the runner's buckets or `max_num_seqs`.
        """
        largest = runner.token_buckets[-1]
        tokens = self.max_step_tokens or largest
        if not self.max_num_seqs <= tokens <= largest:
            rule = f"must lie in [max_num_seqs={self.max_num_seqs}, largest bucket={largest}]"
            raise ConfigError("max_step_tokens", tokens, rule)
        return tokens
