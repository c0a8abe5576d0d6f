"""What a request will touch: from its prompt's expert counts to chances per decode step.

    q_r = (g * c_r + k * D_c) / (g * n_prompt + k)    (DESIGN "Placement")

Prefill counts c_r over n_prompt tokens are shrunk, with the weight of k tokens, towards D_c,
the decode profile of the nearest calibration cluster; a predicted signature's tokens are worth
its confidence g each, 1 for exact counts. Pure functions of frozen data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.core.native import Kernel
from serving.core.signature import Signature

MIN_KEEP = 1e-3
"""Floor of 1 - q: no expert is certain, and the survival rows can take a logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertProfiles:
    """Decode profiles over the masked layers, from calibration.

    Attributes:
        version: written into decision records.
        signature_version: version of the signature model its centroids belong to; "" accepts
            every version (no clusters).
        num_layers: MoE layers of the model.
        num_masked_layers: Lm.
        num_experts, top_k: E and k.
        mean_profile: float32 [M], chance that one decode token touches each masked
            (layer, expert), over all calibration requests.
        shrink_tokens: k of the formula, > 0.
        centroids: float32 [C, M] unit rows, clusters of calibration signatures; C may be 0.
        profiles: float32 [C, M], each cluster's decode profile.
        layer_scale: float32 [C], distinct experts over all layers per one over the masked layers,
            of each cluster's requests; None when not fitted.
    """

    version: str
    num_layers: int
    num_masked_layers: int
    num_experts: int
    top_k: int
    mean_profile: np.ndarray
    signature_version: str = ""
    shrink_tokens: float = 512.0
    centroids: np.ndarray | None = None
    profiles: np.ndarray | None = None
    layer_scale: np.ndarray | None = None

    def __post_init__(self) -> None:
        size = self.num_masked_layers * self.num_experts
        if self.mean_profile.shape != (size,):
            raise ValueError(f"mean_profile has shape {self.mean_profile.shape}, must be ({size},)")
        if not self.shrink_tokens > 0:
            raise ValueError(f"{self.shrink_tokens=} must be > 0")
        if (self.centroids is None) != (self.profiles is None):
            raise ValueError("centroids and profiles come together or not at all")
        if self.centroids is not None and self.profiles is not None:
            shape = (len(self.centroids), size)
            if self.centroids.shape != shape or self.profiles.shape != shape or not shape[0]:
                raise ValueError(
                    f"centroids {self.centroids.shape} and profiles {self.profiles.shape} must "
                    f"both be (C >= 1, {size})"
                )
        if self.layer_scale is not None:
            num = 0 if self.centroids is None else len(self.centroids)
            if self.layer_scale.shape != (num,) or not (self.layer_scale > 0).all():
                raise ValueError(f"layer_scale={self.layer_scale} must hold {num} values > 0")

    @property
    def size(self) -> int:
        """M = Lm * E."""
        return self.mean_profile.size

    def nearest(self, vector: np.ndarray) -> int:
        """Cluster of the greatest cosine with float32 [M] `vector`; -1 without clusters."""
        if self.centroids is None:
            return -1
        return int((self.centroids @ vector).argmax())

    def scale_of(self, cluster: int) -> float:
        """`layer_scale` of a cluster; 0.0 when nobody knows, -1 included."""
        if self.layer_scale is None or cluster < 0:
            return 0.0
        return float(self.layer_scale[cluster])

    def keep(
        self, signature: Signature | None, *, weight: float = 1.0, cluster: int | None = None
    ) -> np.ndarray:
        """1 - q per masked (layer, expert).

        Args:
            signature: the request's, or None: the mean profile then. Its confidence says how
                many tokens each of its tokens is worth beside the cluster's profile.
            weight: in [0, 1], how far to trust signatures at all: it mixes q with the mean
                profile (0 is the mean profile alone).
            cluster: `nearest` of the signature's vector, where it is known already.

        Returns:
            float32 [M] in [MIN_KEEP, 1].

        Raises:
            ValueError: the counts have another size.
        """
        if signature is None or weight <= 0.0:
            return np.maximum(np.float32(1.0) - self.mean_profile, np.float32(MIN_KEEP))
        if signature.counts.size != self.size:
            raise ValueError(f"signature has {signature.counts.size} counts, must be {self.size}")
        if cluster is None:
            cluster = self.nearest(signature.vector)
        profile = self.mean_profile if self.profiles is None else self.profiles[cluster]
        worth = signature.confidence
        total = worth * signature.num_tokens + self.shrink_tokens
        return KEEP.run(
            signature.counts.reshape(-1),
            profile,
            self.mean_profile,
            weight * worth / total,
            weight * self.shrink_tokens / total,
            1.0 - weight,
        )


def _keep_numpy(
    counts: np.ndarray,
    profile: np.ndarray,
    mean_profile: np.ndarray,
    per_count: float,
    of_profile: float,
    of_mean: float,
) -> np.ndarray:
    """1 - (per_count * counts + of_profile * profile + of_mean * mean_profile), >= MIN_KEEP.

    Args:
        counts: uint32 [M].
        profile: float32 [M].
        mean_profile: float32 [M].
        per_count: weight of a count.
        of_profile: weight of `profile`.
        of_mean: weight of `mean_profile`.

    Returns:
        float32 [M].
    """
    keep = counts.astype(np.float32)
    keep *= np.float32(-per_count)
    keep += np.float32(1.0)
    keep -= np.float32(of_profile) * profile
    if of_mean > 0.0:
        keep -= np.float32(of_mean) * mean_profile
    return np.maximum(keep, np.float32(MIN_KEEP), out=keep)


def _keep_loop(counts, profile, mean_profile, per_count, of_profile, of_mean):
    """`_keep_numpy`, one expert after another."""
    keep = np.empty(counts.shape[0], np.float32)
    a, b, c = np.float32(-per_count), np.float32(of_profile), np.float32(of_mean)
    one, least = np.float32(1.0), np.float32(MIN_KEEP)
    if of_mean > 0.0:
        for i in range(keep.shape[0]):
            value = np.float32(counts[i]) * a + one - b * profile[i] - c * mean_profile[i]
            keep[i] = max(value, least)
    else:
        for i in range(keep.shape[0]):
            keep[i] = max(np.float32(counts[i]) * a + one - b * profile[i], least)
    return keep


KEEP = Kernel(_keep_numpy, _keep_loop, "f4[::1](u4[::1],f4[::1],f4[::1],f8,f8,f8)")


def uniform_profiles(
    *, num_layers: int, num_masked_layers: int, num_experts: int, top_k: int
) -> ExpertProfiles:
    """Profiles before any calibration: every expert equally likely, k / E."""
    size = num_masked_layers * num_experts
    return ExpertProfiles(
        version="uniform",
        num_layers=num_layers,
        num_masked_layers=num_masked_layers,
        num_experts=num_experts,
        top_k=top_k,
        mean_profile=np.full(size, top_k / num_experts, np.float32),
    )
