"""Callbacks: called at what they say, in order, from Python and from a plugin; what fails in one names itself."""

import json
from pathlib import Path

import pytest

import tilth
from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tests.flows import tiny
from tilth.api import run_recipe
from tilth.checkpoint import latest
from tilth.core.errors import PluginError, RecipeError
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

SHOUT = """
import json, tilth

@tilth.callback("shout")
class Shout(tilth.Callback):
    def on_step_end(self, run, step, metrics):
        with open(run.directory.path / "shout.jsonl", "a") as file:
            file.write(json.dumps([step, metrics["phase"]]) + "\\n")
"""


class Everything(tilth.Callback):
    """Remember every call."""

    def __init__(self):
        self.seen = []

    def on_run_start(self, run):
        self.seen.append(("start", run.state.step, run.directory.path.name))

    def on_step_end(self, run, step, metrics):
        assert step == run.state.step == metrics["step"] == read_metrics(run.directory.path)[-1]["step"]
        self.seen.append(("step", step, metrics["phase"]))

    def on_evaluation(self, run, step, metrics):
        self.seen.append(("evaluation", step, dict(metrics)))

    def on_save(self, run, step, path):
        self.seen.append(("save", step, path))

    def on_message(self, text):
        self.seen.append(("message", text))

    def on_run_end(self, run, summary):
        self.seen.append(("end", summary["steps"], summary["state"]))


def test_all_is_called_when_it_happened_and_in_order(tmp_path):
    watcher = Everything()
    made = tiny.recipe(tmp_path, supervised={"steps": 3}, run={"save_background": False, "save_every": 2, "keep": 9})
    result = tiny.run(made, callbacks=[watcher])
    seen = {kind: [call[1:] for call in watcher.seen if call[0] == kind] for kind, *_ in watcher.seen}
    assert seen["start"] == [(0, result.directory.name)] and seen["end"] == [(9, "finished")]
    assert [step for step, _ in seen["step"]] == list(range(1, 10))
    records = {row["step"]: row for row in read_metrics(result.directory)}
    evaluated = dict(seen["evaluation"])
    assert list(evaluated) == [3, 6, 9]
    assert watcher.seen.index(("evaluation", 3, evaluated[3])) < watcher.seen.index(("step", 3, "warmup"))
    for step in (3, 6, 9):
        assert evaluated[step].items() <= records[step].items() and evaluated[step]
    saved = dict(seen["save"])
    assert list(saved) == [2, 3, 4, 6, 8, 9] and saved[9] == str(latest(result.directory / "checkpoints"))


@pytest.mark.parametrize("flow", ["sft", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_evaluations_of_supervised_flows_have_the_loss(tmp_path, flow):
    watcher = Everything()
    result = tiny.learn(tmp_path, flow, callbacks=[watcher], supervised={"steps": 4})
    found = {call[1]: call[2] for call in watcher.seen if call[0] == "evaluation"}
    records = {row["step"]: row for row in read_metrics(result.directory)}
    assert list(found) == [0, 3, 4]
    assert all(found[step]["loss/heldout"] == records[step]["loss/heldout"] for step in (3, 4))


def test_a_callback_of_a_plugin_is_in_each_run_that_names_it_and_in_no_other(tmp_path):
    path = write(tmp_path, SHOUT)
    short = {"supervised": {"steps": 1}, "algorithm": {"steps": 1}}
    mine = tiny.run(tiny.recipe(tmp_path / "a", plugins=[str(path)], **short)).directory
    told = [json.loads(line) for line in (mine / "shout.jsonl").read_text().splitlines()]
    assert told == [[1, "warmup"], [2, "grpo"]]
    other = tiny.run(tiny.recipe(tmp_path / "b", **short)).directory
    assert not (other / "shout.jsonl").exists()


class Fails(tilth.Callback):
    def __init__(self, event, error):
        self.event, self.error = event, error

    def _act(self, event):
        if event == self.event:
            raise self.error

    def on_run_start(self, run):
        self._act("on_run_start")

    def on_step_end(self, run, step, metrics):
        if step == 2:
            self._act("on_step_end")

    def on_evaluation(self, run, step, metrics):
        if step:
            self._act("on_evaluation")

    def on_save(self, run, step, path):
        self._act("on_save")

    def on_run_end(self, run, summary):
        self._act("on_run_end")


EVENTS = ["on_run_start", "on_step_end", "on_evaluation", "on_save", "on_run_end"]
FAILURES = [("on_step_end", KeyError("mine")), ("on_save", SystemExit(3))]
FAILURES += [pytest.param(event, SystemExit(3), marks=pytest.mark.slow) for event in EVENTS if event != "on_save"]
FAILURES += [
    pytest.param(event, KeyError("mine"), marks=pytest.mark.slow) for event in EVENTS if event != "on_step_end"
]


@pytest.mark.parametrize(("event", "error"), FAILURES, ids=str)
def test_an_error_names_class_method_file_and_line_and_loses_nothing_committed(tmp_path, event, error):
    made = tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 2})
    with raises(PluginError, f"Fails.{event}"):
        tiny.run(made, callbacks=[Fails(event, error)])
    (folder,) = tmp_path.glob("tiny-*")
    before = {r["step"] for r in read_metrics(folder)} if event not in ("on_run_start",) else set()
    again = tiny.run(made) if event != "on_run_end" else None
    if again:
        assert again.directory == folder
    assert before <= {r["step"] for r in read_metrics(folder)} == set(range(1, 4))


def test_a_method_of_a_name_that_nothing_calls_is_refused():
    with raises(PluginError, "Old.on_step"):

        class Old(tilth.Callback):
            def on_step(self, record, sample):
                pass


@pytest.mark.parametrize("wrong", [Everything, object()], ids=["class", "object"])
def test_what_is_no_callback_is_refused_before_the_run(tmp_path, wrong):
    with raises(RecipeError, "callbacks"):
        tiny.run(tiny.recipe(tmp_path), callbacks=[wrong])
    assert not list(tmp_path.iterdir())


def test_a_declared_class_that_is_no_callback_is_refused(tmp_path):
    path = write(tmp_path, "import tilth\n\n@tilth.callback('mine')\nclass Mine: pass\n")
    with raises(PluginError, "callback.mine"):
        tiny.run(tiny.recipe(tmp_path / "a", plugins=[str(path)]))


class Stops(tilth.Callback):
    def on_step_end(self, run, step, metrics):
        if step == 3:
            run.stop("enough")


@pytest.mark.slow
def test_a_callback_can_stop_a_run_which_goes_on_later(tmp_path):
    made = tiny.recipe(tmp_path, supervised={"steps": 2}, algorithm={"steps": 2})
    with raises(Interrupted, "stop"):
        tiny.run(made, callbacks=[Stops()])
    assert tiny.run(made).summary["steps"] == 4


class Averages(tilth.Callback):
    """A moving mean of rewards and the number of updates, which depend on all steps before."""

    def __init__(self, until=0):
        self.until, self.calls = until, []
        self.load_state({})

    def state(self):
        return {"mean": self.mean, "updates": self.updates, "rows": self.rows}

    def load_state(self, state):
        self.mean, self.updates, self.rows = (state.get(name, 0) for name in ("mean", "updates", "rows"))

    def on_rollout(self, run, step, batch):
        self.mean, self.rows = 0.9 * self.mean + 0.1 * float(batch["reward"].mean()), self.rows + len(batch)
        self.calls.append(("rollout", step))

    def on_update(self, run, step, metrics):
        assert metrics["grad_norm"] >= 0
        self.updates += 1
        self.calls.append(("update", step))

    def on_step_end(self, run, step, metrics):
        self.calls.append(("end", step))
        if step == self.until:
            run.stop("here")


def test_the_state_of_a_callback_is_that_of_an_undisturbed_run_after_a_resume(tmp_path):
    short = {"supervised": {"steps": 2}, "algorithm": {"steps": 3, "minibatches": 2}}
    whole, torn, again = Averages(), Averages(until=4), Averages()
    tiny.run(tiny.recipe(tmp_path / "a", **short), callbacks=[whole])
    made = tiny.recipe(tmp_path / "b", **short)
    with raises(Interrupted, "stop"):
        tiny.run(made, callbacks=[torn])
    again.updates = 99  # what it was made with does not count
    tiny.run(made, callbacks=[again])
    assert again.state() == whole.state() != torn.state() and whole.state()["rows"] > 0
    assert torn.calls + again.calls == whole.calls
    assert whole.calls[:2] == [("update", 1), ("end", 1)]
    assert whole.calls[4:8] == [("rollout", 3), ("update", 3), ("update", 3), ("end", 3)]


@pytest.mark.parametrize("value", [{"x": {1, 2}}, {"x": float("nan")}], ids=str)
def test_a_state_that_is_no_json_is_named(tmp_path, value):
    class Odd(Averages):
        def state(self):
            return value

    with raises(PluginError, "Odd.state"):
        tiny.run(tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 1}), callbacks=[Odd()])


def test_a_state_that_is_never_loaded_is_refused():
    with raises(PluginError, "Half.state"):
        type("Half", (tilth.Callback,), {"state": lambda self: {}})


class Echoes(tilth.Callback):
    """Logs a line about each line that it is told."""

    def __init__(self):
        self.run, self.told = None, []

    def on_run_start(self, run):
        self.run = run
        run.say("begun")

    def on_message(self, text):
        self.told.append(text)
        if self.run is not None:
            self.run.say(f"{id(self)}: {text[:20]}")


def test_a_line_logged_in_on_message_goes_to_the_others_and_ends(tmp_path):
    one, other = Echoes(), Echoes()
    short = {"supervised": {"steps": 0}, "algorithm": {"steps": 1}}
    directory = tiny.run(tiny.recipe(tmp_path, **short), callbacks=[one, other]).directory
    for echo, its in ((one, other), (other, one)):
        assert any(text.startswith(f"{id(its)}: ") for text in echo.told)
        assert not any(text.startswith(f"{id(echo)}: ") for text in echo.told)
    assert f"{id(one)}: " in (directory / "log.txt").read_text()


# ---- trackers of one's own ----

TRACKER = """
import json, tilth

@tilth.tracker("lines")
class Lines(tilth.Tracker):
    def open(self, directory, step):
        self.file = open(directory / "lines.jsonl", "a")

    def write(self, step, values, text):
        self.file.write(json.dumps([step, values["loss"]]) + "\\n")

    def finish(self, failed):
        self.file.close()
"""


def test_a_tracker_of_ones_own_is_a_value_of_run_track(tmp_path):
    path = write(tmp_path, TRACKER)
    own = {"plugins": [str(path)], "run": {"track": ["lines"]}, "supervised": {"steps": 2}, "algorithm": {"steps": 1}}
    directory = tiny.run(tiny.recipe(tmp_path / "a", **own)).directory
    told = [json.loads(line) for line in (directory / "lines.jsonl").read_text().splitlines()]
    assert told == [[row["step"], row["loss"]] for row in read_metrics(directory)]
    with raises(RecipeError, "run.track.0"):
        tiny.recipe(tmp_path / "b", **{**own, "run": {"track": ["line"]}})


def test_a_tracker_that_fails_is_told_and_the_run_goes_on(tmp_path):
    path = write(tmp_path, TRACKER.replace("json.dumps", "json.missing"))
    watcher = tiny.Recorder()
    short = {"supervised": {"steps": 1}, "algorithm": {"steps": 1}}
    made = tiny.recipe(tmp_path / "a", plugins=[str(path)], run={"track": ["lines"]}, **short)
    assert tiny.run(made, callbacks=[watcher]).summary["state"] == "finished"
    (line,) = (text for text in watcher.messages if "Lines" in text)
    assert "write() of step 1 failed: AttributeError" in line and "mine.py:10" in line


def test_a_declared_tracker_that_is_none_is_refused(tmp_path):
    path = write(tmp_path, "import tilth\n\n@tilth.tracker('lines')\nclass Lines: pass\n")
    with raises(PluginError, "tracker.lines"):
        run_recipe(tiny.recipe(tmp_path / "a", plugins=[str(path)], run={"track": ["lines"]}), name="x")
    assert not Path(tmp_path / "a").exists()
