"""An asynchronous run that is repeated by its log, and one that differs from it."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.errors import raises
from tests.flows import test_async_sampler, tiny
from tests.flows.test_async_sampler import rows, state
from tests.flows.test_episodes import Falls
from tilth.core.errors import DataError, PluginError, TokenIdentityError
from tilth.core.lines import iterate_lines
from tilth.flows.async_sampler import FLYING
from tilth.runs.events import EVENTS, AsyncLog, RunReplay, _line, read_events
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

COLUMNS = ("id", "step", "tokens", "logprobs", "mask", "reward", "finish", "text", "version")


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    """A run of staleness 1."""
    return tiny.run(recipe(tmp_path_factory.mktemp("behind"), 1), name="run").directory


@pytest.fixture
def copied(behind, tmp_path):
    """A copy of it, to be changed."""
    return Path(shutil.copytree(behind, tmp_path / behind.name))


def consumed(directory):
    """What the steps learned from, in the log's order."""
    return [event.fields for event in read_events(directory / EVENTS) if event.kind == "consume"]


def recipe(folder, staleness, **sections):
    """A recipe whose bits do not depend on what is drawn side by side, which a replay changes."""
    exact = {"parity": True, "threads": 1, **sections.pop("train", {})}
    return test_async_sampler.recipe(folder, staleness, train=exact, **sections)


def check_same(run, again, trajectories=True):
    """trajectories: False if those that a filter left out are not drawn again."""
    assert consumed(run.directory) == consumed(again.directory)
    one, other = rows(run), rows(again)
    assert other.keys() <= one.keys() and (other.keys() == one.keys() or not trajectories)
    for i, row in other.items():
        for name in COLUMNS:
            assert row[name] == one[i][name], (i, name)
    assert tiny.weights(run.directory) == tiny.weights(again.directory)


def versions(directory):
    """Number of versions that drew a trajectory -> trajectories."""
    replay = RunReplay(directory / EVENTS)
    ids = [part.id for step in range(1, replay.steps + 1) for part in replay.batch(step)]
    return Counter(Counter(part.id for version in range(99) for part in replay.parts(version))[i] for i in ids)


def test_a_replay_learns_the_same_bit_for_bit(tmp_path):
    """Tokens, log-probs and weights, although nothing is in flight while it learns."""
    made = recipe(tmp_path, 2, algorithm={"steps": 4})
    run = tiny.run(made, name="run")
    assert max(record["staleness/max"] for record in read_metrics(run.directory)) == 2
    assert versions(run.directory)[2] > 5 and versions(run.directory)[3] > 0
    again = tiny.run(made, name="again", replay=run.directory)
    check_same(run, again)


def any_reward(prompt, completion, info):
    """Another one at each call."""
    return random.SystemRandom().random()


@pytest.mark.slow
def test_a_replay_takes_rewards_from_the_journal_of_the_run(tmp_path):
    made = recipe(tmp_path, 1, algorithm={"steps": 3})
    run = tiny.run(made, name="run", reward=any_reward)
    again = tiny.run(made, name="again", reward=any_reward, replay=run.directory)
    check_same(run, again)
    journal = again.directory / "scores.jsonl"  # of evaluations alone: nothing else was scored anew
    assert all(i < 0 for line in iterate_lines(journal) for i in line["trajectory"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "more"),
    [
        (
            "dapo",
            {"algorithm": {"advantage": "grpo", "refill": 4, "steps": 4}, "rollout": {"order": "fresh"}, "seed": 4},
        ),
        ("remax", {"algorithm": {"advantage": "remax"}}),
        ("vapo", {"algorithm": {"advantage": "vapo"}, "critic": {"steps": 2}}),
    ],
)
def test_other_flows_are_repeated(tmp_path, flow, more):
    """Dynamic sampling over several rounds, greedy baselines, a critic and a phase before."""
    run = tiny.run(recipe(tmp_path, 3, flow=flow, **more), name="run")
    again = tiny.run(recipe(tmp_path, 3, flow=flow, **more), name="again", replay=run.directory)
    check_same(run, again, trajectories=flow != "dapo")
    ids = [event["id"] for event in consumed(run.directory) if event["batch"] == 1]
    assert flow != "dapo" or ids != sorted(ids)  # the second round took older ones


@pytest.mark.slow
def test_a_run_that_fell_is_repeated_by_a_replay_that_falls(tmp_path):
    made = recipe(tmp_path, 2, run={"save_every": 2}, algorithm={"steps": 8})
    with pytest.raises(PluginError):
        tiny.run(made, name="run", callbacks=[Falls(5)])
    run = tiny.run(made, name="run")
    with pytest.raises(PluginError):
        tiny.run(made, name="again", callbacks=[Falls(5)], replay=run.directory)
    again = tiny.run(made, name="again", replay=run.directory)
    check_same(run, again)
    first = again.directory / FLYING / "attempt-000001-rank-0-part-000000.bin"
    assert not first.exists() and first.with_name("attempt-000001-from-0").exists()  # no step needs it any more


@pytest.mark.slow
def test_a_replay_ends_where_the_run_has_stopped(tmp_path):
    made = recipe(tmp_path, 2, run={"save_every": 2})
    with pytest.raises(PluginError):
        tiny.run(made, name="run", callbacks=[Falls(5)])
    folder = tmp_path / "run-001"
    with pytest.raises(Interrupted):
        tiny.run(made, name="again", replay=folder)
    steps = RunReplay(folder / EVENTS).steps
    assert [record["step"] for record in read_metrics(tmp_path / "again-001")] == [*range(1, steps + 1)]
    assert len(read_metrics(folder)) == steps  # the run itself is not gone on with


def changed(directory, change):
    """Rewrite the events of a log by a function."""
    events = [change(event) for event in read_events(directory / EVENTS)]
    (directory / EVENTS).write_text("".join(f"{_line(event)}\n" for event in events))


def test_a_replay_that_differs_ends_with_an_error(tmp_path, copied):
    target = consumed(copied)[30]

    def other(event):
        it = event.kind == "consume" and event.fields["id"] == target["id"]
        return event._replace(fields={**event.fields, "checksum": 5}) if it else event

    changed(copied, other)
    with raises(TokenIdentityError, "replay.trajectory"):
        tiny.run(recipe(tmp_path, 1), name="again", replay=copied)
    assert [record["step"] for record in read_metrics(tmp_path / "again-001")] == [*range(1, target["batch"])]


def test_what_cannot_be_replayed_is_refused_before_anything_starts(tmp_path, copied):
    for more in ({"seed": 8}, {"optimizer": {"lr": 0.5}}, {"rollout": {"max_tokens": 39}}):
        with raises(DataError, "events.recipe"):
            tiny.run(recipe(tmp_path, 1, **more), name="again", replay=copied)
    exact = tiny.run(recipe(tmp_path, 0, algorithm={"steps": 1}), name="exact")
    with raises(DataError, "--replay"):
        tiny.run(recipe(tmp_path, 0, algorithm={"steps": 1}), name="again", replay=exact.directory)
    os.truncate(copied / EVENTS, (copied / EVENTS).stat().st_size // 2)
    with raises(DataError, "events.cut"):
        tiny.run(recipe(tmp_path, 1), name="again", replay=copied)
    assert not (tmp_path / "again-001").exists()


@pytest.mark.slow
def test_twenty_random_cuts_are_survived_behind_the_checkpoint_and_named_before_it(tmp_path):
    made = recipe(tmp_path, 2, run={"save_every": 2})
    with pytest.raises(PluginError):
        tiny.run(made, name="run", callbacks=[Falls(5)])
    folder, rng = tmp_path / "run-001", random.Random(3)
    whole, number = (folder / EVENTS).read_bytes(), state(SimpleNamespace(directory=folder)).event
    durable = sum(map(len, whole.splitlines(keepends=True)[: number + 1]))
    places = [rng.randrange(1, durable) for _ in range(10)] + [rng.randrange(durable, len(whole)) for _ in range(10)]
    for place in places:
        (folder / EVENTS).write_bytes(whole[:place])
        digests = [next(read_events(folder / EVENTS)).fields["recipe"]] if place > 200 else ["any"]
        log = AsyncLog(folder / EVENTS, digests)
        if place < durable:
            with raises(DataError, "events.cut"):
                log.cut(number)
        else:
            log.cut(number)
            assert log.number == number and (folder / EVENTS).read_bytes() == whole[:durable]
    (folder / EVENTS).write_bytes(whole[: durable - 1])
    with raises(DataError, "events.cut"):
        tiny.run(made, name="run")
    (folder / EVENTS).write_bytes(whole[: rng.randrange(durable, len(whole))])
    run = tiny.run(made, name="run")
    check_same(run, tiny.run(made, name="again", replay=run.directory))
