"""Names of TPU slices."""

from importlib.util import find_spec

import pytest

from eldr_jax.topology import TargetError, devices_of, parse_target


@pytest.mark.parametrize(
    ("name", "chips", "devices", "gib"),
    [("v5e:2x4", 8, 8, 16), ("v6e:1x1", 1, 1, 32), ("tpu7x:2x2x1", 4, 8, 96)],
)
def test_a_slice_has_chips_devices_and_memory(name, chips, devices, gib):
    target = parse_target(name)
    assert (target.num_chips, target.num_devices) == (chips, devices)
    assert target.hbm_bytes == gib * 2**30


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("h100:2x2", "chip 'h100' must be one of v5e, v6e, tpu7x"),
        ("v6e", "shape '' must be chips in 2 dimensions, such as v6e:2x2"),
        ("v6e:2x2x1", "in 2 dimensions"),
        ("tpu7x:2x2", "in 3 dimensions, such as tpu7x:2x2x2"),
        ("v6e:0x2", "shape '0x2'"),
        ("v6e:2x", "shape '2x'"),
        ("v6e:²x2", "shape '²x2'"),
    ],
)
def test_a_wrong_name_is_refused(name, rule):
    with pytest.raises(TargetError, match=rule):
        parse_target(name)


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_the_compiler_it_says_what_to_install():
    with pytest.raises(TargetError, match=r"pip install 'eldr-router\[tpu\]'"):
        devices_of(parse_target("v6e:2x2"))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["v6e:1x1", "v6e:2x2", "tpu7x:2x2x1", "v5e:2x4"])
def test_the_compiler_knows_the_slice(name):
    target = parse_target(name)
    assert len(devices_of(target)) == target.num_devices
