"""What every placement rule promises. Adding a rule is adding a row to `CASES`."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import ConfigError, Rejected
from serving.core.worker import Phase
from serving.policies import POLICIES, make_policy
from tests.serving import decision_parts as parts


@dataclasses.dataclass(frozen=True)
class Case:
    """One rule as the suite runs it.

    Attributes:
        options: factory options.
        order_free: renaming and reordering workers renames the answer, where no ties are.
        reads: column of the view whose NaN must be an error.
        spreads: equal workers are equally likely.
    """

    options: dict = dataclasses.field(default_factory=dict)
    order_free: bool = True
    reads: str = "num_inflight"
    spreads: bool = True


CASES = {
    "random": Case(order_free=False, reads=""),
    "rr": Case(order_free=False, reads="", spreads=False),
    "jsq": Case(),
    "p2c": Case(order_free=False),
    "p2c_work": Case(order_free=False, reads="speed_factor"),
    "kv_aware": Case(reads="speed_factor"),
    "domain": Case(options={"labels": ("law", "code")}, order_free=False, spreads=False),
    "eldr_static": Case(spreads=False),
    "eldr_online": Case(spreads=False),
    "expert_cost": Case(reads="speed_factor"),
    "cost_p2c": Case(order_free=False, reads="speed_factor"),
    "packed_cost": Case(order_free=False, reads="speed_factor", spreads=False),
}
RULES = pytest.mark.parametrize("name", sorted(CASES))


def rule(name):
    return make_policy(name, **CASES[name].options)


def random_context(seed, num=None, phase=Phase.DECODE):
    draw = np.random.default_rng(seed)
    num = num or int(draw.integers(1, 9))
    rows = draw.integers(0, num, 10).tolist()
    decodes = phase is Phase.DECODE
    seen = parts.view(
        num,
        phase=phase,
        num_inflight=np.bincount(rows, minlength=num) + draw.random(num) / 100,
        queued_prefill_tokens=draw.integers(0, 4000, num),
        kv_tokens=draw.integers(0, 9000, num),
        speed_factor=draw.uniform(0.5, 2.0, num),
        members=parts.members(rows, [7.0] * 10, 1e-3, num) if decodes else None,
        experts=parts.expert_rows(num, seed=seed) if decodes else None,
    )
    feasible = draw.random(num) < 0.7
    feasible[int(draw.integers(num))] = True
    ids = [worker.worker_id for worker in seen.workers]
    return parts.context(
        seen,
        phase=phase,
        feasible=feasible,
        sequence=int(draw.integers(100)),
        signature=parts.signature(seed=seed),
        regions=parts.regions(ids, seed=seed),
        domain=str(draw.choice(["law", "code"])),
        experts=parts.profiles(),
        cluster=int(draw.integers(3)),
        keep=parts.profiles().keep(parts.signature(seed=seed)) if decodes else None,
        transfer_s=draw.random(num) / 100 if decodes else np.zeros(num),
    )


def rng(seed=0):
    return np.random.default_rng(seed)


def test_every_rule_has_a_row():
    assert sorted(CASES) == sorted(POLICIES)


@RULES
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), phase=st.sampled_from(list(Phase)))
def test_the_answer_is_feasible_repeatable_and_told_in_order(name, seed, phase):
    asked = random_context(seed, phase=phase)
    first, second = (rule(name).rank(asked, rng(seed)) for _ in range(2))
    assert (first.chosen, first.runner_up) == (second.chosen, second.runner_up)
    np.testing.assert_array_equal(first.score, second.score)
    assert asked.feasible[first.chosen]
    assert first.score.shape == asked.feasible.shape
    assert (first.score[~asked.feasible] == np.inf).all()
    assert first.score[first.chosen] == first.score.min() < np.inf
    if first.runner_up >= 0:
        assert first.runner_up != first.chosen
        assert asked.feasible[first.runner_up]
        others = np.delete(first.score, first.chosen)
        assert first.score[first.runner_up] == others.min()
    else:
        assert np.isfinite(first.score).sum() == 1
    assert first.unit
    set_aside = np.zeros(len(asked.feasible), bool)
    for _, out in first.excluded:
        assert not (out & ~asked.feasible).any()
        set_aside |= out
    scoreless = asked.feasible & np.isinf(first.score)
    assert not (set_aside & ~scoreless).any()
    # Every feasible row without a score has a reason.
    assert first.aside or not (scoreless & ~set_aside).any()


@RULES
def test_the_context_is_left_alone(name):
    asked = random_context(3, num=6)
    frozen = [getattr(asked.view, c) for c in ("num_inflight", "kv_tokens", "speed_factor")]
    for column in (*frozen, asked.feasible, asked.transfer_s, asked.keep):
        column.flags.writeable = False
    rule(name).rank(asked, rng())


@RULES
def test_two_feasible_workers_always_make_a_runner_up(name):
    for seed in range(12):
        asked = random_context(seed, num=6)
        feasible = np.zeros(6, bool)
        feasible[[1, 4]] = True
        answer = rule(name).rank(asked._replace(feasible=feasible), rng(seed))
        assert answer.chosen in (1, 4)
        if name != "domain":  # its other group is not an alternative
            assert {answer.chosen, answer.runner_up} == {1, 4}


@RULES
def test_a_single_worker(name):
    answer = rule(name).rank(random_context(5, num=1), rng())
    assert (answer.chosen, answer.runner_up) == (0, -1)


@RULES
@pytest.mark.parametrize("num", [1, 5])
def test_nobody_feasible_is_rejected(name, num):
    asked = random_context(5, num=num)
    with pytest.raises(Rejected):
        rule(name).rank(asked._replace(feasible=np.zeros(num, bool)), rng())


@pytest.mark.parametrize("name", [name for name in sorted(CASES) if CASES[name].reads])
def test_a_nan_is_an_error_and_never_the_winner(name):
    asked = random_context(7, num=4)
    column = getattr(asked.view, CASES[name].reads).copy()
    column[:] = np.nan
    view = asked.view._replace(**{CASES[name].reads: column})
    with pytest.raises(ValueError, match="NaN"):
        rule(name).rank(asked._replace(view=view, feasible=np.ones(4, bool)), rng())


@pytest.mark.parametrize("name", [name for name in sorted(CASES) if CASES[name].reads])
def test_a_nan_of_an_infeasible_worker_is_nobodys_business(name):
    asked = random_context(7, num=4)
    column = getattr(asked.view, CASES[name].reads).copy()
    column[2] = np.nan
    view = asked.view._replace(**{CASES[name].reads: column})
    feasible = np.array([True, True, False, True])
    answer = rule(name).rank(asked._replace(view=view, feasible=feasible), rng())
    assert answer.chosen != 2


@pytest.mark.parametrize("name", [name for name in sorted(CASES) if CASES[name].spreads])
@pytest.mark.parametrize("phase", list(Phase))
def test_ties_spread(name, phase):
    # A tie that always goes one way is how every peer herds (PEERS.md).
    num, draws = 5, 2000
    asked = parts.context(parts.view(num, phase=phase), phase=phase)
    chosen = np.array([rule(name).rank(asked, rng(seed)).chosen for seed in range(draws)])
    counts = np.bincount(chosen, minlength=num)
    chi_square = ((counts - draws / num) ** 2 / (draws / num)).sum()
    assert chi_square < 23.5  # 1 in 10,000 at 4 degrees of freedom; the seeds are fixed


@pytest.mark.parametrize("name", [name for name in sorted(CASES) if CASES[name].order_free])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), phase=st.sampled_from(list(Phase)))
def test_the_order_of_workers_does_not_matter(name, seed, phase):
    asked = random_context(seed, num=6, phase=phase)
    order = np.random.default_rng(seed).permutation(6)
    answer = rule(name).rank(asked, rng())
    moved = rule(name).rank(asked.take(order), rng())
    assert np.unique(answer.score[asked.feasible]).size == asked.feasible.sum() or answer.fallback
    np.testing.assert_allclose(moved.score, answer.score[order], rtol=1e-6)
    assert order[moved.chosen] == answer.chosen


def test_unknown_names_and_options_list_the_known():
    with pytest.raises(ConfigError, match=r"must be one of .*'eldr_online'"):
        make_policy("eldr")
    with pytest.raises(ConfigError, match=r"policy.eldr_static.taux=0.1: must be one of"):
        make_policy("eldr_static", taux=0.1)
    with pytest.raises(ConfigError, match="tau"):
        make_policy("eldr_static", tau=-1.0)
    with pytest.raises(ConfigError, match="tail_power"):
        make_policy("expert_cost", tail_power=0.0)


@RULES
def test_the_registry_name_is_the_policys_own(name):
    assert rule(name).name == name
