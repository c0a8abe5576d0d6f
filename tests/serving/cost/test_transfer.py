"""Hand-over: full blocks only, measured links over priors, class bans, TPUConnector's rules."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_planner.hardware import load_hardware_dir
from serving.core.errors import ConfigError
from serving.cost.transfer import (
    KvLayout,
    Link,
    LinkDomain,
    TransferMatrix,
    banned,
    hand_over,
    mismatch,
    prior_link,
)

CONFIGS = Path(__file__).parents[3] / "configs"
LAYOUT = KvLayout(kv_bytes_per_token=160_000, block_size_tokens=64, tensor_parallel=2)
PAIR = ("p", "d")


@pytest.fixture(scope="module")
def hardware():
    return load_hardware_dir(CONFIGS / "hardware")


@pytest.fixture
def matrix():
    return TransferMatrix({PAIR: Link(setup_s=0.001, bytes_per_s=15e9)}, fresh_s=100.0)


def test_only_full_blocks_move():
    assert hand_over(63, LAYOUT).num_blocks == 0
    assert hand_over(63, LAYOUT).recomputed_tokens == 63
    moved = hand_over(200, LAYOUT)
    assert (moved.num_blocks, moved.recomputed_tokens) == (3, 8)
    assert moved.num_bytes == 3 * 64 * 160_000


def test_a_partial_local_hit_pulls_everything_on_tpu_only():
    assert hand_over(256, LAYOUT, cached_tokens=128).num_blocks == 4
    assert hand_over(256, LAYOUT, cached_tokens=256).num_blocks == 0
    gpu = KvLayout(kv_bytes_per_token=160_000, block_size_tokens=64, connector="nixl")
    assert hand_over(256, gpu, cached_tokens=128).num_blocks == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5000), st.sampled_from([1, 16, 64, 1024]))
def test_moved_and_recomputed_are_the_prompt(tokens, block):
    moved = hand_over(tokens, KvLayout(kv_bytes_per_token=2, block_size_tokens=block))
    assert moved.num_blocks * block + moved.recomputed_tokens == tokens
    assert 0 <= moved.recomputed_tokens < block
    assert moved.num_bytes == 2 * moved.num_blocks * block


@pytest.mark.parametrize(
    ("chip", "domain", "bytes_per_s"),
    [
        ("tpu7x", LinkDomain.ICI, 200e9),
        ("tpu7x", LinkDomain.DCN, 15e9),
        ("h100", LinkDomain.NVLINK, 350e9),
        ("v6e", LinkDomain.SAME_PROCESS, math.inf),
    ],
)
def test_priors_by_domain(hardware, chip, domain, bytes_per_s):
    assert prior_link(domain, hardware[chip]).bytes_per_s == bytes_per_s


def test_a_link_the_hardware_lacks_is_an_error(hardware):
    with pytest.raises(ConfigError, match="h100 has no such link"):
        prior_link(LinkDomain.ICI, hardware["h100"])
    with pytest.raises(ConfigError, match="cpu_embedded"):
        prior_link(LinkDomain.DCN, hardware["cpu_embedded"])


def test_seconds_are_setup_plus_bytes_over_bandwidth(matrix):
    moved = matrix.moved(PAIR, 2048, LAYOUT)
    assert matrix.seconds(PAIR, moved, now_s=0.0) == pytest.approx(0.001 + 2048 * 160_000 / 15e9)
    nothing = matrix.moved(PAIR, 10, LAYOUT)
    assert matrix.seconds(PAIR, nothing, now_s=0.0) == 0.0


def test_one_process_moves_nothing():
    matrix = TransferMatrix({PAIR: Link(setup_s=0.0, bytes_per_s=math.inf)})
    assert matrix.seconds(PAIR, matrix.moved(PAIR, 4096, LAYOUT), now_s=0.0) == 0.0


def test_measurements_replace_the_prior_while_fresh(matrix):
    first = matrix.moved(PAIR, 2048, LAYOUT)
    matrix.observe(PAIR, first, seconds=5.0, now_s=0.0)  # compiled: teaches the block count only
    assert first.compiles
    assert matrix.estimate(PAIR, now_s=0.0).source == "prior"
    again = matrix.moved(PAIR, 2048, LAYOUT)
    assert not again.compiles
    matrix.observe(PAIR, again, seconds=0.001 + again.num_bytes / 5e9, now_s=1.0)
    found = matrix.estimate(PAIR, now_s=21.0)
    assert (found.source, found.age_s, found.num_samples) == ("measured", 20.0, 1)
    assert found.link.bytes_per_s == pytest.approx(5e9)
    assert matrix.measured_bytes_per_s(now_s=21.0) == {PAIR: pytest.approx(5e9)}
    stale = matrix.estimate(PAIR, now_s=102.0)
    assert (stale.source, stale.link.bytes_per_s) == ("prior", 15e9)
    assert matrix.measured_bytes_per_s(now_s=102.0) == {}


def test_a_stall_counts_in_seconds_not_in_bandwidth(matrix):
    moved = hand_over(2048, LAYOUT, known_block_counts=frozenset({32}))
    for seconds in (0.01, 0.11):
        matrix.observe(PAIR, moved, seconds=0.001 + seconds, now_s=0.0)
    mean_s = 0.8 * 0.01 + 0.2 * 0.11
    assert matrix.seconds(PAIR, moved, now_s=0.0) == pytest.approx(0.001 + mean_s)


def test_the_ewma_converges_to_a_changed_link(matrix):
    moved = hand_over(2048, LAYOUT, known_block_counts=frozenset({32}))
    matrix.observe(PAIR, moved, seconds=0.001 + moved.num_bytes / 14e9, now_s=0.0)
    for step in range(40):
        matrix.observe(PAIR, moved, seconds=0.001 + moved.num_bytes / 4.5e9, now_s=float(step))
    assert matrix.estimate(PAIR, now_s=40.0).link.bytes_per_s == pytest.approx(4.5e9, rel=0.01)


def test_a_new_block_count_pays_its_compile_once():
    matrix = TransferMatrix({PAIR: Link(setup_s=0.0, bytes_per_s=1e10)}, compile_s=2.0)
    first = matrix.moved(PAIR, 128, LAYOUT)
    before = matrix.seconds(PAIR, first, now_s=0.0)
    matrix.observe(PAIR, first, seconds=2.1, now_s=0.0)
    after = matrix.seconds(PAIR, matrix.moved(PAIR, 128, LAYOUT), now_s=0.0)
    assert before - after == pytest.approx(2.0)


@pytest.mark.parametrize(("tokens", "is_banned"), [(9_344, False), (9_408, True), (32_768, True)])
def test_class_a_bans_long_contexts_over_the_network(hardware, tokens, is_banned):
    """20% of 500 ms is about 9.4K tokens over the data-centre network."""
    matrix = TransferMatrix({PAIR: prior_link(LinkDomain.DCN, hardware["tpu7x"])})
    seconds = matrix.seconds(PAIR, matrix.moved(PAIR, tokens, LAYOUT), now_s=0.0)
    assert banned(seconds, 0.5) is is_banned
    assert not banned(seconds, 2.0)
    assert not banned(seconds, math.inf)


def test_layouts_must_agree():
    other = {"kv_bytes_per_token": 160_000, "connector": "tpu"}
    assert mismatch(LAYOUT, LAYOUT) == ""
    pages = KvLayout(block_size_tokens=16, tensor_parallel=2, **other)
    assert "page sizes" in mismatch(LAYOUT, pages)
    parallel = KvLayout(block_size_tokens=64, tensor_parallel=4, **other)
    assert "tensor parallel" in mismatch(LAYOUT, parallel)
    gpu = KvLayout(kv_bytes_per_token=160_000, block_size_tokens=64, connector="nixl")
    assert "connectors" in mismatch(LAYOUT, gpu)


def test_bad_inputs_are_named(matrix):
    with pytest.raises(ConfigError, match="cell pair"):
        matrix.estimate(("x", "d"), now_s=0.0)
    with pytest.raises(ConfigError, match="seconds"):
        matrix.observe(PAIR, hand_over(64, LAYOUT), seconds=math.nan, now_s=0.0)
    with pytest.raises(ConfigError, match="cached_tokens"):
        hand_over(64, LAYOUT, cached_tokens=65)
    with pytest.raises(ConfigError, match="bytes_per_s"):
        Link(setup_s=0.0, bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="block_size_tokens"):
        KvLayout(kv_bytes_per_token=1.0, block_size_tokens=0)
