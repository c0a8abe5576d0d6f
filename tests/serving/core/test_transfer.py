import numpy as np
import pytest

from serving.core.transfer import LinkSpeeds, TransferTimes
from serving.core.worker import Role
from tests.serving import decision_parts as parts

LINKS = LinkSpeeds(
    latency_s=0.001,
    host_bytes_per_s=20e9,
    domain_bytes_per_s=200e9,
    network_bytes_per_s=10e9,
    measured_bytes_per_s={("p", "measured"): 5e9},
)
SOURCE = parts.worker("p0", Role.PREFILL, host="h0", ici_domain="s0")
WORKERS = (
    parts.worker("p0", Role.BOTH, host="h0", ici_domain="s0"),
    parts.worker("same_host", host="h0", ici_domain="s1"),
    parts.worker("same_domain", host="h1", ici_domain="s0"),
    parts.worker("far", host="h2", ici_domain="s2"),
    parts.worker("measured", host="h0", pool="measured"),
)


def test_nearest_shared_link_gives_the_bandwidth():
    seconds = TransferTimes(LINKS).seconds(1e9, SOURCE, WORKERS)
    np.testing.assert_allclose(seconds, [0.0, 0.051, 0.006, 0.101, 0.201])


def test_links_are_looked_up_again_when_the_fleet_changes():
    times = TransferTimes(LINKS)
    times.seconds(1e9, SOURCE, WORKERS)
    moved = (parts.worker("far", host="h0"),)
    np.testing.assert_allclose(times.seconds(1e9, SOURCE, moved), [0.051])


def test_the_brief_bans_class_a_long_context_over_dcn():
    # 9.4K tokens at 160 KB over 15 GB/s take the 100 ms that class A may spend.
    dcn = LinkSpeeds(latency_s=0.0, network_bytes_per_s=15e9)
    seconds = TransferTimes(dcn).seconds(9.4e3 * 160e3, SOURCE, (parts.worker("far"),))
    assert seconds[0] == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("field", ["host_bytes_per_s", "network_bytes_per_s"])
def test_bandwidths_must_be_positive(field):
    with pytest.raises(ValueError, match=field):
        LinkSpeeds(**{field: 0.0})
    with pytest.raises(ValueError, match="measured"):
        LinkSpeeds(measured_bytes_per_s={("p", "measured"): float("nan")})
