"""Runs prompts through the reference model and keeps which experts they touched.

Prompts go in groups of as many sequences as one decode step holds: their prefills are packed
into full steps, then all of a group decode together, greedily. The model's step is the same
bit for bit in any company, so grouping changes the time only, never a count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from calibration.captures import PromptCapture
from calibration.prompts import Prompt
from eldr_jax.paged import KvPool
from eldr_jax.runner import MAX_CHUNKS, Chunk, PagedRunner
from serving.signatures.block_rows import BlockCounts


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A prompt on its way through the model.

    Attributes:
        prompt: the prompt.
        block_ids: its KV blocks.
        done: prompt tokens already prefilled.
        last: the token the model produced last.
        prefill: uint32 [L, E] once prefill has ended.
        prefill_parts: experts per step, each [n, L, K].
        decode_parts: experts per decode step, each [1, L, K].
    """

    prompt: Prompt
    block_ids: np.ndarray
    done: int = 0
    last: int = -1
    prefill: np.ndarray | None = None
    prefill_parts: list[np.ndarray] = field(default_factory=list)
    decode_parts: list[np.ndarray] = field(default_factory=list)


def blocks_for(prompts: Sequence[Prompt], num_decode_tokens: int, block_size: int) -> int:
    """KV blocks that the longest group of `prompts` needs."""
    longest = max(len(prompt.token_ids) for prompt in prompts) + num_decode_tokens
    return MAX_CHUNKS * -(-longest // block_size)


def capture_prompts(
    runner: PagedRunner,
    prompts: Sequence[Prompt],
    *,
    num_decode_tokens: int,
    stop_token: int | None,
    min_decode_tokens: int = 1,
) -> Iterator[PromptCapture]:
    """Runs prompts and yields their captures in order.

    Args:
        runner: built with `debug=True` and at least `blocks_for` blocks.
        prompts: what to run.
        num_decode_tokens: decode forward passes per prompt at most.
        stop_token: end-of-text id that ends a prompt's decode early, or None.
        min_decode_tokens: passes before `stop_token` may end it.

    Raises:
        ValueError: a prompt and its decode are longer than the runner's context.
    """
    pool = runner.new_pool()
    for begin in range(0, len(prompts), MAX_CHUNKS):
        group = prompts[begin : begin + MAX_CHUNKS]
        pool, captures = _capture_group(
            runner, pool, group, num_decode_tokens, stop_token, min_decode_tokens
        )
        yield from captures


def _capture_group(
    runner: PagedRunner,
    pool: KvPool,
    group: Sequence[Prompt],
    num_decode_tokens: int,
    stop_token: int | None,
    min_decode_tokens: int,
) -> tuple[KvPool, list[PromptCapture]]:
    config = runner.config
    counts = BlockCounts(
        num_blocks=runner.num_blocks,
        block_size_tokens=runner.block_size,
        num_layers=config.num_layers,
        num_experts=config.num_experts,
    )
    sequences = []
    first_block = 0
    for prompt in group:
        length = len(prompt.token_ids) + num_decode_tokens
        if length > runner.max_context_tokens:
            raise ValueError(
                f"prompt {prompt.prompt_id!r}: {length} tokens with its decode must be <= "
                f"{runner.max_context_tokens}, the runner's context"
            )
        num_blocks = -(-length // runner.block_size)
        blocks = np.arange(first_block, first_block + num_blocks, dtype=np.int32)
        sequences.append(_Sequence(prompt=prompt, block_ids=blocks))
        first_block += num_blocks
    while True:
        pending = [s for s in sequences if s.done < len(s.prompt.token_ids)]
        if not pending:
            break
        pool = _prefill_step(runner, pool, counts, pending)
    running = sequences
    for passes in range(num_decode_tokens):
        running = [s for s in running if passes < min_decode_tokens or s.last != stop_token]
        if not running:
            break
        pool = _decode_step(runner, pool, running)
    return pool, [
        _finish(sequence, config.num_layers, config.num_experts) for sequence in sequences
    ]


def _prefill_step(
    runner: PagedRunner, pool: KvPool, counts: BlockCounts, pending: Sequence[_Sequence]
) -> KvPool:
    """Fills one step with prompt tokens of the first pending sequences."""
    room = runner.token_buckets[-1]
    chunks: list[Chunk] = []
    for sequence in pending[:MAX_CHUNKS]:
        tokens = sequence.prompt.token_ids[sequence.done : sequence.done + room]
        if not len(tokens):
            break
        chunks.append(Chunk(token_ids=tokens, start=sequence.done, block_ids=sequence.block_ids))
        room -= len(tokens)
    pool, result = runner.step(pool, chunks)
    experts = _experts_by_chunk(result.expert_ids, chunks)
    for index, (sequence, chunk) in enumerate(zip(pending, chunks, strict=False)):
        counts.add_chunk(chunk.block_ids, chunk.start, result.counts[index])
        sequence.prefill_parts.append(experts[index])
        sequence.done += len(chunk.token_ids)
        if sequence.done == len(sequence.prompt.token_ids):
            used = -(-sequence.done // runner.block_size)
            sequence.prefill = counts.total(sequence.block_ids[:used])
            sequence.last = int(result.next_tokens[index])
    return pool


def _decode_step(runner: PagedRunner, pool: KvPool, running: Sequence[_Sequence]) -> KvPool:
    chunks = [
        Chunk(
            token_ids=np.array([sequence.last], np.int32),
            start=len(sequence.prompt.token_ids) + len(sequence.decode_parts),
            block_ids=sequence.block_ids,
        )
        for sequence in running
    ]
    pool, result = runner.step(pool, chunks)
    experts = _experts_by_chunk(result.expert_ids, chunks)
    for index, sequence in enumerate(running):
        sequence.decode_parts.append(experts[index])
        sequence.last = int(result.next_tokens[index])
    return pool


def _experts_by_chunk(expert_ids: np.ndarray | None, chunks: Sequence[Chunk]) -> list[np.ndarray]:
    """[L, K, T] ids of a step to [n, L, K] per chunk."""
    if expert_ids is None:
        raise ValueError("the runner must be built with debug=True: captures need expert ids")
    by_token = np.transpose(expert_ids, (2, 0, 1))
    return np.split(by_token, np.cumsum([len(chunk.token_ids) for chunk in chunks])[:-1])


def _finish(sequence: _Sequence, num_layers: int, num_experts: int) -> PromptCapture:
    if sequence.prefill is None:
        raise ValueError(f"prompt {sequence.prompt.prompt_id!r} was not prefilled to its end")
    top_k = sequence.prefill_parts[0].shape[2]
    decode_experts = np.concatenate(
        [np.zeros((0, num_layers, top_k), np.uint32), *sequence.decode_parts]
    )
    decode = np.zeros((num_layers, num_experts), np.uint32)
    layers = np.broadcast_to(np.arange(num_layers)[:, None], decode_experts.shape)
    np.add.at(decode, (layers, decode_experts.astype(np.int64)), 1)
    return PromptCapture(
        prompt_id=sequence.prompt.prompt_id,
        domain=sequence.prompt.domain,
        token_ids=sequence.prompt.token_ids,
        prefill=sequence.prefill,
        decode=decode,
        decode_experts=decode_experts.astype(np.uint32),
        prefill_experts=np.concatenate(sequence.prefill_parts).astype(np.uint32),
    )
