"""The compiled loops of the decision against their NumPy definitions, argument by argument."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import native_kernels
from serving.core import native
from serving.core.block_hash import CHAIN
from serving.core.costs import WorkerCosts
from serving.core.experts import KEEP
from serving.core.feasibility import FITS
from serving.core.step_kernel import DECODE, MEAN, PRIOR, SURVIVAL
from serving.fleet.ledger import MEMBERS
from serving.fleet.snapshot import SNAPSHOT
from serving.policies.p2c import TWO_OF
from serving.policies.picking import LOWEST_TWO
from serving.signatures.model import UNIT
from tests.serving import decision_parts as parts

SCORES = [0.0, 1.0, 1.5, 2.0, np.inf, np.nan]


def both(kernel, *arguments):
    """What the definition and the compiled loop answer."""
    if not native.is_available():
        pytest.skip("numba is not installed")
    kernel.unload()
    wanted = kernel.run(*arguments)
    kernel.load()
    return kernel.run(*arguments), wanted


def floats(draw, num, low=0.0, high=9.0):
    return draw.uniform(low, high, num)


def bools(draw, num):
    return draw.random(num) < 0.7


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.tuples(st.sampled_from(SCORES), st.booleans()), max_size=9))
def test_lowest_two(rows):
    score = np.array([score for score, _ in rows], np.float64)
    told, wanted = both(LOWEST_TWO, score, np.array([allowed for _, allowed in rows], bool))
    np.testing.assert_array_equal(told[0], wanted[0])
    # Whose score is the first NaN is an error and told; what else there is does not matter.
    assert told[1] == wanted[1] if np.isnan(wanted[0]).any() else told[1:] == wanted[1:]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(0, 40), size=st.integers(1, 16))
def test_chain(seed, num, size):
    draw = np.random.default_rng(seed)
    words = draw.integers(0, 2**64 - 1, (3 + size), np.uint64) | np.uint64(1)
    tokens = draw.integers(0, 2**31, num).astype(np.int32)
    told, wanted = both(CHAIN, tokens, words[3:], words[0], words[1], words[2])
    np.testing.assert_array_equal(told, wanted)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 6), known=st.sampled_from(range(3)))
def test_decode(seed, num, known):
    assert {MEAN, SURVIVAL, PRIOR} == {0, 1, 2}
    draw = np.random.default_rng(seed)
    costs: WorkerCosts = parts.BOOK.rows(parts.view(num).workers)
    load = np.floor(floats(draw, num, 0.0, 4.0))
    num_members = draw.integers(0, 9)
    modelled = np.minimum(load, np.floor(floats(draw, num, 0.0, 4.0)))
    told, wanted = both(
        DECODE,
        load,
        floats(draw, num),
        floats(draw, num, 0.5, 2.0),
        costs.columns,
        costs.rate_usd_per_s,
        floats(draw, num),
        floats(draw, num).astype(np.float32),
        floats(draw, num),
        floats(draw, num).astype(np.float32),
        floats(draw, num, 1.0, 4.0),
        floats(draw, num, 40.0, 50.0),
        modelled,
        draw.integers(0, num, num_members),
        floats(draw, num_members, 1.0, 40.0),
        floats(draw, num_members),
        np.minimum(load, 2.0),
        floats(draw, num),
        bools(draw, num),
        known,
        110.0,
        20.0,
        1e-3,
        (0.0, 1.0, 16.0)[seed % 3],
    )
    np.testing.assert_allclose(told[0], wanted[0], rtol=1e-12, atol=1e-12)
    assert told[1] == wanted[1]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(0, 6))
def test_smaller_ones(seed, num):
    draw = np.random.default_rng(seed)
    load = np.floor(floats(draw, num, 0.0, 3.0))
    told, wanted = both(
        FITS,
        *(bools(draw, num) for _ in range(3)),
        floats(draw, num),
        floats(draw, num, 0.0, 3.0),
        load,
        draw.integers(1, 4, num),
        4,
        bool(seed % 2),
    )
    np.testing.assert_array_equal(told, wanted)

    cached = (draw.integers(0, 3, num) * 16).astype(np.int32)
    told, wanted = both(TWO_OF, bools(draw, num), cached, 0.1, draw.random(), draw.random())
    assert told == wanted

    sums, reported = floats(draw, (11, 8)), floats(draw, (7, 8))
    slots = draw.permutation(8)[:num]
    told, wanted = both(SNAPSHOT, sums, reported, slots, bools(draw, num), 9.0, 5.0, 1.0)
    np.testing.assert_array_equal(told[0], wanted[0])
    np.testing.assert_array_equal(told[1], np.stack(wanted[1]))

    members = floats(draw, (4, 8))
    told, wanted = both(MEMBERS, draw.integers(0, 8, 8), members, num, 9.0, np.arange(8) - 1)
    for one, other in zip(told, wanted, strict=True):
        np.testing.assert_array_equal(one, other)

    counts = draw.integers(0, 99, 24).astype(np.uint32)
    first, second = (floats(draw, 24, 0.0, 1.0).astype(np.float32) for _ in range(2))
    told, wanted = both(UNIT, counts * np.uint32(num > 0), first)
    np.testing.assert_allclose(told, wanted, rtol=1e-6)
    told, wanted = both(KEEP, counts, first, second, 1e-3, 0.5, 0.25 * (seed % 2))
    np.testing.assert_allclose(told, wanted, rtol=1e-6, atol=1e-7)


def test_a_constant_from_another_file_is_not_taken_from_the_cache(tmp_path):
    if not native.is_available():
        pytest.skip("numba is not installed")
    file = tmp_path / "rows.py"
    file.write_text("def loop(x):\n    return x + ROW\n")
    code = compile(file.read_text(), str(file), "exec")
    for row in (1, 2):
        module = {"__name__": "rows", "ROW": row}
        exec(code, module)
        kernel = native.Kernel(None, module["loop"], "i8(i8)")
        kernel.load()
        assert kernel.run(40) == 40 + row
    assert list(tmp_path.glob("__pycache__/*.nbi"))


def test_without_numba_numpy_runs(monkeypatch):
    native_kernels.unload()
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert not native_kernels.load()
    assert all(kernel.run is kernel._numpy for kernel in native_kernels.KERNELS)


def test_a_loop_that_fails_takes_those_before_it_back(monkeypatch, caplog):
    if not native.is_available():
        pytest.skip("numba is not installed")
    native_kernels.unload()
    monkeypatch.setattr(native_kernels.KERNELS[2], "_compiled", None)
    monkeypatch.setattr(native_kernels.KERNELS[2], "_signature", "no signature")
    native_kernels.load_in_background().join(60)
    assert "NumPy" in caplog.text
    assert all(kernel.run is kernel._numpy for kernel in native_kernels.KERNELS)


def test_a_numba_that_fails_leaves_numpy(monkeypatch, caplog):
    native_kernels.unload()
    broken = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "numba", broken)
    for kernel in native_kernels.KERNELS:
        monkeypatch.setattr(kernel, "_compiled", None)
    native_kernels.load_in_background().join(60)
    assert "NumPy" in caplog.text
    assert all(kernel.run is kernel._numpy for kernel in native_kernels.KERNELS)
