"""The histogram as a Pallas kernel for TPUs.

Tokens lie in lanes, layers in sublanes. Three engines share the work:

1. Vector unit. The K ids of a token become one bit mask (`1 << id`, or-ed over K), so
   everything after is independent of K. Out-of-range ids shift by 32 or more, or by a
   negative amount read as unsigned: both give 0, in XLA's definition as on the chip.
2. Matrix unit. Masking one bit in each byte of the masks yields 32 rows of the one-hot
   matrix [experts, tokens] per instruction; the product with the 0/1 matrix
   [output rows, tokens] sums over tokens, wherever a block begins or ends. A row's value
   is a power of two that depends on its bit only; it is divided out at the end.
3. The products are added to an accumulator in vector memory at a dynamic row, so ragged
   and packed requests cost what aligned ones do.

At the end the accumulator is scaled, packed to the output dtype, its lanes put into the
order of the experts, and stored as [block, layer, expert]: no copy is left for XLA.
`pallas_tpu_layout` says which bit becomes which row.
"""

import enum
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.errors import BackendUnavailableError
from kernels.expert_histogram.pallas_tpu_kernel import histogram_kernel
from kernels.expert_histogram.pallas_tpu_layout import SUBLANES, Layout, layout_of
from kernels.expert_histogram.tuned import INTERPRET_CONFIG, LANES, TPU_CONFIGS, TpuConfig

_NO_BLOCK = 2**30


def _row_bounds(block_of_token: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """[num_dots] first and last existing output row among each product's tokens."""
    spec = layout.spec
    padding = layout.padded_tokens - spec.num_tokens
    block = jnp.pad(block_of_token, (0, padding), constant_values=-1) if padding else block_of_token
    block = block.reshape(layout.num_dots, layout.dot_tokens)
    exists = (block >= 0) & (block < spec.num_blocks)
    first = jnp.where(exists, block, _NO_BLOCK).min(axis=1)
    last = jnp.where(exists, block, -1).max(axis=1)
    return first, last


def _step_bounds(
    first_rows: jax.Array, last_rows: jax.Array, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """[num_tiles] first and last grid step with a token of each tile of output rows."""
    first = first_rows.reshape(layout.num_steps, layout.dots_per_step).min(axis=1)
    last = last_rows.reshape(layout.num_steps, layout.dots_per_step).max(axis=1)
    low = jnp.arange(layout.num_tiles, dtype=jnp.int32)[:, None] * layout.tile_rows
    touched = (first < low + layout.tile_rows) & (last >= low)
    step = jnp.arange(layout.num_steps, dtype=jnp.int32)
    first_step = jnp.where(touched, step, _NO_BLOCK).min(axis=1)
    last_step = jnp.where(touched, step, -1).max(axis=1)
    return first_step, last_step


def _ids_spec(layout: Layout, column: int, part: int) -> pl.BlockSpec:
    last_column = -(-layout.spec.num_tokens // LANES) - 1

    def index(tile, step, *prefetched):
        if layout.num_tiles > 1:
            # Steps outside the tile's range repeat a block, so that nothing is fetched.
            first_steps, last_steps = prefetched[2:]
            step = jnp.clip(step, jnp.minimum(first_steps[tile], layout.num_steps - 1), None)
            step = jnp.clip(step, None, jnp.maximum(last_steps[tile], 0))
        at = step * layout.columns_per_step + column
        return 0, part, jnp.minimum(at, last_column)

    return pl.BlockSpec((layout.num_layer_groups * SUBLANES, layout.top_k_block, LANES), index)


def call_kernel(
    ids: jax.Array,
    block_of_token: jax.Array,
    spec: HistogramSpec,
    config: TpuConfig,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Runs the kernel with given block sizes.

    Args:
        ids: [L, K, T] int32.
        block_of_token: [T] int32.
        spec: the call's sizes.
        config: block sizes.
        interpret: run on any platform, slowly.

    Returns:
        [num_blocks, L, E] of `spec.dtype`.
    """
    layout = layout_of(spec, config)
    if spec.top_k == 3:  # three rows have no tiling of their own
        ids = jnp.pad(ids, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
    first_rows, last_rows = _row_bounds(block_of_token, layout)
    prefetched = [first_rows, last_rows]
    if layout.num_tiles > 1:
        prefetched += _step_bounds(first_rows, last_rows, layout)
    ids_specs = [
        _ids_spec(layout, column, part)
        for column in range(layout.columns_per_step)
        for part in range(layout.num_top_k_blocks)
    ]
    step_tokens = layout.columns_per_step * LANES
    accumulator_dtype = jnp.int32 if config.operand_dtype == "int8" else jnp.float32
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=layout.num_prefetched,
        grid=(layout.num_tiles, layout.num_steps),
        in_specs=[
            *ids_specs,
            pl.BlockSpec((1, step_tokens), lambda tile, step, *_: (0, step)),
        ],
        out_specs=pl.BlockSpec(
            (layout.tile_rows, spec.num_layers, spec.num_experts),
            lambda tile, step, *_: (tile, 0, 0),
        ),
        scratch_shapes=[
            pltpu.VMEM((layout.accumulator_rows, LANES), accumulator_dtype),
            pltpu.VMEM((2 * layout.word_rows, LANES), jnp.int32),
        ],
    )
    one_hot_rows = spec.num_layers * layout.num_expert_groups * layout.group_rows
    cost = pl.CostEstimate(
        flops=2 * layout.window_rows * one_hot_rows * layout.padded_tokens,
        bytes_accessed=ids.size * 4 + spec.num_tokens * 4 + _out_bytes(spec),
        transcendentals=0,
    )
    call = pl.pallas_call(
        functools.partial(histogram_kernel, layout=layout),
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct(spec.out_shape, spec.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=config.vmem_bytes,
            disable_bounds_checks=True,
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="expert_histogram",
    )
    return call(
        *prefetched,
        *([ids] * len(ids_specs)),
        block_of_token.reshape(1, spec.num_tokens),
    )


def _out_bytes(spec: HistogramSpec) -> int:
    num_blocks, num_layers, num_experts = spec.out_shape
    return num_blocks * num_layers * num_experts * spec.dtype.itemsize


def expert_histogram(ids: jax.Array, block_of_token: jax.Array, spec: HistogramSpec) -> jax.Array:
    """See `kernels.expert_histogram.api.expert_histogram`; the arguments are checked.

    The chip is the default device's, or while compiling ahead of time that of the mesh
    set by `jax.sharding.use_abstract_mesh`.

    Args:
        ids: [L, K, T] int32.
        block_of_token: [T] int32.
        spec: the call's sizes.

    Returns:
        [num_blocks, L, E] of `spec.dtype`.

    Raises:
        BackendUnavailableError: there is no TPU, or none that the kernel is tuned for.
    """
    return call_kernel(ids, block_of_token, spec, TPU_CONFIGS[current_chip()])


def interpreted_expert_histogram(
    ids: jax.Array, block_of_token: jax.Array, spec: HistogramSpec
) -> jax.Array:
    """The same kernel, interpreted: slow, on any platform."""
    return call_kernel(ids, block_of_token, spec, INTERPRET_CONFIG, interpret=True)


def current_chip() -> str:
    """Name in `TPU_CONFIGS` of the chip that is compiled for.

    Raises:
        BackendUnavailableError: there is no TPU, or none that the kernel is tuned for.
    """
    try:
        found = pltpu.get_tpu_info().chip_version
    except ValueError as error:
        raise BackendUnavailableError(
            f"backend=pallas_tpu: {error}; it needs a TPU, or to compile ahead of time the "
            "mesh of a TPU topology (jax.sharding.use_abstract_mesh); pallas_tpu_interpret "
            "runs anywhere, slowly"
        ) from error
    version = str(found.value) if isinstance(found, enum.Enum) else str(found)
    chip = {"7x": "tpu7x"}.get(version, version)
    if chip not in TPU_CONFIGS:
        raise BackendUnavailableError(
            f"backend=pallas_tpu: {chip=} has no tuned parameters; "
            f"there are some for {', '.join(TPU_CONFIGS)}"
        )
    return chip
