import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.experts import MIN_KEEP
from serving.fleet.survival import SurvivalRows

SIZE = 12


def keeps(num, seed=0):
    draw = np.random.default_rng(seed)
    return [np.maximum(draw.random(SIZE), MIN_KEEP).astype(np.float32) for _ in range(num)]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=60),
    prior=st.booleans(),
)
def test_rows_are_the_products_of_whoever_is_there(steps, prior):
    rows = SurvivalRows(SIZE, layer_scale=2.0)
    rows.arrange(("a", "b", "c"))
    profile = np.linspace(0.0, 1.0, SIZE, dtype=np.float32)
    if prior:
        rows.set_profiles({"b": profile})
    pool, there = keeps(10), [[], [], []]
    for which, what in steps:
        if what in there[which]:
            there[which].remove(what)
            rows.remove("abc"[which], pool[what])
        else:
            there[which].append(what)
            rows.add("abc"[which], pool[what])
    state = rows.rows()
    for which in range(3):
        product = np.prod([pool[i] for i in there[which]], axis=0, dtype=np.float64)
        product = np.broadcast_to(product, SIZE)
        np.testing.assert_allclose(state.survival[which], product, rtol=1e-4, atol=1e-9)
        assert state.survival_sum[which] == pytest.approx(product.sum(), rel=1e-4)
        assert state.num_modelled[which] == len(there[which])
        if prior:
            factor = np.maximum(1 - profile, MIN_KEEP) ** 8 if which == 1 else np.ones(SIZE)
            np.testing.assert_allclose(
                state.survival_prior[which], product * factor, rtol=1e-3, atol=1e-9
            )
    assert (state.survival_prior is not None) == prior


def test_scale_follows_who_is_there_not_only_the_region():
    rows = SurvivalRows(SIZE, layer_scale=2.0, pseudo_members=2.0)
    rows.arrange(("a", "b"))
    rows.set_profiles({"a": np.zeros(SIZE, np.float32)}, {"a": 3.0})
    pool = keeps(3)
    rows.add("a", pool[0], 5.0)
    rows.add("a", pool[1], 4.0)
    rows.add("b", pool[2])  # nobody knows its scale: the region's stands
    state = rows.rows()
    np.testing.assert_allclose(state.layer_scale, [(2 * 3.0 + 5.0 + 4.0) / 4, 2.0])
    np.testing.assert_allclose(state.total_experts, state.layer_scale * SIZE)
    rows.arrange(("c", "b", "a"))
    np.testing.assert_allclose(rows.rows().layer_scale, [2.0, 2.0, 15.0 / 4])
    rows.remove("a", pool[0], 5.0)
    np.testing.assert_allclose(rows.rows().layer_scale[2], (2 * 3.0 + 4.0) / 3)
    # New regions, and then nobody: exactly the region's.
    rows.set_profiles({"a": np.zeros(SIZE, np.float32)}, {"a": 2.5})
    np.testing.assert_allclose(rows.rows().layer_scale[2], (2 * 2.5 + 4.0) / 3)
    rows.remove("a", pool[1], 4.0)
    assert rows.rows().layer_scale[2] == 2.5


def test_a_million_joins_and_leaves_do_not_drift():
    rows = SurvivalRows(SIZE)
    rows.arrange(("a",))
    pool = keeps(8)
    rows.add("a", pool[0])
    for i in range(20_000):
        rows.add("a", pool[1 + i % 7])
        rows.remove("a", pool[1 + i % 7])
    np.testing.assert_allclose(rows.rows().survival[0], pool[0], rtol=1e-5)
    rows.remove("a", pool[0])
    assert (rows.rows().survival[0] == 1.0).all()


def test_many_certain_experts_do_not_underflow_for_good():
    rows = SurvivalRows(SIZE)
    rows.arrange(("a",))
    certain, mild = np.full(SIZE, MIN_KEEP, np.float32), keeps(1)[0]
    rows.add("a", mild)
    for _ in range(40):
        rows.add("a", certain)
    assert (rows.rows().survival[0] == 0.0).all()
    for _ in range(40):
        rows.remove("a", certain)
    np.testing.assert_allclose(rows.rows().survival[0], mild, rtol=1e-5)


def test_rows_move_with_the_fleet():
    rows = SurvivalRows(SIZE)
    rows.arrange(("a", "b"))
    pool = keeps(2)
    rows.set_profiles({"b": np.full(SIZE, 0.5, np.float32)}, {"b": 3.0})
    rows.add("a", pool[0])
    rows.add("b", pool[1])
    rows.arrange(("c", "b"))
    state = rows.rows()
    np.testing.assert_allclose(state.survival, np.stack([np.ones(SIZE), pool[1]]))
    np.testing.assert_allclose(state.survival_prior[1], pool[1] * 0.5**8, rtol=1e-5)
    assert state.layer_scale.tolist() == [1.0, 3.0]
    assert state.total_experts.tolist() == [12.0, 36.0]
    rows.remove("a", pool[0])  # a worker that left
    rows.remove("b", pool[1])
    assert (rows.rows().survival == 1.0).all()


def test_a_drifting_profile_moves_towards_what_is_placed():
    rows = SurvivalRows(SIZE, drift_rate=0.5, pseudo_members=1.0)
    rows.arrange(("a",))
    rows.set_profiles({"a": np.zeros(SIZE, np.float32)})
    keep = np.full(SIZE, 0.25, np.float32)
    rows.add("a", keep)
    # Profile 0.5 * 0.75, so the prior keeps 0.625 of what the request keeps.
    np.testing.assert_allclose(rows.rows().survival_prior[0], 0.25 * 0.625, rtol=1e-5)


def test_requests_of_other_routers_count_as_the_regions_own():
    rows = SurvivalRows(SIZE, pseudo_members=2.0)
    rows.arrange(("a", "b", "c"))
    profile = np.linspace(0.0, 0.9, SIZE, dtype=np.float32)
    rows.set_profiles({"a": profile, "b": profile[::-1].copy()})
    mine, later = keeps(2)
    rows.add("a", mine)
    inflight = np.array([4.0, 0.0, 5.0])
    plain, seen = rows.rows(), rows.rows(inflight)
    assert rows.rows(np.array([1.0, 0.0, 0.0])) is plain
    np.testing.assert_allclose(seen.survival[0], mine * (1 - profile) ** 3, rtol=1e-5)
    np.testing.assert_allclose(seen.survival_prior[0], mine * (1 - profile) ** 5, rtol=1e-4)
    # A worker without a region keeps strangers strange.
    np.testing.assert_array_equal(seen.num_modelled, [4.0, 0.0, 0.0])
    np.testing.assert_array_equal(seen.survival[1:], plain.survival[1:])
    rows.add("a", later)
    rows.remove("a", mine)
    again = rows.rows(inflight)
    np.testing.assert_allclose(again.survival[0], later * (1 - profile) ** 3, rtol=1e-5)
    np.testing.assert_allclose(again.survival_sum[0], again.survival[0].sum(), rtol=1e-5)
    np.testing.assert_allclose(
        again.survival_prior_sum[0], again.survival_prior[0].sum(), rtol=1e-5
    )


def test_profiles_are_checked_and_can_be_taken_away():
    rows = SurvivalRows(SIZE)
    rows.arrange(("a",))
    with pytest.raises(ValueError, match="size=12"):
        rows.set_profiles({"a": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="must lie in"):
        rows.set_profiles({"a": np.full(SIZE, 1.5, np.float32)})
    for scale in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="layer_scale of 'a'"):
            rows.set_profiles({"a": np.zeros(SIZE, np.float32)}, {"a": scale})
    assert rows.rows().survival_prior is None
    assert rows.rows().layer_scale.tolist() == [1.0]
    rows.set_profiles({"a": np.zeros(SIZE, np.float32)})
    assert rows.rows().survival_prior is not None
    rows.set_profiles(None)
    assert rows.rows().survival_prior is None


@pytest.mark.parametrize(
    "bad", [{"size": 0}, {"drift_rate": 1.0}, {"layer_scale": 0.0}, {"pseudo_members": -1.0}]
)
def test_rules(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SurvivalRows(**({"size": SIZE} | bad))
