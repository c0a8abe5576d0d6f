"""What a decode worker tells of a pull, there and back, and nonsense."""

import pytest

from serving.engines.pulled import Pulled, pulled_of

MOVED = Pulled(num_blocks=3, num_bytes=4096, seconds=0.25)


def test_there_and_back():
    assert pulled_of(dict(MOVED.trailers())) == MOVED


@pytest.mark.parametrize(
    "changed",
    [
        {"eldr-pull-s": "soon"},
        {"eldr-pull-s": "nan"},
        {"eldr-pull-s": "-1"},
        {"eldr-pull-blocks": "0"},
        {"eldr-pull-bytes": "1.5"},
        {"eldr-pull-bytes": "9" * 400},
        {"eldr-pull-blocks": str(1 << 30)},
        {"eldr-pull-s": "1e-320"},
        {"eldr-pull-s": "1e300"},
    ],
)
def test_nonsense_is_not_a_measurement(changed):
    assert pulled_of(dict(MOVED.trailers()) | changed) is None
    assert pulled_of({}) is None
