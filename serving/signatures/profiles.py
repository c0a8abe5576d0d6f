"""Decode profiles: what a decode will touch, guessed from its prompt (DESIGN, "Placement").

Prefill counts say how often each expert was touched per prompt token; decode differs (FACTS
section 1: per-expert correlation .70-.92), and a short prompt says little. So counts are shrunk
towards the decode profile of the nearest calibration cluster:

    q_r = (c_r + s * D_c) / (n_prompt + s)          s = shrink_tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.signature import Signature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeProfiles:
    """Calibration clusters and how their members decode.

    Attributes:
        centroids: float32 [C, M], unit rows, in signature space.
        profiles: float32 [C, M]; D_c, probability that a decode token of a member touches each
            masked (layer, expert); each layer's E values sum to k.
        sizes: int32 [C], calibration prompts per cluster.
        layer_scale: float32 [C]; distinct experts over all MoE layers per distinct expert over
            the masked ones, in decode batches of the cluster's members.
        shrink_tokens: s, tokens that the profile counts for.
    """

    centroids: np.ndarray
    profiles: np.ndarray
    sizes: np.ndarray
    layer_scale: np.ndarray
    shrink_tokens: float

    def __post_init__(self) -> None:
        num_clusters = len(self.centroids)
        if num_clusters == 0 or self.profiles.shape != self.centroids.shape:
            raise ValueError(
                f"centroids {self.centroids.shape} and profiles {self.profiles.shape} must be "
                f"equal [C >= 1, M]"
            )
        for name in ("sizes", "layer_scale"):
            if getattr(self, name).shape != (num_clusters,):
                raise ValueError(f"{name} must have shape ({num_clusters},)")
        if not self.shrink_tokens > 0:
            raise ValueError(f"shrink_tokens={self.shrink_tokens} must be > 0")
        if self.sizes.min() < 0 or self.sizes.sum() < 1:
            raise ValueError("sizes must be >= 0 and hold at least one prompt")

    def profile_of(self, vector: np.ndarray) -> np.ndarray:
        """D_c of the cluster nearest to a vector.

        Args:
            vector: float32 [M].

        Returns:
            float32 [M]; the mean profile for a zero vector, which is near to nothing.
        """
        if not vector.any():
            weights = self.sizes / self.sizes.sum()
            return (weights @ self.profiles).astype(np.float32)
        return self.profiles[int(np.argmax(self.centroids @ vector))]

    def expert_probability(self, signature: Signature | None) -> np.ndarray:
        """q_r: probability that one decode token of the request touches each expert.

        A prediction's counts weigh only as many tokens as its confidence leaves of them.

        Args:
            signature: the request's; None gives the mean profile.

        Returns:
            float32 [M] in [0, 1].
        """
        if signature is None:
            return self.profile_of(np.zeros(self.profiles.shape[1], np.float32))
        weight = signature.confidence
        counts = signature.counts.ravel().astype(np.float32) * np.float32(weight)
        counts += np.float32(self.shrink_tokens) * self.profile_of(signature.vector)
        counts /= np.float32(weight * signature.num_tokens + self.shrink_tokens)
        return np.minimum(counts, np.float32(1.0))
