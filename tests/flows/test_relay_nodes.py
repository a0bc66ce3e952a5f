"""Runs whose engines are on other nodes than the policy: each version arrives there by a relay, bit for bit, since what
engines take is compared with the checksums that the policy's ranks have set."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.flows import nodes, tiny
from tests.flows.test_async_cluster import Kills
from tests.flows.test_async_sampler import check_once
from tests.flows.test_lost_node import run_on_all_nodes, three_nodes  # noqa: F401 - a fixture
from tests.launch.test_survive import recoveries
from tilth.launch import build
from tilth.runs.readers import read_metrics

pytestmark = pytest.mark.dist


def check_sent(directory):
    """Of three versions the first was whole, and of the others a part was sent."""
    records = read_metrics(directory)
    shares = [record["sync/sent_bytes"] / record["sync/whole_bytes"] for record in records]
    assert [1 <= share < 1.5 for share in shares] == [number % 3 == 0 for number in range(1, 7)], shares
    assert min(shares) < 0.5


@pytest.mark.parametrize("inflight", ["update", "finish"])
def test_engines_take_whole_versions_and_what_has_changed_since(tmp_path, monkeypatch, inflight):
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    result = tiny.run(nodes.far(tmp_path, rollout={"inflight": inflight}))
    check_once(result, 6, group=4)
    check_sent(result.directory)


def test_a_policy_on_two_nodes_sends_to_both(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    sections = {"cluster": {"pools": {"train": 2, "rollout": 2}}, "policy": {"layout": {"fsdp": 2}}}
    result = tiny.run(nodes.far(tmp_path, **sections))
    check_once(result, 6, group=4)
    check_sent(result.directory)


def test_a_worker_that_dies_costs_no_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    kills = Kills((0, 1, 2), (2, 4), seed=3)
    result = tiny.run(nodes.far(tmp_path, guard={"restarts": 8}), callbacks=[kills])
    kills.join()
    check_once(result, 6, group=4)
    assert kills.killed


@pytest.mark.ray
@pytest.mark.slow
def test_each_node_of_a_ray_cluster_has_a_relay_of_its_own(tmp_path, three_nodes):  # noqa: F811
    address, env, _ = three_nodes
    told = run_on_all_nodes([sys.executable, "-m", "tests.flows.nodes", str(tmp_path), address], env)
    check_sent(Path(told.splitlines()[-1]))


@pytest.mark.ray
@pytest.mark.slow
def test_the_relay_of_a_node_that_has_left_is_made_again_elsewhere(tmp_path, three_nodes):  # noqa: F811
    address, env, pids = three_nodes
    told = run_on_all_nodes([sys.executable, "-m", "tests.flows.nodes", str(tmp_path), address, json.dumps(pids)], env)
    directory = Path(told.splitlines()[-1])
    (found,) = recoveries(directory)
    assert found["replaced"] == [1] and {"rollout", "weight_sync"} <= {*found["made"]}, found
    check_once(SimpleNamespace(directory=directory), 6, group=4)
