import numpy as np
import pytest

from serving.core.worker import Phase
from serving.policies.online_regions import OnlineRegions
from serving.signatures.regions import bind
from tests.serving import decision_parts as parts

IDS = ("d0", "d1", "d2")


def unit(*values):
    row = np.zeros(parts.SIZE, np.float32)
    row[: len(values)] = values
    return row / np.linalg.norm(row)


def fitted():
    rows = np.stack([unit(1, 0, 0), unit(0, 1, 0), unit(0, 0, 1)])
    return bind(rows, IDS, version="fit-1")


def drifted(online, now_s):
    """Traffic that has moved a little from each region."""
    for vector in (unit(1, 0.4, 0), unit(0, 1, 0.4), unit(0.4, 0, 1)):
        online.observe(vector, now_s)


def test_regions_follow_and_workers_keep_their_own():
    online = OnlineRegions(fitted())
    drifted(online, 0.0)
    assert online.due(0.9) is None
    job = online.due(1.0)
    new = online.adopt(job, job.run())
    assert new is online.regions
    assert new.version == "fit-1+1"
    assert new.worker_ids == IDS
    np.testing.assert_allclose(new.centroids[0], unit(1, 0.4, 0), atol=1e-6)
    np.testing.assert_allclose(new.centroids[2], unit(0.4, 0, 1), atol=1e-6)
    assert new.similarity(unit(1, 0.4, 0), IDS).argmax() == 0


def test_the_beat_goes_on_and_old_traffic_is_forgotten():
    online = OnlineRegions(fitted(), window_s=5.0)
    drifted(online, 0.0)
    online.due(1.0)
    assert online.due(1.5) is None
    online.observe(unit(1), 4.0)
    assert len(online.due(4.5).vectors) == 4
    assert len(online.due(6.0).vectors) == 1
    assert online.due(30.0) is None


def test_only_the_newest_signatures_are_used():
    online = OnlineRegions(fitted(), max_vectors=2)
    drifted(online, 0.0)
    assert len(online.due(1.0).vectors) == 2


def test_a_job_of_a_fleet_that_has_changed_is_dropped():
    online = OnlineRegions(fitted())
    drifted(online, 0.0)
    job = online.due(1.0)
    other = bind(np.eye(2, parts.SIZE, dtype=np.float32), ("d0", "d9"), version="fit-2")
    online.rebind(other)
    assert online.adopt(job, job.run()) is other
    assert online.regions.version == "fit-2"


def test_it_watches_decode_placements():
    online = OnlineRegions(fitted())
    rig = parts.Rig(decode="eldr_online", observers=(online,))
    prefill, placed = rig.serve(parts.request(), end=False)
    rig.router.record(prefill)
    rig.router.record(placed)
    job = online.due(rig.clock.now_s + 1.0)
    assert len(job.vectors) == 1
    rig.router.set_regions(online.adopt(job, job.run()))
    rig.serve(parts.request("r2"), end=False)
    line = rig.router.explain("r2")[-1]
    assert line.stage.phase == Phase.DECODE.value
    assert line.versions["regions"] == "fit-1+1"


@pytest.mark.parametrize("bad", [{"interval_s": 0.0}, {"interval_s": 6.0}, {"max_vectors": 0}])
def test_rules(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        OnlineRegions(fitted(), **bad)
