"""The requests of a run: arrivals, classes, prompts with shared prefixes, experts by domain.

Each part draws from a stream of its own, so that policies see the same requests and a change of
one part leaves the others. Expert profiles are drawn, not measured: a domain's profile mixes one
common to all with its own, and `specialisation` says how far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.experts import MIN_KEEP, ExpertProfiles
from serving.core.request import LengthBand, Request, SloClass
from serving.core.signature import Signature, SignatureSource
from serving.cost.catalogue import Moe
from serving.replay.fleets.config import TrafficSection

NUM_MASKED = 12
PROMPTS_PER_DOMAIN = 64
_TEXT_TOKENS = 1 << 22
_COMMON, _OWN = 0.6, 0.15
"""Concentration of the Dirichlet profiles: the common one is flat, a domain's own is not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Domains:
    """Expert profiles and the prompts' signatures, D domains of P prompts.

    Attributes:
        profiles: what the router knows.
        signatures: D * P, domain by domain.
        touched: float32 [D * P, M], chance that a decode token touches each masked expert.
        layer_scale: experts of all layers per masked one.
    """

    profiles: ExpertProfiles
    signatures: tuple[Signature, ...]
    touched: np.ndarray
    layer_scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """N requests of a run, by arrival.

    Attributes:
        arrival_s: float64 [N].
        slo: N classes.
        prompt_tokens, output_tokens: int64 [N].
        prefix: int64 [N], shared prefix, -1 for none.
        prompt: int64 [N], row of `Domains.signatures`.
        section: how they were drawn.
        text: int32, tokens that prompts are windows of; prefixes come first.
        own_text: int64 [N], where each prompt's own window begins.
    """

    arrival_s: np.ndarray
    slo: tuple[SloClass, ...]
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    prefix: np.ndarray
    prompt: np.ndarray
    section: TrafficSection
    text: np.ndarray
    own_text: np.ndarray

    def __len__(self) -> int:
        """N."""
        return len(self.arrival_s)

    def request(self, number: int) -> Request:
        """One request as the door would freeze it."""
        section, output = self.section, int(self.output_tokens[number])
        mean = float(output) if section.known_length == "exact" else section.output_tokens
        p95 = mean if section.known_length == "exact" else 2.6 * mean
        return Request(
            request_id=str(number),
            token_ids=self._token_ids(number),
            max_tokens=max(section.max_output_tokens, output),
            arrival_s=float(self.arrival_s[number]),
            slo=self.slo[number],
            length=LengthBand(mean_tokens=mean, p95_tokens=p95, source=section.known_length),
        )

    def _token_ids(self, number: int) -> np.ndarray:
        num, prefix = int(self.prompt_tokens[number]), int(self.prefix[number])
        ids = self.text[int(self.own_text[number]) :][:num].copy()
        if prefix >= 0:
            length = min(self.section.prefix_tokens, num)
            ids[:length] = self.text[prefix * self.section.prefix_tokens :][:length]
        ids.setflags(write=False)
        return ids


def draw_traffic(section: TrafficSection, rate_per_s: float, seed: int) -> Traffic:
    """Poisson arrivals over `section.seconds`."""
    rng = _rng(seed, 0)
    num = int(rng.poisson(rate_per_s * section.seconds))
    arrival_s = np.sort(rng.random(num)) * section.seconds
    classes = list(section.classes)
    shares = np.array([section.classes[slo] for slo in classes])
    picked = _rng(seed, 1).choice(len(classes), num, p=shares / shares.sum())
    slo = tuple(classes[i] for i in picked.tolist())
    rng = _rng(seed, 2)
    weights = 1.0 / np.arange(1, section.num_prefixes + 1)
    prefix = rng.choice(section.num_prefixes, num, p=weights / weights.sum())
    interactive = np.array([item is not SloClass.C for item in slo], bool)
    prefix = np.where((rng.random(num) < section.shared_share) & interactive, prefix, -1)
    prompt_tokens = _lengths(
        _rng(seed, 3), num, section.prompt_tokens, section.prompt_sigma, section.max_prompt_tokens
    )
    # A prompt with a shared prefix has some of its own behind it.
    prompt_tokens = np.where(
        prefix >= 0, np.maximum(prompt_tokens, section.prefix_tokens + 64), prompt_tokens
    )
    return Traffic(
        arrival_s=arrival_s,
        slo=slo,
        prompt_tokens=prompt_tokens,
        output_tokens=_lengths(
            _rng(seed, 4),
            num,
            section.output_tokens,
            section.output_sigma,
            section.max_output_tokens,
        ),
        prefix=prefix,
        prompt=_rng(seed, 5).integers(0, section.num_domains * PROMPTS_PER_DOMAIN, num),
        section=section,
        text=_rng(seed, 7).integers(0, 150_000, _TEXT_TOKENS, np.int32),
        own_text=_rng(seed, 8).integers(
            section.num_prefixes * section.prefix_tokens,
            _TEXT_TOKENS - section.max_prompt_tokens,
            num,
        ),
    )


def draw_domains(section: TrafficSection, moe: Moe, seed: int) -> Domains:
    """Profiles and signatures, drawn anew for each seed."""
    rng = _rng(seed, 6)
    experts, size = moe.num_experts, NUM_MASKED * moe.num_experts
    common = rng.dirichlet(np.full(experts, _COMMON), NUM_MASKED)
    own = rng.dirichlet(np.full(experts, _OWN), (section.num_domains, NUM_MASKED))
    share = section.specialisation
    domains = (1.0 - share) * common + share * own
    # Prompts of a domain differ a little from each other.
    noise = rng.gamma(4.0, 0.25, (section.num_domains, PROMPTS_PER_DOMAIN, NUM_MASKED, experts))
    prompts = domains[:, None] * noise
    prompts /= prompts.sum(axis=-1, keepdims=True)
    touched = np.minimum(moe.top_k * prompts, 1.0 - MIN_KEEP).astype(np.float32)
    rows = np.minimum(moe.top_k * domains, 1.0 - MIN_KEEP).astype(np.float32)
    rows = rows.reshape(section.num_domains, size)
    tokens = int(section.prompt_tokens)
    signatures = []
    for share_of in touched.reshape(-1, NUM_MASKED, experts):
        counts = rng.binomial(tokens, share_of).astype(np.uint32)
        flat = counts.reshape(-1).astype(np.float32)
        signatures.append(
            Signature(
                counts=counts,
                num_tokens=tokens,
                vector=flat / np.linalg.norm(flat),
                source=SignatureSource.LIVE,
                version="fleets",
            )
        )
    centroids = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return Domains(
        profiles=ExpertProfiles(
            version="fleets",
            signature_version="fleets",
            num_layers=moe.num_layers,
            num_masked_layers=NUM_MASKED,
            num_experts=experts,
            top_k=moe.top_k,
            mean_profile=rows.mean(axis=0),
            centroids=centroids,
            profiles=rows,
        ),
        signatures=tuple(signatures),
        touched=touched.reshape(-1, size),
        layer_scale=moe.num_layers / NUM_MASKED,
    )


def _lengths(
    rng: np.random.Generator, num: int, mean: float, sigma: float, most: int
) -> np.ndarray:
    """Lognormal with a mean, in whole tokens from 16 to `most`."""
    drawn = rng.lognormal(np.log(mean) - 0.5 * sigma**2, sigma, num)
    return np.clip(drawn.round(), 16, most).astype(np.int64)


def _rng(seed: int, part: int) -> np.random.Generator:
    return np.random.default_rng([seed, part])
