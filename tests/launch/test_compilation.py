"""``train.compile = "auto"``: long runs compile, short ones do not, and a run keeps to what it decided."""

import json
from types import SimpleNamespace

import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import RecipeError
from tilth.launch import compilation
from tilth.launch.compilation import COLD, SAVED, CompileCost, cached, choose, measured_seconds, possible, to_record
from tilth.models.family import new_config
from tilth.runs.readers import read_state

CONFIG = new_config(tiny.recipe("nowhere").model, 20)


def chosen(folder, seconds, known=None, monkeypatch=None, **sections):
    recipe = tiny.recipe(folder, train={"compile": "auto", "device": "cpu", **sections.pop("train", {})}, **sections)
    monkeypatch.setattr(compilation, "training_seconds", lambda *_: seconds)
    return choose(recipe, CONFIG, SimpleNamespace(), known)


def test_a_run_compiles_if_its_steps_save_more_than_compiling_takes(tmp_path, monkeypatch):
    long, short = [chosen(tmp_path, f * COLD / SAVED, monkeypatch=monkeypatch) for f in (1.1, 0.9)]
    assert long.compiled and not short.compiled
    assert "compiling takes 55 s (at most)" in long.why and long.why.startswith("compiled: about 60.5 of 605 s")


def test_what_an_earlier_run_has_measured_counts(tmp_path, monkeypatch):
    made = tiny.recipe(tmp_path, train={"compile": True, "device": "cpu"})
    policy, run = SimpleNamespace(compile_seconds=lambda: 7.0), tiny.stand_in(tmp_path)
    costs = CompileCost(made, CONFIG, policy)
    costs.on_step_end(run, 1, {})
    assert measured_seconds(made, CONFIG) == 7.0
    assert chosen(tmp_path, 80.0, monkeypatch=monkeypatch).compiled
    assert not chosen(tmp_path, 60.0, monkeypatch=monkeypatch).compiled
    path = cached(made, CONFIG)
    for damage in ("", "[]", '{"seconds": null}', '{"seconds": -1}'):
        path.write_text(damage)
        assert measured_seconds(made, CONFIG) is None
    policy.compile_seconds = None  # asked once
    costs.on_step_end(run, 2, {})


def test_an_eager_run_measures_nothing(tmp_path):
    made = tiny.recipe(tmp_path, train={"compile": False})
    CompileCost(made, CONFIG, None).on_step_end(tiny.stand_in(tmp_path), 1, {})
    assert measured_seconds(made, CONFIG) is None


@pytest.mark.parametrize(
    ("train", "why"),
    [({"device": "cuda"}, "GPU"), ({"parity": True}, "parity"), ({}, "no C++ compiler")],
    ids=["gpu", "parity", "compiler"],
)
def test_what_cannot_be_compiled_is_eager_with_a_reason(tmp_path, monkeypatch, train, why):
    if not train:
        monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    found = chosen(tmp_path, 1e9, monkeypatch=monkeypatch, train=train)
    assert not found.compiled and why in found.why


@pytest.mark.parametrize(("device", "rest"), [("cpu", (False, False)), ("cuda", (False, True))])
def test_what_this_machine_cannot_compile_is_eager_with_one_sentence(tmp_path, monkeypatch, device, rest):
    asked = tiny.recipe(tmp_path, train={"compile": True}, rollout={"compile": True})
    monkeypatch.setattr(compilation.shutil, "which", str)
    monkeypatch.setattr(compilation, "triton_missing", str)
    assert possible(asked, device, {}) == (asked, [])
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    monkeypatch.setattr(compilation, "triton_missing", lambda: "no Triton")
    made, (said,) = possible(asked, device, {})
    assert (made.train.compile, made.rollout.compile) == rest and "train.compile" in said
    far = tiny.recipe(tmp_path, train={"compile": True}, cluster={"backend": "ray", "address": "10.0.0.1:6379"})
    assert possible(far, device, {}) == (far, [])
    with raises(RecipeError, "train.compile.missing"):
        possible(asked, device, {"train": True})


def test_a_run_that_began_eager_stays_so_where_there_is_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation.shutil, "which", str)
    asked = tiny.recipe(tmp_path, train={"compile": True}, rollout={"compile": True})
    made, (said,) = possible(asked, "cpu", {"train": False, "rollout": True})
    assert not made.train.compile and made.rollout.compile and "train.compile = true: eager: as this run began" in said
    assert to_record(asked, made) == {"compile": False, "compile_rollout": True}
    assert to_record(tiny.recipe(tmp_path), tiny.recipe(tmp_path)) == {}


def test_a_run_without_a_compiler_says_so_once_and_is_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    train = {"compile": True, "device": "cpu"}
    asked = tiny.recipe(tmp_path, train=train, supervised={"steps": 1}, algorithm={"steps": 0})
    seen = tiny.Recorder()
    result = tiny.run(asked, callbacks=[seen])
    state = read_state(result.directory)
    assert (state["state"], state["compile"]) == ("finished", False)
    assert len([text for text in seen.messages if "train.compile = true: eager: " in text]) == 1


def test_a_resumed_run_keeps_to_its_decision(tmp_path, monkeypatch):
    assert chosen(tmp_path, 0.0, True, monkeypatch).compiled and not chosen(tmp_path, 1e9, False, monkeypatch).compiled
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    with raises(RecipeError, "train.compile.missing"):
        chosen(tmp_path, 0.0, True, monkeypatch)


def test_a_run_says_so_once_and_records_it_and_its_resume_follows(tmp_path, monkeypatch):
    asked = tiny.recipe(
        tmp_path, train={"compile": "auto", "threads": 1}, supervised={"steps": 2}, algorithm={"steps": 0}
    )
    seen = []
    monkeypatch.setattr("tilth.launch.build.choose", lambda *given: seen.append(given[-1]) or choose(*given))
    stopping = tiny.Recorder(lambda record: stop())

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(asked, callbacks=[stopping])
    (folder,) = [path for path in tmp_path.iterdir() if path.name != ".cache"]
    assert read_state(folder)["compile"] is False
    said = [text for text in stopping.messages if text.startswith("train.compile = auto: eager: ")]
    assert len(said) == 1
    tiny.run(asked)
    assert seen == [None, False] and read_state(folder)["compile"] is False
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
