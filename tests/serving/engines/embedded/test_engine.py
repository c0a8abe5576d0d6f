"""The engine without a device: a pretended model whose "KV" names the prefix it was made from.

Every step checks that each earlier position of a request still holds what belongs there, so a
block given away too early, shared wrongly or written late is seen at once.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.clock import ManualClock
from serving.core.errors import LeaseError, Rejected, WorkerLost
from serving.core.worker import Role
from serving.engines.embedded.config import EmbeddedWorkerConfig
from serving.engines.embedded.engine import Engine
from serving.engines.embedded.generate_request import GenerateSpec
from serving.engines.embedded.hand_over import HandOver
from serving.engines.embedded.kv_transfer import KvServicer
from serving.engines.embedded.sampling import Sampling
from serving.engines.embedded.scheduler import share_budget
from serving.engines.embedded.sequence import (
    Broken,
    Ended,
    FinishReason,
    PullWanted,
    Sequence,
    State,
    TokenMade,
)
from serving.engines.embedded.work import DuplicateRequest, Geometry, KvBlocks, StepOutcome, Work
from serving.proto import embedded_pb2

BLOCK, LAYERS, EXPERTS, VOCAB = 4, 2, 5, 17
SOURCE = HandOver(
    remote_host="h", remote_port=1, remote_block_ids=(0,), remote_request_id="r", lease="l"
)


def name_of(tokens: np.ndarray, position: int) -> int:
    """What the KV at `position` of a sequence must hold."""
    return hash(tuple(tokens[: position + 1].tolist())) & 0x7FFFFFFF


def next_token(tokens: np.ndarray) -> int:
    return (int(tokens[-1]) * 5 + 3 * len(tokens)) % VOCAB


def experts_of(token: int, position: int) -> tuple[int, int]:
    return (token + position) % EXPERTS, (token * 2 + position + 1) % EXPERTS


def prompt_counts(tokens: np.ndarray) -> np.ndarray:
    counts = np.zeros((LAYERS, EXPERTS), np.uint32)
    for position, token in enumerate(tokens.tolist()):
        for layer, expert in enumerate(experts_of(token, position)):
            counts[layer, expert] += 1
    return counts


def spec_of(
    request_id: str,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    hands_over: bool = False,
    pulls: bool = False,
    salt: str = "",
) -> GenerateSpec:
    return GenerateSpec(
        request_id=request_id,
        token_ids=np.array(tokens, np.int32),
        max_tokens=1 if hands_over else max_tokens,
        min_tokens=0,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset({16}),
        sampling=Sampling(),
        stream=True,
        hands_over=hands_over,
        pull=SOURCE if pulls else None,
        cache_salt=salt,
    )


class Pretend:
    """An engine, its pretended device, and what came out for each request."""

    def __init__(self, num_blocks: int, **options) -> None:
        config = EmbeddedWorkerConfig(worker_id="w", role=Role.BOTH, **options)
        self.clock = ManualClock()
        self.max_step_tokens = 16
        geometry = Geometry(
            num_blocks=num_blocks,
            block_size=BLOCK,
            num_layers=LAYERS,
            num_experts=EXPERTS,
            max_step_tokens=self.max_step_tokens,
        )
        self.engine = Engine(config, geometry, clock=self.clock, emit=self._take)
        self.content = np.full((num_blocks, BLOCK), -1, np.int64)
        self.events: dict[str, list] = {}
        self.prompts: dict[str, np.ndarray] = {}

    def _take(self, events) -> None:
        for sink, event in events:
            sink(event)

    def submit(self, spec: GenerateSpec) -> Sequence:
        self.prompts[spec.request_id] = spec.token_ids
        self.events[spec.request_id] = []
        return self.engine.submit(spec, self.events[spec.request_id].append)

    def deliver(self, sequence: Sequence, first_block: int) -> None:
        """Plays the pull: the right KV, in LANDING until the next work."""
        tokens = sequence.spec.token_ids
        num_blocks = -(-len(tokens) // BLOCK) - first_block
        keys = np.full((num_blocks, BLOCK), -1, np.int64)
        counts = np.zeros((num_blocks, LAYERS, EXPERTS), np.uint16)
        for position in range(first_block * BLOCK, len(tokens)):
            block, offset = divmod(position - first_block * BLOCK, BLOCK)
            keys[block, offset] = name_of(tokens, position)
            for layer, expert in enumerate(experts_of(int(tokens[position]), position)):
                counts[block, layer, expert] += 1
        self.engine.deliver(sequence, first_block, KvBlocks(keys=keys, values=keys, counts=counts))

    def begin(self) -> Work:
        work = self.engine.next_work(wait=False)
        assert work is not None
        return work

    def finish(self, work: Work) -> None:
        for landing in work.landings:
            self.content[landing.block_ids] = landing.blocks.keys
            self.engine.landed(landing)
        for reading in work.readings:
            ids = reading.block_ids
            kv = self.content[ids]
            reading.answer.set_result(
                KvBlocks(keys=kv, values=kv, counts=self.engine.counts_of(ids))
            )
        if work.chunks:
            self._run_step(work)

    def _run_step(self, work: Work) -> None:
        assert sum(len(c.token_ids) for c in work.chunks) <= self.max_step_tokens
        assert len(work.chunks) <= 16
        counts, tokens = [], []
        for chunk in work.chunks:
            known = chunk.sequence.token_ids
            end = chunk.start + len(chunk.token_ids)
            for position in range(chunk.start):
                block, offset = divmod(position, BLOCK)
                held = self.content[chunk.block_ids[block], offset]
                assert held == name_of(known, position), "the KV of another prefix"
            first = chunk.start // BLOCK
            rows = np.zeros(((end - 1) // BLOCK - first + 1, LAYERS, EXPERTS), np.uint8)
            for position in range(chunk.start, end):
                block, offset = divmod(position, BLOCK)
                self.content[chunk.block_ids[block], offset] = name_of(known, position)
                for layer, expert in enumerate(experts_of(int(known[position]), position)):
                    rows[block - first, layer, expert] += 1
            counts.append(rows)
            tokens.append(next_token(known[:end]) if chunk.is_last else None)
        started_s = self.engine.busy.begin()
        self.clock.advance(0.01)
        outcome = StepOutcome(
            counts=tuple(counts),
            tokens=tuple(tokens),
            logprobs=(None,) * len(tokens),
            started_s=started_s,
            duration_s=self.engine.busy.end(),
            num_tokens=sum(len(c.token_ids) for c in work.chunks),
            bucket_tokens=16,
            distinct_experts=1.0,
        )
        self.engine.stepped(work.chunks, outcome)

    def run_until_idle(self) -> None:
        for _ in range(1000):
            work = self.begin()
            if not (work.landings or work.readings or work.chunks):
                return
            self.finish(work)
        raise AssertionError("it never comes to rest")

    def tokens_of(self, request_id: str) -> list[int]:
        return [e.token_id for e in self.events[request_id] if isinstance(e, TokenMade)]

    def end_of(self, request_id: str) -> Ended:
        (ended,) = [e for e in self.events[request_id] if isinstance(e, Ended)]
        return ended

    def check_answer(self, spec: GenerateSpec) -> None:
        """A finished request got exactly what the pretended model says."""
        expected = spec.token_ids
        for _ in range(spec.max_tokens):
            expected = np.append(expected, next_token(expected)).astype(np.int32)
            if expected[-1] == 16:
                break
        ended = self.end_of(spec.request_id)
        got = self.tokens_of(spec.request_id)
        wanted = expected[len(spec.token_ids) :].tolist()
        if ended.reason is FinishReason.ABORT:
            assert got == wanted[: len(got)]
            return
        assert got == wanted
        assert (ended.matched_stop == 16) == (wanted[-1] == 16)
        if spec.hands_over:
            assert np.array_equal(ended.counts, prompt_counts(spec.token_ids))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=16), st.integers(16, 64))
@settings(max_examples=60, deadline=None)
def test_the_budget_is_kept_decode_first_then_in_order(pending, max_tokens):
    shares = share_budget(pending, max_tokens=max_tokens)
    assert sum(shares) == min(sum(pending), max_tokens)
    assert all(s == 1 for p, s in zip(pending, shares, strict=True) if p == 1)
    prompts = [(p, s) for p, s in zip(pending, shares, strict=True) if p > 1]
    partial = [i for i, (p, s) in enumerate(prompts) if s < p]
    assert all(s == 0 for _, s in prompts[partial[0] + 1 :]) if partial else True


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happens_answers_are_right_and_nothing_leaks(data):
    pretend = Pretend(
        data.draw(st.integers(6, 14)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_waiting=4,
        lease_s=1.0,
        prefix_cache=data.draw(st.booleans()),
    )
    specs: list[GenerateSpec] = []
    sequences: list[Sequence] = []
    pulls: dict[str, object] = {}
    under_way: Work | None = None
    # Few distinct prompts, so that prefixes repeat.
    stems = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [7] * 8]
    for turn in range(data.draw(st.integers(5, 50))):
        action = data.draw(
            st.sampled_from(
                [
                    "submit",
                    "submit",
                    "begin",
                    "finish",
                    "finish",
                    "abort",
                    "deliver",
                    "time",
                    "lease",
                    "flush",
                ]
            )
        )
        if action == "submit":
            stem = data.draw(st.sampled_from(stems))
            tail = data.draw(st.lists(st.integers(0, 15), max_size=7))
            spec = spec_of(
                f"r{turn}",
                (stem[: data.draw(st.integers(1, 8))] + tail),
                max_tokens=data.draw(st.integers(1, 6)),
                hands_over=data.draw(st.booleans()),
                pulls=data.draw(st.booleans()),
                salt=data.draw(st.sampled_from(["", "", "s"])),
            )
            try:
                sequences.append(pretend.submit(spec))
                specs.append(spec)
            except Rejected:
                pretend.events.pop(spec.request_id)
        elif action == "begin" and under_way is None:
            under_way = pretend.begin()
        elif action == "finish":
            pretend.finish(under_way if under_way is not None else pretend.begin())
            under_way = None
        elif action == "abort" and sequences:
            sequence = data.draw(st.sampled_from(sequences))
            pretend.engine.leave(sequence, keep_lease=data.draw(st.booleans()))
        elif action == "deliver":
            for sequence in sequences:
                if sequence.state is State.PULLING:
                    wanted = pretend.events[sequence.spec.request_id][0]
                    assert isinstance(wanted, PullWanted)
                    pretend.deliver(sequence, wanted.first_block)
                    break
        elif action == "time":
            pretend.clock.advance(0.4)
        elif action == "lease":
            for sequence in sequences:
                lease = sequence.lease
                if lease is None or lease.lease_id in pulls:
                    continue
                try:
                    held = pretend.engine.begin_pull(lease.lease_id, lease.remote_request_id)
                except LeaseError:
                    continue
                kv = pretend.content[list(held.block_ids)].ravel()
                tokens = sequence.spec.token_ids
                for position in range(len(tokens)):
                    assert kv[position] == name_of(tokens, position)
                done = data.draw(st.booleans())
                pulls[lease.lease_id] = done
                pretend.engine.end_pull(held, completed=done)
                break
        elif action == "flush":
            pretend.engine.flush_cache()
    if under_way is not None:
        pretend.finish(under_way)
    for _ in range(200):
        pretend.run_until_idle()
        fetching = [s for s in sequences if s.state is State.PULLING]
        if not fetching and pretend.engine.accounting().num_waiting == 0:
            break
        for sequence in fetching:
            pretend.deliver(sequence, pretend.events[sequence.spec.request_id][0].first_block)
        pretend.clock.advance(2.0)
    for spec in specs:
        pretend.check_answer(spec)
    pretend.clock.advance(2.0)
    now = pretend.engine.accounting()
    assert now.idle
    assert now.blocks_in_use == 0


def test_a_request_that_fits_waits_its_turn_and_nobody_overtakes_it():
    pretend = Pretend(8, max_waiting=3)
    first = spec_of("a", [1] * 20, max_tokens=4)
    big = spec_of("b", [2] * 24, max_tokens=4)
    small = spec_of("c", [3] * 2, max_tokens=1)
    for spec in (first, big, small):
        pretend.submit(spec)
    assert pretend.engine.accounting().num_running == 1
    assert pretend.engine.accounting().num_uncached_waiting_tokens == 20 + 24 + 2
    pretend.run_until_idle()
    for spec in (first, big, small):
        pretend.check_answer(spec)


def test_a_full_queue_refuses_with_the_facts():
    pretend = Pretend(4, max_waiting=1)
    pretend.submit(spec_of("a", [1] * 12))
    pretend.submit(spec_of("b", [2] * 12))
    with pytest.raises(Rejected, match=r"QUEUE_FULL.*1 requests wait.*0 of 4 blocks free"):
        pretend.submit(spec_of("c", [3] * 12))
    pretend.run_until_idle()
    pretend.submit(spec_of("c", [3] * 12))
    pretend.run_until_idle()
    assert pretend.engine.accounting().blocks_in_use == 0


def test_with_no_queue_at_all_only_what_runs_at_once_is_taken():
    pretend = Pretend(4, max_waiting=0)
    pretend.submit(spec_of("a", [1] * 12))
    with pytest.raises(Rejected, match="QUEUE_FULL"):
        pretend.submit(spec_of("b", [2]))
    pretend.run_until_idle()


def test_a_running_id_is_taken_and_an_aborted_one_is_free_at_once():
    pretend = Pretend(8)
    sequence = pretend.submit(spec_of("a", [1] * 4))
    with pytest.raises(DuplicateRequest, match="ids must be unique"):
        pretend.submit(spec_of("a", [1] * 4))
    work = pretend.begin()
    pretend.engine.leave(sequence, keep_lease=False)
    assert sequence.state is State.RUNNING, "its blocks are part of the step under way"
    again = spec_of("a", [1] * 4)
    pretend.submit(again)
    pretend.finish(work)
    assert sequence.state is State.FINISHED
    pretend.run_until_idle()
    pretend.check_answer(again)


def test_a_pulled_prompt_counts_its_last_token_once():
    pretend = Pretend(12)
    spec = spec_of("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=3, pulls=True)
    sequence = pretend.submit(spec)
    pretend.deliver(sequence, 0)
    work = pretend.begin()
    block_ids = sequence.block_ids.copy()
    pretend.finish(work)
    pretend.run_until_idle()
    pretend.check_answer(spec)
    made = np.append(spec.token_ids, pretend.tokens_of("a")[:-1]).astype(np.int32)
    rows = pretend.engine.counts_of(block_ids).sum(axis=0)
    assert np.array_equal(rows, prompt_counts(made))


def test_a_cached_prefix_is_reused_but_never_the_last_token():
    pretend = Pretend(16)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    pretend.submit(spec_of("a", prompt, max_tokens=1))
    pretend.run_until_idle()
    again = pretend.submit(spec_of("b", prompt, max_tokens=1))
    longer = pretend.submit(spec_of("c", [*prompt, 9], max_tokens=1))
    other = pretend.submit(spec_of("d", prompt, max_tokens=1, salt="tenant"))
    pretend.run_until_idle()
    assert [s.num_cached_tokens for s in (again, longer, other)] == [4, 8, 0]


def test_a_failed_step_breaks_its_own_requests_only():
    pretend = Pretend(16, max_num_seqs=1)
    pretend.submit(spec_of("a", [1] * 4))
    waiting = spec_of("b", [2] * 4)
    pretend.submit(waiting)
    work = pretend.begin()
    sequences = [chunk.sequence for chunk in work.chunks]
    pretend.engine.failed(sequences, ValueError("bad"), pool_lost=False)
    (broken,) = pretend.events["a"]
    assert isinstance(broken, Broken)
    assert "ValueError: bad" in str(broken.error)
    pretend.run_until_idle()
    pretend.check_answer(waiting)
    assert pretend.engine.unhealthy == ""


def test_a_lost_pool_takes_leases_and_cache_with_it():
    pretend = Pretend(16, lease_s=9.0)
    pretend.submit(spec_of("a", [1] * 9, hands_over=True))
    pretend.run_until_idle()
    lease = pretend.end_of("a").lease
    pretend.submit(spec_of("b", [2] * 4))
    work = pretend.begin()
    pretend.engine.failed([c.sequence for c in work.chunks], OSError("gone"), pool_lost=True)
    with pytest.raises(LeaseError, match="lost with the worker's KV"):
        pretend.engine.begin_pull(lease.lease_id, lease.remote_request_id)
    now = pretend.engine.accounting()
    assert (now.blocks_in_use, now.blocks_cached, now.leases_open) == (0, 0, 0)


def test_too_many_failures_in_a_row_make_it_unhealthy():
    pretend = Pretend(16, max_step_failures=2)
    for turn in range(2):
        pretend.submit(spec_of(f"r{turn}", [1] * 4))
        work = pretend.begin()
        pretend.engine.failed([c.sequence for c in work.chunks], ValueError("x"), pool_lost=False)
    assert "2 steps failed in a row" in pretend.engine.unhealthy
    assert pretend.engine.next_work() is None
    with pytest.raises(WorkerLost, match="2 steps failed"):
        pretend.submit(spec_of("z", [1]))


def test_the_busy_clock_runs_in_steps_only():
    pretend = Pretend(16)
    pretend.clock.advance(5.0)
    spec = spec_of("a", [1] * 4, max_tokens=3)
    sequence = pretend.submit(spec)
    pretend.run_until_idle()
    assert pretend.engine.busy.now_s() == pytest.approx(0.03)
    assert sequence.arrived_busy_s == 0.0
    assert sequence.first_token_busy_s == pytest.approx(0.01)
    assert sequence.last_token_busy_s == pytest.approx(0.03)
    steps, upcoming = pretend.engine.steps_since(0, 10)
    assert upcoming == 3
    assert [s.kind for s in steps] == ["prefill", "decode", "decode"]
    assert [s.started_s for s in steps] == pytest.approx([0.0, 0.01, 0.02])
    assert pretend.engine.steps_since(2, 10)[0] == steps[2:]
    assert pretend.engine.output_tokens_per_s() == pytest.approx(100.0)


def test_kv_that_lands_for_an_aborted_request_is_not_written():
    pretend = Pretend(4)
    gone = pretend.submit(spec_of("a", [1] * 8, pulls=True))
    pretend.deliver(gone, 0)
    assert gone.state is State.LANDING
    pretend.engine.leave(gone, keep_lease=False)
    heir = spec_of("b", [2] * 12)
    pretend.submit(heir)
    assert pretend.begin().landings == ()
    pretend.run_until_idle()
    pretend.check_answer(heir)


def test_blocks_filled_by_decode_are_found_again_under_their_own_salt_only():
    pretend = Pretend(16)
    first = spec_of("a", [1, 2, 3], max_tokens=7, salt="tenant")
    pretend.submit(first)
    pretend.run_until_idle()
    history = [1, 2, 3, *pretend.tokens_of("a"), 5]
    mine = pretend.submit(spec_of("b", history, salt="tenant"))
    others = pretend.submit(spec_of("c", history))
    assert (mine.num_cached_tokens, others.num_cached_tokens) == (8, 0)
    pretend.run_until_idle()


def test_a_pull_under_way_keeps_its_blocks_past_the_expiry():
    pretend = Pretend(4, lease_s=1.0)
    pretend.submit(spec_of("a", [1] * 8, hands_over=True))
    pretend.run_until_idle()
    lease = pretend.end_of("a").lease
    held = pretend.engine.begin_pull(lease.lease_id, lease.remote_request_id)
    pretend.clock.advance(5.0)
    assert pretend.engine.accounting().blocks_in_use == 2
    pretend.engine.end_pull(held, completed=False)
    assert pretend.engine.accounting().blocks_in_use == 0


def test_requests_that_arrive_together_share_what_the_first_computes():
    pretend = Pretend(32)
    stem = [1, 2, 3, 4] * 5
    specs = [spec_of(f"r{i}", [*stem, 5 + i], max_tokens=3) for i in range(3)]
    sequences = [pretend.submit(spec) for spec in specs]
    in_use = pretend.engine.accounting().blocks_in_use
    pretend.finish(pretend.begin())
    pretend.finish(pretend.begin())
    assert [s.num_cached_tokens for s in sequences] == [0, 16, 16]
    assert pretend.engine.accounting().blocks_in_use == in_use - 8
    pretend.run_until_idle()
    for spec in specs:
        pretend.check_answer(spec)


def test_a_pull_broken_off_leaves_the_lease_for_another_try():
    pretend = Pretend(8)
    pretend.submit(spec_of("a", [1] * 9, hands_over=True))
    pretend.run_until_idle()
    lease = pretend.end_of("a").lease
    request = embedded_pb2.PullRequest(
        remote_request_id=lease.remote_request_id, lease=lease.lease_id, block_ids=lease.block_ids
    )

    async def pull(num_wanted: int) -> list[int]:
        stream = KvServicer(pretend.engine, BLOCK).Pull(request, None)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        pretend.finish(pretend.begin())
        indices = [(await first).index]
        while len(indices) < num_wanted:
            indices.append((await anext(stream)).index)
        if num_wanted == 3:
            assert [block async for block in stream] == []
        await stream.aclose()
        return indices

    assert asyncio.run(pull(2)) == [0, 1]
    assert pretend.engine.accounting().leases_open == 1
    assert asyncio.run(pull(3)) == [0, 1, 2]
    now = pretend.engine.accounting()
    assert (now.leases_open, now.blocks_in_use) == (0, 0)
