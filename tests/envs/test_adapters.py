"""Environments of ``verifiers`` and ``gymnasium``, as they are: the real packages, where they are installed."""

import sys
from pathlib import Path

import pytest

from tests.errors import raises
from tilth.core.errors import PluginError
from tilth.envs.calls import message_of
from tilth.envs.environment import EnvironmentFault
from tilth.envs.pool import EnvironmentPool
from tilth.envs.process import file_of, load_environment

COMMUNITY = str(Path(__file__).parent / "community")
CALL = '<tool_call>{"name": "%s", "arguments": {"a": 2, "b": 5}}</tool_call>'


@pytest.fixture
def verifiers(monkeypatch):
    found = pytest.importorskip("verifiers", reason="the package verifiers is not installed (pip install verifiers)")
    if not hasattr(found, "load_environment"):
        pytest.skip("this version of verifiers has no environments of its first kind")
    mine = [path for path in sys.path if Path(path).name != "benchmarks"]  # its agents.py hides a package that it needs
    monkeypatch.setattr(sys, "path", [COMMUNITY, *mine])
    return found


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason="the package gymnasium is not installed")


def begun(spec, info):
    kind = load_environment(spec)
    kind.prepare()
    one = kind()
    return one, one.reset(info)


def contents(messages):
    return [m["content"] for m in messages]


def test_a_file_of_an_environment():
    assert file_of("a/b.py:Guess") == "a/b.py" and file_of("guess") == file_of("verifiers:wordle") == ""


@pytest.mark.parametrize("package", ["verifiers", "gymnasium"])
def test_a_package_that_is_missing(monkeypatch, package):
    for name in (package, "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, None)
    with raises(PluginError, f"environment.{package}"):
        load_environment(f"{package}:anything-v0").prepare()


def test_tools_are_called_by_the_environment_itself(verifiers):
    records = list(load_environment("verifiers:small-sums").records(3))
    assert records[2]["prompt"].endswith("2*5=") and records[2]["row"]["answer"] == "10" and len(records) == 3
    one, first = begun("verifiers:small-sums", dict(records[2]))
    assert [m["role"] for m in first] == ["system", "user"]
    assert [t.schema["function"]["name"] for t in one.tools().values()] == ["multiply"]
    said = [one.step(message_of(text)) for text in (CALL % "multiply", CALL % "divide", '<tool_call>{"name": ')]
    assert contents(said[0][0]) == ["10"] and "divide" in said[1][0][0]["content"] and len(said[2][0]) == 1
    assert not any(done for _, done in said) and one.step(message_of("10")) == ([], True)
    assert one.reward() == {
        "right": 1.0, "num_turns": 4.0, "total_tool_calls": 3.0, "multiply_calls": 1.0, "reward": 1.0
    }  # fmt: skip


def test_a_game_ends_when_it_says_so(verifiers):
    one, first = begun("verifiers:guess-word", {"prompt": "?", "answer": "bat"})
    assert contents(first) == ["?"]
    assert contents(one.step(message_of("cat"))[0]) == ["1: before"]
    assert one.step(message_of("bat"))[1] and one.reward()["reward"] == pytest.approx(0.9)


def test_an_episode_that_is_cut_is_scored_as_it_is(verifiers):
    one, _ = begun("verifiers:guess-word", {"prompt": "?", "answer": "bat"})
    one.step(message_of("cat"))
    assert one.reward() == {"reward": -0.1, "num_turns": 1.0, "score": -0.1}


def test_an_environment_that_fails_gives_no_reward(verifiers):
    one, _ = begun("verifiers:guess-word", {"prompt": "?", "answer": "bat"})
    assert one.step(message_of("boom"))[1]
    with raises(EnvironmentFault, "environment.verifiers.error"):
        one.reward()


def test_an_environment_that_rewrites_what_was_said_is_refused(verifiers):
    one, _ = begun("verifiers:guess-word", {"prompt": "?", "answer": "bat"})
    with raises(EnvironmentFault, "environment.verifiers.rewrites"):
        one.step(message_of("forget"))


def test_no_such_environment(verifiers):
    with raises(PluginError, "environment.verifiers.name"):
        load_environment("verifiers:nothing-there").prepare()


@pytest.mark.dist
@pytest.mark.slow
def test_episodes_of_verifiers_in_a_pool(verifiers):
    pool = EnvironmentPool("verifiers:guess-word", timeout=30.0)
    try:
        for i in range(20):
            pool.begin(i, {"prompt": "?", "answer": "bat"})
        rewards = {}
        while len(rewards) < 20:
            for answer in pool.poll(60.0):
                assert answer.status == "ok", answer.reason
                if answer.op == "reward":
                    rewards[answer.episode] = answer.value["value"]
                elif answer.op == "step" and answer.value["done"]:
                    pool.reward(answer.episode)
                else:
                    word = "bat" if answer.op == "step" or answer.episode % 2 else "cat"
                    pool.step(answer.episode, message_of(word))
        assert rewards == {i: pytest.approx(0.9) for i in range(20)}
    finally:
        pool.close()


def test_a_game_that_is_drawn_is_read_as_text(gymnasium):
    one, first = begun("gymnasium:FrozenLake-v1", {"seed": 1})
    assert contents(first) == ["\n[S]FFF\nFHFH\nFFFH\nHFFG\n"]
    said, done, paid = one.step({"content": "9"})
    assert "0 to 3" in said[0]["content"] and not done and not paid
    said, done, paid = one.step({"content": " 1"})
    assert said[0]["content"].count("[") == 1 and not done and one.reward() == {"reward": 0.0, "steps": 1.0}


def test_the_same_seed_is_the_same_game(gymnasium):
    games = [begun("gymnasium:Blackjack-v1", {"seed": seed})[1] for seed in (5, 5, 6, 7, 8)]
    assert games[0] == games[1] and any(game != games[0] for game in games)


def test_a_game_whose_actions_are_text(gymnasium):
    class Echo(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(20)
        action_space = gymnasium.spaces.Text(5, charset="abc")

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "say abc", {}

        def step(self, action):
            return action[::-1], float(action == "abc"), action == "abc", False, {}

    gymnasium.register("Echo-v0", entry_point=Echo)
    one, first = begun("gymnasium:Echo-v0", {"seed": 0})
    assert contents(first) == ["say abc"] and "1 to 5" in one.step({"content": "xyz"})[0][0]["content"]
    assert contents(one.step({"content": "ab"})[0]) == ["ba"]
    assert one.step({"content": "abc"})[1:] == (True, 1.0) and one.reward() == {"reward": 0.0, "steps": 2.0}


@pytest.mark.parametrize(
    "name, key", [("Nothing-v0", "environment.gymnasium.name"), ("Pendulum-v1", "environment.gymnasium.actions")]
)
def test_games_that_no_policy_can_play(gymnasium, name, key):
    with raises(PluginError, key):
        load_environment(f"gymnasium:{name}").prepare()


def test_a_game_without_a_seed(gymnasium):
    with raises(EnvironmentFault, "environment.gymnasium.seed"):
        begun("gymnasium:FrozenLake-v1", {"prompt": "go"})
