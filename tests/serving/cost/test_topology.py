"""Slices from labels: shapes, hops, wrap-around, and who fails together."""

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.hardware import load_hardware_dir
from serving.core.errors import ConfigError
from serving.cost.topology import (
    SliceShape,
    failure_units,
    lost_with,
    parse_topology,
    partition_ids,
    slice_of_labels,
)

CONFIGS = Path(__file__).parents[3] / "configs"
PREFIX = "cloud.google.com/"


@pytest.fixture(scope="module")
def hardware():
    return load_hardware_dir(CONFIGS / "hardware")


def node(**labels: str) -> dict[str, str]:
    return {PREFIX + key.replace("_", "-"): value for key, value in labels.items()}


@pytest.mark.parametrize(
    ("chip", "topology", "chips", "devices", "wraps"),
    [
        ("v6e", "2x2", 4, 4, (False, False)),
        ("v6e", "8x16", 128, 128, (False, True)),
        ("v6e", "16x16", 256, 256, (True, True)),
        ("tpu7x", "2x2x1", 4, 8, (False, False, False)),
        ("tpu7x", "4x4x8", 128, 256, (True, True, True)),
    ],
)
def test_shapes(hardware, chip, topology, chips, devices, wraps):
    shape = parse_topology(topology, hardware[chip])
    assert (shape.num_chips, shape.num_jax_devices, shape.wraps) == (chips, devices, wraps)
    assert len(set(shape.coordinates())) == chips


@pytest.mark.parametrize(
    ("chip", "topology", "rule"),
    [
        ("v6e", "2x2x1", "2 axes"),
        ("tpu7x", "4x4", "3 axes"),
        ("v6e", "32x16", "at most 256"),
        ("v6e", "", "look like"),
        ("v6e", "2x", "look like"),
        ("v6e", "2x0", "look like"),
        ("v6e", "2*2", "look like"),
        ("tpu7x", "tpu7x-8", "look like"),
        ("h100", "2x2", "no torus"),
    ],
)
def test_topologies_that_do_not_parse(hardware, chip, topology, rule):
    with pytest.raises(ConfigError, match=rule):
        parse_topology(topology, hardware[chip])


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789x -", max_size=12))
def test_any_text_parses_or_names_the_rule(hardware, text):
    parts = text.split("x")
    sizes = [int(part) for part in parts if part.isdigit() and not part.startswith("0")]
    if len(parts) == len(sizes) == 2 and sizes[0] * sizes[1] <= 256:
        assert parse_topology(text, hardware["v6e"]).dims == tuple(sizes)
    else:
        with pytest.raises(ConfigError, match="topology"):
            parse_topology(text, hardware["v6e"])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_hops_are_shortest_paths(data):
    """Hops equal a breadth-first search over the mesh's own neighbours."""
    dims = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    wraps = tuple(data.draw(st.booleans()) for _ in dims)
    shape = SliceShape(hardware_id="x", dims=dims, wraps=wraps, jax_devices_per_chip=1)
    start = shape.coordinates_of(data.draw(st.integers(0, shape.num_chips - 1)))
    distance = {start: 0}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        for axis, length in enumerate(dims):
            for step in (-1, 1):
                to = at[axis] + step
                if wraps[axis]:
                    to %= length
                if 0 <= to < length:
                    there = (*at[:axis], to, *at[axis + 1 :])
                    if there not in distance:
                        distance[there] = distance[at] + 1
                        queue.append(there)
    assert {point: shape.hops(start, point) for point in shape.coordinates()} == distance
    assert max(distance.values()) <= shape.diameter()


def test_row_major_coordinates():
    shape = SliceShape(hardware_id="x", dims=(2, 3, 4), wraps=(False,) * 3, jax_devices_per_chip=2)
    assert [shape.coordinates_of(i) for i in range(24)] == list(shape.coordinates())
    with pytest.raises(ConfigError, match="chip"):
        shape.coordinates_of(24)
    with pytest.raises(ConfigError, match="coordinates"):
        shape.hops((0, 0, 0), (2, 0, 0))


def test_a_node_pool_is_a_slice(hardware):
    labels = node(
        gke_tpu_accelerator="tpu-v6e-slice", gke_tpu_topology="4x4", gke_nodepool="pool-a"
    )
    member = slice_of_labels(labels, hardware)
    assert member.slice_id == "pool-a"
    assert member.shape.num_chips == 16
    assert member.shape.hardware_id == "v6e"


def test_slice_and_partition_labels_win_over_the_pool(hardware):
    labels = node(gke_tpu_accelerator="tpu7x", gke_tpu_topology="2x2x2", gke_nodepool="pool")
    labels[PREFIX + "gke-tpu-partition-2x2x2-id"] = "part-1"
    labels[PREFIX + "gke-tpu-partition-4x4x4-id"] = "cube-9"
    labels[PREFIX + "gke-tpu-partition-4x4x4-state"] = "HEALTHY"
    assert slice_of_labels(labels, hardware).slice_id == "part-1"
    assert partition_ids(labels) == {"2x2x2": "part-1", "4x4x4": "cube-9"}
    labels[PREFIX + "gke-tpu-slice-2x2x2-id"] = "slice-7"
    assert slice_of_labels(labels, hardware).slice_id == "slice-7"


@pytest.mark.parametrize(
    ("missing", "value", "rule"),
    [
        ("gke-tpu-accelerator", None, "no such label"),
        ("gke-tpu-accelerator", "tpu-v99", "unknown; known: .*tpu7x"),
        ("gke-tpu-topology", None, "no such label"),
        ("gke-tpu-topology", "two by two", "look like"),
        ("gke-nodepool", None, "no such label"),
    ],
)
def test_labels_that_do_not_say_enough(hardware, missing, value, rule):
    labels = node(
        gke_tpu_accelerator="tpu-v6e-slice", gke_tpu_topology="2x2", gke_nodepool="pool-a"
    )
    del labels[PREFIX + missing]
    if value is not None:
        labels[PREFIX + missing] = value
    with pytest.raises(ConfigError, match=rule) as caught:
        slice_of_labels(labels, hardware)
    assert missing in caught.value.field


def test_a_slice_fails_as_one():
    units = failure_units({"a0": "s1", "b0": "s2", "a1": "s1", "lone": ""})
    assert units["a0"] == units["a1"] == ("a0", "a1")
    assert units["lone"] == ("lone",)
    assert lost_with(["a1"], units) == ("a0", "a1")
    assert lost_with(["b0", "lone"], units) == ("b0", "lone")
    with pytest.raises(ConfigError, match="worker"):
        lost_with(["zz"], units)
