"""Which run is gone on with: the same work, or work that differs in what was allowed by name."""

import json
from dataclasses import replace

import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth import __version__
from tilth.config.load import digest, dump_toml, newer_keys
from tilth.core.errors import RecipeError
from tilth.launch.life import _inputs
from tilth.runs.directory import RunDir
from tilth.runs.files import Lock
from tilth.runs.identity import Identity, claim, find, of_command, passed_over
from tilth.runs.readers import checkpoints_of, read_state

TWO = {"cluster": {"workers": 2, "backend": "local"}, "policy": {"layout": {"fsdp": 2}}}


def begun(folder, inputs="data1", **sections):
    """The path of an unfinished run."""
    with RunDir.create(tiny.recipe(folder, **sections), "demo", given(inputs)) as run:
        run.end("interrupted")
    return run.path


def who(folder, *allow, inputs="data1", **sections):
    return Identity(tiny.recipe(folder, **sections), given(inputs), allow)


def given(inputs):
    """By key; a text alone is that of the data."""
    return {"data": inputs} if isinstance(inputs, str) else inputs


def test_the_same_work_goes_on_and_other_work_begins_anew(tmp_path):
    path = begun(tmp_path)
    assert find(who(tmp_path), "demo") == path
    for other in (who(tmp_path, seed=9), who(tmp_path, inputs="data2"), who(tmp_path, optimizer={"lr": 1.0})):
        assert find(other, "demo") is None
    new, lock = claim(who(tmp_path, seed=9), "demo")
    lock.release()
    assert new != path


@pytest.mark.parametrize(
    ("allow", "changed", "goes_on"),
    [
        (("optimizer.lr",), {"optimizer": {"lr": 1.0}}, True),
        (("optimizer",), {"optimizer": {"lr": 1.0, "clip_norm": 0.5}}, True),
        (("optimizer.l",), {"optimizer": {"lr": 1.0}}, False),  # not by the beginning of a name
        (("optimizer.lr",), {"optimizer": {"lr": 1.0, "clip_norm": 0.5}}, False),
        (("optimizer.lr",), {"optimizer": {"lr": 1.0}, "inputs": "data2"}, False),
        (("optimizer.lr", "data"), {"optimizer": {"lr": 1.0}, "inputs": "data2"}, True),
        (("data.source",), {"inputs": "data2"}, True),
        (("reward.function",), {"inputs": "data2"}, False),  # each input has its own key
        (("reward",), {"inputs": {"data": "data1", "reward.function": "f"}}, True),
        (("reward.function",), {"inputs": {"data": "data1", "reward.function": "f"}}, True),
        (("reward",), {"inputs": {"data": "data1", "reward.model": "m"}}, True),
        (("reward.function",), {"inputs": {"data": "data1", "reward.model": "m"}}, False),
        (("judge",), {"inputs": {"data": "data1", "judge.path": "j"}}, True),
        (("reference",), {"inputs": {"data": "data1", "judge.path": "j"}}, False),
        (("reference.path",), {"inputs": {"data": "data1", "reference.path": "r"}}, True),
        (("data",), {"inputs": {"data": "data1", "reference.path": "r"}}, False),
        (("data",), {"inputs": {"data": "data1", "data.template": "t"}}, True),
        (("policy.layout", "cluster"), TWO, True),
        (("cluster",), TWO, False),
        ((), {"run": {"save_every": 9, "keep": 5, "save_background": False, "grace": 1.0, "save_minutes": 3.0}}, True),
    ],
)  # fmt: skip
def test_what_is_allowed_may_differ_and_nothing_else(tmp_path, allow, changed, goes_on):
    path = begun(tmp_path)
    found = find(who(tmp_path, *allow, **changed), "demo")
    assert (found == path) if goes_on else (found is None)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"inputs": "data2"}, False),
        ({"inputs": {"data": "data1", "data.template": "t"}}, False),
        ({"data": {"holdout": 0.3}}, False),
        ({"inputs": {"data": "data1", "reward.function": "f"}, "seed": 9}, True),
        ({"data": {"loaders": 2, "shadows": 1}}, True),
    ],
)
def test_samples_keep_their_numbers_while_the_data_stay(tmp_path, changed, same):
    assert (who(tmp_path, **changed).data == who(tmp_path).data) == same


def test_the_newest_that_may_be_gone_on_with_is_taken(tmp_path):
    begun(tmp_path)
    second = begun(tmp_path, seed=9)
    assert find(who(tmp_path, "seed", seed=5), "demo") == second


def test_a_named_run_says_which_keys_would_have_to_be_allowed(tmp_path):
    begun(tmp_path, run={"name": "mine"})
    changed = {"seed": 5, "optimizer": {"lr": 1.0, "clip_norm": 0.5}, "run": {"name": "mine"}}
    with pytest.raises(RecipeError) as caught:
        who(tmp_path, "seed", **changed).check_name()
    message = str(caught.value)
    assert "optimizer.lr was 0.0001 and is 1.0" in message and "seed was" not in message
    assert "--allow optimizer.lr --allow optimizer.clip_norm" in message and "\n" not in message
    who(tmp_path, "seed", "optimizer", **changed).check_name()
    with raises(RecipeError, "data"):
        who(tmp_path, "seed", inputs="data2", run={"name": "mine"}).check_name()
    teacher = {"data": "data1", "reference.path": "runs/teacher@4"}
    with raises(RecipeError, "reference.path"):
        who(tmp_path, inputs=teacher, run={"name": "mine"}).check_name()
    (tmp_path / "mine" / "recipe.toml").write_text(dump_toml(who(tmp_path, **changed).recipe))  # as a kill may leave it
    with raises(RecipeError, "run.json.digest"):
        who(tmp_path, **changed).check_name()


def test_a_finished_run_goes_on_only_if_it_is_named_and_something_may_change(tmp_path):
    with RunDir.create(tiny.recipe(tmp_path, run={"name": "mine"}), "demo") as run:
        run.end("finished")
    same = Identity(tiny.recipe(tmp_path, run={"name": "mine"}))
    with raises(RecipeError, "run.json.state"):
        same.check_name()
    with raises(RecipeError, "run.name"):
        claim(same, "demo")
    longer = Identity(tiny.recipe(tmp_path, algorithm={"steps": 9}, run={"name": "mine"}), allow=("algorithm.steps",))
    longer.check_name()
    path, lock = claim(longer, "demo")
    lock.release()
    assert path == tmp_path / "mine"
    assert find(who(tmp_path, "seed", "data", seed=9), "demo") is None  # without its name a new one is begun


def test_a_run_remembers_as_what_it_went_on(tmp_path):
    path = begun(tmp_path)
    first = read_state(path)["digest"]
    with RunDir.create(tiny.recipe(tmp_path, seed=9), "demo", given("data1"), ("seed",)) as run:
        assert run.path == path and run.resumed and run.changes == {"seed": "seed was 3 and is 9"}
        assert read_state(path)["digest"] == first  # not before it could be gone on with
        run.accept()
        assert run.digests == [first, run.digest] and run.digest != first
    state = read_state(path)
    assert state["digest"] == run.digest and state["attempts"][-1]["changed"] == ["seed was 3 and is 9"]
    assert find(who(tmp_path), "demo") is None  # what it was before is now the other work
    with RunDir.create(tiny.recipe(tmp_path, seed=9), "demo", given("data1")) as again:
        assert again.path == path and not again.changes


def test_a_recipe_of_other_keys_is_not_gone_on_with(tmp_path):
    path = begun(tmp_path)
    (path / "recipe.toml").write_text("[section_of_another_time]\nkey = 1\n")
    assert find(who(tmp_path, "seed", seed=9), "demo") is None
    assert find(who(tmp_path), "demo") == path  # the same digest is the same work


def test_a_run_of_a_version_without_a_key_says_so_and_goes_on_if_the_key_is_allowed(tmp_path):
    """A run of Muon from before ``muon_precision``: to go on with fp32 changes its numbers."""
    muon = {"optimizer": {"name": "muon"}}
    path = begun(tmp_path, run={"name": "demo-001"}, **muon)
    recipe = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(recipe.replace('muon_precision = "fp32"\n', ""))
    change_state(path, digest="0123-" + read_state(path)["digest"].partition("-")[2])
    with raises(RecipeError, "optimizer.muon_precision") as caught:
        who(tmp_path, run={"name": "demo-001"}, **muon).check_name()
    assert __version__ in str(caught.value) and "--allow optimizer.muon_precision" in str(caught.value)
    assert find(who(tmp_path, **muon), "demo") is find(who(tmp_path, "seed", **muon), "demo") is None
    (line,) = passed_over(who(tmp_path, **muon), "demo")
    assert "--allow optimizer.muon_precision resumes it" in line
    assert passed_over(who(tmp_path, seed=9, **muon), "demo") == []
    assert find(who(tmp_path, "optimizer.muon_precision", **muon), "demo") == path
    (path / "recipe.toml").write_text(recipe)  # as a kill may leave it
    assert passed_over(who(tmp_path, **muon), "demo") == []


def test_a_run_of_a_version_without_a_momentum_goes_on_with_that_of_then(tmp_path):
    muon = {"optimizer": {"name": "muon"}}
    path = begun(tmp_path, run={"name": "demo-001"}, **muon)
    recipe = (path / "recipe.toml").read_text()
    (path / "recipe.toml").write_text(recipe.replace("muon_momentum = 0.95\n", ""))
    assert find(who(tmp_path, **muon), "demo") == path
    muon["optimizer"]["muon_momentum"] = 0.8
    assert find(who(tmp_path, **muon), "demo") is None


def test_a_run_of_m2po_with_other_denominators_says_so_and_goes_on_if_that_is_allowed(tmp_path):
    """The recipe has neither; one that has them is as it was."""
    m2po = {"algorithm": {"correction": "decoupled_m2po"}, "rollout": {"staleness": 2}}
    path = begun(tmp_path, run={"name": "demo-001"}, **m2po)
    made = tiny.recipe(tmp_path, run={"name": "demo-001"}, **m2po)
    now = Identity(made, _inputs(made, "data1", ""))
    with raises(RecipeError, "algorithm.correction") as caught:
        now.check_name()
    assert "divides by all tokens now" in str(caught.value) and "--allow algorithm.correction" in str(caught.value)
    assert find(replace(now, allow=("algorithm.correction",)), "demo") == path
    for options in ({"denominators": "kept"}, {"denominators": "all"}):
        other = tiny.recipe(tmp_path, algorithm={**m2po["algorithm"], "options": options}, rollout=m2po["rollout"])
        assert _inputs(other, "data1", "") == {"data": "data1"}
    assert _inputs(tiny.recipe(tmp_path), "data1", "") == {"data": "data1"}


def test_a_version_that_dumps_a_recipe_lacks_none_of_its_keys(tmp_path):
    pools = {"cluster": {"backend": "local", "workers": 2, "pools": {"a": 1, "b": 1}}, "optimizer": {"name": "muon"}}
    for recipe in (tiny.recipe(tmp_path), tiny.recipe(tmp_path, **pools)):
        assert newer_keys(dump_toml(recipe), recipe) == {}


def test_the_precision_of_muon_is_no_part_of_other_runs(tmp_path):
    both = [tiny.recipe(tmp_path, optimizer={"muon_precision": precision}) for precision in ("fp32", "bf16")]
    assert digest(both[0]) == digest(both[1])


def test_checkpoints_elsewhere_have_a_place_of_their_own(tmp_path):
    place = str(tmp_path / "store")
    runs = [begun(tmp_path / name, run={"checkpoints": place}) for name in ("a", "b")]
    found = [checkpoints_of(run) for run in runs]
    assert len(set(found)) == 2 and all(f.startswith(f"{place}/demo-001-") for f in found)
    with RunDir.create(tiny.recipe(tmp_path / "a", run={"checkpoints": place}), "demo", given("data1")) as again:
        assert again.checkpoints == found[0]
    url = begun(tmp_path / "c", run={"checkpoints": "memory://bucket/x/"})
    assert checkpoints_of(url).startswith("memory://bucket/x/demo-001-")
    own = begun(tmp_path / "d")
    moved = own.rename(tmp_path / "moved")
    assert checkpoints_of(moved) == str(moved / "checkpoints")


def test_checkpoints_stay_where_they_are_once_there_may_be_some(tmp_path):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    path = begun(tmp_path / "runs", run={"checkpoints": first})
    place = checkpoints_of(path)
    with RunDir.create(tiny.recipe(tmp_path / "runs", run={"checkpoints": second}), "demo", given("data1")) as run:
        assert run.path == path and run.checkpoints.startswith(second)  # nothing has been saved yet
        run.update(saved=4)
    with RunDir.create(tiny.recipe(tmp_path / "runs", run={"checkpoints": first}), "demo", given("data1")) as run:
        assert run.path == path and run.checkpoints.startswith(second) and run.checkpoints != place


def test_a_command_knows_the_run_that_it_began_whatever_updates_have_changed(tmp_path):
    none = {"number": 0, "overrides": [], "allow": []}
    path = begun(tmp_path)
    began = {"recipe": digest(tiny.recipe(tmp_path)), "inputs": given("data1")}
    change_state(path, began=began, change=none, digest="another")
    assert find(who(tmp_path), "demo") is None and of_command(who(tmp_path), "demo") == path
    assert of_command(who(tmp_path, optimizer={"lr": 1.0}), "demo") is None
    assert of_command(who(tmp_path, inputs={"data": "data1", "plugins": "p"}), "demo") is None
    change_state(path, change=none | {"allow": ["plugins"]})  # an update brought another one of its name
    assert of_command(who(tmp_path, inputs={"data": "data1", "plugins": "p"}), "demo") == path
    assert of_command(who(tmp_path, inputs="data2"), "demo") is None
    lock = Lock(path / "run.lock")
    assert of_command(who(tmp_path), "demo") is None  # another process writes it
    lock.release()
    change_state(path, state="finished")
    assert of_command(who(tmp_path), "demo") is None


def change_state(path, **fields):
    state = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(state | fields))
