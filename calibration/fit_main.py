"""Fits IDF, layer mask, decode profiles, regions and token table from a capture."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from absl import flags

from calibration.captures import read_capture
from calibration.fit.pipeline import FitConfig, fit_capture
from calibration.fit.step_time import fit_step_time
from eldr_jax.command_line import run_binary
from serving.core.errors import ArtefactError, ConfigError
from serving.signatures.manifest import Manifest


def define_flags() -> None:
    """Declares the binary's flags; called once, by `cli`."""
    flags.DEFINE_string(
        "capture", None, "Folder written by calibration.capture_main.", required=True
    )
    flags.DEFINE_string("out", None, "Folder for the artefact.", required=True)
    flags.DEFINE_string(
        "latency_table", None, "CSV (tokens, activated_experts, time_us) to fit step times from."
    )
    flags.DEFINE_integer("latency_min_tokens", 16, "Smallest step of the table used.")
    flags.DEFINE_integer("latency_max_tokens", 256, "Largest step of the table used.")
    flags.DEFINE_integer("num_pairs", 30_000, "Prompt pairs behind the layer mask.")
    flags.DEFINE_integer("num_clusters", 32, "Clusters of decode profiles.")
    flags.DEFINE_float(
        "shrink_tokens", 0.0, "Tokens a decode profile counts for; 0 chooses on unseen prompts."
    )
    flags.DEFINE_list(
        "regions", ["2", "4", "8", "16"], "Numbers of decode workers to fit regions for beforehand."
    )
    flags.DEFINE_bool("idf", True, "Weigh experts by how few prompts hit them; off is an ablation.")
    flags.DEFINE_bool("layer_mask", True, "Keep the best layers only; off is an ablation.")
    flags.DEFINE_integer("seed", 0, "Of every draw.")


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
    idf: bool = True
    layer_mask: bool = True

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
        idf=config.idf,
        layer_mask=config.layer_mask,
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


def main() -> None:
    """Reads the flags, fits, prints the metrics."""
    values = flags.FLAGS
    manifest = run(
        FitMainConfig(
            capture=values.capture,
            out=values.out,
            latency_table=values.latency_table,
            latency_min_tokens=values.latency_min_tokens,
            latency_max_tokens=values.latency_max_tokens,
            num_pairs=values.num_pairs,
            num_clusters=values.num_clusters,
            shrink_tokens=values.shrink_tokens,
            regions=_integers(values.regions),
            seed=values.seed,
            idf=values.idf,
            layer_mask=values.layer_mask,
        )
    )
    print(f"artefact {manifest.version} ({manifest.mask_version}) in {values.out}")
    for name, value in manifest.metrics.items():
        print(f"  {name:36s} {value:.4g}")


def cli() -> None:
    """Entry point."""
    define_flags()
    run_binary(main, (ArtefactError, ConfigError))


if __name__ == "__main__":
    cli()
