"""Runs whose engines are on other nodes than the policy: each version arrives there by a relay, bit for bit, since what
engines take is compared with the checksums that the policy's ranks have set."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.flows import nodes, tiny
from tests.flows.test_async_sampler import check_once, state
from tests.flows.test_lora import LORA, stored
from tests.flows.test_lost_node import run_on_all_nodes, three_nodes  # noqa: F401 - a fixture
from tests.flows.test_replay import check_same
from tests.launch.test_survive import recoveries
from tilth.core.random import stream_id
from tilth.launch import build
from tilth.plan.lora import is_adapter
from tilth.runs.readers import read_metrics

pytestmark = pytest.mark.dist


def check_sent(directory):
    """Of three versions the first was whole, and of the others a part was sent."""
    records = read_metrics(directory)
    shares = [record["sync/sent_bytes"] / record["sync/whole_bytes"] for record in records]
    assert [1 <= share < 1.5 for share in shares] == [number % 3 == 0 for number in range(1, 7)], shares
    assert min(shares) < 0.5


@pytest.mark.parametrize("inflight", ["update", pytest.param("finish", marks=pytest.mark.slow)])
def test_engines_take_whole_versions_and_what_has_changed_since(tmp_path, monkeypatch, inflight):
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    result = tiny.run(nodes.far(tmp_path, rollout={"inflight": inflight}))
    check_once(result, 6, group=4)
    check_sent(result.directory)


@pytest.mark.slow
@pytest.mark.parametrize("inflight", ["update", "finish"])
def test_adapters_alone_reach_another_node(tmp_path, monkeypatch, inflight):
    """Their base goes there once; a run in one process that draws the same learns the same, bit for bit."""
    short = {"model": {"context": 48}, "supervised": {"steps": 2}, "algorithm": {"steps": 0}}
    base = tiny.run(tiny.recipe(tmp_path / "base", **short)).directory
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    given = {"model": {"path": str(base)}, "policy": {"lora": LORA}, "optimizer": {"lr": 1e-2}}
    given["train"] = {"precision": "fp32", "parity": True}
    how = {"adapters": "adapter", "inflight": inflight}
    run = tiny.run(nodes.far(tmp_path, rollout=how, **given), name="run")
    check_once(run, 6, group=4)
    weights, _ = stored(run.directory)
    adapters = sum(tensor.nbytes for name, tensor in weights.items() if is_adapter(name))
    for record in read_metrics(run.directory):
        assert record["sync/bytes"] == adapters and 0 < record["sync/sent_bytes"] < 2 * adapters
    assert 3 * adapters < sum(tensor.nbytes for tensor in weights.values())
    inline = {"cluster": {"backend": "inline", "pools": {}}, **given}
    made = nodes.far(tmp_path, rollout={**how, "pool": "", "layout": {"dp": 1}}, **inline)
    check_same(run, tiny.run(made, name="again", replay=run.directory))


@pytest.mark.slow  # quickly in tests/roles/test_relay.py
def test_a_policy_on_two_nodes_sends_to_both(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    sections = {"cluster": {"pools": {"train": 2, "rollout": 2}}, "policy": {"layout": {"fsdp": 2}}}
    result = tiny.run(nodes.far(tmp_path, **sections))
    check_once(result, 6, group=4)
    check_sent(result.directory)


class Breaks(tiny.Recorder):
    """Asks after each step for the end of some transfer to come; names: of what ends, in turn."""

    def __init__(self, folder, names, seed):
        super().__init__()
        self.folder, self.names, self.chance = folder, names, random.Random(seed)

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step <= len(self.names):
            new = self.folder / "new"
            new.write_text(str(self.chance.random()))
            new.rename(self.folder / self.names[step - 1])

    @property
    def done(self):
        """Number of each that has happened."""
        return Counter(path.stem for path in self.folder.glob("*.[0-9]*"))


def broken(folder, monkeypatch, names, steps, **rollout):
    """A run of so many steps whose transfers end so, and each sample of which is consumed once, within the bound."""
    monkeypatch.setattr(build, "_WORKERS", nodes.__name__)
    breaks = Breaks(folder, names, stream_id("breaks", steps))
    made = nodes.far(folder, guard={"restarts": 64}, algorithm={"steps": steps}, rollout=rollout)
    result = tiny.run(made, callbacks=[breaks])
    check_once(result, steps, group=4)
    assert not state(result).dropped
    assert max(record["staleness/max"] for record in read_metrics(result.directory)) <= 2
    return breaks, result


@pytest.mark.slow  # quickly in tests/roles/test_relay.py
def test_transfers_that_break_off_cost_no_sample(tmp_path, monkeypatch):
    breaks, result = broken(tmp_path, monkeypatch, ["unpack", nodes.REMOVED], 5)
    assert breaks.done == {"unpack": 1, nodes.REMOVED: 1}
    found = recoveries(result.directory)  # one, if a transfer waits to break off until the other file is gone
    assert found[0]["kind"] == "crash" or len(found) == 1
    assert all(one["kind"] == "storage" and not one["replaced"] for one in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("inflight", ["update", "finish"])
def test_twenty_transfers_that_break_off_cost_no_sample(tmp_path, monkeypatch, inflight):
    """Of whole versions and changes, at any piece, where they are written, packed, unpacked and read."""
    names = [name for _ in range(5) for name in (*nodes.TRANSFERS, nodes.REMOVED)]
    breaks, result = broken(tmp_path, monkeypatch, names, len(names) + 2, inflight=inflight)
    assert breaks.done.total() >= 20 and {*breaks.done} == {*names}, breaks.done
    assert len(recoveries(result.directory)) >= 20


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
