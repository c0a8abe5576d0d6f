"""The store against a plain dict-of-sets model, and its own structure after every step."""

import gc
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.fleet import key_table, prefix_store
from serving.fleet.prefix_store import PrefixStore

TTL_S = 5.0
NUM_TIERS = 2
NUM_COLUMNS = 3


def prompts_of(paths):
    """Chained hashes of token paths: equal hashes mean equal prefixes."""
    nodes: dict[tuple, int] = {}
    rng = np.random.default_rng(7)
    prompts = []
    for path in paths:
        hashes = []
        for end in range(1, len(path) + 1):
            key = tuple(path[:end])
            if key not in nodes:
                nodes[key] = int(rng.integers(1, 1 << 63)) << 1 | 1
            hashes.append(nodes[key])
        prompts.append(np.array(hashes, np.uint64))
    return prompts


# Long enough to matter, alike enough to share: small draws would leave most rules unvisited.
PROMPTS = st.lists(
    st.lists(st.sampled_from([0, 0, 0, 1]), min_size=4, max_size=9), min_size=2, max_size=4
).map(prompts_of)
COLUMN = st.integers(0, NUM_COLUMNS - 1)
PICK = st.integers(0, 1000)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), COLUMN, PICK, PICK, st.integers(0, NUM_TIERS - 1)),
        st.tuples(
            st.just("removed"), COLUMN, st.lists(PICK, min_size=1, max_size=5), st.booleans()
        ),
        st.tuples(st.just("removed_prompt"), COLUMN, PICK),
        st.tuples(st.just("predict"), COLUMN, PICK),
        st.tuples(st.just("retire"), COLUMN),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 6.0])),
        st.tuples(st.just("sweep"), st.sampled_from([1, 3, 1000])),
    ),
    min_size=15,
    max_size=40,
)


class Model:
    """What columns hold: plain sets; `expected` is the specification of `depths`."""

    def __init__(self):
        self.held = [[set() for _ in range(NUM_TIERS)] for _ in range(NUM_COLUMNS)]
        self.predicted = [{} for _ in range(NUM_COLUMNS)]

    def clear(self, column):
        self.held[column] = [set() for _ in range(NUM_TIERS)]
        self.predicted[column] = {}

    def expire(self, now_s):
        self.predicted = [
            {h: at for h, at in pairs.items() if at > now_s - TTL_S} for pairs in self.predicted
        ]

    def expected(self, column, tier, prompt):
        usable = set(self.predicted[column]).union(*self.held[column][: tier + 1])
        return next((d for d, h in enumerate(prompt.tolist()) if h not in usable), len(prompt))


def run(prompts, steps, store, check, limit=1000):
    """Plays steps on the store and the model; `check(got, expected)` after each."""
    everything = np.concatenate(prompts).tolist()
    model = Model()

    def new_column():
        column = store.add_column()
        store.predicted.configure(column, ttl_s=TTL_S, limit=limit)
        return column

    columns = [new_column() for _ in range(NUM_COLUMNS)]
    now_s = 0.0
    for name, *args in steps:
        match name, args:
            case "stored", [c, pick, cut, tier]:
                prompt = prompts[pick % len(prompts)]
                start = cut % len(prompt)
                parent = int(prompt[start - 1]) if start else None
                store.stored(columns[c], tier, parent, prompt[start:])
                model.held[c][tier].update(prompt[start:].tolist())
                if tier == 0:
                    for h in prompt[start:].tolist():
                        model.predicted[c].pop(h, None)
            case (("removed" | "removed_prompt"), [c, picks, *rest]):
                if name == "removed":
                    gone = [everything[p % len(everything)] for p in picks]
                    tiers = (0, 1) if rest[0] else (1,)
                else:
                    gone, tiers = prompts[picks % len(prompts)].tolist(), (0,)
                store.removed(columns[c], tiers, np.array(gone, np.uint64))
                for tier in tiers:
                    model.held[c][tier].difference_update(gone)
                if 0 in tiers:
                    for h in gone:
                        model.predicted[c].pop(h, None)
            case "predict", [c, pick]:
                prompt = prompts[pick % len(prompts)]
                store.predict(columns[c], prompt, now_s)
                fresh = [h for h in prompt.tolist() if h not in model.held[c][0]]
                model.predicted[c].update(dict.fromkeys(fresh, now_s))
            case "retire", [c]:
                store.retire(columns[c])
                columns[c] = new_column()
                model.clear(c)
            case "wait", [seconds]:
                now_s += seconds
                store.expire(now_s)
                model.expire(now_s)
            case "sweep", [rows]:
                store.sweep(rows)
        for prompt in prompts:
            for tier in range(NUM_TIERS):
                depths = store.depths(prompt, tier)
                assert depths[0] == 0
                for c, column in enumerate(columns):
                    check(depths[column], model.expected(c, tier, prompt))
        check_structure(store)
    for column in columns:
        store.retire(column)
    for _ in range(3):
        store.sweep(10_000)
    assert len(store.tree.table) == len(store.predicted) == 0, "what nobody holds is forgotten"


def check_structure(store):
    tree = store.tree
    used = np.flatnonzero(tree.used_at).tolist()
    assert len(used) == len(tree.table) <= tree.table.capacity
    for block in used:
        children = [other for other in used if tree.parent[other] == block]
        assert sorted(tree.children(np.array([block], np.int32)).tolist()) == children
        assert tree.num_children[block] == len(children)
    unused = np.setdiff1d(np.arange(1, len(tree.used_at)), used)
    for plane in (*store.held, *store.reach):
        assert not plane.rows[unused].any(), "a new block must start with an empty row"
    assert not store.predicted.any(unused).any()


def equal(got, expected):
    assert got == expected


def never_more(got, expected):
    assert got <= expected


def with_few(few):
    """Which messages go block by block and which through whole arrays; both must be right."""
    return mock.patch.multiple(prefix_store, FEW=few), mock.patch.multiple(key_table, FEW=few)


@pytest.mark.parametrize("few", [0, key_table.FEW])
@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, steps=STEPS)
def test_equals_the_model(few, prompts, steps):
    store = PrefixStore(max_blocks=200, max_predicted=1000, num_tiers=NUM_TIERS)
    in_store, in_table = with_few(few)
    with in_store, in_table:
        run(prompts, steps, store, equal)


@pytest.mark.parametrize("few", [0, key_table.FEW])
@settings(max_examples=40, deadline=None)
@given(
    prompts=PROMPTS,
    steps=STEPS,
    max_blocks=st.integers(1, 12),
    max_predicted=st.integers(1, 12),
    limit=st.integers(1, 12),
)
def test_full_store_credits_less_never_more(few, prompts, steps, max_blocks, max_predicted, limit):
    store = PrefixStore(max_blocks=max_blocks, max_predicted=max_predicted, num_tiers=NUM_TIERS)
    in_store, in_table = with_few(few)
    with in_store, in_table:
        run(prompts, steps, store, never_more, limit)
    assert store.predicted.num_pairs.max() <= limit


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ragged_depths_of_many_columns(data):
    num_columns = data.draw(st.sampled_from([3, 70, 300]))
    store = PrefixStore(max_blocks=500, max_predicted=10, num_tiers=1)
    columns = [store.add_column() for _ in range(num_columns)]
    prompt = np.random.default_rng(1).integers(1, 1 << 63, 300, dtype=np.uint64)
    depth = data.draw(st.sampled_from([1, 2, 9, 128, 300]))
    kinds = data.draw(st.integers(1, 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    expected = rng.choice(rng.integers(0, depth + 1, kinds), num_columns)
    for column, length in zip(columns, expected.tolist(), strict=True):
        if length:
            store.stored(column, 0, None, prompt[:length])
    assert store.depths(prompt[:depth], 0)[columns].tolist() == expected.tolist()


def test_columns_are_reused_only_after_their_bits_are_gone():
    store = PrefixStore(max_blocks=3000, max_predicted=10, num_tiers=1)
    prompt = np.arange(1, 2001, dtype=np.uint64)
    for _ in range(500):
        column = store.add_column()
        assert store.depths(prompt, 0)[column] == 0
        store.stored(column, 0, None, prompt)
        assert store.depths(prompt, 0)[column] == 2000
        store.retire(column)
    assert store.num_columns <= 256


def test_inner_block_lost_and_found_restores_what_hangs_under_it():
    store = PrefixStore(max_blocks=100, max_predicted=10, num_tiers=1)
    column, other = store.add_column(), store.add_column()
    prompt = np.arange(1, 9, dtype=np.uint64)
    store.stored(column, 0, None, prompt)
    store.stored(other, 0, None, prompt)
    store.removed(column, (0,), prompt[2:3])
    assert store.depths(prompt, 0)[[column, other]].tolist() == [2, 8]
    store.stored(column, 0, 2, prompt[2:3])
    assert store.depths(prompt, 0)[[column, other]].tolist() == [8, 8]


def test_a_block_of_unknown_origin_is_forgotten_with_the_last_under_it():
    """Room is made for a prompt that leads to the block, and then ends before it."""
    store = PrefixStore(max_blocks=2, max_predicted=1, num_tiers=1)
    column = store.add_column()
    store.predicted.configure(column, ttl_s=5.0, limit=1)
    prompt = np.arange(1, 6, dtype=np.uint64)
    store.stored(column, 0, 4, prompt[4:])
    store.predict(column, prompt[:4], 0.0)
    assert store.depths(prompt, 0)[column] <= 1
    store.retire(column)
    for _ in range(3):
        store.sweep(10)
    assert len(store.tree.table) == 0


def test_slower_tier_is_bounded_by_configuration():
    store = PrefixStore(max_blocks=10, max_predicted=10, num_tiers=2)
    with pytest.raises(ValueError, match=r"tier=2 must be in \[0, 2\)"):
        store.stored(store.add_column(), 2, None, np.array([1], np.uint64))


def test_blocks_are_no_python_objects():
    """What the garbage collector walks must not grow with the number of blocks."""
    store = PrefixStore(max_blocks=40_000, max_predicted=20_000, num_tiers=1)
    column = store.add_column()
    store.predicted.configure(column, ttl_s=60.0, limit=20_000)
    rng = np.random.default_rng(0)
    gc.collect()
    before = len(gc.get_objects())
    for step in range(200):
        store.stored(column, 0, None, rng.integers(1, 1 << 63, 100, dtype=np.uint64))
        store.predict(column, rng.integers(1, 1 << 63, 100, dtype=np.uint64), float(step))
    gc.collect()
    assert len(store.tree.table) == 40_000
    assert len(gc.get_objects()) - before < 100
