import numpy as np
import pytest

from serving.fleet.block_tree import ROOT, UNKNOWN, BlockTree


@pytest.fixture
def released():
    return []


def make_tree(capacity, released, held=None):
    """A tree whose blocks are held by somebody unless `held` lists those that are."""
    return BlockTree(
        capacity,
        is_empty=lambda ids: ~np.isin(ids, list(held)) if held is not None else ids < 0,
        on_release=lambda ids: released.extend(ids.tolist()),
    )


def hashes(*values):
    return np.array(values, np.uint64)


def known(tree):
    return sorted(int(tree.table.keys[i]) for i in np.flatnonzero(tree.used_at))


def test_chain_links_and_finds_again(released):
    tree = make_tree(10, released)
    first = tree.chain(None, hashes(1, 2, 3), 1)
    again = tree.chain(None, hashes(1, 2, 30), 2)
    assert first.ids[:2].tolist() == again.ids[:2].tolist()
    assert tree.parent[first.ids[0]] == ROOT
    assert tree.parent[first.ids[2]] == first.ids[1]
    assert sorted(tree.children(first.ids[1:2]).tolist()) == sorted(
        [int(first.ids[2]), int(again.ids[2])]
    )
    assert (first.num_refused, again.num_refused) == (0, 0)


def test_parent_seen_later_is_linked(released):
    tree = make_tree(10, released)
    tail = tree.chain(2, hashes(3, 4), 1)
    assert tree.parent[tail.parent] == UNKNOWN
    head = tree.chain(None, hashes(1, 2), 2)
    assert head.ids[1] == tail.parent
    assert tree.parent[tail.parent] == head.ids[0]
    assert tree.children(head.ids[1:]).tolist() == [int(tail.ids[0])]


def test_clash_of_parents_cuts_the_chain(released):
    tree = make_tree(10, released)
    tree.chain(None, hashes(1, 2, 3), 1)
    for parent, chain in ((None, hashes(7, 2, 3)), (None, hashes(2, 3)), (9, hashes(1, 2))):
        result = tree.chain(parent, chain, 2)
        assert result.num_refused > 0
        assert 2 not in tree.table.keys[result.ids]


def test_ring_is_refused(released):
    tree = make_tree(10, released)
    tree.chain(5, hashes(6, 7), 1)
    ring = tree.chain(7, hashes(5), 2)
    assert ring.num_refused == 1
    assert tree.parent[tree.table.find_one(5)] == UNKNOWN


def test_oldest_leaf_goes_first_and_takes_its_private_chain(released):
    tree = make_tree(6, released)
    tree.chain(None, hashes(1, 2, 3), 1)
    tree.chain(None, hashes(1, 4, 5), 2)
    tree.chain(None, hashes(8, 9), 3)
    assert known(tree) == [1, 2, 4, 5, 8, 9], "3 is the leaf of the oldest prompt"
    tree.chain(None, hashes(1, 4), 4)
    tree.chain(None, hashes(20, 21, 22), 5)
    assert known(tree) == [1, 4, 8, 20, 21, 22], "2, 5 and 9; 4 is younger than its child was"
    tree.chain(None, hashes(30, 31), 6)
    assert known(tree) == [1, 20, 21, 22, 30, 31], "8, then 4, a leaf by now; 1 is as young"
    assert tree.num_evicted == len(released) == 6


def test_private_ancestors_go_with_their_leaf(released):
    tree = make_tree(8, released)
    tree.chain(None, hashes(1, 2, 3, 4), 1)
    tree.chain(None, hashes(5, 6, 7, 8), 2)
    tree.chain(None, hashes(9, 10, 11), 3)
    assert known(tree) == [1, 5, 6, 7, 8, 9, 10, 11]


def test_chain_longer_than_the_tree_keeps_its_head(released):
    tree = make_tree(4, released)
    chain = tree.chain(None, hashes(*range(1, 11)), 1)
    assert tree.table.keys[chain.ids].tolist() == [1, 2, 3, 4]
    assert chain.num_refused == 6
    assert tree.chain(99, hashes(100), 2).num_refused == 0
    assert len(tree.table) <= 4


def test_prune_takes_empty_ancestors_but_nothing_held(released):
    held = set()
    tree = make_tree(10, released, held)
    chain = tree.chain(None, hashes(1, 2, 3, 4), 1)
    side = tree.chain(2, hashes(7), 2)
    held.update(side.ids.tolist())
    tree.prune(chain.ids)
    assert known(tree) == [1, 2, 7]
    held.clear()
    tree.prune(side.ids)
    assert known(tree) == []


def test_eviction_leaves_no_block_of_unknown_origin_behind(released):
    held = set()
    tree = make_tree(4, released, held)
    held.update(tree.chain(9, hashes(10), 1).ids.tolist())
    tree.chain(None, hashes(1, 2, 3), 2)
    assert known(tree) == [1, 2, 3]


def test_children_of_a_popular_block(released):
    tree = make_tree(400, released)
    top = tree.chain(None, hashes(1), 1).ids
    expected = [int(tree.chain(1, hashes(h), h).ids[0]) for h in range(2, 302)]
    assert sorted(tree.children(top).tolist()) == sorted(expected)


def test_large_tree_evicts_old_leaves_from_a_sample(released):
    tree = make_tree(5000, released)
    for tick in range(1, 5001):
        tree.chain(None, hashes(tick), tick)
    tree.chain(None, hashes(*range(10_001, 10_101)), 6000)
    assert len(tree.table) == 5000
    assert len(released) == 100
    assert max(released) <= 2500, "ids were handed out in age order; only the older half may go"
