"""Trackers: what they leave is read back with the reader of the library itself, or record by record."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from tests.errors import raises
from tests.flows.tiny import stand_in
from tilth.config.load import from_dict
from tilth.config.open_sets import TRACKERS
from tilth.core.errors import PluginError, RecipeError
from tilth.ui import track
from tilth.ui.track import MLflow, TensorBoard, Tracker, WeightsAndBiases, numbers, sample_text, tracking

RECIPE = from_dict({"run": {"track": ["tensorboard"]}, "algorithm": {"steps": 7}})
SAMPLE = {"prompt": "1+1=", "text": "2 <b>*x*", "answer": "2", "reward": 1.0}
has = {name: importlib.util.find_spec(name) is not None for name in TRACKERS}
needs_tensorboard = pytest.mark.skipif(not has["tensorboard"], reason="tensorboard is not installed")
needs_wandb = pytest.mark.skipif(not has["wandb"], reason="wandb is not installed")


def record(step, attempt=1, **more):
    return {
        "step": step, "attempt": attempt, "phase": "grpo", "phase_step": step, "seconds": 1.5 * step,
        "loss": step + attempt / 8, "length/mean": 4.0, **more,
    }  # fmt: skip


def watched(kind, directory, steps, begin=0, attempt=1, recipe=RECIPE, failed=False):
    """One attempt; returns what was said."""
    said = []
    tracker = kind(recipe)
    tracker.on_run_start(stand_in(directory, begin, said.append))
    for step in steps:
        tracker.on_step_end(stand_in(sample=SAMPLE), step, record(step, attempt))
    tracker.on_run_end(stand_in(), {"steps": 7, "accuracy_last": None})
    tracker.close(failed)
    return said


# ---- what is shown ----


def test_numbers_are_the_finite_metrics():
    found = numbers(record(3, **{"lr": None, "entropy": float("nan"), "ratio": 1, "time/step": float("inf")}))
    assert found == {"loss": 3.125, "length/mean": 4.0, "ratio": 1.0}


@pytest.mark.parametrize(("reward", "want"), [(None, "reward missing, right: 2"), (0.5, "reward 0.5, right: 2")])
def test_a_sample_says_what_it_earned(reward, want):
    assert sample_text(SAMPLE | {"reward": reward}) == f"{want}\n\n1+1=2 <b>*x*"
    assert sample_text({"prompt": "a", "text": "b", "answer": None, "reward": 0}) == "reward 0\n\nab"


# ---- the thread ----


class Broken(Tracker):
    """Fails in one of its calls."""

    package = "json"  # is always there

    def __init__(self, recipe=RECIPE, at="open"):
        super().__init__(recipe)
        self.at, self.calls, self.threads = at, [], set()

    def _act(self, name):
        self.calls.append(name)
        self.threads.add(threading.get_ident())
        if name == self.at:
            raise ConnectionError("no route to host\nsecond line")

    def open(self, directory, step):
        self._act("open")

    def write(self, step, values, text):
        self._act("write")

    def conclude(self, summary):
        self._act("conclude")

    def finish(self, failed):
        self._act("failed" if failed else "finish")


def observe(tracker, steps=5):
    said = []
    tracker.on_run_start(stand_in(say=said.append))
    for step in range(1, steps + 1):
        tracker.on_step_end(stand_in(), step, record(step))
        time.sleep(0.02)
    return said


@pytest.mark.parametrize("at", ["open", "write"])
def test_a_failure_is_told_once_and_never_raised(at, capsys):
    tracker = Broken(at=at)
    said = observe(tracker)
    tracker.on_run_end(stand_in(), {})
    tracker.close(False)
    call = {"open": "open()", "write": "write() of step 1"}[at]
    (line,) = said
    assert line.startswith(
        f"tracker json: {call} failed: ConnectionError: no route to host second line at test_track.py:"
    )
    assert "continues without it" in line and "metrics.jsonl" in line
    assert len(tracker.calls) < 5 and capsys.readouterr().err == ""


@pytest.mark.parametrize("at", ["conclude", "finish"])
def test_a_failure_after_the_run_goes_to_stderr(at, capsys):
    tracker = Broken(at=at)
    assert observe(tracker) == []
    tracker.on_run_end(stand_in(), {})
    tracker.close(False)
    assert capsys.readouterr().err.count("no route to host") == 1


def test_everything_happens_in_one_other_thread_in_order():
    tracker = Broken(at="")
    observe(tracker)
    tracker.on_run_end(stand_in(), {})
    tracker.close(True)
    assert tracker.calls == ["open", *["write"] * 5, "conclude", "failed"]
    assert len(tracker.threads) == 1 and threading.get_ident() not in tracker.threads


def test_a_slow_tracker_delays_no_step_and_the_end_not_for_ever(monkeypatch, capsys):
    monkeypatch.setattr(track, "PATIENCE", 0.05)
    gate = threading.Event()
    tracker = Broken(at="")
    written = []
    monkeypatch.setattr(tracker, "write", lambda *_: (gate.wait(60), written.append(1)))
    tracker.on_run_start(stand_in(say=print))
    for step in range(1, 101):
        tracker.on_step_end(stand_in(), step, record(step))
    tracker.close(False)
    assert not written and "not done after" in capsys.readouterr().err
    gate.set()


def test_samples_come_now_and_then(monkeypatch):
    texts = {}
    tracker = Broken(at="")
    monkeypatch.setattr(tracker, "write", lambda step, _, text: texts.update({step: text}))
    tracker.on_run_start(stand_in(say=print))
    for step in range(1, 61):
        tracker.on_step_end(stand_in(sample=SAMPLE if step > 3 else None), step, record(step))
    tracker.close(False)
    assert [step for step, text in texts.items() if text] == [4, 29, 54]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_library_is_told_before_the_run(monkeypatch, name):
    monkeypatch.setattr(track.importlib.util, "find_spec", lambda _: None)
    recipe = from_dict({"run": {"track": [name]}})
    with raises(RecipeError, f"run.track.{name}"):
        with tracking(recipe):
            pass


def test_no_tracker_unless_asked_for():
    with tracking(from_dict({})) as none:
        assert none == []


@pytest.mark.parametrize("begun", [True, False])
def test_an_error_closes_the_trackers_too_that_have_begun(monkeypatch, begun):
    monkeypatch.setattr(track, "TensorBoard", partial(Broken, at=""))
    with pytest.raises(ValueError):
        with tracking(RECIPE) as (tracker,):
            if begun:
                tracker.on_run_start(stand_in(say=print))
            raise ValueError("of the run")
    assert tracker.calls == (["open", "failed"] if begun else [])


# ---- TensorBoard ----


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    return found


@needs_tensorboard
def test_tensorboard_reads_every_step_back(tmp_path):
    assert watched(TensorBoard, tmp_path, range(1, 6)) == []
    found = read_events(tmp_path)
    assert found.Tags()["tensors"] or found.Tags()["scalars"]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(s, s + 0.125) for s in range(1, 6)]
    assert set(found.Tags()["scalars"]) == {"loss", "length/mean"}
    about = found.SummaryMetadata("length/mean")
    assert about.summary_description == "length of a completion (unit: tokens, reduction: mean)"


def scalars_of(provider):
    """Metric -> (step, value) of every step, as TensorBoard's own pages ask for them."""
    from tensorboard import context

    asked = {"experiment_id": "", "plugin_name": "scalars"}
    found = provider.read_scalars(context.RequestContext(), downsample=100, **asked)
    return {tag: [(e.step, e.value) for e in points] for run in found.values() for tag, points in run.items()}


CURVES = {"loss": [(s, s + 0.125) for s in range(1, 6)], "length/mean": [(s, 4.0) for s in range(1, 6)]}


@needs_tensorboard
def test_every_curve_belongs_to_the_page_of_scalars(tmp_path, caplog):
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

    watched(TensorBoard, tmp_path, range(1, 6))
    assert set(read_events(tmp_path).PluginTagToContent("scalars")) == set(CURVES)
    assert not [r for r in caplog.records if "not associated" in r.getMessage()]
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    runs.Reload()
    assert scalars_of(MultiplexerDataProvider(runs, str(tmp_path))) == CURVES


@needs_tensorboard
def test_texts_are_blocks_of_code(tmp_path):
    watched(TensorBoard, tmp_path, range(1, 4))
    found = read_events(tmp_path)
    (sample,) = found.Tensors("sample")
    (recipe,) = found.Tensors("recipe")
    assert sample.step == 1 and recipe.step == 0
    text = sample.tensor_proto.string_val[0].decode()
    assert text.endswith("    1+1=2 <b>*x*") and all(line.startswith("    ") for line in text.splitlines())
    assert "    steps = 7" in recipe.tensor_proto.string_val[0].decode()
    assert found.SummaryMetadata("sample").plugin_data.plugin_name == "text"


@needs_tensorboard
@pytest.mark.parametrize("kept", [0, 4])
def test_steps_that_run_again_appear_once(tmp_path, kept):
    watched(TensorBoard, tmp_path, range(1, 7))
    time.sleep(1.1)  # the reader sorts files by the second they were made in
    watched(TensorBoard, tmp_path, range(kept + 1, 9), begin=kept, attempt=2)
    found = read_events(tmp_path)
    expected = [(s, s + (0.125 if s <= kept else 0.25)) for s in range(1, 9)]
    assert [(e.step, e.value) for e in found.Scalars("loss")] == expected
    assert len(found.Tensors("recipe")) == 1


@needs_tensorboard
def test_a_file_is_complete_while_the_run_goes_on(tmp_path):
    """What a kill finds: nothing of a committed step waits in memory for long."""
    tracker = TensorBoard(RECIPE)
    tracker.on_run_start(stand_in(tmp_path, 0, print))
    for step in range(1, 4):
        tracker.on_step_end(stand_in(), step, record(step))
    deadline = time.monotonic() + 10
    while tracker._pending and time.monotonic() < deadline:
        tracker._look()
        time.sleep(0.01)
    assert [e.step for e in read_events(tmp_path).Scalars("loss")] == [1, 2, 3]
    tracker.close(False)


# ---- Weights & Biases ----


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    return tmp_path


def wandb_records(file):
    """The records of an offline run: a LevelDB log (blocks of 32 KiB, parts of records with a header of 7 bytes)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def whole(file):
    """The records of a finished run: its service writes the last ones a moment after ``finish`` has returned."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = list(wandb_records(file))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.05)
    raise AssertionError(f"{file} has no end")


def wandb_history(directory):
    """(run id, step, loss) of every row of every offline run of the directory."""
    rows = []
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        found = whole(file)
        (run,) = [r.run for r in found if r.WhichOneof("record_type") == "run"]
        for r in found:
            if r.WhichOneof("record_type") == "history":
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
                rows.append((run.run_id, row["_step"], row["loss"]))
    return rows


@needs_wandb
def test_wandb_goes_on_under_the_same_id_and_sends_no_step_twice(offline):
    run = offline / "demo-001"
    run.mkdir()
    assert watched(WeightsAndBiases, run, range(1, 7)) == []
    name = json.loads((run / "wandb.json").read_text())["id"]
    time.sleep(1.1)  # folders are named by the second
    assert watched(WeightsAndBiases, run, range(5, 9), begin=4, attempt=2) == []
    expected = [(name, s, s + (0.125 if s <= 6 else 0.25)) for s in range(1, 9)]
    assert wandb_history(run) == expected
    assert json.loads((run / "wandb.json").read_text()) == {"id": name, "step": 8}
    assert len(list(run.glob("wandb/offline-run-*"))) == 2


@needs_wandb
def test_wandb_knows_recipe_units_and_a_sample(offline):
    watched(WeightsAndBiases, offline, range(1, 3))
    (file,) = offline.glob("wandb/offline-run-*/*.wandb")
    runs = [r.run for r in whole(file) if r.WhichOneof("record_type") == "run"]
    config = {u.key: json.loads(u.value_json) for u in runs[0].config.update}
    assert config["algorithm"]["steps"] == 7 and config["metrics"]["length/mean"]["unit"] == "tokens"
    assert config["metrics"]["length/max"]["reduction"] == "max"
    assert (runs[0].project, runs[0].display_name) == ("tilth", offline.name)
    (sample,) = offline.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "2 &lt;b&gt;*x*" in sample.read_text()


@needs_wandb
def test_wandb_that_cannot_begin_is_told_once(offline, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "sideways")
    said = watched(WeightsAndBiases, offline, range(1, 4))
    lines = said + [line for line in capsys.readouterr().err.splitlines() if "continues without" in line]
    assert len(lines) == 1 and lines[0].startswith("tracker wandb: open() failed") and "sideways" in lines[0]


def test_of_several_failures_the_first_is_told(offline):
    class Broken(WeightsAndBiases):
        def open(self, directory, step):
            raise ValueError("the first")

        def write(self, step, values, text):
            raise AttributeError(f"of step {step}")

    for _ in range(5):  # were they in no order, another one would come first sooner or later
        assert watched(Broken, offline, range(1, 9))[0].startswith(
            "tracker wandb: open() failed: ValueError: the first"
        )


# ---- a whole run ----


@pytest.mark.slow
@needs_tensorboard
def test_a_killed_run_goes_on_with_average_noise_and_tracker_as_if_never_killed(tmp_path):
    """The average of the weights bit for bit, every metric equal, every step once in TensorBoard."""
    from tests.flows.tiny import Recorder, recipe, run, weights
    from tests.flows.tiny import numbers as committed
    from tilth.checkpoint import latest, open_checkpoint

    def fall(record):
        if record["step"] == 10:  # two steps after a checkpoint
            raise MemoryError("of the test")

    def made(folder, tracked):
        extras = {"ema": 0.9, "watch": ("noise_scale", "layer_norms"), "micro_tokens": 64}
        return recipe(tmp_path / folder, train=extras, run={"track": tracked})

    whole = run(made("whole", ())).directory
    with pytest.raises(PluginError):
        run(made("torn", ("tensorboard",)), callbacks=[Recorder(fall)])
    time.sleep(1.1)
    torn = run(made("torn", ("tensorboard",))).directory
    assert weights(whole) == weights(torn)
    assert committed(whole) == committed(torn)
    checkpoint = open_checkpoint(latest(torn / "checkpoints"))
    assert checkpoint.names("ema") == checkpoint.names("model")
    assert "noise_trace" in checkpoint.objects["positions"]["policy"]
    events = read_events(torn)
    assert [e.step for e in events.Scalars("loss")] == list(range(1, 13))
    assert {"noise/trace", "norm/grad/0", "norm/weight/embedding"} <= set(events.Tags()["scalars"])


# ---- MLflow and Trackio ----


@pytest.mark.skipif(not has["mlflow"], reason="mlflow is not installed")
def test_mlflow_reads_every_step_back_once_and_a_resumed_run_is_the_same(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert watched(MLflow, tmp_path, range(1, 5), failed=True) == []
    assert watched(MLflow, tmp_path, range(4, 7), begin=3, attempt=2) == []
    client, one = MlflowClient(), json.loads((tmp_path / "mlflow.json").read_text())["id"]
    (experiment,) = [e for e in client.search_experiments() if e.name == "tilth"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == one and run.info.status == "FINISHED" and run.info.run_name == tmp_path.name
    found = [(m.step, m.value) for m in client.get_metric_history(one, "loss")]
    assert sorted(found) == [(s, s + (0.125 if s < 5 else 0.25)) for s in range(1, 7)]
    assert {file.path for file in client.list_artifacts(one)} == {"recipe.toml", "samples"}


@pytest.mark.skipif(not has["trackio"], reason="trackio is not installed")
def test_trackio_reads_every_step_back_once_and_a_resumed_run_is_the_same(tmp_path):
    """In a process of its own: its folder is chosen when it is imported."""
    text = """
import json, sys
from pathlib import Path
from tests.ui.test_track import watched
from tilth.ui.track import Trackio
run = Path(sys.argv[1])
assert watched(Trackio, run, range(1, 5)) == [] and watched(Trackio, run, range(4, 7), begin=3, attempt=2) == []
from trackio.sqlite_storage import SQLiteStorage
name = json.loads((run / "trackio.json").read_text())["id"]
print(json.dumps([[row["step"], row["loss"]] for row in SQLiteStorage.get_logs("tilth", name)]))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run([sys.executable, "-c", text, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[s, s + (0.125 if s < 5 else 0.25)] for s in range(1, 7)]
