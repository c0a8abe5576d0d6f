"""Token expert ids -> per-KV-block expert counts."""

from kernels.expert_histogram.api import BACKENDS, expert_histogram
from kernels.expert_histogram.arg_specs import HistogramSpec, default_out_dtype
from kernels.expert_histogram.blocks import (
    PackedBlocks,
    max_num_blocks,
    pack_blocks,
)
from kernels.expert_histogram.errors import (
    BackendUnavailableError,
    HistogramArgumentError,
    HistogramError,
)

__all__ = [
    "BACKENDS",
    "BackendUnavailableError",
    "HistogramArgumentError",
    "HistogramError",
    "HistogramSpec",
    "PackedBlocks",
    "default_out_dtype",
    "expert_histogram",
    "max_num_blocks",
    "pack_blocks",
]
