import numpy as np
import pytest

from serving.core.guard import SignatureGuard
from tests.serving import decision_parts as parts


def feed(guard, num, *, signature_error, mean_error, slowness=1.0, seed=0):
    """Outcomes around which the two predictors scatter by their own error."""
    draw = np.random.default_rng(seed)
    for i in range(num):
        truth = 0.01 * np.exp(draw.normal(0, 0.1))
        guard.expect(
            f"r{seed}-{i}",
            by_signature_s=truth * np.exp(draw.normal(0, signature_error)),
            by_mean_s=truth * np.exp(draw.normal(0, mean_error)),
        )
        guard.realise(f"r{seed}-{i}", truth * slowness)


def test_signatures_that_predict_better_are_trusted():
    guard = SignatureGuard()
    feed(guard, 500, signature_error=0.05, mean_error=0.1)
    assert guard.error_ratio < 0.7
    assert guard.weight == 1.0


def test_signatures_that_predict_worse_lose_weight_and_earn_it_back():
    guard = SignatureGuard()
    feed(guard, 500, signature_error=0.2, mean_error=0.1)
    assert guard.weight == 0.1
    feed(guard, 1500, signature_error=0.05, mean_error=0.1, seed=1)
    assert guard.weight == 1.0


def test_between_the_two_the_weight_is_linear():
    guard = SignatureGuard(memory=10**6)
    feed(guard, 6000, signature_error=0.1125, mean_error=0.1)
    assert guard.weight == pytest.approx(1 - 0.9 * (guard.error_ratio - 1) / 0.25)
    assert 0.3 < guard.weight < 0.8


def test_a_slow_machine_is_nobodys_error():
    fast, slow = SignatureGuard(), SignatureGuard()
    feed(fast, 400, signature_error=0.05, mean_error=0.1)
    feed(slow, 400, signature_error=0.05, mean_error=0.1, slowness=3.0)
    assert slow.weight == fast.weight == 1.0
    assert slow.error_ratio == pytest.approx(fast.error_ratio, rel=0.3)


def test_it_waits_for_outcomes_and_forgets_what_never_ends():
    guard = SignatureGuard(warm_up=50, max_pending=3)
    feed(guard, 49, signature_error=0.5, mean_error=0.01)
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


def test_the_router_feeds_it_and_follows_it():
    guard = SignatureGuard(warm_up=1, memory=10)
    rig = parts.Rig(guard=guard)
    for i in range(8):
        rig.serve(parts.request(f"r{i}"), seed=i, end=False)
    for i in range(8):
        rig.router.done(f"r{i}", 20, 0.1, 0.01 + i * 0.001)
    assert guard.error_ratio != 1.0
    # Whatever it says now, a lost guard is felt in the survival rows of the next placement.
    guard._by_signature.error, guard._by_mean.error = 9.0, 1.0
    rig.serve(parts.request("r9"), end=True)
    guard._by_signature.error, guard._by_mean.error = 9.0, 1.0
    rig.router.set_signature_weight(1.0)
    sign = parts.signature(seed=3)
    placed = rig.router.place_decode(parts.request("x"), signature=sign, prefill_worker_id=None)
    seen = rig.router.view(placed.phase)
    row = seen.experts.survival[seen.index_of(placed.worker.worker_id)]
    np.testing.assert_allclose(row, parts.profiles().keep(sign, weight=0.1), rtol=1e-4)


@pytest.mark.parametrize("bad", [{"memory": 0}, {"worst_ratio": 1.0}, {"min_weight": 0.0}])
def test_rules(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SignatureGuard(**bad)
