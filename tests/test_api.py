"""``tilth.train``: what it takes, what it refuses before anything is made, what it gives back."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

import tilth
from tests import forked
from tests.errors import raises
from tests.flows import tiny
from tests.patience import patience
from tilth import api
from tilth.core.errors import DataError, RecipeError, RewardError
from tilth.data.prompts import load_source
from tilth.runs.progress import StepProgress
from tilth.runs.readers import read_state, read_trajectories
from tilth.runs.signals import Interrupted

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def settings(folder, **sections):
    made = tiny.settings(folder, supervised={"steps": 0}, algorithm={"steps": 1}, **sections)
    return {name: value for name, value in made.items() if name != "data"}


def caught(monkeypatch):
    """What ``train`` hands on, with no run."""
    seen = {}

    def run_recipe(recipe, **rest):
        seen.update(rest, recipe=recipe)
        return SimpleNamespace(report="report.html")

    monkeypatch.setattr(api, "run_recipe", run_recipe)
    return seen


# ---- what is handed on ----


def test_settings_are_the_sections_and_keys_of_a_recipe(monkeypatch):
    seen = caught(monkeypatch)
    tilth.train(SUMS, len, live=False, seed=7, model={"hidden": 32}, rollout={"stop": ["\n"]})
    recipe = seen["recipe"]
    assert (recipe.seed, recipe.model.hidden, recipe.rollout.stop) == (7, 32, ("\n",))
    assert recipe.algorithm.steps == 100  # whatever is not said has its default


def test_data_may_be_dictionaries_or_texts_and_any_iterable(monkeypatch):
    seen = caught(monkeypatch)
    tilth.train(({"prompt": p, "hint": i} for i, p in enumerate("ab")), len, live=False)
    assert [(p.text, p.answer, p.info) for p in seen["prompts"]] == [("a", None, {"hint": 0}), ("b", None, {"hint": 1})]
    tilth.train(["1+1=", "2+2="], len, live=False)
    assert [p.text for p in seen["prompts"]] == ["1+1=", "2+2="]


def test_data_may_have_columns_of_other_names(monkeypatch):
    seen = caught(monkeypatch)
    named = {"data.columns": {"prompt": "question", "answer": "solution"}}
    tilth.train([{"question": "1+1=", "solution": "2"}], len, live=False, keys=named)
    assert (seen["prompts"][0].text, seen["prompts"][0].answer) == ("1+1=", "2")


def test_name_reward_and_callbacks_are_those_given(monkeypatch):
    seen, watcher = caught(monkeypatch), tiny.Recorder()
    tilth.train(SUMS, tiny.close_enough, name="mine", callbacks=(watcher,), live=False)
    assert seen["name"] == "mine" and seen["reward"] is tiny.close_enough and list(seen["callbacks"]) == [watcher]


def test_the_terminal_watches_too_unless_told_otherwise(monkeypatch):
    from tilth.ui.live import Live

    seen = caught(monkeypatch)
    tilth.train(SUMS, len, callbacks=[tiny.Recorder()])
    assert seen["name"] == "train" and [type(o) for o in seen["callbacks"]] == [Live, tiny.Recorder]
    tilth.train(SUMS, len, live=False)
    assert seen["callbacks"] == []


# ---- what is refused, before a directory is made ----


@pytest.mark.parametrize(
    "wrong, key",
    [
        ({"rollouts": {"group": 4}}, "rollouts"),
        ({"rollout": {"grup": 4}}, "rollout.grup"),
        ({"rollout": {"group": 0}}, "rollout.group"),
        ({"model": {"hidden": 30, "heads": 4}}, "model.hidden"),
        ({"seed": "one"}, "seed"),
    ],
)
def test_a_wrong_setting_is_told_as_in_a_recipe(tmp_path, wrong, key):
    with raises(RecipeError, key):
        tilth.train(SUMS, len, live=False, **{"run": {"dir": str(tmp_path / "runs")}, **wrong})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data, key",
    [
        ([], "data"),
        ([{"question": "1+1="}], "record 1.prompt.missing"),
        (["1+1=", 3], "record 2.type"),
        ([{"prompt": "1", "answer": 2}], "record 1.answer.type"),
        ("tr.jsonl", "data.source"),
        (Path("tr.jsonl"), "data.source"),
        ("", "data.source.empty"),
        (b"tr.jsonl", "data.bytes"),
        ({"prompt": "1+1=", "answer": "2"}, "data.dict"),
        (7, "data.int"),
        (iter([]), "data.exhausted"),
    ],
)
def test_wrong_data_are_told_with_their_place(tmp_path, data, key):
    with raises(DataError, key):
        tilth.train(data, tiny.close_enough, live=False, **settings(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reward, key", [(7, "function"), (lambda prompt: 1.0, "<lambda>.arguments")])
def test_a_reward_that_cannot_be_called_is_refused(tmp_path, reward, key):
    with raises(RewardError, key):
        tilth.train(SUMS, reward, live=False, **settings(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_warm_up_needs_answers(tmp_path):
    how = settings(tmp_path) | {"supervised": {"steps": 1, "batch": 4}}
    with raises(DataError, "record 1.answer"):
        tilth.train([s["prompt"] for s in SUMS], tiny.close_enough, live=False, **how)


def test_a_source_has_no_place_beside_the_data():
    with raises(RecipeError, "data.source"):
        tilth.train(SUMS, len, live=False, keys={"data.source": "tr.jsonl"})


def write_csv(folder):
    (folder / "sums.csv").write_text("prompt,answer\n" + "".join(f"{s['prompt']},{s['answer']}\n" for s in SUMS))
    return folder / "sums.csv"


@pytest.mark.parametrize("named", [str, Path])
def test_a_file_by_its_name_is_data_source(monkeypatch, tmp_path, named):
    seen, path = caught(monkeypatch), write_csv(tmp_path)
    tilth.train(named(path), len, heldout=named(path), live=False)
    assert seen["prompts"] is None and (seen["recipe"].data.source, seen["recipe"].data.heldout) == (str(path),) * 2
    assert [p.info for p in load_source(seen["recipe"].data)][:25] == [{"answer": s["answer"]} for s in SUMS]
    tilth.train("addition", len, live=False, keys={"data.digits": 1})
    assert seen["recipe"].data.source == "addition" and len(load_source(seen["recipe"].data)) == 100


def test_records_leave_no_name_in_the_recipe(monkeypatch):
    seen = caught(monkeypatch)
    tilth.train(SUMS, len, live=False)
    assert seen["recipe"].data.source == ""
    with raises(DataError, "data.source.empty"):
        load_source(seen["recipe"].data)


HELD = [{"prompt": "7+7=", "answer": "14"}, {"prompt": "1+1=", "answer": "2"}]


@pytest.mark.parametrize("kind", [list, iter, "table", "file", "both files"])
def test_heldout_is_of_any_kind_that_data_is(monkeypatch, tmp_path, kind):
    seen = caught(monkeypatch)
    (tmp_path / "te.jsonl").write_text("".join(json.dumps(record) + "\n" for record in HELD))
    made = {"table": pa.Table.from_pylist(HELD), "file": tmp_path / "te.jsonl", "both files": tmp_path / "te.jsonl"}
    data = write_csv(tmp_path) if kind == "both files" else iter(SUMS)
    tilth.train(data, len, heldout=made[kind] if kind in made else kind(HELD), live=False, keys={"data.holdout": 0})
    prompts = seen["prompts"] or load_source(seen["recipe"].data)
    train, held = prompts.split(0.5)
    assert [p.text for p in held] == ["7+7=", "1+1="]
    assert [p.text for p in train] == [s["prompt"] for s in SUMS if s["prompt"] != "1+1="]


def test_heldout_is_given_once_and_has_records(tmp_path):
    with raises(RecipeError, "data.heldout"):
        tilth.train(SUMS, len, heldout=HELD, live=False, keys={"data.heldout": "te.jsonl"})
    with raises(DataError, "heldout"):
        tilth.train(SUMS, len, heldout=[], live=False)
    with raises(DataError, "heldout record 2.prompt.missing"):
        tilth.train(SUMS, len, heldout=[HELD[0], {"question": "?"}], live=False)


def test_documents_and_pairs_may_be_records_too(monkeypatch):
    seen = caught(monkeypatch)
    steps = {"supervised": {"steps": 1}}
    texts = pa.table({"text": ["a b", "c d", "held"], "by": ["x", "y", "z"]})
    tilth.train(texts, flow="pretrain", heldout=["held", "out"], live=False, **steps)
    assert seen["prompts"][:2] == (["a b", "c d"], ["held", "out"])
    tilth.train(iter([{"prompt": "1", "answer": "2"}, "3"]), flow="pretrain", live=False, **steps,
                keys={"data.holdout": 0})  # fmt: skip
    assert seen["prompts"][:2] == (["12", "3"], [])
    pair = {"prompt": "a", "chosen": "x", "rejected": "y"}
    held = pa.Table.from_pylist([pair | {"prompt": "b"}])
    tilth.train([pair], flow="dpo", heldout=held, live=False, **steps)
    train, kept = seen["prompts"].split(0.0)
    assert [p.text for p in train] == ["a"] and [p.text for p in kept] == ["b"]
    assert seen["prompts"][1].pairs[0][:2] == ("x", "y")


@pytest.mark.parametrize("allow", ["optimizer.lr", ["optimizer.lr", "data"], ()])
def test_allow_is_handed_on(monkeypatch, allow):
    seen = caught(monkeypatch)
    tilth.train(SUMS, len, live=False, allow=allow)
    assert seen["allow"] == ((allow,) if isinstance(allow, str) else tuple(allow))
    with raises(RecipeError, "--allow"):
        tilth.train(SUMS, len, live=False, allow="optimizer.rl")


def test_prompts_of_data_heldout_are_those_held_out(monkeypatch, tmp_path):
    seen = caught(monkeypatch)
    (tmp_path / "te.jsonl").write_text('{"prompt": "7+7=", "answer": "14"}\n{"prompt": "1+1=", "answer": "2"}\n')
    tilth.train(SUMS, len, live=False, keys={"data.heldout": str(tmp_path / "te.jsonl"), "data.holdout": 0.5})
    train, held = seen["prompts"].split(0.5)
    assert [p.text for p in held] == ["7+7=", "1+1="]
    assert [p.text for p in train] == [s["prompt"] for s in SUMS if s["prompt"] != "1+1="]
    with raises(DataError, "data.heldout"):
        tilth.train(SUMS, len, live=False, keys={"data.heldout": str(tmp_path / "none.jsonl")})


# ---- what comes back ----


def test_a_run_of_the_caller_s_data_and_a_lambda(tmp_path, monkeypatch):
    parts, note = [], StepProgress.at
    monkeypatch.setattr(StepProgress, "at", lambda self, *now: (parts.append(now), note(self, *now)))
    result = tilth.train(
        SUMS, lambda prompt, completion, info: len(info["answer"]) / 2, live=False, name="sums",
        **settings(tmp_path),
    )  # fmt: skip
    assert result.directory == tmp_path / "sums-001" and result.summary["state"] == "finished"
    assert result.accuracy is None and result.reward == result.summary["reward_heldout_last"] == 0.5
    (phase,) = result.summary["phases"]
    assert phase["range"] == (0.5, 0.5) and phase["change"][0] == 0 <= phase["change"][1]  # the same prompts
    asked = {what: now for what, *now in parts}
    assert asked["generating"] == [6 * 4, 6 * 4] and asked["evaluating"][1] == phase["prompts"]
    assert {"scoring", "syncing weights"} <= set(asked) and not (result.directory / "progress.json").exists()
    assert result.report == result.directory / "report.html" and "sums-001" in result.report.read_text()
    rows = read_trajectories(result.directory).to_pylist()
    assert {r["prompt_text"] for r in rows} <= {s["prompt"] for s in SUMS}
    assert all(r["reward"] == len(r["answer"]) / 2 for r in rows)


def generated(numbers):
    return ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers)


def test_an_interrupted_run_goes_on_with_the_same_rows_of_a_new_iterator(tmp_path):
    def interrupt(record):
        if record["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    how = {**tiny.settings(tmp_path, supervised={"steps": 0}, algorithm={"steps": 3}), "run": {"dir": str(tmp_path)}}
    del how["data"]

    def go(numbers, observer, **more):
        more = {"name": "sums", "heldout": generated(range(8, 10)), **more}
        return tilth.train(generated(numbers), tiny.close_enough, callbacks=[observer], live=False, **more, **how)

    with pytest.raises(Interrupted):
        go(range(5), tiny.Recorder(at_step=interrupt))
    others = {"other rows": (range(6), {}), "other heldout": (range(5), {"heldout": generated(range(9, 11))})}
    for numbers, more in others.values():
        with raises(RecipeError, "data"):
            go(numbers, tiny.Recorder(), **more, keys={"run.name": "sums-001"})
    again = tiny.Recorder()
    assert go(range(5), again).directory.name == "sums-001" and [r["step"] for r in again.records] == [2, 3]
    assert {r["prompt_text"] for r in read_trajectories(tmp_path / "sums-001").to_pylist()} <= {
        record["prompt"] for record in generated(range(5))
    }


class Signals(tiny.Recorder):
    """Get SIGINT at the end of a run."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def on_run_end(self, run, summary):
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """The handler of Ctrl-C, which a shell lets its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Another(tiny.Recorder):
    """Start another run in the midst of one."""

    def on_run_start(self, run):
        with raises(RecipeError, "run"):
            tiny.run(run.recipe)
        self.refused = True


def test_a_process_has_one_run_at_a_time_and_no_thread_of_it_afterwards(tmp_path):
    tiny._rewards()  # the pool that all tests share has a thread of its own
    made, another, before = tiny.recipe(tmp_path, supervised={"steps": 1}), Another(), {*threading.enumerate()}
    tiny.run(made, callbacks=[another])
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(patience(10))
    assert another.refused and not [thread for thread in left if thread.is_alive()]


@pytest.mark.parametrize("times, reported", [(1, True), (2, False)])
def test_a_finished_run_has_its_report_before_ctrl_c_ends_the_program(tmp_path, capfd, interruptible, times, reported):
    made = tiny.recipe(tmp_path, supervised={"steps": 0}, algorithm={"steps": 1}, run={"dir": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        tiny.run(made, callbacks=[Signals(times)], report=True)
    assert read_state(tmp_path / "tiny-001")["state"] == "finished"
    assert (tmp_path / "tiny-001" / "report.html").exists() is reported
    assert "tilth report RUN" in capfd.readouterr().err and signal.getsignal(signal.SIGINT) is interruptible


@pytest.mark.slow
def test_a_finished_run_is_not_continued(tmp_path):
    def go():
        return tilth.train(SUMS, tiny.close_enough, live=False, name="sums", **settings(tmp_path)).directory.name

    assert [go(), go()] == ["sums-001", "sums-002"]


LIGHT = """
import importlib, sys, tilth
tilth.train
tilth.config.load.load_recipe("addition-grpo")
names = "data.pairs data.prompts runs.directory runs.metrics models.families.qwen3 "
names += "plan.traffic plan.steps plan.memory plan.shape plan.packing"
for name in names.split():
    importlib.import_module(f"tilth.{name}")
    assert "torch" not in sys.modules, name
tilth.nothing
"""


def test_what_reads_recipes_data_runs_and_plans_loads_no_torch_and_unknown_names_are_told():
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert "module 'tilth' has no attribute 'nothing'" in found.stderr


def test_public_names_are_listed_without_loading_them():
    code = "import sys, tilth; print(*dir(tilth)); assert not {'torch', 'pyarrow', 'numpy'} & set(sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"train", "rl", "__version__"} <= set(listed)
    assert set(tilth.__all__) == set(dir(tilth)) and all(hasattr(tilth, name) for name in tilth.__all__)


USER = """
import pathlib
from collections.abc import Iterator

import tilth


def rows() -> Iterator[dict[str, str | int]]:
    yield {"prompt": "1+1=", "answer": "2", "level": 1}


class Table:
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def score(prompt: str, completion: str, info: dict[str, object]) -> float:
    return 1.0


reveal_type(tilth.train([{"prompt": "a"}], score, heldout=["b"], allow=["optimizer.lr"], algorithm={"steps": 1}))
tilth.train(rows(), score)
tilth.train(Table(), lambda prompt, completion, info: 1.0, heldout=pathlib.Path("b.csv"))
tilth.train("a.csv", "exact").accuracy
reveal_type(tilth.rl.advantages.__name__)
tilth.train(7, score)
tilth.trian
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_public_names(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    skipped = "[mypy-torch.*,transformers.*,numpy.*,pyarrow.*,pydantic.*]\nfollow_imports = skip\n"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n{skipped}")
    env = {**os.environ, "MYPYPATH": str(Path(tilth.__file__).parents[1])}
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), "user.py"],
        capture_output=True, text=True, cwd=tmp_path, env=env,
    )  # fmt: skip
    last = USER.count("\n")
    lines = [line.removeprefix("user.py:") for line in found.stdout.splitlines()]
    assert [line.partition(":")[0] for line in lines] == [str(last - n) for n in (6, 2, 1, 0)], found.stdout
    assert "tilth.ui.result.RunResult" in lines[0] and "str" in lines[1]
    assert "arg-type" in lines[2] and "attr-defined" in lines[3]


def test_keys_reach_the_sections_whose_names_are_taken(monkeypatch):
    seen = {}
    monkeypatch.setattr("tilth.api.run_recipe", lambda recipe, **rest: seen.update(recipe=recipe))
    keys = {"data.holdout": 0.25, "reward.timeout": 2.5, "seed": 9}
    tilth.train(SUMS, tiny.close_enough, live=False, keys=keys, algorithm={"steps": 3})
    made = seen["recipe"]
    assert (made.data.holdout, made.reward.timeout, made.seed, made.algorithm.steps) == (0.25, 2.5, 9, 3)


# ---- a reward that changed ----

SCRIPT = """
import sys
import tilth
from helper import bonus
from tilth.core.errors import RecipeError

WEIGHT = {weight}
SUMS = [{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a in range(5) for b in range(5)]
sections = {sections}

try:
    tilth.train(SUMS, lambda prompt, completion, info: WEIGHT * len(completion) + bonus(), live=False, **sections)
except RecipeError as error:
    sys.exit(f"refused: {{error}}")
"""


@pytest.mark.slow  # quickly in tests/rewards/test_fingerprint.py
def test_a_global_or_a_helper_that_changed_is_another_reward(tmp_path):
    """A script that is called again, in processes of its own."""
    sections = settings(str(tmp_path / "runs"))
    sections["run"] |= {"name": "mine"}

    def call(weight, helper):
        (tmp_path / "script.py").write_text(SCRIPT.format(weight=weight, sections=sections))
        (tmp_path / "helper.py").write_text(f"def bonus(): return {helper}\n")
        return subprocess.run([*forked.python(), "script.py"], cwd=tmp_path, capture_output=True, text=True).stderr

    assert call(0.1, 0.0) == ""
    assert "mine is finished" in call(0.1, 0.0)  # it is the same work
    for other in (call(0.2, 0.0), call(0.1, 0.5)):
        assert other.startswith("refused: ") and "mine is another run: its reward function" in other
        assert "--allow reward.function" in other


@pytest.mark.parametrize("name", ["", "..", "a/../../b"])
def test_a_name_that_would_lead_out_of_the_folder_of_runs_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with raises(RecipeError, "name"):
        tilth.train([{"prompt": "1+1=", "answer": "2"}], lambda p, c, i: 0.0, name=name)
    assert not list(tmp_path.iterdir())
