"""Episodes that may be behind: whole, each once, with turns under the weights that were there when they were drawn."""

import shutil
from types import SimpleNamespace

import pytest

from tests.config.test_plugins import forget
from tests.errors import raises
from tests.flows import tiny
from tests.flows.killed import FLOWS
from tests.flows.test_async_cluster import POOLS, RANKS, Kills, short_rounds  # noqa: F401  (a fixture)
from tests.flows.test_async_sampler import check_once, members, numbers, rows, state
from tests.flows.test_episodes import PLUGIN, Falls
from tests.flows.test_episodes import recipe as episodes
from tests.flows.test_fapo import TOLD
from tests.flows.test_replay import check_same, versions
from tests.flows.test_resume import kill_and_resume
from tests.serve.test_agent import runs as agents
from tilth.core.errors import DataError, PluginError
from tilth.core.random import stream_id
from tilth.data.prompts import PromptSet
from tilth.runs.events import EVENTS, read_events
from tilth.runs.readers import read_metrics


def recipe(folder, staleness=1, **sections):
    """Turns of up to 16 tokens, two rounds of the inline backend, and an evaluation beside them in each step."""
    how = {"staleness": staleness, "prompts": 4, "group": 2, "max_rows": 8, "max_tokens": 16, "turns": 3, "stop": ["="]}
    sections["rollout"] = {**how, **sections.get("rollout", {})}
    sections["run"] = {"eval_every": 1, "eval_prompts": 4, "save_every": 2, **sections.get("run", {})}
    sections["algorithm"] = {"steps": 4, **sections.get("algorithm", {})}
    made = episodes(folder, supervised={"steps": 0}, **sections)
    return made.replaced("model", context=80)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    forget()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    result = tiny.run(recipe(tmp_path_factory.mktemp("ran")), reward=None)
    forget()
    return result


def spans(result):
    """Versions of each episode that a step has learned from: (first token, version)."""
    log = read_events(result.directory / EVENTS)
    return {event.fields["id"]: event.fields["versions"] for event in log if event.kind == "finish"}


def check_turns(result):
    """Each version names a token that the policy chose, and the reward is that of the episode's own environment."""
    versions, missing = spans(result), 0
    for i, row in rows(result).items():
        turns = [segment for segment in row["segments"] if segment["role"] == "assistant"]
        assert all(row["mask"][first] for first, _ in versions[i])
        missing += row["reward"] is None
        assert row["reward"] is None or dict(row["parts"])["turns_seen"] == len(turns)
    assert sum(record["reward/missing"] for record in read_metrics(result.directory)) == missing


def test_each_episode_is_consumed_once_in_a_whole_group(ran):
    check_once(ran, 4, prompts=4)
    check_turns(ran)
    records = read_metrics(ran.directory)
    assert [record["staleness/max"] for record in records] == [0, 1, 1, 1]
    assert sum(record["reward/missing"] for record in records) > 0


def test_weights_change_within_episodes(ran):
    """Tokens of environments count for no version."""
    found, versions = rows(ran), spans(ran)
    assert any(len(versions[i]) > 1 for i in found)
    chosen = sum(sum(row["mask"]) for row in found.values())
    counted = [v for r in read_metrics(ran.directory) for k, v in r.items() if k.startswith("staleness/tokens/")]
    assert sum(counted) == chosen


def test_a_run_without_a_journal_of_environments_is_not_repeated(tmp_path, ran):
    copied = shutil.copytree(ran.directory, tmp_path / "copied", ignore=shutil.ignore_patterns("observations"))
    with raises(DataError, "rollout.environment"):
        tiny.run(recipe(tmp_path / "again"), reward=None, replay=copied)


@pytest.mark.slow  # quickly in tests/envs/test_journal.py
def test_what_environments_said_is_dropped_where_neither_resume_nor_replay_needs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.envs.journal.PART", 1)
    how = {"run": {"save_every": 1}, "algorithm": {"steps": 5}}
    drafts = {"rollout": {"speculate": "suffix"}}
    with pytest.raises(PluginError):
        tiny.run(recipe(tmp_path, **how, **drafts), reward=None, name="drops", callbacks=[Falls(3)])
    drops = tiny.run(recipe(tmp_path, **how, **drafts), reward=None, name="drops")
    check_once(drops, 5, prompts=4)
    check_resumed(drops)
    keeps = tiny.run(recipe(tmp_path, **how), reward=None, name="keeps")
    left, every = (len([*(run.directory / "observations").glob("attempt-*")]) for run in (drops, keeps))
    assert left < every == 6


DRAWS = PLUGIN.replace('"content": "1+1="', '"content": draw() + "="')
DRAWS = DRAWS.replace("sum(len(said) for said in self.said) % 3", "CHANCE.random()")
DRAWS += """
import random
CHANCE = random.SystemRandom()

def draw():
    return f"{CHANCE.randrange(10)}+{CHANCE.randrange(10)}"
"""


def exact(folder, text=DRAWS, staleness=2, **sections):
    """Episodes of environments that draw at random, in bits that do not depend on what is beside them."""
    return recipe(folder, staleness, text=text, train={"parity": True, "threads": 1}, **sections)


def test_a_replay_hears_what_environments_have_said(tmp_path):
    """They are asked nothing, and those that failed fail again."""
    made = exact(tmp_path)
    run = tiny.run(made, name="run", reward=None)
    assert max(record["staleness/max"] for record in read_metrics(run.directory)) == 2
    assert versions(run.directory)[2] > 3 and any(row["reward"] is None for row in rows(run).values())
    again = tiny.run(made, name="again", reward=None, replay=run.directory)
    check_same(run, again)
    observed = (again.directory / "observations").glob("attempt-*.jsonl")
    assert [path.name for path in observed] == ["attempt-000001-rank-0-part-000000.jsonl"]
    path = run.directory / "observations" / "attempt-000001-rank-0-part-000000.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-9]))
    with raises(DataError, "observations"):
        tiny.run(made, name="torn", reward=None, replay=run.directory)


def drawn_by(row, spans):
    """Version of each token that the policy chose."""
    return [[v for first, v in spans if first <= at][-1] for at, mask in enumerate(row["mask"]) if mask]


def check_resumed(result):
    """Some episodes have gone on, with the tokens that versions before have drawn."""
    events = [e.fields for e in read_events(result.directory / EVENTS) if e.kind == "resume"]
    assert sum(record["samples/resumed"] for record in read_metrics(result.directory)) == len(events)
    ends, before = spans(result), 0
    found = {one["id"]: one for one in events}  # one that was resumed twice, as the last time
    for i, one in found.items():
        by, count = drawn_by(rows(result)[i], ends[i]), one["tokens"]
        assert 0 < count <= len(by)
        assert all(version <= one["version"] for version in by[:count])
        assert all(version >= one["version"] for version in by[count:])
        before += by[0] < one["version"]
    assert before


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_run(tmp_path, ran):
    """Each step of the inline engine waits for the environments, so that no clock has a say."""
    again = tiny.run(recipe(tmp_path), reward=None)
    assert tiny.same(numbers(ran), numbers(again)) and tiny.weights(ran.directory) == tiny.weights(again.directory)


@pytest.mark.slow
@pytest.mark.parametrize("graded", [False, True])
def test_under_weights_that_stay_episodes_are_those_of_a_synchronous_run(tmp_path, graded, monkeypatch):
    """Also those that were set aside for an evaluation, and what a judge gives them while others are played."""
    still, made = {"optimizer": {"lr": 0.0}, "train": {"parity": True}}, {}
    if graded:
        monkeypatch.setattr("tilth.roles.judge.grade", lambda reply: float(len(reply) % 3))
        monkeypatch.setattr("tilth.flows.sampler.apart", lambda *groups: True)  # as in pools of their own
        how = {"model": {"context": 48}, "supervised": {"steps": 2}, "run": {"save_every": 1}}
        path = tiny.learn(tmp_path / "judge", "sft", prompts=PromptSet.of(TOLD), **how).directory
        still["judge"] = {"path": str(path), "rubric": "{completion}?", "max_tokens": 8}
    for staleness in (2, 0):
        made[staleness] = rows(tiny.run(recipe(tmp_path / str(staleness), staleness, **still), reward=None))
        forget()
    assert made[2].keys() == made[0].keys() and len(made[2]) == 32
    assert graded == any("judge" in dict(row["parts"]) for row in made[2].values())
    for i, row in made[2].items():
        for name in ("tokens", "mask", "logprobs", "reward", "parts", "finish", "prompt"):
            assert row[name] == made[0][i][name], name


@pytest.mark.slow
def test_agents_with_several_conversations_are_those_of_a_synchronous_run(tmp_path):
    """Their calls wait while they are set aside."""
    made = {}
    for staleness in (2, 0):
        how = {"staleness": staleness, "turns": 12, "max_tokens": 24, "prompts": 4, "group": 2, "max_rows": 8}
        more = {"algorithm": {"steps": 3}, "supervised": {"steps": 0}, "optimizer": {"lr": 0.0}}
        run = {"eval_every": 1, "eval_prompts": 4}
        recipe = agents(tmp_path / str(staleness), "Teams", rollout=how, model={"context": 500}, run=run, **more)
        result = tiny.run(recipe, reward=None)
        made[staleness] = rows(result)
        if staleness:
            check_once(result, 3, prompts=4)
    assert made[2].keys() == made[0].keys()
    assert any(row["conversations"] is not None for row in made[2].values())
    for i, row in made[2].items():
        for name in ("tokens", "mask", "logprobs", "reward", "conversations"):
            assert row[name] == made[0][i][name], name


@pytest.mark.slow
def test_agents_with_several_conversations_are_repeated(tmp_path):
    """Each conversation stops where later versions went on with it."""
    how = {"staleness": 2, "turns": 12, "max_tokens": 24, "prompts": 4, "group": 2, "max_rows": 8}
    more = {"algorithm": {"steps": 4}, "supervised": {"steps": 0}, "train": {"parity": True, "threads": 1}}
    made = agents(tmp_path, "Teams", rollout=how, model={"context": 500}, **more)
    run = tiny.run(made, reward=None, name="run")
    assert any(row["conversations"] is not None for row in rows(run).values())
    assert sum(count for number, count in versions(run.directory).items() if number > 1) > 3
    check_same(run, tiny.run(made, reward=None, name="again", replay=run.directory))


@pytest.mark.slow
@pytest.mark.parametrize("inflight", ["update", "finish"])
def test_open_episodes_go_on_after_a_fall(tmp_path, inflight):
    """With their turns and what they have heard; a replay that falls too has the same."""
    made = exact(tmp_path, PLUGIN, rollout={"inflight": inflight}, algorithm={"steps": 6})
    run, again = (SimpleNamespace(directory=tmp_path / f"{name}-001") for name in ("run", "again"))
    for one, more in ((run, {}), (again, {"replay": run.directory})):
        with pytest.raises(PluginError):
            tiny.run(made, reward=None, name=one.directory.name[:-4], callbacks=[Falls(3)], **more)
        assert state(one).flying or more
        tiny.run(made, reward=None, name=one.directory.name[:-4], **more)
        check_turns(one)
    check_once(run, 6, prompts=4)
    check_same(run, again)
    if inflight == "update":
        check_resumed(run)
    else:
        assert all(len(one) == 1 for one in spans(run).values())
    assert not [*(run.directory / "flying").glob("*.bin")]


@pytest.mark.slow
def test_episodes_say_after_a_fall_what_they_would_have_said(tmp_path):
    """Under weights that stay."""
    still = {"optimizer": {"lr": 0.0}, "train": {"parity": True}, "algorithm": {"steps": 6}}
    whole = rows(tiny.run(recipe(tmp_path / "exact", 0, **still), reward=None))
    forget()
    with pytest.raises(PluginError):
        tiny.run(recipe(tmp_path / "behind", 2, **still), reward=None, callbacks=[Falls(3)])
    result = tiny.run(recipe(tmp_path / "behind", 2, **still), reward=None)
    assert sum(record["samples/resumed"] for record in read_metrics(result.directory)) > 3
    for i, row in rows(result).items():
        for name in ("tokens", "mask", "logprobs", "reward", "parts", "finish", "prompt"):
            assert row[name] == whole[i][name], name


@pytest.mark.slow
def test_an_episode_whose_environment_is_not_the_same_again_begins_anew(tmp_path):
    """No reward is missing for it, and a replay has the new course."""
    made = exact(tmp_path, DRAWS.replace('endswith("7")', 'endswith("none")'), algorithm={"steps": 6})
    with pytest.raises(PluginError):
        tiny.run(made, reward=None, name="run", callbacks=[Falls(3)])
    run = tiny.run(made, reward=None, name="run")
    check_once(run, 6, prompts=4)
    assert any(event.kind == "resume" for event in read_events(run.directory / EVENTS))
    journal = (run.directory / "observations" / "attempt-000002-rank-0-part-000000.jsonl").read_text()
    assert journal.count('"differs"') > 0 == sum(record["reward/missing"] for record in read_metrics(run.directory))
    check_same(run, tiny.run(made, name="again", reward=None, replay=run.directory))


@pytest.mark.slow
@pytest.mark.parametrize(("point", "call"), [("generating", 50), ("publishing", 5), ("committing", 4)])
def test_episodes_go_on_after_the_death_of_the_controller(tmp_path, point, call):
    kill_and_resume(tmp_path, point, call, "episodes behind")
    run = SimpleNamespace(directory=tmp_path / "tiny-001")
    check_once(run, 6, prompts=4)
    check_resumed(run)
    check_same(run, tiny.run(tiny.recipe(tmp_path, **FLOWS["episodes behind"]), name="again", replay=run.directory))


@pytest.mark.slow
def test_dropped_groups_end_their_environments(tmp_path, monkeypatch):
    """The run goes on with others; nothing of the dropped ones is left on the replica or in the store."""
    dropped, left = [], []

    def loop(run):
        for batch in run.experience(group=2):
            run.log_update(run.policy.update(run.policy.advantages(run.logprobs(batch), run.algo), run.algo))
            run.sync_weights(run.policy)
            sampler, pool = run.sampler, tiny.worker(run.rollout).player.pool
            if not dropped:
                flying = [first for first in sampler.ledger.open if first not in sampler._flights]
                dropped.extend(i for first in flying for i in (first, first + 1))
                assert not pool._episodes.keys().isdisjoint(dropped)
                sampler._drop(flying, "stale")
                continue
            left.append([i for i in dropped if i in pool._episodes or i in sampler._leases])

    monkeypatch.setattr("tilth.launch.life.policy_gradient", loop)
    result = tiny.run(recipe(tmp_path), reward=None)
    books, found = state(result), rows(result)
    assert dropped and members(books.dropped) == set(dropped) and found.keys() == members(books.consumed)
    assert members(books.admitted) == found.keys() | set(dropped) and len(found) == 32
    assert left and not any(left)


@pytest.mark.slow
@pytest.mark.dist
def test_killed_processes_of_environments_cost_no_episode(tmp_path):
    """At random moments of each step. Episodes begin again in another process and repeat what they have heard; the run
    does not begin again, and a replay inline, without deaths, has the same."""
    kills = Kills(RANKS["replica"], range(1, 12), stream_id("environments", 1), inside="tilth.envs.process")
    placed = {"pool": "rollout", "layout": {"dp": 2}, "environments": 2}
    more = {"staleness": 1, "algorithm": {"steps": 12}}
    run = tiny.run(exact(tmp_path, PLUGIN, rollout=placed, cluster=POOLS, **more), reward=None, callbacks=[kills])
    kills.join()
    check_once(run, 12, prompts=4)
    check_turns(run)
    assert len(kills.killed) >= 10 and not any("is new" in line for line in kills.messages), kills.messages
    assert not state(run).dropped and max(record["staleness/max"] for record in read_metrics(run.directory)) == 1
    where = {"cluster": {"backend": "inline", "pools": {}}}
    check_same(run, tiny.run(exact(tmp_path, PLUGIN, **more, **where), reward=None, name="again", replay=run.directory))


@pytest.mark.slow
@pytest.mark.dist
def test_episodes_of_a_replica_that_dies_go_on_with_their_turns(tmp_path, short_rounds):  # noqa: F811
    """On other workers, and with new environments; a replay inline has the same."""
    kills = Kills(RANKS["replica"], [2, 4], stream_id("kills", 1))
    how, more = {"pool": "rollout", "layout": {"dp": 2}}, {"algorithm": {"steps": 8}}
    made = exact(tmp_path, PLUGIN, rollout=how, cluster=POOLS, **more)
    plugins = {"plugins": (*made.plugins, *short_rounds)}
    made = made.model_copy(update=plugins)
    run = tiny.run(made, reward=None, name="run", callbacks=[kills])
    kills.join()
    assert len(kills.killed) == 2
    check_once(run, 8, prompts=4)
    check_turns(run)
    check_resumed(run)
    where = {"rollout": {"pool": "", "layout": {"dp": 1}}, "cluster": {"backend": "inline", "pools": {}}}
    inline = exact(tmp_path, PLUGIN, **more, **where).model_copy(update=plugins)
    check_same(run, tiny.run(inline, reward=None, name="again", replay=run.directory))
