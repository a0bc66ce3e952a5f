"""Runs in which a replica takes weights when its samples have ended: each trajectory has one version."""

from types import SimpleNamespace

import pytest

from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_async_cluster import PLACED, POOLS
from tests.flows.test_async_episodes import recipe as episodes
from tests.flows.test_async_sampler import check_once, rows
from tests.flows.test_episodes import Falls
from tests.flows.test_replay import check_same, versions
from tests.flows.test_replay import recipe as exact
from tilth.core.errors import PluginError
from tilth.engines.protocol import EngineError
from tilth.flows.replicas import Replicas
from tilth.roles.relay_sync import RelaySyncWorker
from tilth.runs.events import EVENTS, read_events
from tilth.runs.readers import read_metrics

STEPS = 5


def recipe(folder, staleness=2, **sections):
    small = {"inflight": "finish", "prompts": 3, "max_tokens": 24, **sections.pop("rollout", {})}
    return exact(
        folder, staleness, rollout=small, **{"algorithm": {"steps": STEPS}, "run": {"eval_every": 3}, **sections}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny.run(recipe(tmp_path_factory.mktemp("finish")), name="run")


def facts(run, kind):
    return [event.fields for event in read_events(run.directory / EVENTS) if event.kind == kind]


def test_each_trajectory_has_one_version_within_the_bound(run):
    """The replica skips versions, and samples are nevertheless behind: they are drawn while the policy learns."""
    check_once(run, STEPS, prompts=3)
    assert set(versions(run.directory)) == {1}
    assert all(len(one["versions"]) == 1 for one in facts(run, "finish"))
    records, pulled = read_metrics(run.directory), [one["version"] for one in facts(run, "pull")]
    assert max(record["staleness/max"] for record in records) == 2
    assert all(record["fully_async/partial/partial_ratio"] == 0 for record in records)
    assert pulled == sorted(set(pulled)) and len(pulled) < len(facts(run, "publish")) - 1


@pytest.mark.slow
def test_a_replay_learns_the_same_bit_for_bit(run, tmp_path):
    again = tiny.run(recipe(tmp_path), name="again", replay=run.directory)
    check_same(run, again)


def test_weights_that_come_early_are_named(tmp_path, monkeypatch):
    """A replica that does not wait for its samples."""
    monkeypatch.setattr(Replicas, "_due", lambda self: [p for p, has in enumerate(self._has) if has != self._newest])
    with raises(EngineError, "rollout.inflight.versions"):
        tiny.run(recipe(tmp_path, run={"eval_every": 0}), name="early")


def test_a_relay_inline_goes_with_its_worker():
    done = []
    relay, session = (SimpleNamespace(close=lambda: done.append(0)), SimpleNamespace(remove=lambda: done.append(1)))
    RelaySyncWorker.close(SimpleNamespace(relays={"rollout": relay}, _session=session))
    assert done == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, "free"])
def test_under_weights_that_stay_samples_are_those_of_a_synchronous_run(tmp_path, staleness):
    still = {"optimizer": {"lr": 0.0}, "run": {"eval_every": 1}}
    behind = rows(tiny.run(recipe(tmp_path, staleness, **still), name="behind"))
    plain = rows(tiny.run(recipe(tmp_path, 0, **still, rollout={"inflight": "update"}), name="plain"))
    assert behind.keys() == plain.keys()
    for i, row in behind.items():
        for name in ("tokens", "logprobs", "reward", "finish", "prompt"):
            assert row[name] == plain[i][name], name


@pytest.mark.slow
def test_after_a_fall_no_sample_has_tokens_of_another_version(tmp_path):
    """Those that were begun under older weights than the checkpoint's begin again."""
    made = recipe(tmp_path, run={"save_every": 2})
    with pytest.raises(PluginError):
        tiny.run(made, name="run", callbacks=[Falls(4)])
    run = tiny.run(made, name="run")
    check_once(run, STEPS, prompts=3)
    assert set(versions(run.directory)) == {1}
    ends = {one["id"]: one["versions"] for one in facts(run, "finish")}
    assert all([one["version"]] == [version for _, version in ends[one["id"]]] for one in facts(run, "resume"))


@pytest.mark.slow
def test_all_turns_of_an_episode_have_one_version(tmp_path):
    run = tiny.run(episodes(tmp_path, staleness=2, rollout={"inflight": "finish"}), reward=None)
    check_once(run, 4, prompts=4)
    assert all(len(one["versions"]) == 1 for one in facts(run, "finish"))
    assert max(record["staleness/max"] for record in read_metrics(run.directory)) > 0


@pytest.mark.slow
@pytest.mark.dist
def test_two_replicas_take_weights_each_in_its_own_time(tmp_path):
    """With versions of their own; a replay inline ends with the same weights."""
    placed = recipe(tmp_path, rollout=PLACED, cluster=POOLS)
    run = tiny.run(placed, name="run")
    check_once(run, STEPS, prompts=3, group=4)
    assert set(versions(run.directory)) == {1}
    pulled = {place: [one["version"] for one in facts(run, "pull") if one["replica"] == place] for place in (0, 1)}
    assert all(found == sorted(set(found)) and found for found in pulled.values())
    assert all(record["staleness/max"] <= 2 for record in read_metrics(run.directory))
    where = {"rollout": {"group": 4}, "cluster": {"backend": "inline", "pools": {}}}
    check_same(run, tiny.run(recipe(tmp_path, **where), name="again", replay=run.directory))
