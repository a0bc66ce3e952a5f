"""A run on replicas in processes, where clocks decide, repeated on other workers."""

import pytest

from tests.flows import tiny
from tests.flows.test_async_cluster import PLACED, POOLS, RANKS, Kills
from tests.flows.test_replay import check_same, recipe
from tilth.core.random import stream_id
from tilth.runs.readers import read_metrics

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rollout"), [({"backend": "inline", "pools": {}}, {"pool": "", "layout": {"dp": 1}}), (POOLS, {})]
)
def test_a_run_of_two_replicas_is_repeated_on_any_workers(tmp_path, where, rollout):
    """It has lost one of them, and gone back to the step before."""
    kills = Kills(RANKS["replica"], [2], stream_id("kills", 0))
    short = {"algorithm": {"steps": 4}}
    made = recipe(tmp_path, 2, rollout=PLACED, cluster=POOLS, **short)
    run = tiny.run(made, name="run", callbacks=[kills])
    kills.join()
    assert max(record["staleness/max"] for record in read_metrics(run.directory)) > 0
    elsewhere = recipe(tmp_path, 2, rollout={**PLACED, **rollout}, cluster=where, **short)
    check_same(run, tiny.run(elsewhere, name="again", replay=run.directory))
