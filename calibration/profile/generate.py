"""Routes tokens through the tables: paper-sized expert ids from three published layers.

Composition of a model of L layers and E experts from S published layers of E0 experts:

- layer l copies slot floor(l * S / L); the copies of a slot share its token -> expert structure
  but nothing else: each has its own permutation of experts, its own split and its own draws;
- E = m * E0: each expert is split into m children, a token always going to the same child of an
  expert (a hash of token, layer and expert decides), so children are as token-bound as parents;
- a token's k experts are drawn without replacement, with the table's probabilities as weights
  (the Plackett-Luce law, calibration/profile/draws.py), the request's bias added to their
  logarithm.

Mixtral's tokenizer is not among the data: a Mixtral workload keeps the real texts' lengths and
draws tokens by their frequency in the table's domain.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from calibration.capture_checks import Geometry
from calibration.captures import PromptCapture
from calibration.profile.draws import draw_experts
from calibration.profile.routing_tables import RoutingTables
from calibration.profile.settings import Workload
from calibration.profile.windows import Window, unit_hash

_FLOOR = 1e-9


class ProfileRouter:
    """Draws expert ids for one workload.

    Attributes:
        workload: the settings.
        tables: the substrate.
        num_children: m, children per published expert.
        slots: int64 [L], published layer behind each layer.
    """

    def __init__(self, workload: Workload, tables: RoutingTables) -> None:
        geometry = workload.geometry
        children, rest = divmod(geometry.num_experts, tables.num_experts)
        if rest or children < 1:
            raise ValueError(
                f"geometry.num_experts={geometry.num_experts} must be a multiple of the "
                f"substrate's {tables.num_experts}"
            )
        if geometry.top_k > tables.top_k:
            raise ValueError(
                f"geometry.top_k={geometry.top_k} must be <= the substrate's {tables.top_k}"
            )
        if unknown := sorted(set(workload.tables.values()) - set(tables.index)):
            raise ValueError(
                f"tables: {unknown[0]!r} must be one of {', '.join(sorted(tables.index))}"
            )
        self.workload = workload
        self.tables = tables
        self.num_children = children
        self.slots = np.arange(geometry.num_layers) * tables.num_slots // geometry.num_layers
        layout = np.random.default_rng([workload.seed, 0])
        self._permutations = np.stack(
            [layout.permutation(geometry.num_experts) for _ in range(geometry.num_layers)]
        ).astype(np.int32)
        self._biases: dict[tuple[str, ...], np.ndarray] = {}

    def capture(self, window: Window, *, keep_prefill_experts: bool = False) -> PromptCapture:
        """Routes a window's prompt and continuation.

        Args:
            window: the tokens.
            keep_prefill_experts: keep the prompt's ids too (large; needed by token tables).
        """
        rng = np.random.default_rng(_seed_of(self.workload.seed, window.prompt_id))
        if self.workload.substrate == "mixtral":
            window = self._in_own_vocabulary(window, rng)
        in_prefill, in_decode = self._biases_of(window)
        prefill = self._route(window.prompt, window.domain, in_prefill, rng)
        decode = self._route(window.continuation, window.domain, in_decode, rng)
        geometry = self.workload.geometry
        return PromptCapture(
            prompt_id=window.prompt_id,
            domain=window.domain,
            token_ids=window.prompt,
            prefill=_count(prefill, geometry),
            decode=_count(decode, geometry),
            decode_experts=decode,
            prefill_experts=prefill if keep_prefill_experts else None,
        )

    def _in_own_vocabulary(self, window: Window, rng: np.random.Generator) -> Window:
        """The window's lengths, its tokens drawn by their frequency in the table's domain."""
        frequency = self.tables.frequency[self._table_of(window.domain)]
        drawn = rng.choice(
            len(frequency), size=len(window.prompt) + len(window.continuation), p=frequency
        ).astype(np.int32)
        prompt, continuation = np.split(drawn, [len(window.prompt)])
        return dataclasses.replace(window, prompt=prompt, continuation=continuation)

    def _table_of(self, domain: str) -> str:
        return self.workload.tables.get(domain, self.workload.tables[""])

    def _route(
        self, tokens: np.ndarray, domain: str, bias: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Experts of each token, int32 [T, L, K]."""
        geometry, tables = self.workload.geometry, self.tables
        rows = tables.rows_of(tokens, self._table_of(domain))
        shape = (geometry.num_layers, len(tokens), geometry.top_k)
        parents = np.empty(shape, np.int64)
        uniforms = rng.random(shape)
        for layer, slot in enumerate(self.slots.tolist()):
            draw_experts(
                tables.rows[slot], rows, bias[layer], uniforms[layer], _FLOOR, parents[layer]
            )
        experts = parents
        if self.num_children > 1:
            token_bits = _mix(tokens.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
            salts = np.arange(geometry.num_layers * tables.num_experts, dtype=np.uint64)
            layer_of = np.arange(geometry.num_layers)[:, None, None] * tables.num_experts
            child = _mix(token_bits[None, :, None] ^ _mix(salts)[layer_of + parents])
            child %= np.uint64(self.num_children)
            experts = parents * self.num_children + child.astype(np.int64)
        placed = np.take_along_axis(
            self._permutations, experts.reshape(geometry.num_layers, -1), axis=1
        )
        return np.ascontiguousarray(placed.reshape(shape).transpose(1, 0, 2))

    def _biases_of(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Factors on the published experts' probabilities in prefill and decode, [L, E0]."""
        bias = self.workload.bias
        topic = int(unit_hash("topic", window.subject) * bias.num_topics)
        style = int(unit_hash("style", window.prompt_id) * bias.num_styles)
        prefill = np.float32(bias.domain) * self._shared_bias("domain", window.domain)
        prefill += np.float32(bias.topic) * self._shared_bias("topic", window.domain, str(topic))
        own = np.random.default_rng(_seed_of(self.workload.seed, "bias", window.prompt_id))
        prefill += np.float32(bias.request) * own.standard_normal(prefill.shape, np.float32)
        decode = prefill + np.float32(bias.style) * self._shared_bias("style", str(style))
        return np.exp(prefill), np.exp(decode)

    def _shared_bias(self, *key: str) -> np.ndarray:
        if key not in self._biases:
            rng = np.random.default_rng(_seed_of(self.workload.seed, *key))
            self._biases[key] = rng.standard_normal(self._bias_shape(), np.float32)
        return self._biases[key]

    def _bias_shape(self) -> tuple[int, int]:
        return self.workload.geometry.num_layers, self.tables.num_experts


def _count(experts: np.ndarray, geometry: Geometry) -> np.ndarray:
    """[T, L, K] ids to uint32 [L, E] counts."""
    offsets = (np.arange(geometry.num_layers) * geometry.num_experts)[:, None]
    flat = np.bincount(
        (experts + offsets).ravel(), minlength=geometry.num_layers * geometry.num_experts
    )
    return flat.reshape(geometry.num_layers, geometry.num_experts).astype(np.uint32)


def _seed_of(seed: int, *parts: str) -> list[int]:
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return [seed, int.from_bytes(digest[:8], "big")]


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, a bijection on uint64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
