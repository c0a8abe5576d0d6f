"""Where the TPU kernel keeps what: sizes and bit positions, as plain integers.

A token's expert set becomes one bit mask per layer: expert e is bit e % 32 of word
e // 32. A group of up to 128 experts is up to four words. For the matrix unit the
words of one layer lie in the eight sublanes of a register, each word repeated to fill
them:

    sublane u = copy * num_words + word

Masking one bit in every byte of such a register and reading it as bytes gives 32 rows
of the one-hot matrix at once (`byte` is the byte's place in its 32-bit word):

    row = 32 * step + 4 * u + byte      holds      bit = 8 * byte + num_words * copy + step

because the copies of a word take different bits: step + num_words * copy runs through
the eight bits of a byte.
"""

from dataclasses import dataclass

from kernels.expert_histogram.arg_specs import HistogramSpec
from kernels.expert_histogram.errors import HistogramArgumentError
from kernels.expert_histogram.tuned import LANES, TpuConfig

SUBLANES = 8
WORD_BITS = 32
GROUP_EXPERTS = 128
COPY_PITCH = 9
"""Rows between the copies of a word in memory: odd, so that a strided load is one load."""
MAX_WINDOW_ROWS = 256


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Static sizes of one compiled kernel.

    Attributes:
        spec: the call.
        config: the chip's block sizes.
        num_layer_groups: groups of eight layers.
        num_expert_groups: groups of 128 experts.
        num_words: words of an expert group, 1, 2 or 4.
        top_k_block: K rows of one input block.
        num_top_k_blocks: input blocks over K.
        dot_columns: groups of 128 tokens that one product sums over.
        dots_per_step: products per grid step.
        num_steps: grid steps over the tokens.
        window_rows: output rows that one product fills.
        tile_rows: output rows of one tile; all of them unless memory is short.
        num_tiles: tiles of output rows.
        pitch: accumulator rows of one layer, odd.
        out_rows: layers of one stored output register.
    """

    spec: HistogramSpec
    config: TpuConfig
    num_layer_groups: int
    num_expert_groups: int
    num_words: int
    top_k_block: int
    num_top_k_blocks: int
    dot_columns: int
    dots_per_step: int
    num_steps: int
    window_rows: int
    tile_rows: int
    num_tiles: int
    pitch: int
    out_rows: int

    @property
    def num_prefetched(self) -> int:
        """Scalar arrays: rows of each product, and steps of each tile where there are several."""
        return 2 if self.num_tiles == 1 else 4

    @property
    def num_copies(self) -> int:
        """Times that a word is repeated in the sublanes."""
        return SUBLANES // self.num_words

    @property
    def group_rows(self) -> int:
        """One-hot rows of a layer and expert group: 32, 64 or 128."""
        return WORD_BITS * self.num_words

    @property
    def layers_per_dot(self) -> int:
        """Layers whose rows fill the matrix unit's 256 columns."""
        return min(SUBLANES, 256 // self.group_rows)

    @property
    def columns_per_step(self) -> int:
        """Groups of 128 tokens per grid step."""
        return self.dot_columns * self.dots_per_step

    @property
    def dot_tokens(self) -> int:
        """Tokens that one product sums over."""
        return self.dot_columns * LANES

    @property
    def num_dots(self) -> int:
        """Products per layer over all tokens."""
        return self.num_steps * self.dots_per_step

    @property
    def padded_tokens(self) -> int:
        """Tokens of all grid steps."""
        return self.num_dots * self.dot_tokens

    @property
    def word_rows(self) -> int:
        """Memory rows of one buffer of words."""
        return self.num_expert_groups * self.dot_columns * SUBLANES * COPY_PITCH

    @property
    def accumulator_rows(self) -> int:
        """Accumulator rows, with the slack that the last strided load touches."""
        layers = self.num_expert_groups * self.num_layer_groups * SUBLANES
        slack = round_up(self.spec.num_layers, self.out_rows) - self.spec.num_layers
        return round_up((layers + slack) * self.pitch, SUBLANES * SUBLANES)

    @property
    def counts_per_word(self) -> int:
        """Counts of the output dtype in 32 bits."""
        return 4 // self.spec.dtype.itemsize

    def accumulator_row(self, expert_group: int) -> int:
        """First accumulator row of an expert group."""
        return expert_group * self.num_layer_groups * SUBLANES * self.pitch


def layout_of(spec: HistogramSpec, config: TpuConfig) -> Layout:
    """Sizes of the kernel for a call.

    Args:
        spec: the call.
        config: the chip's block sizes.

    Returns:
        The layout, with as many output rows per tile as the memory holds.

    Raises:
        HistogramArgumentError: not even eight output rows fit into `config.vmem_bytes`.
    """
    num_columns = -(-spec.num_tokens // LANES)
    dot_columns = min(config.dot_columns, num_columns)
    dots_per_step = min(config.dots_per_step, -(-num_columns // dot_columns))
    tokens_per_step = dot_columns * dots_per_step * LANES
    num_steps = -(-spec.num_tokens // tokens_per_step)
    top_k_block = {1: 1, 2: 2, 3: 4, 4: 4}.get(spec.top_k, SUBLANES)
    window_rows = _window_rows(spec, dot_columns * LANES)
    counts_per_word = 4 // spec.dtype.itemsize
    num_layer_groups = -(-spec.num_layers // SUBLANES)
    num_expert_groups = -(-spec.num_experts // GROUP_EXPERTS)
    out_rows = SUBLANES * counts_per_word

    acc_layers = num_expert_groups * num_layer_groups * SUBLANES + out_rows
    out_bytes = round_up(spec.num_layers, out_rows) * num_expert_groups * LANES
    bytes_per_row = acc_layers * LANES * 4 + 2 * out_bytes * spec.dtype.itemsize
    top_k_rows = round_up(spec.top_k, top_k_block)
    input_bytes = 2 * num_layer_groups * SUBLANES * top_k_rows * tokens_per_step * 4
    free_bytes = config.vmem_bytes - input_bytes - acc_layers * LANES * 4 * (window_rows + 1)
    fitting_rows = free_bytes // bytes_per_row
    if fitting_rows < SUBLANES:
        raise HistogramArgumentError(
            f"vmem_bytes={config.vmem_bytes} holds {fitting_rows} rows of the output; "
            f"num_layers={spec.num_layers} and num_experts={spec.num_experts} need 8 at least"
        )
    num_tiles = -(-spec.num_blocks // fitting_rows)
    tile_rows = -(-spec.num_blocks // num_tiles)
    return Layout(
        spec=spec,
        config=config,
        num_layer_groups=num_layer_groups,
        num_expert_groups=num_expert_groups,
        num_words=_num_words(spec.num_experts),
        top_k_block=top_k_block,
        num_top_k_blocks=-(-spec.top_k // top_k_block),
        dot_columns=dot_columns,
        dots_per_step=dots_per_step,
        num_steps=num_steps,
        window_rows=window_rows,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        pitch=(tile_rows + window_rows) | 1,
        out_rows=out_rows,
    )


def _num_words(num_experts: int) -> int:
    words = -(-min(num_experts, GROUP_EXPERTS) // WORD_BITS)
    return {1: 1, 2: 2}.get(words, 4)


def _window_rows(spec: HistogramSpec, dot_tokens: int) -> int:
    """Rows that most products touch: a long request's, or the step's mean if denser."""
    one_request = dot_tokens // spec.block_size + 2
    mean = -(-spec.num_blocks * dot_tokens // max(spec.num_tokens, dot_tokens))
    rows = min(max(one_request, mean), spec.num_blocks, MAX_WINDOW_ROWS)
    return round_up(rows, SUBLANES)
