"""A run whose lost worker cannot be replaced goes on with fewer."""

import json
import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.test_whole import ENVIRONMENT, TILTH
from tests.examples import examples
from tests.patience import patience
from tilth.config.axes import AXES
from tilth.config.load import all_differences, dump_toml, load_recipe
from tilth.config.schema import LayoutConfig
from tilth.launch.hot_update import ROWS, _fit, smaller
from tilth.runs.readers import read_metrics, read_state
from tilth.runs.updates import RecipeChange, Update, read_updates, shrunk, tries

PLUGIN = str(Path(__file__).with_name("shrunk.py"))
SHAPE = ["model.hidden=16", "model.layers=2", "model.heads=2", "model.ffn=32", "data.digits=1", "train.threads=1"]
SFT = [
    *("flow=sft", *SHAPE, "supervised.steps=7", "supervised.batch=16", "supervised.check_every=100", "run.name=a"),
    *("run.eval_prompts=8", "cluster.backend=local", "policy.layout.tp=2"),
]


def over(*overrides):
    return load_recipe("addition-grpo", [*SHAPE, "cluster.backend=local", *overrides])


@pytest.mark.parametrize(
    "sections, lost, expected",
    [
        (["cluster.workers=4"], [3], {"cluster.workers=3"}),
        (["cluster.workers=4", "policy.layout.fsdp=4"], [0], {"cluster.workers=3", "policy.layout.fsdp=3"}),
        (["cluster.workers=4", "policy.layout.tp=2"], [1], {"cluster.workers=2"}),
        (
            ["cluster.workers=8", "policy.layout.fsdp=2", "policy.layout.tp=2", "rollout.layout.tp=2"],
            [1, 2],
            {"cluster.workers=6", "policy.layout.fsdp=3"},
        ),
        (
            ["cluster.workers=6", "policy.layout.fsdp=2", "policy.layout.dp=3"],
            [4, 5],
            {"cluster.workers=4", "policy.layout.dp=2"},
        ),
        (["cluster.workers=2", "flow=sft", "policy.comm={local='cser', every=4}"], [1], {"cluster.workers=1"}),
        (["cluster.workers=2", "policy.layout.tp=2"], [1], set()),
        (["cluster.workers=2", "policy.layout.pp=2"], [1], set()),
        (["cluster.pools={a=2,b=2}", "rollout.pool=b"], [3], {"cluster.pools={a = 2, b = 1}"}),
        (["cluster.pools={a=2,b=1}", "rollout.pool=b"], [2], set()),
    ],
)
def test_the_largest_layout_keeps_the_model_axes_and_every_pool(tmp_path, sections, lost, expected):
    recipe = over(*sections)
    (tmp_path / "recipe.toml").write_text(dump_toml(recipe))
    overrides, changes, back = smaller(tmp_path, recipe, lost)
    assert expected <= set(overrides) and bool(overrides) == bool(expected) == bool(changes)
    if overrides:
        after = load_recipe(str(tmp_path / "recipe.toml"), overrides)
        (tmp_path / "recipe.toml").write_text(dump_toml(after))
        assert not all_differences(recipe, load_recipe(str(tmp_path / "recipe.toml"), back))


def test_who_is_asked_for_again_was_taken_away_last_and_by_nobody_else():
    def made(number, **facts):
        return Update(
            RecipeChange(number), facts.pop("changes", {}), 8, True, "", "", facts.pop("state", "in force"), **facts
        )

    first, second = (made(number, back=("cluster.workers=4", "policy.layout.fsdp=4")) for number in (1, 2))
    assert shrunk([]) is None and shrunk([made(1, back=("a=1",), state="undone")]) is None
    assert shrunk([first, second]) is second
    assert shrunk([first, second, made(3, grows=2, state="undone")]) is second
    assert shrunk([first, second, made(3, grows=2)]) is first
    failed = made(3, grows=2, state="undone")
    assert tries([first, second, failed], second) == 1
    assert tries([first, second, failed, made(4, grows=2)], first) == 0  # one that succeeds ends the waits before it
    assert shrunk([first, made(2, changes={"optimizer.lr": ""})]) is first
    assert shrunk([first, made(2, changes={"policy.layout.fsdp": ""})]) is None


SIZES = st.fixed_dictionaries({name: st.integers(1, 3) for name in AXES})


@settings(max_examples=examples(100), deadline=None)
@given(SIZES, st.booleans(), st.integers(1, 200))
def test_a_layout_that_fits_fills_the_workers_and_leaves_the_model_axes(sizes, fills, workers):
    before = math.prod(sizes.values())
    layout = LayoutConfig(**{**sizes, "dp": 0 if fills else sizes["dp"]})
    found = _fit(layout, before, workers)
    model = math.prod(size for axis, size in sizes.items() if axis not in ROWS)
    assert (found is None) == (workers % model != 0)
    if found is not None:
        new = layout.model_copy(update=found).sizes(workers)
        assert math.prod(new.values()) == workers
        assert all(new[axis] == size for axis, size in sizes.items() if axis not in ROWS)
        assert (new["fsdp"] > 1) <= (sizes["fsdp"] > 1)


def run(folder, *more, **variables):
    folder.mkdir()
    done = subprocess.run(
        [*TILTH, "run", "addition-grpo", *SFT, *more],
        cwd=folder, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=patience(300),
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr, folder / "runs/a"


def same_rows(one_run, other_run):
    """Return the metrics of both runs step by step: as many steps, over the same rows."""
    pairs = list(zip(read_metrics(one_run), read_metrics(other_run), strict=True))
    assert [one["step"] for one, _ in pairs] == [other["step"] for _, other in pairs] == list(range(1, 8))
    for one, other in pairs:
        assert one["tokens/trained"] == other["tokens/trained"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    return pairs


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_two_of_four_workers_and_the_same_data(tmp_path):
    four = ["cluster.workers=4", "policy.layout.fsdp=2"]
    code, errors, shrunk = run(tmp_path / "shrunk", *four, f"plugins={json.dumps([PLUGIN])}")
    assert code == 0, errors
    (update,) = read_updates(shrunk)
    assert (update.by, update.state, update.step) == ("guard", "in force", 2)  # the snapshot of step 3 has failed
    assert "cluster.workers" in update.changes and "policy.layout.fsdp" in update.changes
    assert [one["state"] for one in read_state(shrunk)["attempts"]][-1] == "finished"
    assert "cannot be replaced, and fewer go on" in (shrunk / "log.txt").read_text()

    code, errors, plain = run(tmp_path / "plain", *four)
    assert code == 0, errors
    for one, other in same_rows(shrunk, plain):
        if one["step"] <= 2:
            assert one["loss"] == other["loss"]

    code, errors, _ = run(tmp_path / "ends", *four, f"plugins={json.dumps([PLUGIN])}", "guard.shrink=false")
    assert code == 2 and "its machine is gone" in errors


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_of_fewer_workers_has_all_again_as_soon_as_they_can_be_made(tmp_path):
    four = ["cluster.workers=4", "policy.layout.fsdp=2"]
    (tmp_path / "gone").touch()
    code, errors, grown = run(
        tmp_path / "grown", *four, f"plugins={json.dumps([PLUGIN])}", GROWS=str(tmp_path / "gone")
    )
    assert code == 0, errors
    shrink, failed, again = read_updates(grown)
    assert (shrink.state, shrink.step, failed.state, again.state) == ("in force", 2, "undone", "in force")
    assert "still gone" in failed.why and failed.grows == again.grows == shrink.number
    assert (failed.step, again.step) == (3, 4)  # no step is lost
    recipe = load_recipe(str(grown / "recipe.toml"), [])
    assert recipe.cluster.workers == 4 and recipe.policy.layout.fsdp == 2

    code, errors, plain = run(tmp_path / "plain", *four)
    assert code == 0, errors
    same_rows(grown, plain)
