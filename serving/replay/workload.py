"""The requests of one run: arrivals, prompts, lengths and draws, the same for every policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.errors import ConfigError
from serving.core.request import LengthBand
from serving.replay import traces
from serving.replay.bank import RoutingBank
from serving.replay.compiled import layers_s
from serving.replay.config import ReplayConfig, Scenario
from serving.replay.decode_kernel import Requests, Times
from serving.replay.traces import Arrivals

_PARTS = {"arrivals": 0, "prompts": 1, "rows": 2, "wrong": 3, "lengths": 4, "rate": 5}
_RATE_DRAWS = 64
# Prompts that a trace gives no hashes for share nothing: their blocks count from here.
_UNSHARED = 1 << 33


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """N requests.

    Attributes:
        bank: prompts and their routing.
        arrivals: when, and the trace's own lengths and prefix hashes.
        prompt: int64 [N], bank prompt behind each request.
        signature_of: int64 [N], prompt whose signature it carries; another one where the
            signature is wrong.
        output_tokens: int64 [N].
        key: uint64 [N], of its routing draws.
        measured: slice of requests the metrics are over.
        band: what the router is told of a length, None for the request's own.
        max_tokens: the client's limit, 0 for the request's own length.
        rate_per_s: mean rate of a drawn process, 0 for a trace.
        shift: first request of the mix after a drift, N without one.
    """

    bank: RoutingBank
    arrivals: Arrivals
    prompt: np.ndarray
    signature_of: np.ndarray
    output_tokens: np.ndarray
    key: np.ndarray
    measured: slice
    band: LengthBand | None
    max_tokens: int
    rate_per_s: float
    shift: int

    def __len__(self) -> int:
        """N."""
        return len(self.prompt)

    def domain(self, request: int) -> str:
        """The prompt's oracle label."""
        header = self.bank.header
        return header.domains[int(self.bank.domain_of[self.prompt[request]])]

    def token_ids(self, request: int) -> np.ndarray:
        """The request's prompt, int32.

        The bank prompt's own where arrivals were drawn. A trace's prompts have the trace's
        length and prefixes, and no text: their ids only say which blocks are equal.
        """
        num = int(self.arrivals.prompt_tokens[request])
        if num == 0:
            return self.bank.tokens(int(self.prompt[request]))
        starts, block = self.arrivals.hash_starts, self.arrivals.block_tokens
        ids = self.arrivals.hash_ids[starts[request] : starts[request + 1]]
        if not len(ids):
            num_blocks = -(-num // block)
            ids = _UNSHARED + request * np.int64(1 << 12) + np.arange(num_blocks)
        # Ids have up to 34 bits, tokens 17: a block's even places say the low half, odd ones the
        # high.
        out = np.empty((len(ids), block), np.int32)
        out[:, ::2] = (ids & 0x1FFFF)[:, None]
        out[:, 1::2] = (ids >> 17)[:, None]
        return out.reshape(-1)[:num]

    def num_prompt_tokens(self, request: int) -> int:
        """Prompt length."""
        own = int(self.arrivals.prompt_tokens[request])
        starts, prompt = self.bank.token_starts, int(self.prompt[request])
        return own or int(starts[prompt + 1] - starts[prompt])

    def length(self, request: int) -> LengthBand:
        """What the router is told of the output length."""
        if self.band is not None:
            return self.band
        tokens = float(self.output_tokens[request])
        return LengthBand(mean_tokens=tokens, p95_tokens=tokens, source="exact")

    def rows(self) -> Requests:
        """Fresh decode rows of all requests."""
        num, starts = len(self), self.bank.row_starts
        return Requests(
            row_start=starts[self.prompt],
            num_rows=starts[self.prompt + 1] - starts[self.prompt],
            key=self.key,
            produced=np.zeros(num, np.int64),
            target=self.output_tokens,
            context=np.zeros(num, np.int64),
            first_s=np.full(num, np.nan),
            last_s=np.full(num, np.nan),
        )


def build_workload(
    config: ReplayConfig, scenario: Scenario, bank: RoutingBank, times: Times, seed: int
) -> Workload:
    """Draws a run's requests; every part has its own stream of the seed.

    Args:
        config: whose folder trace paths start at.
        scenario: the cell.
        bank: prompts.
        times: decode service times, for the rate behind `mean_batch`.
        seed: of every draw.

    Raises:
        ConfigError, TraceError: a trace or a domain is wrong.
    """
    arrivals, measured, rate = _arrivals(config, scenario, bank, times, seed)
    num = len(arrivals)
    prompt = _prompts(scenario, bank, num, _rng(seed, "prompts"))
    wrong = _rng(seed, "wrong")
    swapped = wrong.random(num) < scenario.signatures.wrong_share
    other = (prompt + wrong.integers(1, max(2, bank.num_prompts), num)) % bank.num_prompts
    output = _output_tokens(config, scenario, arrivals, _rng(seed, "lengths"))
    return Workload(
        bank=bank,
        arrivals=arrivals,
        prompt=prompt,
        signature_of=np.where(swapped, other, prompt),
        output_tokens=output,
        key=_rng(seed, "rows").integers(0, 1 << 63, num, np.uint64),
        measured=measured,
        band=_band(scenario, output),
        max_tokens=scenario.requests.max_tokens,
        rate_per_s=rate,
        shift=_shift(scenario, num),
    )


def rate_of(
    bank: RoutingBank,
    times: Times,
    *,
    mean_batch: float,
    output_tokens: float,
    num_workers: int,
    context_tokens: float,
    rng: np.random.Generator,
) -> float:
    """Requests per second that keep mixed decode batches at a mean size (Little's law).

    rate = workers * batch / (output tokens * step time), the step of a batch of prompts drawn
    at random: a property of bank and machine, not of a policy.
    """
    batch = max(1, round(mean_batch))
    words = np.zeros(bank.rows.shape[1:], np.uint64)
    found = np.zeros(1, np.int64)
    total_s = 0.0
    for _ in range(_RATE_DRAWS):
        rows = rng.integers(0, len(bank.rows), batch)
        if times.realised[0]:
            total_s += layers_s(bank.rows, rows, batch, times.masks, times.moe_s, words, found)
        else:
            total_s += float(times.mean_s[batch])
    step_s = total_s / _RATE_DRAWS + float(times.rest_s[batch])
    step_s += float(times.context_s[0]) * context_tokens * batch
    return num_workers * mean_batch / (output_tokens * step_s)


def _arrivals(
    config: ReplayConfig, scenario: Scenario, bank: RoutingBank, times: Times, seed: int
) -> tuple[Arrivals, slice, float]:
    load, requests, fleet = scenario.load, scenario.requests, scenario.fleet
    rng = _rng(seed, "arrivals")
    if load.kind in ("azure", "mooncake"):
        path = config.path(load.path)
        found = (
            traces.read_azure(path) if load.kind == "azure" else traces.read_mooncake(path, rng=rng)
        ).scaled(load.speedup)
        if requests.num_measured:
            found = found.first(requests.num_measured)
        return found, slice(0, len(found)), 0.0
    if not load.rate_per_s and load.mean_batch > fleet.max_num_seqs:
        raise ConfigError(
            "load.mean_batch", load.mean_batch, f"must be <= {fleet.max_num_seqs=}: no batch is"
        )
    prompt_tokens = float(np.diff(bank.token_starts).mean())
    rate = load.rate_per_s or rate_of(
        bank,
        times,
        mean_batch=load.mean_batch,
        output_tokens=float(requests.output_tokens),
        num_workers=fleet.num_decode,
        context_tokens=prompt_tokens + requests.output_tokens / 2.0,
        rng=_rng(seed, "rate"),
    )
    in_flight = load.mean_batch * fleet.num_decode
    before = round(requests.warmup_batches * in_flight)
    after = round(requests.cooldown_batches * in_flight)
    measured = max(1, requests.num_measured)
    num = before + measured + after
    if load.kind == "poisson":
        found = traces.poisson(num, rate, rng)
    else:
        found = traces.bursty(num, rate, rng, peak=load.peak)
    return found, slice(before, before + measured), rate


def _prompts(
    scenario: Scenario, bank: RoutingBank, num: int, rng: np.random.Generator
) -> np.ndarray:
    drift = scenario.drift
    shift = _shift(scenario, num)
    parts = []
    for names, count in ((drift.before, shift), (drift.after, num - shift)):
        if count == 0:
            continue
        allowed = np.arange(bank.num_prompts)
        if names:
            if unknown := sorted(set(names) - set(bank.header.domains)):
                raise ConfigError("drift", unknown[0], f"must be one of {bank.header.domains}")
            wanted = [bank.header.domains.index(name) for name in names]
            allowed = np.flatnonzero(np.isin(bank.domain_of, wanted))
            if not len(allowed):
                raise ConfigError("drift", names, "the bank holds no prompt of these domains")
        if scenario.requests.phase_requests:
            parts.append(_phases(bank, allowed, count, scenario.requests.phase_requests, rng))
        elif scenario.requests.repeat_prompts:
            parts.append(allowed[rng.integers(0, len(allowed), count)])
        else:
            rounds = -(-count // len(allowed))
            parts.append(np.concatenate([rng.permutation(allowed) for _ in range(rounds)])[:count])
    return np.concatenate(parts)


def _shift(scenario: Scenario, num: int) -> int:
    return round(num * scenario.drift.at_share)


def _phases(
    bank: RoutingBank, allowed: np.ndarray, count: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Prompts in stretches of one domain each; every domain walks through its own prompts."""
    domain_of = bank.domain_of[allowed]
    walks = {int(d): rng.permutation(allowed[domain_of == d]) for d in np.unique(domain_of)}
    at = dict.fromkeys(walks, 0)
    out: list[np.ndarray] = []
    last = -1
    for begin in range(0, count, length):
        num = min(length, count - begin)
        others = [domain for domain in walks if domain != last] or [last]
        last = int(rng.choice(others))
        walk = walks[last]
        out.append(walk[(at[last] + np.arange(num)) % len(walk)])
        at[last] += num
    return np.concatenate(out)


def _output_tokens(
    config: ReplayConfig, scenario: Scenario, arrivals: Arrivals, rng: np.random.Generator
) -> np.ndarray:
    requests = scenario.requests
    if requests.lengths == "trace":
        drawn = traces.read_azure(config.path(requests.lengths_path)).output_tokens
        return rng.choice(drawn, len(arrivals))
    own = arrivals.output_tokens
    return np.where(own > 0, own, requests.output_tokens).astype(np.int64)


def _band(scenario: Scenario, output_tokens: np.ndarray) -> LengthBand | None:
    requests = scenario.requests
    if requests.known_length == "exact":
        return None
    if requests.known_length == "mean":
        return LengthBand(
            mean_tokens=float(output_tokens.mean()),
            p95_tokens=float(np.quantile(output_tokens, 0.95)),
            source="workload",
        )
    limit = float(requests.max_tokens or output_tokens.max())
    return LengthBand(mean_tokens=limit, p95_tokens=limit, source="max_tokens")


def _rng(seed: int, part: str) -> np.random.Generator:
    return np.random.default_rng([seed, _PARTS[part]])
