"""Static times of the histogram kernels on accelerators that are not there.

    python -m kernels.expert_histogram.bench_main --out=out/histogram.json

See `bench`. What is not installed is skipped with one line.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from kernels.expert_histogram import tpu_compile
from kernels.expert_histogram.bench import BenchConfig, run
from kernels.expert_histogram.errors import HistogramArgumentError

_CHIPS = flags.DEFINE_list("chips", list(tpu_compile.CHIPS), "TPU chips to compile for.")
_EXPERTS = flags.DEFINE_list("experts", ["64", "128", "512"], "Numbers of experts E.")
_TOP_KS = flags.DEFINE_list("top_ks", ["4", "8"], "Experts per token K.")
_BLOCK_SIZES = flags.DEFINE_list("block_sizes", ["16", "64", "128", "1024"], "KV block sizes B.")
_TOKENS = flags.DEFINE_list("tokens", ["512", "2048", "8192"], "Tokens per step T.")
_LAYERS = flags.DEFINE_integer("layers", 48, "MoE layers L.", lower_bound=1)
_PROFILE = flags.DEFINE_boolean(
    "profile", False, "Also ask for the compiler's static profile; it aborts for some chips."
)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.")


def _numbers(name: str, values: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in values)
    except ValueError as error:
        raise HistogramArgumentError(f"--{name}={','.join(values)} must be integers") from error


def main(argv: list[str]) -> None:
    """Flags -> config -> run."""
    try:
        if len(argv) > 1:
            raise HistogramArgumentError(f"unexpected argument {argv[1]}")
        config = BenchConfig(
            chips=tuple(_CHIPS.value),
            experts=_numbers("experts", _EXPERTS.value),
            top_ks=_numbers("top_ks", _TOP_KS.value),
            block_sizes=_numbers("block_sizes", _BLOCK_SIZES.value),
            tokens=_numbers("tokens", _TOKENS.value),
            num_layers=_LAYERS.value,
            profile=_PROFILE.value,
            out=None if _OUT.value is None else Path(_OUT.value),
        )
        config.specs()
        if config.out is not None:  # told before the work, not after it
            config.out.parent.mkdir(parents=True, exist_ok=True)
    except (HistogramArgumentError, OSError) as error:
        print(f"bench_main: {error}", file=sys.stderr)
        sys.exit(2)
    run(config, functools.partial(print, flush=True))


if __name__ == "__main__":
    app.run(main)
