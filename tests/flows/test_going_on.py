"""Going on after something has changed or broken: damage, other keys, a signal; an optimizer taken over."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_resume_exact import benchmark
from tilth.checkpoint import latest, open_checkpoint
from tilth.core.errors import CheckpointError, PluginError, RecipeError
from tilth.core.layout import Box
from tilth.core.random import stream
from tilth.data.prompts import load_source
from tilth.models.hf import save_pretrained
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics, read_state, read_trajectories
from tilth.runs.signals import Interrupted

SAVING = {"save_every": 2, "keep": 9}


def go(folder, *, stop=0, allow=(), fallback=False, watcher=None, **sections):
    """The run of ``tiny`` in a folder; ``stop``: interrupted in that step. Its directory, and what it said."""

    def interrupt(record):
        if record["step"] == stop:
            os.kill(os.getpid(), signal.SIGINT)

    watcher = watcher or tiny.Recorder(at_step=interrupt)
    made = tiny.recipe(folder, **{"run": SAVING, **sections})
    try:
        tiny.run(made, callbacks=[watcher], allow=allow, fallback=fallback)
    except Interrupted:
        assert stop
    return folder / "tiny-001", watcher.messages


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Without anything that happens: 12 steps."""
    return go(tmp_path_factory.mktemp("whole"))[0]


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """Stopped after the eighth step."""
    return go(tmp_path_factory.mktemp("part"), stop=8)[0]


@pytest.fixture
def again(part, tmp_path):
    """A copy of it, to go on with."""
    shutil.copytree(part, tmp_path / part.name)
    return tmp_path


def flip(path):
    """Turn a bit of the last tensor in a file."""
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 4]))


# ---- damage ----


def test_a_damaged_checkpoint_is_named_each_time_and_fallback_goes_on_from_the_one_before(again, whole):
    kept = again / "tiny-001" / "checkpoints"
    flip(latest(kept) / "optimizer.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            go(again)
        assert caught.value.key.startswith("optimizer/") and "--fallback goes on from step-000006" in str(caught.value)
    directory, said = go(again, fallback=True)
    assert any("is corrupt in file optimizer.safetensors" in line and "put aside" in line for line in said)
    assert "continuing after step 6" in said
    shutil.rmtree(kept / "step-000008.damaged")  # kept to be looked at; step 8 was made anew
    assert benchmark().differences(directory, whole) == []


@pytest.mark.slow
def test_fallback_changes_nothing_where_nothing_is_damaged(again, whole):
    directory, said = go(again, fallback=True)
    assert "continuing after step 8" in said and benchmark().differences(directory, whole) == []


@pytest.mark.slow
def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_anew(again):
    for path in (again / "tiny-001" / "checkpoints").glob("step-*/model.safetensors"):
        flip(path)
    with raises(CheckpointError, "root"):
        go(again, fallback=True)


@pytest.mark.slow
def test_another_runs_checkpoint_is_refused(again, tmp_path_factory):
    other, _ = go(tmp_path_factory.mktemp("other"), seed=4, algorithm={"steps": 3})
    newest = latest(other / "checkpoints")
    shutil.copytree(newest, again / "tiny-001" / "checkpoints" / newest.name)
    with raises(CheckpointError, "step-000009.digest"):
        go(again)
    kept = again / "tiny-001" / "checkpoints"
    shutil.rmtree(kept / "step-000008")
    shutil.copytree(newest.with_name("step-000008"), kept / "step-000008")  # that is no way out either
    with raises(CheckpointError, "step-000009.digest"):
        go(again)
    _, said = go(again, fallback=True)
    assert "continuing after step 6" in said and sum("; it is passed over" in line for line in said) == 2
    assert (kept / newest.name / "manifest.json").is_file() and not list(kept.glob("*.damaged"))  # intact, so it stays


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(again):
    kept, metrics = again / "tiny-001" / "checkpoints", (again / "tiny-001" / "metrics.jsonl").read_bytes()
    kept.rename(again / "unmounted")
    for fallback in (False, True):
        with raises(CheckpointError, "checkpoints"):
            go(again, fallback=fallback)
    assert (again / "tiny-001" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_a_newest_checkpoint_without_its_manifest_is_missed(again, whole):
    (latest(again / "tiny-001" / "checkpoints") / "manifest.json").unlink()
    with raises(CheckpointError, "step-000008"):
        go(again)
    directory, said = go(again, fallback=True)
    assert "continuing after step 6" in said and any("saved one of step 8" in line for line in said)
    assert benchmark().differences(directory, whole) == []


# ---- other keys ----


@pytest.mark.slow
def test_more_steps_are_the_steps_of_a_run_that_was_asked_for_them(again, tmp_path_factory):
    more = {"algorithm": {"steps": 8}}
    wanted, _ = go(tmp_path_factory.mktemp("more"), **more)
    directory, said = go(again, allow=["algorithm.steps"], **more)
    assert any(line.startswith("it goes on changed") and "algorithm.steps was 6 and is 8" in line for line in said)
    assert tiny.weights(directory) == tiny.weights(wanted)
    assert tiny.same([r["loss"] for r in read_metrics(directory)], [r["loss"] for r in read_metrics(wanted)])


@pytest.mark.slow
def test_a_learning_rate_that_is_allowed_to_change_takes_effect_at_once(again):
    directory, _ = go(again, allow=["optimizer"], optimizer={"lr": 3e-3})
    rates = [r["lr"] for r in read_metrics(directory) if r["phase"] == "grpo"]
    assert rates == pytest.approx([1e-4] * 2 + [3e-3] * 4)


@pytest.mark.slow
def test_what_was_allowed_holds_also_if_the_run_is_killed_before_it_is_saved(again):
    def fall(record):
        if record["step"] == 9:  # a step before the next checkpoint
            raise MemoryError("of the test")

    with raises(PluginError, "Recorder.on_step_end"):
        go(again, allow=["optimizer"], optimizer={"lr": 3e-3}, watcher=tiny.Recorder(at_step=fall))
    directory, said = go(again, optimizer={"lr": 3e-3})
    assert "continuing after step 8" in said
    rates = [r["lr"] for r in read_metrics(directory) if r["phase"] == "grpo"]
    assert rates == pytest.approx([1e-4] * 2 + [3e-3] * 4)


@pytest.mark.slow
def test_a_change_that_cannot_be_gone_on_with_leaves_the_run_as_it_was(again, whole):
    with pytest.raises(CheckpointError) as caught:
        go(again, allow=["model"], model={"layers": 3})
    assert "is missing" in str(caught.value) and "fallback" not in str(caught.value)
    directory, _ = go(again)
    assert benchmark().differences(directory, whole) == []


@pytest.mark.slow
def test_what_is_watched_may_be_allowed_to_change(again):
    directory, _ = go(again, allow=["train"], train={"watch": ["noise_scale"], "micro_tokens": 64})
    assert read_state(directory)["state"] == "finished"


@pytest.mark.slow
def test_a_finished_run_goes_on_longer(tmp_path, tmp_path_factory):
    named = {"run": {**SAVING, "name": "tiny-001"}, "supervised": {"steps": 2}}
    more = {"supervised": {"steps": 2}, "algorithm": {"steps": 3}}
    wanted, _ = go(tmp_path_factory.mktemp("longer"), **more)
    go(tmp_path, **named, algorithm={"steps": 2})
    directory, said = go(tmp_path, allow=["algorithm.steps"], **{**named, **more})
    assert "continuing after step 4" in said and tiny.weights(directory) == tiny.weights(wanted)


def test_other_batch_sizes_leave_no_prompt_out_and_take_none_twice(again):
    directory, _ = go(again, allow=["rollout"], rollout={"prompts": 9, "group": 2})
    table = read_trajectories(directory).sort_by([("step", "ascending")]).to_pydict()
    assert len(set(table["id"])) == len(table["id"])
    seen = [prompt for _, prompt in dict.fromkeys(zip(table["group"], table["prompt"]))]
    assert len(seen) == 2 * 6 + 4 * 9
    recipe = tiny.recipe(again)
    train, _ = load_source(recipe.data).split(recipe.data.holdout)
    drawn = train.take(stream(recipe.seed, "prompts"), 0, len(seen))  # as one who never changed it draws them
    assert drawn.tolist() == seen


# ---- another reward ----


def rewarded(folder, *, stop=0, allow=(), name="mine"):
    """A run of the reward in ``rewards.py`` of a folder, which imports ``helper.py`` there."""

    def interrupt(record):
        if record["step"] == stop:
            os.kill(os.getpid(), signal.SIGINT)

    watcher, function = tiny.Recorder(at_step=interrupt), {"function": f"{folder}/rewards.py:score"}
    run = {"name": name, "save_every": 2, "eval_prompts": 2}
    made = tiny.recipe(folder / "runs", supervised={"steps": 0}, algorithm={"steps": 4}, run=run, reward=function)
    try:
        found = tiny.run(made, reward=None, callbacks=[watcher], allow=allow)
        return found.directory.name, watcher.messages
    except Interrupted:
        assert stop


@pytest.mark.parametrize("file", [pytest.param("rewards.py", marks=pytest.mark.slow), "helper.py"])
def test_a_reward_whose_files_changed_is_refused_unless_it_is_allowed(tmp_path, file):
    (tmp_path / "rewards.py").write_text("import helper\ndef score(p, c, i): return helper.length(c)\n")
    (tmp_path / "helper.py").write_text("def length(c): return 0.1 * len(c)\n")
    rewarded(tmp_path, stop=2)
    rewarded(tmp_path, stop=2, name="")
    with open(tmp_path / file, "a") as changed:
        changed.write("# mended\n")
    with raises(RecipeError, "reward.function"):
        rewarded(tmp_path)
    name, said = rewarded(tmp_path, allow=["reward.function"])
    assert name == "mine" and any(line.startswith("it goes on changed") for line in said)
    assert rewarded(tmp_path, name="")[0] == "tiny-002"  # without a name it is begun anew, as with other data


# ---- a signal that does not wait ----


def test_after_sigterm_the_run_ends_in_time_even_in_the_middle_of_a_step(tmp_path, whole):
    def slow(record):
        if record["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
            slept.append(True)

    slept = []
    with raises(Interrupted, "run.grace"):
        tiny.run(tiny.recipe(tmp_path, run={**SAVING, "grace": 0.3}), callbacks=[tiny.Recorder(at_step=slow)])
    assert not slept
    assert read_state(tmp_path / "tiny-001")["state"] == "interrupted"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    directory, said = go(tmp_path)
    assert "continuing after step 4" in said and benchmark().differences(directory, whole) == []


# ---- an optimizer taken over ----


def counts(directory):
    """Steps that the optimizer's state has seen."""
    kept = open_checkpoint(latest(directory / "checkpoints"))
    return {int(kept.read("optimizer", name)) for name in kept.names("optimizer") if name.startswith("step.")}


@pytest.mark.parametrize(("taken", "steps"), [(True, 7), pytest.param(False, 1, marks=pytest.mark.slow)])
def test_a_run_begins_with_the_optimizer_of_the_one_before_where_it_is_asked_to(part, whole, tmp_path, taken, steps):
    made = {"model": {"path": str(whole), "optimizer": taken}, "supervised": {"steps": 0}, "algorithm": {"steps": 1}}
    assert counts(whole) == {6}
    directory, _ = go(tmp_path, **made)
    assert counts(directory) == {steps}


def test_an_optimizer_that_is_not_there_or_another_one_is_told_before_the_run(whole, tmp_path):
    path = {"path": str(whole), "optimizer": True}
    with raises(RecipeError, "optimizer.name"):
        go(tmp_path, model=path, optimizer={"name": "muon"})
    loaded = load_model(whole)
    save_pretrained(tmp_path / "hf", loaded.config, loaded.tensors, tokenizer=loaded.tokenizer)
    with raises(RecipeError, "model.optimizer"):
        go(tmp_path, model={**path, "path": str(tmp_path / "hf")})
    with raises(RecipeError, "model.optimizer"):
        go(tmp_path, model={"optimizer": True})
    assert not list(tmp_path.glob("tiny-*"))


def test_what_is_read_of_another_runs_weights_is_what_it_saved(whole):
    tensors, kept = load_model(whole).tensors, open_checkpoint(latest(whole / "checkpoints"))
    for name in tensors:
        full = kept.read("model", name)
        box = Box(tuple(s // 2 for s in full.shape), tuple(s - s // 2 for s in full.shape))
        assert torch.equal(tensors.part(name, box.slices), full[box.slices])
        assert np.array_equal(tensors[name].numpy(), full.numpy())
