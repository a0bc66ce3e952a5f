"""Parts of ``Run`` by themselves: minibatches, experience, evaluation ids, phases, progress; no training."""

import ast
import json
from dataclasses import asdict
from graphlib import TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilth.flows as flows
from tests.errors import raises
from tests.examples import examples
from tests.flows import tiny
from tilth.config.code import parse
from tilth.config.schema import DataConfig
from tilth.core.batch import Batch
from tilth.data.prompts import PromptSet, load_source
from tilth.flows.generation import Scorers
from tilth.flows.heldout import EVALUATION_IDS
from tilth.flows.reward_shaping import has_spread
from tilth.flows.run import Run
from tilth.launch.build import build
from tilth.rewards.process_pool import Outcome
from tilth.roles.rollout import ask
from tilth.runs.directory import RunDir
from tilth.runs.metrics import Metrics
from tilth.runs.progress import StepProgress
from tilth.runs.readers import read_metrics, read_trajectories
from tilth.runs.signals import Interrupted, StopRequest
from tilth.runs.state import RunState


def test_no_module_of_flows_needs_one_that_needs_it():
    """Not for its types either: ``if TYPE_CHECKING`` hides a circle, it does not open it."""
    needs = {}
    for file in Path(flows.__file__).parent.glob("*.py"):
        found = [n.module or "" for n in ast.walk(parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
        needs[f"tilth.flows.{file.stem}"] = [module for module in found if module.startswith("tilth.flows.")]
    assert len(needs) > 15 and "tilth.flows.heldout" in needs["tilth.flows.run"]
    TopologicalSorter(needs).prepare()  # CycleError names the circle


class Scores:
    """A pool that scores in this process."""

    def __init__(self, score=lambda id, text: float(len(text))):
        self._score = score

    def score(self, items, known=None):
        found = [self._score(id, text) for id, _, text, _ in items]
        return [
            Outcome(v, reason="" if v is not None else "none", status="ok" if v is not None else "error") for v in found
        ]


class Asked:
    """A rollout group that remembers what it was asked."""

    def __init__(self, group):
        self._group, self.batches = group, []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def submit(self, asked, *, greedy=False, since=None):
        self.batches.append((asked, greedy))
        return self._group.submit(asked, greedy=greedy, since=since)


class Saved:
    """In place of what makes checkpoints: remembers the steps."""

    failed, wanted, error = 0, False, None

    def __init__(self, steps, every):
        self.steps, self.every = steps, every

    def due(self, step):
        return step % self.every == 0

    def begin(self, step, objects, best, mesh, trouble=None):
        self.steps.append(step)

    def look(self):
        pass

    finish = look


@pytest.fixture
def new_run(tmp_path):
    opened = []

    def make(score=None, stop=None, **sections):
        recipe = tiny.recipe(tmp_path / str(len(opened)), policy={"probe_every": 0}, **sections)
        cluster = tiny.inline()
        parts = build(recipe, load_source(recipe.data), Scores(score) if score else Scores(), cluster)
        directory = RunDir.create(recipe, "pieces")
        opened.append(directory)
        saved = []
        parts.roles["rollout"] = Asked(parts.roles["rollout"])
        run = Run(
            recipe, parts.roles, parts.train, parts.heldout, cluster.store, directory, [],
            saving=Saved(saved, recipe.run.save_every), stop=stop or StopRequest(), metrics=Metrics(), say=print,
        )  # fmt: skip
        run.saved = saved
        return run

    yield make
    for directory in opened:
        directory.close()


# ---- minibatches ----


class Position:
    """Of a ``Run`` only what ``minibatches`` reads."""

    def __init__(self, step=0, **sections):
        self.recipe, self.state = tiny.recipe("runs", **sections), RunState(step=step)
        self.progress = StepProgress(Path("nowhere"))
        self.log = SimpleNamespace(learned=None)

    def parts(self, n):
        batch = Batch({"id": np.arange(n) + 100})
        return [p["id"].tolist() for p in Run.minibatches(self, batch)]


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 24), st.integers(1, 7), st.integers(1, 3), st.integers(0, 5))
def test_each_row_is_in_one_minibatch_of_each_epoch(n, minibatches, epochs, step):
    parts = Position(step, algorithm={"minibatches": minibatches, "epochs": epochs}).parts(n)
    a_pass = min(minibatches, n)
    assert len(parts) == epochs * a_pass
    for epoch in range(epochs):
        mine = parts[epoch * a_pass : (epoch + 1) * a_pass]
        assert sorted(i for p in mine for i in p) == list(range(100, 100 + n))
        sizes = [len(p) for p in mine]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert all(p == sorted(p) for p in mine)


def test_the_order_is_a_function_of_seed_step_and_epoch():
    how = {"algorithm": {"minibatches": 3, "epochs": 2}}
    first = Position(5, **how).parts(24)
    assert Position(5, **how).parts(24) == first
    assert Position(6, **how).parts(24) != first
    assert Position(5, seed=4, **how).parts(24) != first
    assert first[:3] != first[3:]


def test_one_minibatch_is_the_batch_itself_in_every_epoch():
    assert Position(algorithm={"minibatches": 1, "epochs": 2}).parts(4) == [[100, 101, 102, 103]] * 2


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_batch_without_rows_is_one_part_without_rows(minibatches):
    assert Position(algorithm={"minibatches": minibatches}).parts(0) == [[]]


def test_a_run_whose_groups_are_all_flat_goes_on_with_several_minibatches(tmp_path):
    watcher = tiny.Recorder()
    made = tiny.recipe(
        tmp_path,
        supervised={"steps": 0},
        algorithm={"steps": 2, "minibatches": 2},
        run={"eval_prompts": 2},
    )
    result = tiny.run(made, reward=lambda p, c, i: 1.0, callbacks=[watcher])
    assert result.summary["state"] == "finished"
    assert watcher.records[-1]["groups/flat"] == 1.0 and watcher.records[-1]["samples/trained"] == 0


# ---- experience ----


def take(run, steps, **options):
    """Some steps of a page that does not train."""
    run.enter("grpo", steps, 1e-3)
    return list(run.experience(group=4, **options))


def test_a_step_asks_for_groups_of_prompts_that_follow_from_seed_and_step(new_run):
    def asked(**sections):
        run = new_run(**sections)
        take(run, 2)
        return [a for a, greedy in run.rollout.batches if not greedy]

    first, again, other = asked(), asked(), asked(seed=4)
    for a, b in zip(first, again):
        assert all(np.array_equal(a[c], b[c]) for c in a.rows)
    assert not np.array_equal(first[0]["prompt"], other[0]["prompt"])
    assert not np.array_equal(first[0]["prompt"], first[1]["prompt"])
    assert [a["id"].tolist() for a in first] == [list(range(24)), list(range(24, 48))]
    assert first[1]["group"].tolist() == [g for g in range(24, 48, 4) for _ in range(4)]


def test_missing_rewards_are_left_out_of_the_batch_and_counted(new_run):
    run = new_run(lambda id, text: None if id % 3 == 0 else 1.0, run={"eval_every": 0})
    run.enter("grpo", 3, 1e-3)
    stream = run.experience(group=4)
    batch = next(stream)
    assert batch["id"].tolist() == [i for i in range(24) if i % 3]
    assert not np.isnan(batch["reward"]).any()
    heldout = sum(i % 3 == 0 for i in range(EVALUATION_IDS, EVALUATION_IDS + 16))
    assert run.metrics.values()["reward/missing"] == 8
    assert run.metrics.values()["reward/heldout/missing"] == heldout
    assert run.metrics.values()["reward/mean"] == 1.0


def test_keep_sees_scored_rows_only_and_decides_which_remain(new_run):
    run = new_run(lambda id, text: None if id == 1 else float(id // 4 == 2 and id % 2))
    run.enter("grpo", 2, 1e-3)
    seen = []

    def keep(batch):
        seen.append(batch)
        return has_spread(batch)

    batch = next(run.experience(group=4, keep=keep))
    assert len(seen[0]) == 23 and not np.isnan(seen[0]["reward"]).any()
    assert batch["id"].tolist() == [8, 9, 10, 11]
    values = run.metrics.values()
    assert values["groups/flat"] == pytest.approx(19 / 23) and values["samples/trained"] == 4
    assert values["samples"] == 24


def test_what_was_left_out_is_in_the_trajectories_all_the_same(new_run):
    run = new_run(lambda id, text: None if id == 1 else 1.0)
    take(run, 2, keep=has_spread)
    run.save()
    table = read_trajectories(run.directory.path)
    assert table["id"].to_pylist() == list(range(48))
    assert table["reward"].to_pylist() == [None if i == 1 else 1.0 for i in range(48)]


def test_the_payload_of_a_step_is_gone_with_it(new_run):
    run = new_run()
    batches = take(run, 2)
    assert run.store.nbytes == 0
    with pytest.raises(KeyError):
        batches[0].read(run.store, "tokens")


# ---- evaluation ----


def test_ids_of_evaluations_lie_below_those_of_training_and_are_always_the_same(new_run):
    run = new_run(run={"eval_every": 1})
    take(run, 3)
    greedy = [a["id"] for a, greedy in run.rollout.batches if greedy]
    trained = np.concatenate([a["id"] for a, greedy in run.rollout.batches if not greedy])
    assert len(greedy) == 4 and all(np.array_equal(ids, greedy[0]) for ids in greedy)
    assert max(ids.max() for ids in greedy) < 0 <= trained.min()
    assert greedy[0].tolist() == list(range(EVALUATION_IDS, EVALUATION_IDS + 16))


def test_an_evaluation_is_of_prompts_that_are_never_trained_on(new_run):
    run = new_run(run={"eval_every": 1})
    take(run, 3)
    heldout = {int(p) for a, greedy in run.rollout.batches if greedy for p in a["prompt"]}
    trained = {int(p) for a, greedy in run.rollout.batches if not greedy for p in a["prompt"]}
    assert len(heldout) == 16 and not heldout & trained


@pytest.mark.parametrize(
    "values, metric, mean", [((0, 1), "accuracy/heldout", 0.5), ((0, 0.5), "reward/heldout", 0.25)]
)
def test_only_a_share_of_right_answers_is_an_accuracy(new_run, values, metric, mean):
    run = new_run(lambda id, text: float(values[id % 2]), run={"eval_every": 1})
    take(run, 1)
    assert run.state.heldout.get("reward/heldout") == mean and next(iter(run.state.heldout)) == metric
    assert ("accuracy/heldout" in run.state.heldout) == (metric == "accuracy/heldout")
    assert run.state.best == {"step": 1, "metric": metric, "value": mean} and run.state.accuracy_last == mean


@pytest.mark.slow
def test_what_has_been_graded_once_is_no_accuracy_later_either(new_run, monkeypatch):
    """Nor is the best of what seemed to be an accuracy a measure of it."""
    monkeypatch.setattr(Scorers, "take", lambda self, ended: None)  # the reward depends on the order of its calls
    given, evaluations = [0.0], iter([0.0, 0.0, -1.5, -1.0, 0.0])

    def reward(id, text):
        if id == EVALUATION_IDS:
            given[0] = next(evaluations)
        return given[0]

    run = new_run(reward, run={"eval_every": 1})
    take(run, 4)
    found = [[r.get(f"{name}/heldout") for name in ("accuracy", "reward")] for r in read_metrics(run.directory.path)]
    assert found == [[0.0, 0.0], [None, -1.5], [None, -1.0], [None, 0.0]]
    assert run.state.graded and run.state.best == {"step": 4, "metric": "reward/heldout", "value": 0.0}
    assert RunState(**json.loads(json.dumps(asdict(run.state)))) == run.state


def test_an_evaluation_without_any_reward_is_no_accuracy_and_all_missing(new_run):
    run = new_run(lambda id, text: None if id < 0 else 1.0)
    run.sync_weights(run.policy)
    run.generate_and_score(ask([0, 1], 2, 0))  # the reward has worked before, so this is no broken function
    run.enter("grpo", 1, 1e-3)
    assert run.state.accuracy_first is None and "accuracy/heldout" not in run.metrics.values()
    assert run.metrics.values()["reward/heldout/missing"] == 16


# ---- progress and phases ----


def test_progress_survives_json():
    at = RunState(7, "grpo", 3, ["warmup"], 9, 8, 0.25, 1.0)
    assert RunState(**json.loads(json.dumps(asdict(at)))) == at
    assert RunState(**json.loads(json.dumps(asdict(RunState())))) == RunState()


def test_the_state_of_a_run_is_its_progress(new_run):
    run = new_run()
    take(run, 2)
    assert RunState(**json.loads(json.dumps(run.checkpoint_objects()))["progress"]) == run.state
    assert (run.state.step, run.state.phase_step, run.state.finished) == (2, 2, ["grpo"])


def test_a_finished_phase_is_passed_over(new_run):
    run = new_run()
    take(run, 2)
    assert take(run, 2) == [] and run.state.step == 2


def test_inside_a_phase_a_run_goes_on_where_it_was(new_run):
    run = new_run()
    progress = {"step": 1, "phase": "grpo", "phase_step": 1, "accuracy_first": 0.5, "accuracy_last": 0.5, "version": 4}
    run.restore({"progress": progress})
    assert len(take(run, 3)) == 2
    assert run.state.step == 3 and run.state.accuracy_first == 0.5
    assert not any(greedy for _, greedy in run.rollout.batches[:1])  # no first evaluation again
    assert run.directory.path.joinpath("metrics.jsonl").read_text().count("\n") == 2


def test_a_stop_that_was_asked_for_comes_after_the_commit_and_saves(new_run):
    stop = StopRequest()
    run = new_run(stop=stop)
    run.enter("grpo", 3, 1e-3)
    stream = run.experience(group=4)
    next(stream)
    stop.requested = True
    with raises(Interrupted, "stop"):
        next(stream)
    assert run.saved == [1] and run.state.step == 1


def test_a_stop_that_was_asked_for_in_the_last_step_is_the_end_of_the_run(new_run):
    stop = StopRequest()
    run = new_run(stop=stop)
    run.enter("grpo", 1, 1e-3)
    stream = run.experience(group=4)
    next(stream)
    stop.requested = True
    assert list(stream) == [] and run.saved == [1] and run.state.finished == ["grpo"]


def test_checkpoints_are_written_where_the_recipe_says_and_at_the_end_of_a_phase(new_run):
    run = new_run(run={"save_every": 2})
    take(run, 3)
    assert run.saved == [2, 3]


# ---- what travels ----


def created(tmp_path, prompts, **sections):
    """Bytes with which each role was made."""
    with tiny.inline() as cluster:
        build(tiny.recipe(tmp_path, **sections), prompts, Scores(), cluster)
        return {op.removesuffix(".create"): n for (op, way), n in cluster.traffic().items() if way == "sent"}


def test_given_data_travel_once_to_the_loader_and_files_to_nobody(tmp_path):
    """Two thousand records more are bytes more for the loader alone, and none where they are in a file."""
    records = [{"prompt": f"{i % 10}+{i // 10}=", "answer": f"{i:06}"} for i in range(3_000)]
    few, many = (created(tmp_path, PromptSet.of(records[:n])) for n in (1_000, 3_000))
    assert many["loader"] - few["loader"] > 2_000 * 10
    assert {op: n for op, n in many.items() if n - few[op] > 64} == {"loader": many["loader"]}
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    read = created(tmp_path, load_source(DataConfig(source=str(file))))
    assert read["loader"] < few["loader"] / 9 and max(read.values()) < 50_000
