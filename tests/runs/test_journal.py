"""The journal of rewards: a step that runs again has the rewards that it had, and no other sample has them."""

import json
import os
import sys

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.flows import tiny
from tilth.api import run_recipe
from tilth.core.batch import Batch
from tilth.core.errors import DataError, RewardError
from tilth.rewards.process_pool import Outcome
from tilth.roles.policy import PolicyWorker
from tilth.runs.journal import Journal
from tilth.runs.readers import read_metrics, read_state, read_trajectories

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a reward's process need not import torch

# ---- the file ----


def scored(rewards, first=0, checksum=100, **columns):
    """Rows as the reward role gives them back; NaN: missing."""
    rewards = np.array(rewards, np.float32)
    ids = np.arange(first, first + len(rewards))
    parts = {f"part/{name}": np.array(values, np.float32) for name, values in columns.items()}
    identity = (ids + checksum).astype(np.uint32)
    return Batch({"id": ids, "identity": identity, "reward": rewards, "outcome": rewards.copy(), **parts})


def failures(batch, status="error"):
    missing = batch["id"][np.isnan(batch["reward"])].tolist()
    return {i: {"value": None, "parts": {}, "reason": f"why {i}", "seconds": 0.5, "status": status} for i in missing}


def reopened(path, step=0, reward="one", **how):
    journal = Journal(path, reward, **how)
    journal.rewind(step)
    return journal


def test_what_was_written_is_known_to_the_next_attempt(tmp_path):
    batch = scored([1.0, np.nan, 0.1], form=[0.5, np.nan, np.nan])
    first = reopened(tmp_path)
    first.write(3, batch, failures(batch))
    first.write(3, scored([9.0, 9.0, 9.0]), {})  # the first one stands
    first.close()
    with open(tmp_path / "rewards.jsonl", "a") as file:
        file.write('{"step": 3, "traj')  # killed while writing
    for journal in (first, reopened(tmp_path)):
        known = journal.known(3, batch)
        assert known[0]["value"] == 1.0 and known[0]["parts"] == {"form": 0.5}
        assert known[1] == failures(batch)[1]
        assert np.float32(known[2]["value"]) == batch["reward"][2] and np.isnan(known[2]["parts"]["form"])
        assert journal.known(4, batch).keys() == known.keys()  # in whichever step they are learned from
        assert [Outcome(**known[i]).value is None for i in range(3)] == [False, True, False]


def test_it_holds_for_the_very_sample_and_the_very_reward(tmp_path):
    batch = scored([1.0, np.nan])
    reopened(tmp_path).write(3, batch, failures(batch, "timeout"))
    assert set(reopened(tmp_path).known(3, batch)) == {0, 1}
    assert reopened(tmp_path).known(3, scored([1.0, np.nan], checksum=200)) == {}  # other completions
    assert reopened(tmp_path).known(3, scored([1.0, np.nan], first=1, checksum=99)) == {}  # of other trajectories
    assert reopened(tmp_path, reward="another").known(3, batch) == {}
    assert reopened(tmp_path, replay=False).known(3, batch) == {}
    entry = json.loads((tmp_path / "rewards.jsonl").read_text())
    assert (entry["trajectory"], entry["checksum"], entry["reward"]) == (1, 101, "one")


def test_evaluations_are_scored_again_in_a_later_step(tmp_path):
    """Their ids come again, and the same answer may get another reward."""
    batch = scored([1.0, np.nan], first=-7)
    journal = reopened(tmp_path)
    journal.write(3, batch, failures(batch))
    assert set(journal.known(3, batch)) == {-7, -6} and journal.known(4, batch) == {}
    journal.write(4, scored([0.5, 0.5], first=-7), {})
    again = reopened(tmp_path)
    assert again.known(4, batch)[-7]["value"] == 0.5 and again.known(3, batch)[-7]["value"] == 1.0


def test_a_trajectory_that_waits_keeps_its_outcome(tmp_path):
    """Steps later, in memory, on disk and after a resume; one that was consumed does not."""
    journal, late, done = reopened(tmp_path), scored([0.25, np.nan], first=4), scored([0.5], first=8)
    journal.waits = range(4, 6).__contains__
    journal.write(1, late, failures(late))
    journal.write(1, done, {})
    journal.forget(6)
    assert set(journal.known(6, late)) == {4, 5} and journal.known(6, done) == {}
    journal.trim(5)
    again = Journal(tmp_path, "one")
    again.waits = range(4, 6).__contains__
    again.rewind(5)
    assert set(again.known(6, late)) == {4, 5} and again.known(6, done) == {}
    whole = reopened(tmp_path)  # nothing is trimmed: a replay needs it
    assert whole.known(1, done)[8]["value"] == 0.5


def test_a_replay_has_the_rewards_of_the_run(tmp_path):
    run, batch = tmp_path / "run", scored([0.25, np.nan, 0.75])
    run.mkdir()
    first = reopened(run)
    first.write(1, batch, failures(batch))
    first.write(1, scored([0.5], first=-3), {})
    journal = reopened(tmp_path)
    journal.replay(run)
    journal.rewind(0)
    known = journal.known(4, batch)
    assert [known[i]["value"] for i in range(3)] == [0.25, None, 0.75]
    assert journal.known(1, scored([0.5], first=-3)) == {} == journal.known(4, scored([0.25], checksum=7))
    other = reopened(tmp_path, reward="another")
    other.replay(run)
    assert other.known(4, batch) == {}


def test_a_journal_of_an_earlier_version_is_read(tmp_path):
    """Its key had the step, which its lines have still."""
    missing = {"step": 3, "reward": "one", "trajectory": 5, "checksum": 105, "outcome": {"value": None}}
    scores = {
        "step": 3,
        "reward": "one",
        "trajectory": [6],
        "checksum": [106],
        "columns": {"reward": [0.5], "outcome": [1]},
    }
    (tmp_path / "rewards.jsonl").write_text(json.dumps(missing) + "\n")
    (tmp_path / "scores.jsonl").write_text(json.dumps(scores) + "\n")
    known = reopened(tmp_path).known(3, scored([1, 1], first=5))
    assert known == {5: {"value": None}, 6: {"value": 0.5, "parts": {}}}


@given(
    st.lists(
        st.one_of(st.floats(width=32, allow_infinity=False), st.just(float("nan"))), min_size=1, max_size=6
    ).flatmap(
        lambda rewards: st.tuples(
            st.just(rewards),
            *[st.lists(st.floats(width=32, allow_infinity=False), min_size=len(rewards), max_size=len(rewards))] * 2,
        )
    )
)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_made_of_known_outcomes_are_the_rows_that_were_written(tmp_path_factory, columns):
    """To the bit, also what the verifier said where the part ``correct`` is no number or is not there."""
    rewards, form, correct = columns
    path = tmp_path_factory.mktemp("journal")
    batch = scored(rewards, form=form, correct=correct)
    for i, (value, part) in enumerate(zip(rewards, correct)):
        if not np.isnan(value) and (not np.isnan(part) or i % 2):
            batch.rows["outcome"][i] = part  # NaN: it was said, and was no number
    reopened(path).write(0, batch, failures(batch))
    known = [Outcome(**o) for o in reopened(path).known(0, batch).values()]
    assert len(known) == len(rewards)
    again = np.array([np.nan if o.value is None else o.value for o in known], np.float32)
    assert np.array_equal(again, batch["reward"], equal_nan=True)
    verdicts = np.array([o.verdict for o in known], np.float32)
    assert np.array_equal(verdicts, batch["outcome"], equal_nan=True)
    parts = np.array([o.parts.get("form", np.nan) for o in known], np.float32)
    there = ~np.isnan(batch["reward"])
    assert np.array_equal(parts[there], batch["part/form"][there], equal_nan=True)


def test_memory_and_scores_are_bounded_and_what_is_missing_stays_on_disk(tmp_path):
    journal = reopened(tmp_path)
    for step in range(30):
        batch = scored([1.0, np.nan, 2.0], first=3 * step)
        journal.write(step, batch, failures(batch))
        journal.forget(step)
        if step % 5 == 4:
            journal.trim(step - 4)
    assert len(journal._known) <= 6
    steps = [json.loads(line)["step"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert steps == list(range(25, 30))
    assert len((tmp_path / "rewards.jsonl").read_text().splitlines()) == 30  # why they are missing is shown to people
    again = reopened(tmp_path, step=27)
    found = [again.known(29, scored([1.0, np.nan, 2.0], first=3 * step)) for step in (26, 27, 29, 30)]
    assert [len(known) for known in found] == [0, 3, 3, 0]
    again.write(30, batch, failures(batch))  # it goes on where it was cut
    assert len(reopened(tmp_path, step=29).known(30, batch)) == 3


def test_a_line_that_is_no_entry_is_named(tmp_path):
    (tmp_path / "rewards.jsonl").write_text("nonsense\n{}\n")
    with raises(DataError, "rewards.jsonl.1"):
        reopened(tmp_path)


# ---- runs ----

SHORT = {"supervised": {"steps": 0}, "algorithm": {"steps": 6}, "run": {"save_every": 2, "eval_every": 2}}

UNSAVED = {"save_every": 1000, "eval_every": 1000}  # the best evaluation would be saved


class Chance:
    """A reward of random values that fails by chance too; while the file is there, and it is the same reward after."""

    def __init__(self, folder, fails="raise"):
        self.flag, self.fails = str(folder / "chance"), fails
        (folder / "chance").touch()

    def __call__(self, prompt, completion, info):
        import os
        import time

        if self.fails == "hang":
            if self.slow(prompt, completion) and os.path.exists(self.flag):
                time.sleep(60)
            return 0.1 * len(completion)
        dice = os.urandom(1)[0]
        if dice < 40:
            raise ConnectionError("the judge does not answer")
        return (
            {"reward": dice / 256, "form": 0.5} if dice < 200 else {"reward": dice / 256, "correct": float(dice > 220)}
        )

    def slow(self, prompt, completion):
        return sum(map(ord, prompt + completion)) % 8 == 0


class Killed(BaseException):
    """In the place of a SIGKILL: nothing is saved."""


def go(folder, function, *, kill_at=0, allow=(), **sections):
    """A run in a folder, which may end at the commit of a step; its directory, or None where it was killed."""

    def kill(record):
        if record["step"] == kill_at:
            raise Killed

    made = tiny.recipe(folder, **{**SHORT, **sections})
    try:
        run_recipe(made, name="tiny", callbacks=[tiny.Recorder(kill)], reward=function, allow=allow)
    except Killed:
        assert kill_at
    (directory,) = folder.glob("tiny-001")
    return directory


def noted(whole, found):
    """The method, which also keeps the rewards that it is given."""

    def sees(self, batch, *args, **kwargs):
        found.append(batch["reward"].copy())
        return whole(self, batch, *args, **kwargs)

    sees.__tilth_transfer__ = whole.__tilth_transfer__
    return sees


def trajectories(directory):
    return read_trajectories(directory, columns=["step", "prompt_text", "text", "reward"]).to_pylist()


def test_rewards_of_chance_are_the_same_when_steps_run_again(tmp_path, monkeypatch):
    """Random values and random errors, of committed steps, of evaluations, and of a step that was only scored."""
    (folder := tmp_path / "runs").mkdir()
    reward, seen = Chance(tmp_path), []
    whole = PolicyWorker.advantages

    def dies(self, batch, *args, **kwargs):
        seen.append(batch["reward"].copy())
        if len(seen) == 6:  # step 6 was scored, and is never committed
            raise Killed
        return whole(self, batch, *args, **kwargs)

    dies.__tilth_transfer__ = whole.__tilth_transfer__
    monkeypatch.setattr(PolicyWorker, "advantages", dies)
    with pytest.raises(BaseException):
        run_recipe(tiny.recipe(folder, **SHORT), name="tiny", callbacks=[], reward=reward)
    directory = folder / "tiny-001"
    before, scores = tiny.numbers(directory), list(seen)
    assert [r["step"] for r in before] == [1, 2, 3, 4, 5] and sum(r["reward/missing"] for r in before) > 0
    again, found = tiny.Recorder(), []
    monkeypatch.setattr(PolicyWorker, "advantages", noted(whole, found))
    run_recipe(tiny.recipe(folder, **SHORT), name="tiny", callbacks=[again], reward=reward)
    assert [r["step"] for r in again.records] == [5, 6]
    after = tiny.numbers(directory)
    assert tiny.same(after[:5], before)
    assert [np.array_equal(a, b) for a, b in zip(found, scores[4:])] == [True, True]


@pytest.mark.slow
def test_a_time_out_is_not_handed_on_to_another_completion(tmp_path):
    """After another learning rate the completions are others; those that never hung have a reward."""
    (folder := tmp_path / "runs").mkdir()
    reward, limit = Chance(tmp_path, "hang"), {"timeout": 0.25}
    directory = go(folder, reward, kill_at=4, reward=limit, run=UNSAVED)
    assert (directory / "rewards.jsonl").read_text()
    os.remove(reward.flag)  # from now on nothing hangs
    go(folder, reward, allow=["optimizer.lr"], reward=limit, optimizer={"lr": 0.5}, run=UNSAVED)
    assert read_state(directory)["attempt"] == 2
    missing = [r for r in trajectories(directory) if r["reward"] is None]
    hung = [r for r in missing if reward.slow(r["prompt_text"], r["text"])]
    assert missing == hung, f"{len(missing) - len(hung)} completions that never hung have no reward"
    assert {r["step"] for r in hung} >= {1}  # of the same weights, so the same samples


@pytest.mark.parametrize(
    ("change", "allow"),
    [({"timeout": 0.5}, ["reward.timeout"]), pytest.param({"timeout": 0.25}, ["reward"], marks=pytest.mark.slow)],
    ids=["limit", "asked for"],
)
def test_what_was_late_is_asked_again_where_the_reward_may_have_changed(tmp_path, change, allow):
    (folder := tmp_path / "runs").mkdir()
    reward = Chance(tmp_path, "hang")
    directory = go(folder, reward, kill_at=2, reward={"timeout": 0.25}, run=UNSAVED)
    assert (directory / "rewards.jsonl").read_text()
    os.remove(reward.flag)
    go(folder, reward, allow=allow, reward=change, run=UNSAVED)
    assert read_state(directory)["attempt"] == 2
    assert not any(r.get("reward/missing") for r in read_metrics(directory))


def test_a_reward_that_never_worked_is_asked_again_by_the_next_attempt(tmp_path):
    """Nothing has been learned from these failures, and what was missing may be there now."""
    (folder := tmp_path / "runs").mkdir()
    flag = str(tmp_path / "down")
    open(flag, "w").close()

    def judged(prompt, completion, info):
        import os

        if os.path.exists(flag):
            raise ConnectionError("no route to the judge")
        return 0.1 * len(completion)

    with raises(RewardError, "reward.function"):
        go(folder, judged)
    os.remove(flag)
    directory = go(folder, judged)
    assert read_state(directory)["attempt"] == 2
    assert not any(r.get("reward/missing") for r in read_metrics(directory))
