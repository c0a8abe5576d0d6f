"""Fits IDF, layer mask, decode profiles, regions and token table from a capture."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from absl import app, flags

from calibration.captures import read_capture
from calibration.fit.pipeline import FitConfig, fit_capture
from calibration.fit.step_time import fit_step_time
from serving.core.errors import ArtefactError, ConfigError
from serving.signatures.manifest import Manifest

_CAPTURE = flags.DEFINE_string(
    "capture", None, "Folder written by calibration.capture_main.", required=True
)
_OUT = flags.DEFINE_string("out", None, "Folder for the artefact.", required=True)
_LATENCY = flags.DEFINE_string(
    "latency_table", None, "CSV (tokens, activated_experts, time_us) to fit step times from."
)
_LATENCY_MIN = flags.DEFINE_integer("latency_min_tokens", 16, "Smallest step of the table used.")
_LATENCY_MAX = flags.DEFINE_integer("latency_max_tokens", 256, "Largest step of the table used.")
_PAIRS = flags.DEFINE_integer("num_pairs", 30_000, "Prompt pairs behind the layer mask.")
_CLUSTERS = flags.DEFINE_integer("num_clusters", 32, "Clusters of decode profiles.")
_SHRINK = flags.DEFINE_float(
    "shrink_tokens", 0.0, "Tokens a decode profile counts for; 0 chooses on unseen prompts."
)
_REGIONS = flags.DEFINE_list(
    "regions", ["2", "4", "8", "16"], "Numbers of decode workers to fit regions for beforehand."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of every draw.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitMainConfig:
    """What to fit; see the flags of the same names.

    Raises:
        ConfigError: a field breaks its rule.
    """

    capture: str
    out: str
    latency_table: str | None
    latency_min_tokens: int
    latency_max_tokens: int
    num_pairs: int
    num_clusters: int
    shrink_tokens: float
    regions: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_pairs", "num_clusters", "latency_min_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be >= 1")
        if self.latency_max_tokens < self.latency_min_tokens:
            raise ConfigError(
                "latency_max_tokens", self.latency_max_tokens, "must be >= latency_min_tokens"
            )
        if not self.shrink_tokens >= 0:
            raise ConfigError("shrink_tokens", self.shrink_tokens, "must be >= 0")
        if any(k < 1 for k in self.regions) or len(set(self.regions)) != len(self.regions):
            raise ConfigError("regions", self.regions, "must be distinct numbers >= 1")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "must be >= 0")


def run(config: FitMainConfig) -> Manifest:
    """Fits and writes the artefact.

    Args:
        config: what to fit.

    Returns:
        The artefact's manifest.

    Raises:
        ArtefactError: the capture or the latency table cannot be used.
    """
    step_time = None
    if config.latency_table is not None:
        step_time = fit_step_time(
            config.latency_table,
            min_tokens=config.latency_min_tokens,
            max_tokens=config.latency_max_tokens,
        )
    started = time.monotonic()

    def on_stage(stage: str) -> None:
        print(f"fit: {stage} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)

    on_stage("read capture")
    capture = read_capture(config.capture)
    fit_config = FitConfig(
        num_pairs=config.num_pairs,
        num_clusters=config.num_clusters,
        shrink_tokens=config.shrink_tokens,
        num_regions=config.regions,
        seed=config.seed,
    )
    manifest = fit_capture(capture, config.out, fit_config, step_time=step_time, on_stage=on_stage)
    on_stage("written")
    return manifest


def _integers(texts: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(text) for text in texts)
    except ValueError as error:
        raise ConfigError("regions", texts, "must be whole numbers") from error


def _main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        manifest = run(
            FitMainConfig(
                capture=_CAPTURE.value,
                out=_OUT.value,
                latency_table=_LATENCY.value,
                latency_min_tokens=_LATENCY_MIN.value,
                latency_max_tokens=_LATENCY_MAX.value,
                num_pairs=_PAIRS.value,
                num_clusters=_CLUSTERS.value,
                shrink_tokens=_SHRINK.value,
                regions=_integers(_REGIONS.value),
                seed=_SEED.value,
            )
        )
    except (ArtefactError, ConfigError, OSError) as error:
        print(f"fit_main: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"artefact {manifest.version} ({manifest.mask_version}) in {_OUT.value}")
    for name, value in manifest.metrics.items():
        print(f"  {name:36s} {value:.4g}")


if __name__ == "__main__":
    app.run(_main)
