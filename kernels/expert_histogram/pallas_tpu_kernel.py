"""The body of the TPU kernel; `pallas_tpu` says what it does and calls it.

Runs once per grid step: (tile of output rows, chunk of tokens). The accumulator holds a
tile of output rows for all layers; row bounds of every product are prefetched scalars.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.expert_histogram.pallas_tpu_layout import (
    COPY_PITCH,
    GROUP_EXPERTS,
    SUBLANES,
    WORD_BITS,
    Layout,
)
from kernels.expert_histogram.tuned import LANES

_EVERY_BYTE = 0x01010101


class _Step:
    """One grid step: the references and static sizes that its parts share."""

    def __init__(self, layout: Layout, at, blocks, accumulator, words, bounds):
        self.layout = layout
        self.blocks = blocks
        self.accumulator = accumulator
        self.words = words
        self.first_rows, self.last_rows = bounds
        self.first_tile_row = at[0] * layout.tile_rows
        self.step = at[1]
        self.ids: list = []
        self.bit_masks: list[jax.Array] = []

    def has_tokens(self) -> jax.Array:
        """Whether any token of the step lies in the tile."""
        bounds = [self.row_bounds(dot) for dot in range(self.layout.dots_per_step)]
        return functools.reduce(jnp.logical_or, [first <= last for first, last in bounds])

    def open(self, ids: Sequence) -> None:
        """Views the input blocks as rows, and builds the masks of the bits."""
        layout = self.layout
        rows = layout.num_layer_groups * SUBLANES * layout.top_k_block
        self.ids = [ref.reshape(rows, LANES) for ref in ids]
        copy = _sublane() // layout.num_words
        for step in range(layout.num_words):
            bit = step + layout.num_words * copy
            # Float8 takes bits 3..6 only: they are the normal numbers with one bit set.
            shift = bit if layout.config.operand_dtype == "int8" else 3 + bit % 4
            self.bit_masks.append(jnp.full_like(shift, _EVERY_BYTE) << shift)

    def row_bounds(self, dot: int) -> tuple[jax.Array, jax.Array]:
        """First and last output row of this tile that a product touches."""
        at = self.step * self.layout.dots_per_step + dot
        low, high = self.first_tile_row, self.first_tile_row + self.layout.tile_rows - 1
        return jnp.maximum(self.first_rows[at], low), jnp.minimum(self.last_rows[at], high)

    def selector(self, dot: int, row: jax.Array) -> jax.Array:
        """[window_rows, dot_tokens] of 0/1: which token lies in which row from `row` on."""
        layout = self.layout
        tokens = layout.dot_tokens
        block = self.blocks[:, pl.ds(dot * tokens, tokens)]
        token = self.step * (layout.dots_per_step * tokens) + dot * tokens
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
        block = jnp.where(lane < layout.spec.num_tokens - token, block, -1)
        rows = jax.lax.broadcasted_iota(jnp.int32, (layout.window_rows, tokens), 0)
        inside = rows == block - row
        if layout.config.operand_dtype == "int8":
            return inside.astype(jnp.int32).astype(jnp.int8)
        return inside.astype(jnp.float32).astype(jnp.float8_e4m3fn)

    def build_words(self, dot: int, group: jax.Array | int, column: int, buffer: int) -> None:
        """Bit masks of eight layers and 128 tokens, into the buffer."""
        layout = self.layout
        num_words = layout.num_expert_groups * layout.num_words
        masks: list[jax.Array] = []
        for rank in range(layout.spec.top_k):
            part = rank // layout.top_k_block
            ref = self.ids[(dot * layout.dot_columns + column) * layout.num_top_k_blocks + part]
            start = group * (SUBLANES * layout.top_k_block) + rank % layout.top_k_block
            expert = ref[pl.ds(start, SUBLANES, stride=layout.top_k_block), :]
            one = jnp.ones_like(expert)
            bits = [jax.lax.shift_left(one, expert - WORD_BITS * w) for w in range(num_words)]
            masks = [m | b for m, b in zip(masks, bits, strict=True)] if masks else bits
        for index, mask in enumerate(masks):
            expert_group, word = divmod(index, layout.num_words)
            block = buffer * layout.word_rows
            block += (expert_group * layout.dot_columns + column) * SUBLANES * COPY_PITCH
            for copy in range(layout.num_copies):
                sublane = copy * layout.num_words + word
                at = block + sublane * COPY_PITCH
                self.words[pl.ds(at, SUBLANES), :] = self._aligned_bits(mask, copy)

    def _aligned_bits(self, mask: jax.Array, copy: int) -> jax.Array:
        if self.layout.config.operand_dtype == "int8":
            return mask
        # This copy's bits, 0..3 or 4..7 of every byte, go to bits 3..6.
        if copy * self.layout.num_words < 4:
            return jax.lax.shift_left(mask, jnp.full_like(mask, 3))
        return jax.lax.shift_right_logical(mask, jnp.full_like(mask, 1))

    def multiply(
        self,
        selector: jax.Array,
        row: jax.Array,
        group: jax.Array | int,
        first_layer: int,
        expert_group: int,
        buffer: int,
    ) -> None:
        """Adds the counts of some layers of a group to the accumulator, from `row` on."""
        layout = self.layout
        operand_dtype = jnp.dtype(layout.config.operand_dtype)
        columns = []
        for column in range(layout.dot_columns):
            block = buffer * layout.word_rows
            block += (expert_group * layout.dot_columns + column) * SUBLANES * COPY_PITCH
            rows = []
            for layer in range(first_layer, first_layer + layout.layers_per_dot):
                words = self.words[pl.ds(block + layer, SUBLANES, stride=COPY_PITCH), :]
                rows += [pltpu.bitcast(words & mask, operand_dtype) for mask in self.bit_masks]
            columns.append(jnp.concatenate(rows, axis=0))
        one_hot = jnp.concatenate(columns, axis=1)
        counts = jax.lax.dot_general(
            selector,
            one_hot,
            (((1,), (1,)), ((), ())),
            preferred_element_type=self.accumulator.dtype,
        )
        for index in range(layout.layers_per_dot):
            layer = group * SUBLANES + first_layer + index
            at = layout.accumulator_row(expert_group) + layer * layout.pitch
            at += row - self.first_tile_row
            part = counts[:, index * layout.group_rows : (index + 1) * layout.group_rows]
            self.accumulator[pl.ds(at, layout.window_rows), : layout.group_rows] += part

    def products(self) -> list[tuple[int, int]]:
        """(first layer, expert group) of the products of eight layers."""
        return [
            (first_layer, expert_group)
            for first_layer in range(0, SUBLANES, self.layout.layers_per_dot)
            for expert_group in range(self.layout.num_expert_groups)
        ]

    def run_windows(self, dot: int, first_window: int) -> None:
        """All windows of a product from `first_window` on, in little code."""
        first, last = self.row_bounds(dot)

        def window(index: jax.Array, carry: None) -> None:
            row = first + index * self.layout.window_rows
            selector = self.selector(dot, row)

            def layer_group(group: jax.Array, carry: None) -> None:
                for column in range(self.layout.dot_columns):
                    self.build_words(dot, group, column, 0)
                for first_layer, expert_group in self.products():
                    self.multiply(selector, row, group, first_layer, expert_group, 0)
                return carry

            return jax.lax.fori_loop(0, self.layout.num_layer_groups, layer_group, carry)

        num_windows = (last - first) // self.layout.window_rows + 1
        jax.lax.fori_loop(first_window, num_windows, window, None)

    def run_first_windows(self) -> None:
        """The first window of every product, as one software pipeline.

        While the matrix unit works on eight layers, the vector unit builds the words of
        the next eight.
        """
        layout = self.layout
        last_row = self.first_tile_row + layout.tile_rows - 1
        stages = [
            (dot, group)
            for dot in range(layout.dots_per_step)
            for group in range(layout.num_layer_groups)
        ]
        products = self.products()
        selector, row = jnp.zeros(()), self.first_tile_row
        for column in range(layout.dot_columns):
            self.build_words(0, 0, column, 0)
        for at, (dot, group) in enumerate(stages):
            if group == 0:
                # A product without a token in this tile selects nothing; its row is any.
                row = jnp.clip(self.row_bounds(dot)[0], self.first_tile_row, last_row)
                selector = self.selector(dot, row)
            built = 0
            for index, (first_layer, expert_group) in enumerate(products):
                self.multiply(selector, row, group, first_layer, expert_group, at % 2)
                if at + 1 < len(stages):
                    until = (index + 1) * layout.dot_columns // len(products)
                    for column in range(built, until):
                        self.build_words(*stages[at + 1], column, (at + 1) % 2)
                    built = until


def _sublane() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)


def _lane() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)


def histogram_kernel(*refs, layout: Layout) -> None:
    """The kernel's body at one grid step.

    Args:
        *refs: prefetched scalars (`layout.num_prefetched` arrays: first and last row of
            each product, then first and last step of each tile), the ids' blocks
            [layers, K, 128] (column by column, each in parts of K), the tokens' output
            rows [1, tokens], the output tile [tile_rows, L, E], the accumulator
            [accumulator_rows, 128] and two buffers of words [2 * word_rows, 128].
        layout: the static sizes.
    """
    first_rows, last_rows = refs[:2]
    refs = refs[layout.num_prefetched :]
    num_inputs = layout.columns_per_step * layout.num_top_k_blocks
    ids, (blocks, out, accumulator, words) = refs[:num_inputs], refs[num_inputs:]
    tile, step_index = pl.program_id(0), pl.program_id(1)

    @pl.when(step_index == 0)
    def _() -> None:
        _clear(accumulator)

    step = _Step(layout, (tile, step_index), blocks, accumulator, words, (first_rows, last_rows))

    @pl.when(step.has_tokens())
    def _() -> None:
        step.open(ids)
        if layout.config.pipelined:
            step.run_first_windows()
        for dot in range(layout.dots_per_step):
            step.run_windows(dot, 1 if layout.config.pipelined else 0)

    @pl.when(step_index == layout.num_steps - 1)
    def _() -> None:
        _write(layout, accumulator, out)


def _clear(accumulator) -> None:
    rows = SUBLANES * SUBLANES

    def clear(index: jax.Array, carry: None) -> None:
        zeros = jnp.zeros((rows, LANES), accumulator.dtype)
        accumulator[pl.ds(index * rows, rows), :] = zeros
        return carry

    jax.lax.fori_loop(0, accumulator.shape[0] // rows, clear, None)


def _write(layout: Layout, accumulator, out) -> None:
    """Scales, packs and reorders the accumulator into the output tile."""
    spec = layout.spec
    num_words = layout.num_words
    lane = _lane()
    bit = lane // WORD_BITS + num_words * (lane // 4 % SUBLANES // num_words)
    # The lane that holds expert `lane` of a group; lanes past the last expert are not kept.
    source = WORD_BITS * (lane % 8 % num_words)
    source += 4 * (lane % 8 // num_words * num_words + lane // WORD_BITS) + lane // 8 % 4
    source = jnp.minimum(source, LANES - 1)
    is_int8 = layout.config.operand_dtype == "int8"
    # Reciprocals of the values of float8_e4m3fn with just bit 3, 4, 5 or 6 set.
    fold = bit % 4
    scale = jnp.where(fold == 0, 64.0, jnp.where(fold == 1, 32.0, jnp.where(fold == 2, 8.0, 0.5)))

    def write_row(row: jax.Array) -> None:
        for first_layer in range(0, spec.num_layers, layout.out_rows):
            for group in range(layout.num_expert_groups):
                packed = None
                for part in range(layout.counts_per_word):
                    at = layout.accumulator_row(group) + (first_layer + part) * layout.pitch + row
                    stride = layout.counts_per_word * layout.pitch
                    sums = accumulator[pl.ds(at, SUBLANES, stride=stride), :]
                    if is_int8:  # bit 7 of an int8 is -128
                        counts = jax.lax.shift_right_logical(jnp.abs(sums), bit)
                    else:
                        counts = (sums * scale).astype(jnp.int32)
                    counts = counts << (part * 8 * spec.dtype.itemsize)
                    packed = counts if packed is None else packed | counts
                assert packed is not None
                packed = jnp.take_along_axis(packed, source, axis=1)
                if layout.counts_per_word > 1:
                    packed = pltpu.bitcast(packed, spec.dtype)
                layers = min(layout.out_rows, spec.num_layers - first_layer)
                experts = min(GROUP_EXPERTS, spec.num_experts - group * GROUP_EXPERTS)
                out[
                    row,
                    first_layer : first_layer + layers,
                    group * GROUP_EXPERTS : group * GROUP_EXPERTS + experts,
                ] = packed[:layers, :experts]

    rows_per_loop = min(layout.config.rows_per_loop, layout.tile_rows)

    def write_rows(index: jax.Array, carry: None) -> None:
        # The last iteration repeats rows instead of leaving the tile.
        first = jnp.minimum(index * rows_per_loop, layout.tile_rows - rows_per_loop)
        for row in range(rows_per_loop):
            write_row(first + row)
        return carry

    jax.lax.fori_loop(0, -(-layout.tile_rows // rows_per_loop), write_rows, None)
