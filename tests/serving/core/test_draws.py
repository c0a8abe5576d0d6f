import numpy as np

from serving.core.draws import KeyedDraws


def test_a_decision_draws_the_same_whatever_came_before():
    first, second = KeyedDraws(7), KeyedDraws(7)
    first.at(3).random(5)
    first.at(3).integers(10)
    wanted = first.at(9).random(4)
    np.testing.assert_array_equal(second.at(9).random(4), wanted)
    np.testing.assert_array_equal(first.at(9).random(4), wanted)


def test_streams_and_seeds_differ_and_are_uniform():
    draws = KeyedDraws(1)
    values = np.array([draws.at(n).random() for n in range(4000)])
    assert len(set(values.tolist())) == 4000
    counts, _ = np.histogram(values, bins=8, range=(0, 1))
    assert counts.min() > 400
    assert KeyedDraws(2).at(0).random() != draws.at(0).random()


def test_half_used_words_do_not_leak_into_the_next_decision():
    draws = KeyedDraws(5)
    wanted = draws.at(1).integers(0, 2**31, 3, np.int32).tolist()
    draws.at(0).integers(0, 2**31, 1, np.int32)
    assert draws.at(1).integers(0, 2**31, 3, np.int32).tolist() == wanted
