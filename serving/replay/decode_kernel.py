"""Decode workers between events: steps run until a given time, in one call for the whole fleet.

Nobody joins or leaves a batch between two events of the replay except by ending, so workers can
be advanced through any number of steps at once. A worker stops early, for its owner
(replay/decode.py) to act, when a slot came free that somebody waits for, or when the next
step does not fit its KV.

The loop is written once; numba compiles it, or the interpreter runs it (replay/compiled.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serving.replay.compiled import inlined, jit, layers_s, row_of

RUNNING, FREED, OUT_OF_KV = 0, 1, 2
"""What a worker waits for: nothing, admission of waiting requests, a preemption."""

FIRST, FINISHED = 0, 1
"""Kinds of output: a request's first decode token, its last one."""

LAST_S = 1e300
NUM_BINS = 1200
BINS_PER_FACTOR = 100.0
LOWEST_S = 1e-4
"""Step times are counted in bins of 1% from 0.1 ms up."""


class Workers(NamedTuple):
    """One row per decode worker.

    Attributes:
        step_end_s: float64 [W], when the step under way ends; inf when none is.
        factor: float64 [W], slowness (1 is as modelled).
        num_active: int64 [W], requests in the step under way: the first slots.
        num_pending: int64 [W], requests that join at the next step: the slots behind.
        slots: int64 [W, S], requests.
        kv_blocks: int64 [W], held by active and pending requests.
        kv_limit: int64 [W].
        someone_waits: int64 [W], 1 stops the worker when a request ends.
        stopped: int64 [W], see RUNNING.
        resume_s: float64 [W], when it stopped.
        extra_s: float64 [W], work that the next step carries (recomputed prompts).
        busy_s, modelled_s: float64 [W], step time taken, and as modelled.
    """

    step_end_s: np.ndarray
    factor: np.ndarray
    num_active: np.ndarray
    num_pending: np.ndarray
    slots: np.ndarray
    kv_blocks: np.ndarray
    kv_limit: np.ndarray
    someone_waits: np.ndarray
    stopped: np.ndarray
    resume_s: np.ndarray
    extra_s: np.ndarray
    busy_s: np.ndarray
    modelled_s: np.ndarray


class Requests(NamedTuple):
    """One row per request of the run.

    Attributes:
        row_start, num_rows: int64 [N], its prompt's rows in the bank.
        key: uint64 [N], of its draws.
        produced, target: int64 [N], output tokens so far and in the end.
        context: int64 [N], tokens whose KV it holds.
        first_s, last_s: float64 [N], when its first and last decode token came; nan before.
    """

    row_start: np.ndarray
    num_rows: np.ndarray
    key: np.ndarray
    produced: np.ndarray
    target: np.ndarray
    context: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray


class Times(NamedTuple):
    """What a step takes.

    Attributes:
        rows: uint64 [R, L, Wd], the bank's.
        masks: uint64 [ranks, Wd], see `compiled.layers_s`.
        moe_s: float64 [S + 1, E + 1], a MoE layer by requests and distinct experts.
        rest_s: float64 [S + 1], everything but MoE and attention over context, by requests.
        mean_s: float64 [S + 1], all MoE layers by requests at the mean number of experts.
        mean_experts: float64 [S + 1], that number, over all layers.
        context_s: float64 [1], per context token.
        block_tokens: int64 [1].
        realised: int64 [1], 0 takes the mean number of experts in place of the rows.
    """

    rows: np.ndarray
    masks: np.ndarray
    moe_s: np.ndarray
    rest_s: np.ndarray
    mean_s: np.ndarray
    mean_experts: np.ndarray
    context_s: np.ndarray
    block_tokens: np.ndarray
    realised: np.ndarray


class Output(NamedTuple):
    """What happened, in the order it was found: sort by time before use.

    Attributes:
        count: int64 [1].
        kind, request: int64 [capacity].
        time_s: float64 [capacity].
    """

    count: np.ndarray
    kind: np.ndarray
    request: np.ndarray
    time_s: np.ndarray


class Tally(NamedTuple):
    """Sums over the steps that began inside a window.

    Attributes:
        window_s: float64 [2].
        sums: float64 [5]: steps, tokens, tokens * distinct experts (over all layers), seconds,
            tokens * seconds.
        bins: float64 [NUM_BINS], tokens by step time.
    """

    window_s: np.ndarray
    sums: np.ndarray
    bins: np.ndarray


class Scratch(NamedTuple):
    """Room to work in: `chosen` int64 [S], `words` uint64 [L, Wd], `found` int64 [1]."""

    chosen: np.ndarray
    words: np.ndarray
    found: np.ndarray


@inlined
def start_step(worker, now_s, workers, requests, times, tally, scratch):
    """Begins the worker's next step at `now_s`, pending requests included."""
    num = workers.num_active[worker] + workers.num_pending[worker]
    workers.num_active[worker] = num
    workers.num_pending[worker] = 0
    workers.stopped[worker] = RUNNING
    if num == 0:
        workers.step_end_s[worker] = np.inf
        return
    block = times.block_tokens[0]
    more_blocks = 0
    context = 0
    for i in range(num):
        held = requests.context[workers.slots[worker, i]]
        context += held
        if held % block == 0:
            more_blocks += 1
    if workers.kv_blocks[worker] + more_blocks > workers.kv_limit[worker] and num > 1:
        workers.stopped[worker] = OUT_OF_KV
        workers.resume_s[worker] = now_s
        workers.step_end_s[worker] = np.inf
        return
    workers.kv_blocks[worker] += more_blocks
    if times.realised[0] != 0:
        for i in range(num):
            request = workers.slots[worker, i]
            scratch.chosen[i] = row_of(
                requests.key[request],
                requests.produced[request],
                requests.row_start[request],
                requests.num_rows[request],
            )
        moe_s = layers_s(
            times.rows,
            scratch.chosen,
            num,
            times.masks,
            times.moe_s,
            scratch.words,
            scratch.found,
        )
        experts = float(scratch.found[0])
    else:
        moe_s = times.mean_s[num]
        experts = times.mean_experts[num]
    modelled_s = times.rest_s[num] + moe_s + times.context_s[0] * context
    taken_s = (modelled_s + workers.extra_s[worker]) * workers.factor[worker]
    workers.busy_s[worker] += taken_s
    workers.modelled_s[worker] += modelled_s + workers.extra_s[worker]
    workers.extra_s[worker] = 0.0
    workers.step_end_s[worker] = now_s + taken_s
    if tally.window_s[0] <= now_s < tally.window_s[1]:
        tally.sums[0] += 1.0
        tally.sums[1] += num
        tally.sums[2] += num * experts
        tally.sums[3] += taken_s
        tally.sums[4] += num * taken_s
        place = int(np.log(taken_s / LOWEST_S) * BINS_PER_FACTOR)
        tally.bins[min(max(place, 0), NUM_BINS - 1)] += num


@inlined
def end_step(worker, workers, requests, times, out):
    """Gives every active request its token; those that are done leave. Returns how many left."""
    now_s = workers.step_end_s[worker]
    num = workers.num_active[worker]
    total = num + workers.num_pending[worker]
    block = times.block_tokens[0]
    kept = 0
    for i in range(num):
        request = workers.slots[worker, i]
        requests.produced[request] += 1
        requests.context[request] += 1
        if np.isnan(requests.first_s[request]):
            requests.first_s[request] = now_s
            place = out.count[0]
            out.kind[place], out.request[place], out.time_s[place] = FIRST, request, now_s
            out.count[0] = place + 1
        if requests.produced[request] >= requests.target[request]:
            requests.last_s[request] = now_s
            place = out.count[0]
            out.kind[place], out.request[place], out.time_s[place] = FINISHED, request, now_s
            out.count[0] = place + 1
            workers.kv_blocks[worker] -= (requests.context[request] + block - 1) // block
        else:
            workers.slots[worker, kept] = request
            kept += 1
    for i in range(num, total):
        workers.slots[worker, kept + i - num] = workers.slots[worker, i]
    workers.num_active[worker] = kept
    return num - kept


@jit
def advance(until_s, workers, requests, times, out, tally, scratch):
    """Runs every step that ends by `until_s`, on all workers.

    Returns:
        How many workers stopped for their owner.
    """
    num_stopped = 0
    until_s = min(until_s, LAST_S)  # idle workers end their step never, which is not before
    for worker in range(len(workers.step_end_s)):
        while workers.step_end_s[worker] <= until_s:
            now_s = workers.step_end_s[worker]
            left = end_step(worker, workers, requests, times, out)
            if left > 0 and workers.someone_waits[worker] != 0:
                workers.stopped[worker] = FREED
                workers.resume_s[worker] = now_s
                workers.step_end_s[worker] = np.inf
            else:
                start_step(worker, now_s, workers, requests, times, tally, scratch)
        if workers.stopped[worker] != RUNNING:
            num_stopped += 1
    return num_stopped
