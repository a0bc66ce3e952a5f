"""Environments of ``verifiers`` 0.4, as they are: the real package, where it is installed."""

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from tests.errors import raises
from tilth.core.errors import PluginError
from tilth.envs import adapters
from tilth.envs.environment import EnvironmentFault
from tilth.envs.process import load_environment
from tilth.serve.agents.taskset import VerifiersTaskset


@pytest.fixture
def tasksets(monkeypatch):
    found = pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed (pip install verifiers)")
    if not adapters.has_tasksets():
        pytest.skip("this version of verifiers has environments of its first kind")
    mine = [path for path in sys.path if Path(path).name != "benchmarks"]  # its agents.py hides a package that it needs
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "envs" / "community"), *mine])
    return found


def begun(kind, record):
    kind.prepare()
    episode = kind()
    return episode, episode.reset(record)


def said(text):
    return {"role": "assistant", "content": text, "finish": "stop"}


def test_its_harness_calls_the_policy_and_its_rewards_score_the_episode(tasksets):
    kind = load_environment("verifiers:sums-v1")
    records = list(kind.records(3))
    assert issubclass(kind, VerifiersTaskset) and [one["prompt"] for one in records] == ["0+0=", "1+1=", "2+2="]
    for text, reward in (("it is 4", 1.0), ("it is 5", 0.0)):
        episode, asked = begun(kind, records[2])
        assert asked == [{"role": "user", "content": "2+2="}]
        assert episode.step(said(text)) == ([], True)
        assert episode.reward() == {"letters": 7.0, "reward": reward}
        episode.close()


def test_an_episode_that_is_cut_is_scored_and_one_that_fails_is_not(tasksets):
    kind = load_environment("verifiers:sums-v1")
    episode, _ = begun(kind, {"prompt": "cut", "task": {"prompt": "2+2=", "answer": "4"}})
    episode.cut("the policy has no further turn")
    assert episode.reward()["reward"] == 0.0
    episode.close()
    episode, _ = begun(kind, {"prompt": "falls", "task": {"prompt": "falls", "answer": "4"}})
    episode.step(said("4"))
    with raises(EnvironmentFault, "environment.verifiers.error"):
        episode.reward()
    episode.close()


def test_a_name_that_is_none_and_a_harness_that_runs_code_here(tasksets):
    with raises(PluginError, "environment.verifiers.name"):
        load_environment("verifiers:nothing-there").prepare()

    class Codes(VerifiersTaskset, declares=False):
        id = "sums-v1"
        options: ClassVar = {"agent": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}}

    with raises(PluginError, "environment.verifiers.runtime"):
        Codes.prepare()


@pytest.mark.parametrize("version, kind", [("0.3.9", adapters.VerifiersEnvironment), ("0.4.0", VerifiersTaskset)])
def test_the_version_chooses_the_adapter(monkeypatch, version, kind):
    monkeypatch.setattr(adapters, "version", lambda package: version)
    assert issubclass(load_environment("verifiers:any"), kind)
