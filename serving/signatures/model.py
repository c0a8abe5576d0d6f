"""From expert counts to signatures: IDF weights, layer mask, one global norm (FACTS section 1).

Counts are integers and exact, so a prompt whose prefix came from a cache and the same prompt
computed cold give the same vector bit for bit. The vector is a function of the counts alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from serving.core.native import Kernel
from serving.core.signature import Signature, SignatureSource


def idf_weights(num_prompts_with: np.ndarray, num_prompts: int) -> np.ndarray:
    """Inverse document frequency, w = ln((N + 1) / (df + 1)) (FACTS section 1).

    An expert that every calibration prompt hits weighs exactly 0.

    Args:
        num_prompts_with: integer [...], df: prompts whose count of that expert is not 0.
        num_prompts: N.

    Returns:
        float32 of the same shape, all >= 0.

    Raises:
        ValueError: a df outside [0, N].
    """
    df = np.asarray(num_prompts_with)
    if df.size and (df.min() < 0 or df.max() > num_prompts):
        raise ValueError(f"document frequency must lie in [0, {num_prompts=}], got {df.max()=}")
    return np.log((num_prompts + 1) / (df + 1.0)).astype(np.float32)


def mask_version_of(layers: np.ndarray, *, num_layers: int, num_experts: int, top_k: int) -> str:
    """Name of a mask: equal for equal layers in equal order and equal geometry."""
    text = f"{num_layers}x{num_experts}x{top_k}:" + ",".join(str(int(layer)) for layer in layers)
    return "mask-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _unit_numpy(counts: np.ndarray, idf: np.ndarray) -> np.ndarray:
    """Counts uint32 [M] times weights float32 [M], at length 1 (or 0): float32 [M]."""
    weighted = counts.astype(np.float32)
    weighted *= idf
    norm = math.sqrt(np.dot(weighted, weighted))
    if norm > 0.0:
        weighted *= np.float32(1.0 / norm)
    return weighted


def _unit_loop(counts, idf):
    """`_unit_numpy`, one expert after another."""
    weighted = np.empty(counts.shape[0], np.float32)
    square = 0.0
    for i in range(weighted.shape[0]):
        value = np.float32(counts[i]) * idf[i]
        weighted[i] = value
        square += value * value
    if square > 0.0:
        scale = np.float32(1.0 / np.sqrt(square))
        for i in range(weighted.shape[0]):
            weighted[i] *= scale
    return weighted


UNIT = Kernel(_unit_numpy, _unit_loop, "f4[::1](u4[::1],f4[::1])")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SignatureModel:
    """IDF weights over the masked layers of one model variant.

    Attributes:
        version: version of the whole fit, written into signatures and decision records.
        mask_version: names the layers and the geometry; workers and router must agree on it.
        layers: int32 [Lm], distinct MoE layer indices in the order of the vector.
        num_layers: L, MoE layers of the model.
        num_experts: E.
        top_k: experts per token and layer.
        idf: float32 [Lm, E], >= 0.
    """

    version: str
    mask_version: str
    layers: np.ndarray
    num_layers: int
    num_experts: int
    top_k: int
    idf: np.ndarray

    def __post_init__(self) -> None:
        layers = self.layers
        for name in ("num_layers", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be >= 1")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must be <= num_experts={self.num_experts}")
        if layers.ndim != 1 or layers.size == 0 or len(set(layers.tolist())) != layers.size:
            raise ValueError(f"layers={layers!r} must be one row of distinct indices")
        if layers.min() < 0 or layers.max() >= self.num_layers:
            raise ValueError(f"layers={layers!r} must lie in [0, num_layers={self.num_layers})")
        if self.idf.shape != (layers.size, self.num_experts):
            raise ValueError(
                f"idf has shape {self.idf.shape}, must be ({layers.size}, {self.num_experts})"
            )
        if not np.isfinite(self.idf).all() or self.idf.min() < 0:
            raise ValueError("idf must be finite and >= 0")

    @property
    def num_masked_layers(self) -> int:
        """Lm."""
        return int(self.layers.size)

    @property
    def size(self) -> int:
        """M = Lm * E, length of a vector."""
        return int(self.idf.size)

    def mask(self, counts: np.ndarray) -> np.ndarray:
        """Keeps the masked layers of full counts.

        Args:
            counts: integer [..., L, E].

        Returns:
            uint32 [..., Lm, E].

        Raises:
            ValueError: wrong shape.
        """
        if counts.shape[-2:] != (self.num_layers, self.num_experts):
            raise ValueError(
                f"counts have shape {counts.shape}, must end in "
                f"({self.num_layers}, {self.num_experts})"
            )
        return counts[..., self.layers, :].astype(np.uint32)

    def vector(self, counts_masked: np.ndarray) -> np.ndarray:
        """Weighted and normalised counts.

        Args:
            counts_masked: integer [Lm, E].

        Returns:
            float32 [M]: unit length, or all zero when every weighted count is 0 (an empty
            prompt, or only experts that every prompt hits). Its cosine with anything is 0, so
            such a request is placed by load alone.
        """
        counts = np.ascontiguousarray(counts_masked, np.uint32)
        return UNIT.run(counts.reshape(-1), self.idf.reshape(-1))

    def vectors(self, counts_masked: np.ndarray) -> np.ndarray:
        """`vector` of each row: integer [N, Lm, E] -> float32 [N, M]."""
        if len(counts_masked) == 0:
            return np.zeros((0, self.size), np.float32)
        return np.stack([self.vector(row) for row in counts_masked])

    def signature(
        self,
        counts_masked: np.ndarray,
        num_tokens: int,
        *,
        source: SignatureSource,
        confidence: float = 1.0,
    ) -> Signature:
        """Makes a request's signature.

        Args:
            counts_masked: integer [Lm, E] over `num_tokens` tokens.
            num_tokens: tokens counted.
            source: where the counts came from.
            confidence: in (0, 1]; 1.0 for exact counts.

        Raises:
            ValueError: wrong shape, or confidence out of range.
        """
        if counts_masked.shape != self.idf.shape:
            raise ValueError(f"counts have shape {counts_masked.shape}, must be {self.idf.shape}")
        if not 0.0 < confidence <= 1.0:
            raise ValueError(f"{confidence=} must lie in (0, 1]")
        return Signature(
            counts=counts_masked.astype(np.uint32, copy=False),
            num_tokens=num_tokens,
            vector=self.vector(counts_masked),
            source=source,
            version=self.version,
            confidence=confidence,
        )
