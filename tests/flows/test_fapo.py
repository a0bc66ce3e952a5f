"""FAPO as a run: who is judged, what a verdict does to a reward, and that nothing else than that differs from DAPO."""

import signal
from collections import Counter

import numpy as np
import pytest
import torch

import tilth.flows.step_judge as judged
from tests.errors import raises
from tests.flows import tiny
from tilth.config.load import from_dict
from tilth.core.batch import Batch
from tilth.core.errors import ModelError, RecipeError, RewardError
from tilth.data.prompts import PromptSet
from tilth.engines.rounds import RoundLimits
from tilth.flows import sampler
from tilth.flows.async_sampler import AsyncSampler
from tilth.flows.reward_shaping import can_differ
from tilth.launch import life as launch
from tilth.rewards.judging import question
from tilth.roles import judge as roles_judge
from tilth.roles import rollout as roles_rollout
from tilth.roles.experience import is_right
from tilth.roles.judge import JUDGED_BY, VERDICT, JudgeWorker
from tilth.roles.policy import PolicyWorker
from tilth.runs.model_refs import identity
from tilth.runs.readers import read_metrics, read_trajectories
from tilth.runs.signals import Interrupted

TOLD = [
    {"prompt": question(f"{a}+{b}=", f"{a + b:02}", [f"{a + b:02}"]), "answer": f"#{'-1' if a > b else '0'}"}
    for a in range(10)
    for b in range(10)
]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A run of a judge that has learned next to nothing."""
    sections = {"model": {"context": 48}, "supervised": {"steps": 2}, "run": {"save_every": 1}}
    return tiny.learn(tmp_path_factory.mktemp("judge"), "sft", prompts=PromptSet.of(TOLD), **sections).directory


def recipe(folder, path, flow="fapo", algorithm=None, penalty=1.0, **sections):
    how = {"steps": 3, "overlong_buffer": 0.0, "refill": 0, "minibatches": 2, **(algorithm or {})}
    short = {"supervised": {"steps": 2}, "run": {"eval_every": 1, "save_every": 100}}
    base = tiny.settings(folder, **{"flow": flow, **short, **sections})
    if path is not None:
        base["judge"] = {"path": str(path), "penalty": penalty, "max_tokens": 8, **sections.get("judge", {})}
    base["algorithm"] = how
    return from_dict(base)


def odd(prompt, completion, info):
    """About every other answer is right, and every other one of these is flawed."""
    right = len(completion) % 2
    return {"reward": right, "correct": right} | ({"flawed": sum(map(ord, completion)) % 2} if right else {})


def by_id(ids):
    """Verdicts that look random: clean, flawed or none."""
    return np.array([-1.0, 0.0, np.nan], np.float32)[ids % 3]


class Ruled:
    """In the place of a judge; remembers what it is asked."""

    def __init__(self, patch, rule):
        self.asked, self.learned = list[Batch](), list[Batch]()
        self._wrap(patch, JudgeWorker, "verdicts", self.asked, rule)
        self._wrap(patch, PolicyWorker, "advantages", self.learned, None)

    @staticmethod
    def _wrap(patch, owner, name, seen, rule):
        whole = getattr(owner, name)

        def method(worker, batch, *args, **kwargs):
            seen.append(batch)
            if rule is None:
                return whole(worker, batch, *args, **kwargs)
            return batch.with_rows(**{VERDICT: rule(batch["id"]), JUDGED_BY: np.full(len(batch), 2)})

        method.__tilth_transfer__ = whole.__tilth_transfer__
        patch.setattr(owner, name, method)


def ruled(monkeypatch, folder, judge, rule=by_id, **changes):
    """A run with these verdicts, and what was seen of it."""
    with monkeypatch.context() as patch:
        seen = Ruled(patch, rule)
        done = tiny.run(recipe(folder, judge, **changes), reward=odd)
    return done.directory, seen


def fapo_steps(directory):
    return [record for record in read_metrics(directory) if record["phase"] in ("fapo", "dapo")]


# ---- who is judged ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory, judge):
    """A run with a penalty, its verdicts by id."""
    patch = pytest.MonkeyPatch()
    found = ruled(patch, tmp_path_factory.mktemp("whole"), judge)
    patch.undo()
    return found


def test_only_right_answers_are_judged_each_once_and_none_of_an_evaluation(whole):
    directory, seen = whole
    table = read_trajectories(directory)
    right = {i for i, parts in zip(table["id"].to_pylist(), table["parts"].to_pylist()) if dict(parts)["correct"] == 1}
    asked = [int(i) for batch in seen.asked for i in batch["id"]]
    assert asked and len(asked) == len(set(asked)) and set(asked) <= right and min(asked) >= 0
    assert all((batch["part/correct"] == 1).all() for batch in seen.asked)
    evaluated = [record for record in fapo_steps(directory) if "accuracy/heldout" in record]
    assert len(evaluated) == 3


def test_a_flawed_answer_loses_half_of_lambda_and_nothing_else_changes(whole):
    _, seen = whole
    assert len(seen.learned) == 3
    for batch in seen.learned:
        flawed = (batch["part/correct"] == 1) & (batch["id"] % 3 == 1)
        assert flawed.any() and np.array_equal(batch["reward"], batch["part/correct"] - np.where(flawed, 0.5, 0))
        assert judged.has_spread(batch).all()


def test_what_the_judge_said_is_counted(whole):
    directory, seen = whole
    for record, batch, learned in zip(fapo_steps(directory), seen.asked, seen.learned):
        assert record["samples/trained"] == len(learned) > 0
        said, truth = by_id(batch["id"]), batch["part/flawed"] == 1
        flawed = said == 0
        assert record["judge/asked"] == len(batch) and record["judge/version"] == 2
        assert record["judge/unparsed"] == np.isnan(said).sum()
        assert record["judge/flawed"] == pytest.approx(flawed.mean())
        assert record["judge/precision"] == pytest.approx(truth[flawed].mean())
        assert record["judge/recall"] == pytest.approx(flawed[truth].mean())


# ---- what it changes ----


@pytest.mark.slow
def test_without_a_penalty_it_is_dapo_bit_for_bit(tmp_path, judge, monkeypatch):
    none, _ = ruled(monkeypatch, tmp_path / "a", judge, penalty=0.0)
    plain = tiny.run(recipe(tmp_path / "b", None, "dapo"), reward=odd).directory
    assert tiny.weights(none) == tiny.weights(plain)
    ours, theirs = read_trajectories(none), read_trajectories(plain)
    assert ours["tokens"].equals(theirs["tokens"]) and ours["logprobs"].equals(theirs["logprobs"])
    kept = [{k: v for k, v in r.items() if not k.startswith("judge/") and k != "phase"} for r in tiny.numbers(none)]
    assert tiny.same(kept, [{k: v for k, v in r.items() if k != "phase"} for r in tiny.numbers(plain)])


@pytest.mark.slow
def test_a_penalty_changes_what_is_learned(tmp_path, whole, judge, monkeypatch):
    none, _ = ruled(monkeypatch, tmp_path, judge, penalty=0.0)
    assert tiny.weights(none) != tiny.weights(whole[0])


@pytest.mark.slow
def test_a_judge_that_says_nothing_usable_lowers_no_reward_and_is_counted(tmp_path, judge, monkeypatch):
    none = lambda ids: np.full(len(ids), np.nan, np.float32)  # noqa: E731
    silent, seen = ruled(monkeypatch, tmp_path, judge, none, algorithm={"steps": 1})
    for batch in seen.learned:
        assert np.array_equal(batch["reward"], batch["part/correct"])
    for record in fapo_steps(silent):
        assert record["judge/unparsed"] == record["judge/asked"] > 0 == record["judge/flawed"]


@pytest.mark.slow
def test_a_group_that_is_all_right_is_learned_from_where_its_steps_differ(tmp_path, judge, monkeypatch):
    def always(prompt, completion, info):
        return 1.0

    with monkeypatch.context() as patch:
        seen = Ruled(patch, by_id)
        tiny.run(recipe(tmp_path, judge, algorithm={"steps": 1}), reward=always)
    assert all(len(batch) for batch in seen.learned)


# ---- a real judge ----


def test_a_judge_reads_in_a_run_and_the_run_goes_on_after_a_stop_bit_for_bit(tmp_path, judge):
    done = tiny.run(recipe(tmp_path / "whole", judge), reward=odd).directory
    stop = tiny.Recorder(at_step=lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == 4 else None)
    with pytest.raises(Interrupted):
        tiny.run(recipe(tmp_path / "part", judge), reward=odd, callbacks=[stop])
    again = tiny.run(recipe(tmp_path / "part", judge), reward=odd).directory
    assert tiny.weights(again) == tiny.weights(done) and tiny.same(tiny.numbers(again), tiny.numbers(done))
    records = fapo_steps(done)
    assert all(r["judge/asked"] > 0 and r["time/judge"] > 0 and r["judge/version"] == 2 for r in records)
    assert any(f"judge: {judge}@2" in m for m in stop.messages)


def test_another_judge_under_the_same_path_is_another_run(tmp_path, judge):
    first = identity(f"{judge}@1")
    assert first != identity(f"{judge}@2") == identity(str(judge)) and "step 2" in identity(str(judge))


def test_a_run_goes_on_with_the_same_weights_of_its_judge_only(tmp_path, judge, monkeypatch):
    made = recipe(tmp_path, judge)
    before = launch._inputs(made, "d", "")
    assert before == launch._inputs(made, "d", "") == {"data": "d", "judge.path": identity(str(judge))}
    monkeypatch.setattr(launch, "identity", lambda path: f"{path} with other weights")
    assert {key for key, said in launch._inputs(made, "d", "").items() if said != before[key]} == {"judge.path"}


def test_a_judge_that_is_not_there_is_told_before_the_run(tmp_path):
    with raises(ModelError, "judge.path"):
        tiny.run(recipe(tmp_path, tmp_path / "nowhere"), reward=odd)


@pytest.mark.slow
@pytest.mark.dist
def test_a_judge_over_two_ranks_says_what_one_says(tmp_path, judge):
    found = []
    for name, placed in (
        ("one", {}),
        ("two", {"cluster": {"backend": "local", "workers": 2}, "judge": {"layout": {"tp": 2}}}),
    ):
        done = tiny.run(recipe(tmp_path / name, judge, algorithm={"steps": 1}, **placed), reward=odd)
        found.append(
            [{k: v for k, v in record.items() if k.startswith("judge/")} for record in fapo_steps(done.directory)]
        )
    assert found[0] == found[1] and found[0][0]


# ---- what is refused ----


@pytest.mark.parametrize(
    "flow, given, key",
    [
        ("fapo", {}, "judge.path"),
        ("grpo", {"path": "runs/x"}, "judge.path.unused"),
        ("grpo", {"rubric": "{completion}"}, "judge.path"),
        ("grpo", {"path": "x", "rubric": "{prompt}"}, "judge.rubric"),
        ("fapo", {"path": "x", "penalty": -1.0}, "judge.penalty"),
        ("fapo", {"path": "x", "pool": "other"}, "judge.pool"),
        ("fapo", {"path": "x", "layout": {"tp": 2}}, "judge.layout.tp"),
    ],
)
def test_recipes_that_contradict_themselves(flow, given, key):
    with raises(RecipeError, key):
        from_dict({"flow": flow, "judge": given})


def test_an_engine_is_not_divided():
    divided = {"path": "x", "layout": {"fsdp": 2}}
    with raises(RecipeError, "judge.layout.fsdp.copies"):
        from_dict({"flow": "fapo", "judge": divided, "cluster": {"backend": "local", "workers": 2}})


# ---- rows ----


def rows(groups, rewards, **more):
    said = np.array(rewards, np.float32)
    return Batch({"id": np.arange(len(groups)), "group": np.array(groups), "reward": said, "outcome": said, **more})


def test_what_is_right():
    assert is_right(rows([0, 0], [1.0, 0.1])).tolist() == [True, False]
    shaped = rows([0, 0, 0], [0.4, 1.3, 1.3], outcome=np.array([1.0, 0.0, np.nan]))
    assert is_right(shaped).tolist() == [True, False, False]


def test_groups_that_may_come_to_differ_are_judged():
    batch = rows([0, 0, 1, 1, 2, 2, 3], [1, 1, 0, 0, 1, 0, 1])
    assert can_differ(1.0)(batch).tolist() == [True, True, False, False, True, True, False]
    assert can_differ(0.0)(batch).tolist() == [False] * 4 + [True, True, False]


def test_no_batch_at_all_is_no_question(judge):
    assert len(can_differ(1.0)(rows([], []))) == 0


@pytest.mark.slow
@pytest.mark.dist
def test_a_judge_with_a_pool_of_its_own_says_the_same(tmp_path, judge):
    """On another worker, and what is learned is what one process learns."""
    alone = tiny.run(recipe(tmp_path / "a", judge), reward=odd).directory
    cluster = {"cluster": {"backend": "local", "pools": {"main": 1, "judge": 1}}, "judge": {"pool": "judge"}}
    apart = tiny.run(recipe(tmp_path / "b", judge, **cluster), reward=odd).directory
    ours, theirs = (tiny.numbers(directory) for directory in (alone, apart))
    for name in ("judge/asked", "judge/flawed", "judge/unparsed", "reward/mean", "samples/trained"):
        assert [r.get(name) for r in ours] == [r.get(name) for r in theirs]
    assert torch.equal(*(torch.tensor([r.get("loss", 0.0) for r in found]) for found in (ours, theirs)))


@pytest.mark.slow
def test_a_judge_grades_in_a_flow_without_steps(tmp_path, judge, monkeypatch):
    """Its score is a part of the reward, or all of it; FAPO's penalty has no place. It begins while others are
    generated, and what is learned is what is learned if it begins when all are."""
    monkeypatch.setattr(roles_judge, "grade", lambda reply: float(len(reply) % 3))
    found = []
    how = {"judge": {"path": str(judge), "rubric": "{prompt}{completion}?", "max_tokens": 8}}
    for name, reward, early in (("alone", None, 1), ("beside", odd, 4), ("late", None, 10**6)):
        monkeypatch.setattr(roles_rollout, "LIMITS", RoundLimits(10**6, early))
        monkeypatch.setattr(sampler, "apart", lambda *groups, name=name: name != "late")  # as in pools of their own
        made = tiny.recipe(tmp_path, **how)
        recorder = tiny.Recorder()
        result = tiny.run(made, reward=reward, name=name, callbacks=[recorder])
        rows = read_trajectories(result.directory).to_pylist()
        parts = [dict(row["parts"]) for row in rows]
        given = [row["reward"] - part["judge"] for row, part in zip(rows, parts)]
        assert given == ([0.0] * len(rows) if reward is None else [part["correct"] for part in parts])
        assert {part["judge"] for part in parts} <= {0.0, 1.0, 2.0}
        found.append((tiny.numbers(result.directory), tiny.weights(result.directory)))
    assert tiny.same(found[0][0], found[2][0]) and found[0][1] == found[2][1]


@pytest.mark.slow
def test_a_judge_grades_samples_that_are_behind_as_at_their_end(tmp_path, judge, monkeypatch):
    """Under weights that stay, each sample has the score that it has in a synchronous run; none is kept for good."""
    monkeypatch.setattr(roles_judge, "grade", lambda reply: float(len(reply) % 3))
    monkeypatch.setattr(sampler, "apart", lambda *groups: True)  # as in pools of their own
    how = {"judge": {"path": str(judge), "rubric": "{prompt}{completion}?", "max_tokens": 8}, "optimizer": {"lr": 0.0}}
    how["run"] = {"eval_every": 1}
    found, held, asked = {}, [], Counter()
    left, take = AsyncSampler.leave, JudgeWorker._take

    def leave(self):
        held.append(dict(tiny.worker(self.roles.judge)._scores))
        left(self)

    monkeypatch.setattr(AsyncSampler, "leave", leave)
    monkeypatch.setattr(JudgeWorker, "_take", lambda self, done: take(self, [asked.update([t.id]) or t for t in done]))
    for name, staleness in (("behind", 2), ("exact", 0)):
        made = tiny.recipe(tmp_path, rollout={"staleness": staleness}, train={"parity": True}, **how)
        rows = read_trajectories(tiny.run(made, reward=odd, name=name).directory).to_pylist()
        found[name] = {row["id"]: (row["reward"], dict(row["parts"])) for row in rows}
    assert found["behind"] == found["exact"] and len(found["exact"]) == 144
    assert not any(held)
    assert all(count == 2 for i, count in asked.items() if i >= 0)  # once in each run, whatever is evaluated between


def test_a_judge_that_never_gives_a_score_ends_the_run(tmp_path, judge):
    with raises(RewardError, "reward.function"):
        how = {"path": str(judge), "rubric": "{completion}?", "max_tokens": 8}
        tiny.run(tiny.recipe(tmp_path, judge=how), reward=None)
