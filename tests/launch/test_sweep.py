"""Sweeps: which runs there are, how they are named, and that each is trained once."""

import json
import os
import re
import shlex
import signal
import threading
import time

import pytest

from tests.errors import raises
from tests.launch.sweeping import FAILS, WAITS
from tests.patience import patience
from tilth.config.load import digest, load_recipe
from tilth.core.errors import DataError, RecipeError
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import with_holdout
from tilth.launch.sweep import SweepProcesses, devices, finished, plan_sweep, shares, split_values, value_of
from tilth.runs.directory import RunDir
from tilth.runs.signals import Interrupted

STAND_IN = "tests.launch.sweeping:main"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return f"run.dir={tmp_path}"


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("optimizer.lr=1e-4,3e-4", ["0.0001", "0.0003"]),
        ("optimizer.name=adamw, muon", ["adamw", "muon"]),
        ("data.source=a.jsonl", ["a.jsonl"]),
        ('data.source="a,b.jsonl"', ['"a,b.jsonl"']),
        ('data.source="a,b","c"', ['"a,b"', '"c"']),
        ("run.profile_ranks=[0,1]", ["[0,1]"]),
        ("run.profile_ranks=[0,1],[2]", ["[0, 1]", "[2]"]),
        ("policy.layout={dp=2,fsdp=1}", ["{dp=2,fsdp=1}"]),
        ("train.parity=true,false", ["true", "false"]),
        ("train.parity=True,False", ["True", "False"]),
        ("rollout.temperature=1,x", ["1", "x"]),
    ],
)
def test_commas_part_values_but_not_those_inside_of_one(given, values):
    assert split_values(given) == (given.partition("=")[0], values)


@pytest.mark.parametrize("text", ["1,", ",1", "1,,2", '"a,b', '"a,b",c', "[1,2],[3", "[1,2],x", "it's,on"])
def test_a_comma_that_parts_nothing_clearly_is_refused_by_key_and_value(text):
    with raises(RecipeError, "data.source") as caught:
        split_values(f"data.source={text}")
    assert f"data.source={text}" in str(caught.value)


def test_a_swept_value_in_json_is_of_its_key_s_type():
    assert value_of("optimizer.lr", "0.0001") == 1e-4 and value_of("optimizer.name", "muon") == "muon"
    assert value_of("run.name", "7") == "7" and value_of("run.profile_ranks", "[0, 1]") == [0, 1]


def test_runs_are_all_combinations_with_names_that_the_same_command_finds_again(here):
    sweep = plan_sweep("addition-grpo", ["optimizer.lr=1e-4,3e-4", "rollout.group=4,8", here], 3)
    names = [run.name for run in sweep.runs]
    assert len(set(names)) == 12 and all(name.startswith(f"{sweep.name}-") for name in names)
    assert names[0].endswith("-lr0.0001-group4-seed0") and sweep.seeds == (0, 1, 2)
    recipe = load_recipe("addition-grpo", sweep.runs[-1].overrides)
    assert (recipe.optimizer.lr, recipe.rollout.group, recipe.seed) == (3e-4, 8, 2)
    assert (recipe.run.sweep, recipe.run.name) == (sweep.name, names[-1])
    more = plan_sweep("addition-grpo", ["rollout.group=4,8,16", "optimizer.lr=1e-4,3e-4", here], 4)
    assert more.name == sweep.name and len(more.runs) == 24
    assert set(names) < {run.name for run in more.runs}
    for other in (["optimizer.lr=1e-4,3e-4", "rollout.group=4,8", "algorithm.steps=7"], ["optimizer.lr=1e-4,3e-4"]):
        assert plan_sweep("addition-grpo", [*other, here], 3).name != sweep.name
    mine = plan_sweep("addition-grpo", ["seed=4,9", "run.name=mine", here], None)
    assert [run.name for run in mine.runs] == ["mine-seed4", "mine-seed9"]


def test_a_value_that_is_no_name_of_a_folder_is_told_apart_by_its_digest(here):
    texts = ['"a/b"', '"a:b"', f'"{"x" * 300}1"', f'"{"x" * 300}2"']
    sweep = plan_sweep("addition-grpo", [f"data.template={','.join(texts)}", here], 1)
    names = [run.name for run in sweep.runs]
    assert len(set(names)) == 4 and not any("/" in name or len(name) > 200 for name in names)


def test_a_sweep_is_no_part_of_the_work_of_its_runs():
    assert digest(load_recipe("addition-grpo", ["run.sweep=a"])) == digest(load_recipe("addition-grpo"))


@pytest.mark.parametrize(
    ("given", "seeds", "key"),
    [
        ([], None, "--seeds"),
        (["optimizer.lr=1e-4"], 1, "--seeds"),
        (["seed=0,1"], 2, "seed"),
        (["seed=0,x"], None, "seed"),
        (["run.name=a,b"], None, "run.name"),
        (["run.sweep=mine"], 2, "run.sweep"),
        ([], 10**12, "--seeds"),
        (["optimizer.lr=1e-4,3e-4"], 501, "--seeds"),
        (["optimizer.lr=1e-4,0.0001"], 2, "optimizer.lr"),
        (["optimizer.lr=1e-4", "optimizer.lr=1e-4,3e-4"], None, "optimizer.lr"),
        (["optimizer.lr=1e-4,3e-4", "optimizer.lr=1e-4,3e-4"], None, "optimizer.lr"),
        (["run.save_every=1,2"], None, "run.save_every"),
        (["optimizer.lr=1e-4,low"], None, "optimizer.lr"),
        (["optimizer.rate=1e-4,3e-4"], None, "optimizer.rate"),
    ],
)
def test_what_makes_no_sweep_is_refused_before_anything_starts(here, tmp_path, given, seeds, key):
    with raises(RecipeError, key):
        plan_sweep("addition-grpo", [*given, here], seeds)
    assert not [*tmp_path.iterdir()]


def test_a_folder_with_another_run_or_one_under_way_is_refused(here):
    words = ["run.name=mine", here]
    run = plan_sweep("addition-grpo", words, 2).runs[1]
    recipe = load_recipe("addition-grpo", run.overrides)
    with RunDir.create(recipe, "addition-grpo") as directory:
        with raises(DataError, "run.json.state"):
            plan_sweep("addition-grpo", words, 2)
        directory.end("finished")
    assert finished(plan_sweep("addition-grpo", words, 2).runs[1])
    with raises(RecipeError, "algorithm.steps"):
        plan_sweep("addition-grpo", ["algorithm.steps=7", *words], 2)


def leave(recipe):
    """A finished run of a recipe."""
    with RunDir.create(recipe, "addition-grpo") as directory:
        directory.end("finished")
    return directory.path


def test_a_share_held_out_that_fits_the_data_makes_no_other_run(here, tmp_path):
    sums = [{"prompt": f"2+{n}=", "answer": str(n + 2)} for n in range(3)]  # none is in a tenth
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, sums)))
    words = [f"data.source={tmp_path}/few.jsonl", "run.name=mine", here]
    recipe = load_recipe("addition-grpo", plan_sweep("addition-grpo", words, 2).runs[0].overrides)
    fitted = with_holdout(recipe, recipe_prompts(recipe))
    assert fitted.data.holdout != recipe.data.holdout
    leave(fitted)
    assert finished(plan_sweep("addition-grpo", words, 2).runs[0])
    with raises(RecipeError, "data.holdout"):
        plan_sweep("addition-grpo", ["data.holdout=0.15", *words], 2)


def test_a_share_held_out_that_somebody_has_set_makes_another_run(here):
    words = ["run.name=mine", here]
    leave(load_recipe("addition-grpo", [*plan_sweep("addition-grpo", words, 2).runs[0].overrides, "data.holdout=0.3"]))
    with raises(RecipeError, "data.holdout"):
        plan_sweep("addition-grpo", words, 2)


def test_a_run_that_an_earlier_version_has_named_otherwise_is_the_sweep_s(here):
    words = ["optimizer.lr=1e-4,3e-4", "run.name=mine", here]
    planned = plan_sweep("addition-grpo", words, 1).runs
    path = leave(load_recipe("addition-grpo", [*planned[1].overrides, "run.name=mine-1"]))
    found = plan_sweep("addition-grpo", words, 1).runs
    assert [run.name for run in found] == [planned[0].name, "mine-1"] and finished(found[1])
    assert load_recipe("addition-grpo", found[1].overrides).run.name == "mine-1"
    text = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(re.sub(r"(?m)^muon_lr_ratio = .*$", "", text))
    state = json.loads((path / "run.json").read_text()) | {"digest": "f00d"}
    (path / "run.json").write_text(json.dumps(state))
    with raises(RecipeError, "optimizer.muon_lr_ratio"):  # it did not have that key
        plan_sweep("addition-grpo", words, 1)


def test_a_sweep_of_another_name_goes_on_by_itself_with_more_seeds(here):
    words, old = ["optimizer.lr=1e-4,3e-4", here], "addition-grpo-sweep-0ld"
    run = plan_sweep("addition-grpo", words, 1).runs[0]
    leave(load_recipe("addition-grpo", [*run.overrides, f"run.sweep={old}", f"run.name={old}-lr0.0001-seed0"]))
    sweep = plan_sweep("addition-grpo", words, 2)
    assert sweep.name == old and [*map(finished, sweep.runs)] == [True, False, False, False]
    assert sweep.runs[1].name == f"{old}-lr0.0001-seed1"
    assert not any(map(finished, plan_sweep("addition-grpo", [*words, "run.name=new"], 1).runs))
    assert plan_sweep("addition-grpo", ["optimizer.lr=2e-4,4e-4", here], 1).name != old


@pytest.mark.parametrize("again", [(["seed=0,1,2"], None), (["seed=0"], 3), (["seed=1"], 2), (["run.save_every=7"], 3)])
def test_a_sweep_goes_on_however_its_seeds_are_given(here, again):
    sweep = plan_sweep("addition-grpo", [here], 2)
    leave(load_recipe("addition-grpo", sweep.runs[1].overrides))
    words, seeds = again
    more = plan_sweep("addition-grpo", [*words, here], seeds)
    assert more.name == sweep.name and [run.seed for run in more.runs if finished(run)] == [1]


def test_another_axis_is_refused_with_the_command_that_goes_on(here):
    done = plan_sweep("addition-grpo", [here], 2)
    leave(load_recipe("addition-grpo", done.runs[1].overrides))
    words = ["optimizer.lr=1e-3,5e-4", "rollout.group=8,4", here]
    with raises(RecipeError, "run.name") as caught:
        plan_sweep("addition-grpo", words, 2)
    command = re.search(r"tilth sweep (.*) goes on", str(caught.value))[1]
    name, *overrides, flag, count, own = shlex.split(command)
    sweep = plan_sweep(name, [*overrides, own], int(count))
    assert (overrides, flag, sweep.name) == (words, "--seeds", done.name)
    assert [run.path for run in sweep.runs if finished(run)] == [done.runs[1].path]


def train(sweep, parallel=1):
    told = []
    SweepProcesses(sweep, parallel, STAND_IN).train(lambda run, error: told.append((run.seed, error)))
    return told


def test_each_run_is_trained_once_and_one_that_fails_ends_no_other(here, tmp_path):
    sweep = plan_sweep("addition-grpo", [f"seed={FAILS},1,2", "run.name=mine", here], None)
    assert train(sweep) == [(FAILS, "error: seed = 7 brings no luck"), (1, ""), (2, "")]
    assert [seed for seed, _ in train(sweep)] == [FAILS]
    assert [len((run.path / "began").read_text().splitlines()) for run in sweep.runs] == [2, 1, 1]


def test_a_signal_is_passed_on_and_starts_no_further_run(here, tmp_path):
    sweep = plan_sweep("addition-grpo", [f"seed={WAITS},1", "run.name=mine", here], None)

    def interrupt():
        late = time.monotonic() + patience(60)
        while not (tmp_path / f"mine-seed{WAITS}" / "again").exists() and time.monotonic() < late:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with raises(Interrupted, "SIGTERM"):
        train(sweep)
    assert not (tmp_path / "mine-seed1").exists() and not finished(sweep.runs[0])
    assert train(sweep) == [(WAITS, ""), (1, "")]


def test_runs_side_by_side_share_the_cores(here, tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.launch.sweep.cores", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert shares(1) == [[]] and shares(2) == [[0, 2], [1, 3]]
    with raises(RecipeError, "--parallel"):
        shares(5)


def test_runs_side_by_side_share_the_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices(2, "auto") == ["0,2", "1"] and devices(4, "cuda") == ["0", "1", "2", "0"]
    assert devices(1, "auto") == [None] and devices(2, "cpu") == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert devices(2, "auto") == ["5,7", "6"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_process_has_its_share_of_cores(here, tmp_path):
    sweep = plan_sweep("addition-grpo", ["run.name=mine", here], 2)
    assert sorted(train(sweep, 2)) == [(0, ""), (1, "")]
    assert all(int((run.path / "began").read_text()) < len(os.sched_getaffinity(0)) for run in sweep.runs)
