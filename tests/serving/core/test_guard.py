import numpy as np
import pytest

from serving.core.guard import SignatureGuard
from tests.serving import decision_parts as parts


def feed(guard, num, *, known, slowness=1.0, trend=0.0, seed=0):
    """Outcomes whose savings the signatures know to a share `known`, guessing the rest."""
    draw = np.random.default_rng(seed)
    for i in range(num):
        curve = 0.01 * np.exp(draw.normal(0, 0.1) + trend * i)
        saving, guess, noise = draw.normal(0.2, 0.06, 3)
        promised = known * saving + (1.0 - known) * guess
        guard.expect(f"r{seed}-{i}", by_signature_s=curve * np.exp(-promised), by_mean_s=curve)
        guard.realise(f"r{seed}-{i}", slowness * curve * np.exp(-saving + 0.5 * (noise - 0.2)))


def test_signatures_whose_promises_are_kept_are_trusted():
    guard = SignatureGuard()
    assert guard.agreement == 1.0
    feed(guard, 500, known=1.0)
    assert guard.agreement > 0.7
    assert guard.weight == 1.0


def test_promises_that_mean_nothing_lose_weight_and_earn_it_back():
    guard = SignatureGuard(memory=400)
    feed(guard, 800, known=0.0)
    assert guard.weight < 0.3
    feed(guard, 1500, known=1.0, seed=1)
    assert guard.weight == 1.0


def test_between_the_two_the_weight_is_linear():
    guard = SignatureGuard(memory=10**6, lost_below=0.0, full_above=1.0)
    feed(guard, 3000, known=0.5)
    assert guard.weight == pytest.approx(0.1 + 0.9 * guard.agreement)
    assert 0.3 < guard.weight < 0.9


def test_neither_a_slow_machine_nor_a_moving_load_is_the_signatures_fault():
    plain, slow, loaded = SignatureGuard(), SignatureGuard(), SignatureGuard()
    feed(plain, 400, known=0.8)
    feed(slow, 400, known=0.8, slowness=3.0)
    feed(loaded, 400, known=0.8, trend=0.005)
    assert slow.agreement == pytest.approx(plain.agreement)
    assert loaded.agreement == pytest.approx(plain.agreement, abs=0.02)


def test_agreement_is_the_partial_correlation():
    guard = SignatureGuard(memory=10**6)
    draw = np.random.default_rng(3)
    rows = np.exp(draw.normal(0, [0.1, 0.2, 0.3], (200, 3)))
    for i, (signature, curve, taken) in enumerate(rows.tolist()):
        guard.expect(f"r{i}", by_signature_s=signature, by_mean_s=curve)
        guard.realise(f"r{i}", taken)
    logs = np.log(rows)
    design = np.stack([np.ones(200), logs[:, 1]], axis=1)
    residual = [
        column - design @ np.linalg.lstsq(design, column, rcond=None)[0]
        for column in (logs[:, 0] - logs[:, 1], logs[:, 2])
    ]
    assert guard.agreement == pytest.approx(np.corrcoef(*residual)[0, 1], abs=1e-6)


def test_it_waits_for_outcomes_and_forgets_what_never_ends():
    guard = SignatureGuard(warm_up=50, max_pending=3)
    feed(guard, 49, known=0.0)
    assert guard.weight == 1.0
    for i in range(5):
        guard.expect(f"x{i}", by_signature_s=1.0, by_mean_s=1.0)
    guard.realise("x0", 1.0)
    guard.realise("x4", None)
    guard.realise("nobody", 1.0)
    guard.expect("bad", by_signature_s=0.0, by_mean_s=1.0)
    guard.realise("bad", 1.0)
    assert guard.weight == 1.0
    guard.realise("x3", 1.0)
    assert guard.weight < 1.0


def test_equal_outcomes_agree_with_nothing():
    guard = SignatureGuard(warm_up=1)
    for i in range(5):
        guard.expect(f"x{i}", by_signature_s=0.01, by_mean_s=0.02)
        guard.realise(f"x{i}", 0.015)
    assert guard.agreement == 0.0


def test_the_router_feeds_it_and_follows_it():
    guard = SignatureGuard(warm_up=1, memory=10, lost_below=0.999, full_above=1.0)
    rig = parts.Rig(guard=guard)
    for i in range(8):
        rig.serve(parts.request(f"r{i}"), seed=i, end=False)
    for i in range(8):
        rig.router.done(f"r{i}", 20, 0.1, 0.01 + i * 0.001)
    assert guard.agreement < 0.999
    # A guard that trusts nothing is felt in the survival rows of the next placement.
    sign = parts.signature(seed=3)
    placed = rig.router.place_decode(parts.request("x"), signature=sign, prefill_worker_id=None)
    seen = rig.router.view(placed.phase)
    row = seen.experts.survival[seen.index_of(placed.worker.worker_id)]
    np.testing.assert_allclose(row, parts.profiles().keep(sign, weight=0.1), rtol=1e-4)


@pytest.mark.parametrize("bad", [{"memory": 0}, {"lost_below": 0.5}, {"min_weight": 0.0}])
def test_rules(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SignatureGuard(**bad)
