"""Updates of running runs: real commands that are asked to go on with other keys and other code."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.cli.test_whole import ENVIRONMENT, TILTH
from tests.errors import raises
from tests.flows import tiny
from tests.launch.test_supervisor import RECIPE, supervisor_in
from tests.launch.test_survive import assert_same_run
from tests.patience import patience
from tilth.cli import guard
from tilth.cli.main import GuardUpdateCommand
from tilth.config import plugins as user_code
from tilth.config.load import all_differences, dump_toml, load_recipe
from tilth.core.clock import utc_now
from tilth.core.errors import DataError, PluginError, RecipeError
from tilth.flows.callbacks import Callback
from tilth.launch import supervisor
from tilth.launch.hot_update import HotUpdates
from tilth.launch.supervisor import LEFT, Inherited
from tilth.runs.directory import RunDir
from tilth.runs.readers import read_state, summarise
from tilth.runs.signals import Interrupted
from tilth.runs.updates import CODE, FIXED, NONE, RecipeChange, Update, allowed, check, keep_code, path_of, read_updates
from tilth.ui import format
from tilth.ui.result import RunResult

PLUGIN = str(Path(__file__).with_name("updated.py"))
HERE = [word for word in RECIPE if not word.startswith("plugins")]
BROKEN = """
import tilth

@tilth.callback("broken")
class Broken(tilth.Callback):
    def on_step_end(self, run, step, metrics):
        pass

    def on_run_start(self, run):
        raise KeyError("a mistake")
"""


def run(folder, asks, *more, plugins=(PLUGIN,), **variables):
    """Run a recipe whose plugin asks for updates; return exit code, errors and the run's folder."""
    (folder / "asks").write_text(json.dumps(asks))
    arguments = [*TILTH, "run", "addition-grpo", *HERE, f"plugins={json.dumps(list(plugins))}", *more]
    environment = {**ENVIRONMENT, "ASKS": str(folder / "asks"), **variables}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(240), check=False
    )
    return done.returncode, done.stderr, folder / "runs/a"


def answers(folder):
    return [json.loads(line) for line in (folder / "answers").read_text().splitlines()]


class Stops(Callback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, run, step, metrics):
        if step == self.at:
            run.stop("the test")


def resumed(folder, monkeypatch, at, *changes):
    """The undisturbed run, ended after a step and resumed with other keys."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ASKS", str(folder / "asks"))
    recipe = [*HERE, f'plugins=["{PLUGIN}"]']
    if not changes:
        return tiny.run_recipe(load_recipe("addition-grpo", recipe), name="addition-grpo")
    with pytest.raises(Interrupted):
        tiny.run_recipe(load_recipe("addition-grpo", recipe), name="addition-grpo", callbacks=[Stops(at)])
    allow = [word.partition("=")[0] for word in changes]
    return tiny.run_recipe(load_recipe("addition-grpo", [*recipe, *changes]), name="addition-grpo", allow=allow)


@pytest.mark.dist
@pytest.mark.slow
def test_a_broken_plugin_is_undone_and_other_keys_are_those_of_a_resume_at_that_step(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    asks = {
        3: [["--plugin", str(broken), "--now"]],
        5: [["model.hidden=32", "--now"], ["optimizer.lr=3e-3"], ["guard.hang_after=60", "--now", "--json"]],
        7: [["--now"]],
    }
    code, errors, found = run(tmp_path, asks)
    assert code == 0, errors
    assert "is undone" in errors and "a mistake" in errors

    undone, first, second, code = read_updates(found)
    assert (undone.state, undone.step, first.state, second.state) == ("undone", 3, "in force", "in force")
    assert (code.state, code.step, dict(code.changes)) == ("in force", 7, CODE)
    assert "a mistake" in undone.why and dict(undone.changes) == {"plugins": "plugins: broken.py"}
    assert (first.step, second.step) == (5, 5) and not first.urgent  # one restart for both
    assert dict(second.changes) == {"guard.hang_after": "guard.hang_after was 120.0 and is 60.0"}
    states = [one["state"] for one in read_state(found)["attempts"]]
    assert states == ["left", "failed", "left", "left", "finished"]
    assert (found / "log.txt").read_text().count("from memory") == 4  # no step was lost
    assert not (found / "checkpoints" / "step-000005").exists() and (found / "checkpoints" / "step-000007").exists()
    said = answers(tmp_path)
    assert [one[0] for one in said] == [0, 2, 0, 0, 0]
    assert "model.hidden" in said[1][2] and FIXED["model"] in said[1][2]
    assert json.loads(said[3][1])["number"] == 3
    brief = summarise(found)["updates"]
    assert [one["state"] for one in brief] == ["undone", "in force", "in force", "in force"]
    assert "optimizer.lr was" in format.updated(brief[1])
    assert "a mistake" in (found / "report.html").read_text()
    assert "hang_after = 60.0" in (found / "recipe.toml").read_text()

    plain = resumed(tmp_path / "plain", monkeypatch, 5, "optimizer.lr=3e-3")
    assert_same_run(RunResult(found, {}), plain)


@pytest.mark.dist
@pytest.mark.slow
def test_an_update_that_waits_is_taken_after_a_recovery_and_before_a_run_ends_hopelessly(tmp_path, monkeypatch):
    """Step 3: an update that waits; step 4: a worker is killed; step 6: another one, before the loop raises at 7."""
    lucky = tmp_path / "lucky.py"
    lucky.write_text(BROKEN.replace('raise KeyError("a mistake")', "pass").replace("pass", RAISES, 1))
    fixed = tmp_path / "fixed" / "lucky.py"
    fixed.parent.mkdir()
    fixed.write_text(BROKEN.replace('raise KeyError("a mistake")', "pass"))
    asks = {3: [["run.save_every=50"]], 6: [["--plugin", str(fixed)]]}
    code, errors, found = run(tmp_path, asks, plugins=[PLUGIN, str(lucky)])
    assert code == 0, errors
    first, second = read_updates(found)
    assert (first.state, first.step, second.state, second.step) == ("in force", 4, "in force", 6)
    assert [one["kind"] for one in summarise(found)["recoveries"]] == ["crash"]
    plain = resumed(tmp_path / "plain", monkeypatch, 0)
    assert_same_run(RunResult(found, {}), plain)


@pytest.mark.dist
@pytest.mark.slow
def test_no_controller_follows_the_last_step(tmp_path):
    code, errors, found = run(tmp_path, {8: [["optimizer.lr=3e-3", "--now"]]})
    assert code == 0, errors
    assert [one["state"] for one in read_state(found)["attempts"]] == ["finished"]
    assert [one.state for one in read_updates(found)] == ["waiting"]


@pytest.mark.dist
@pytest.mark.slow
def test_the_command_that_began_a_run_goes_on_with_its_updates(tmp_path, monkeypatch):
    asks = {3: [["optimizer.lr=3e-3", "guard.hang_after=60", "--now"]], 5: [["run.save_every=50"]]}
    unnamed = "run.name="
    code, errors, _ = run(tmp_path, asks, unnamed, END="5")
    assert code == 130, errors
    code, errors, _ = run(tmp_path, {}, unnamed)
    assert code == 0, errors
    (found,) = (tmp_path / "runs").iterdir()
    assert [one.state for one in read_updates(found)] == ["in force", "in force"]
    text = (found / "recipe.toml").read_text()
    assert "lr = 0.003" in text and "save_every = 50" in text and "hang_after = 60.0" in text
    plain = resumed(tmp_path / "plain", monkeypatch, 3, "optimizer.lr=3e-3")
    assert_same_run(RunResult(found, {}), plain)


RAISES = """
        import os, pathlib
        killed = pathlib.Path(os.environ["ASKS"] + ".killed")
        if step == 4 and not killed.exists():
            killed.touch()
            os.kill(run.policy._dispatch.backend.probe(1).pid, 9)
        if step == 7:
            raise KeyError("a mistake")
"""


def shape(*overrides):
    """A recipe without its plugin."""
    return load_recipe("addition-grpo", [*HERE, "plugins=[]", *overrides])


OTHER = {
    "flow": "flow=dapo", "seed": "seed=9", "model": "model.hidden=32", "data": "data.digits=2",
    "reference.path": "reference.path=there", "policy.lora": "policy.lora.alpha=8",
    "optimizer.name": "optimizer.name=adamw", "train.ema": "train.ema=0.9",
    "cluster.backend": "cluster.backend=ray", "cluster.address": "cluster.address=there:1",
    "cluster.search": "cluster.search=true", "run.dir": "run.dir=there", "run.name": "run.name=b",
    "run.checkpoints": "run.checkpoints=there",
}  # fmt: skip


@pytest.fixture
def active(tmp_path):
    """A folder like that of a run which this process supervises."""
    (tmp_path / "recipe.toml").write_text(dump_toml(shape("algorithm.kl_coef=0.1")))
    owner = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    state = {"state": "running", "digest": "", "supervisor": owner, "host": os.uname().nodename, "attempts": []}
    state |= {"pid": os.getpid(), "pid_started": owner["started"], "change": asdict(NONE)}
    (tmp_path / "run.json").write_text(json.dumps(state))
    return tmp_path


def test_every_key_that_makes_another_run_is_refused_with_its_reason(active):
    teachers = {"reference.teachers", "reference.field"}
    assert OTHER.keys() | teachers | {"critic.lora", "model.dropout"} == FIXED.keys()
    check(shape(), shape("model.dropout=0.1"), {"model.dropout": "it may change, though its section may not"})
    with raises(RecipeError, "critic.lora.rank"):
        check(shape(), shape(), {"critic.lora.rank": "critic.lora.rank was 2 and is 4"})
    for key in ("reference.teachers.l.path", "reference.field"):
        with raises(RecipeError, key):
            check(shape(), shape(), {key: f"{key} was a and is b"})
    for fixed, override in OTHER.items():
        with pytest.raises(RecipeError) as refused:
            guard.update(GuardUpdateCommand(active, [override], now=False))
        assert refused.value.key.startswith(fixed) and FIXED[fixed] in str(refused.value)
    with raises(RecipeError, "algorithm.kl_coef"):  # it would lose its reference
        guard.update(GuardUpdateCommand(active, ["algorithm.kl_coef=0"], now=False))
    with raises(RecipeError, "plugins"):
        guard.update(GuardUpdateCommand(active, [f'plugins=["{PLUGIN}"]'], now=False))
    with raises(RecipeError, "optimizer.lrr"):
        guard.update(GuardUpdateCommand(active, ["optimizer.lrr=1"], now=False))
    same = f"optimizer.lr={shape().optimizer.lr}"
    with raises(RecipeError, "optimizer.lr"):
        guard.update(GuardUpdateCommand(active, [same], now=False))
    with raises(PluginError, "nowhere.py"):
        guard.update(GuardUpdateCommand(active, [], ["nowhere.py"], now=False))
    assert not read_updates(active)


def test_requests_are_numbered_and_later_ones_hold_earlier_ones(active, capsys):
    guard.update(GuardUpdateCommand(active, ["optimizer.lr=0.5", "model.dropout=0.1"], now=False))
    guard.update(GuardUpdateCommand(active, ["policy.layout.zero=2"], now=True, as_json=True))
    guard.update(GuardUpdateCommand(active, now=False))
    assert json.loads(capsys.readouterr().out.splitlines()[1])["number"] == 2
    first, second, third = read_updates(active)
    assert [one.number for one in (first, second, third)] == [1, 2, 3] and second.urgent and not first.urgent
    assert second.change.overrides == ("optimizer.lr=0.5", "model.dropout=0.1", "policy.layout.zero=2")
    assert set(second.change.allow) == {"optimizer.lr", "model.dropout", "policy.layout.zero"}
    assert dict(second.changes) == {"policy.layout.zero": "policy.layout.zero was 3 and is 2"}
    assert third.change.overrides == second.change.overrides and "code" in third.changes
    assert first.by.endswith(os.uname().nodename)


@pytest.mark.parametrize(
    "state, key",
    [
        ({"state": "finished"}, "run.json.state"),
        ({"supervisor": None}, "run.json.supervisor"),
        ({"state": "failed", "supervisor": {"pid": 2**22 + 1, "started": 0.0}}, "run.json.supervisor"),
        ({"host": "another"}, "run.json.host"),
    ],
)
def test_a_run_that_cannot_take_an_update_says_why(active, state, key):
    (active / "run.json").write_text(json.dumps(json.loads((active / "run.json").read_text()) | state))
    with raises(DataError, key):
        guard.update(GuardUpdateCommand(active, ["optimizer.lr=0.5"], now=True))


def test_code_is_kept_with_what_it_imports_from_its_folder(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine.py").write_text("import helps\nimport json\n")
    (there / "helps.py").write_text("A = 1\n")
    (there / "apart.py").write_text("B = 1\n")
    kept = keep_code(tmp_path, ["a.module", str(there / "mine.py")])
    assert kept[0] == "a.module" and Path(kept[1]).read_text().startswith("import helps")
    assert {file.name for file in Path(kept[1]).parent.iterdir()} == {"mine.py", "helps.py"}
    (there / "helps.py").write_text("A = 2\n")
    again = keep_code(tmp_path, [str(there / "mine.py")])
    assert again[0] != kept[1] and Path(kept[1]).with_name("helps.py").read_text() == "A = 1\n"


def test_code_is_kept_with_what_it_imports_from_the_folders_of_other_plugins(tmp_path):
    for folder, name, text in (("a", "mine_a", "import beside_b\n"), ("b", "mine_b", ""), ("b", "beside_b", "B = 1\n")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
    kept = keep_code(tmp_path, [str(tmp_path / folder / f"mine_{folder}.py") for folder in "ba"])
    shutil.rmtree(tmp_path / "b")
    try:
        user_code.load_plugins(kept)
        assert Path(sys.modules["beside_b"].__file__).is_relative_to(tmp_path / "updates")
    finally:
        user_code.forget(())


class Server:
    """A fork server that only ends."""

    def __init__(self):
        self.process, self.killed = self, False

    def kill(self):
        self.killed = True

    def wait(self):
        pass


@pytest.fixture
def supervised(active, monkeypatch):
    """A supervisor whose fork servers are none, of a run with an update that waits."""
    one = supervisor_in(active)
    one._server = Server()
    monkeypatch.setattr(one, "_serve", Server)
    Inherited(str(active)).enter(active)
    guard.update(GuardUpdateCommand(active, ["optimizer.lr=0.5", "guard.restarts=3"], now=False))
    return one


def test_an_update_that_fails_before_its_first_commit_goes_back_to_the_former_keys_and_plugins(supervised, active):
    server = supervised._server
    state = json.loads((active / "run.json").read_text()) | {"plugins": ["/kept/mine.py"]}
    (active / "run.json").write_text(json.dumps(state))
    handed = supervised._with_updates(Inherited(str(active), str(active)))
    assert handed.tried == handed.change.number == 1 and "optimizer.lr=0.5" in handed.change.overrides
    back = supervised._with_updates(supervised._undo(supervised._trying, "it is broken"))
    assert supervised._trying is None and (back.tried, back.undone) == (1, "it is broken")
    assert back.change.number == 0 and back.change.overrides == ('plugins=["/kept/mine.py"]',)
    assert back.change.allow == ("optimizer.lr", "guard.restarts")
    assert supervised._server is server and not server.killed
    assert Inherited.of(json.loads(json.dumps(supervisor.asdict(back)))) == back


def test_the_code_of_tilth_comes_with_another_fork_server(supervised, active):
    guard.update(GuardUpdateCommand(active, now=False))
    guard.update(GuardUpdateCommand(active, ["optimizer.lr=0.6"], now=False))
    server = supervised._server
    handed = supervised._with_updates(Inherited(str(active), str(active)))
    assert server.killed and supervised._server is not server and handed.tried == 3


def controller(folder, directory, **handed):
    """The updates of a run as its next controller has them, before it begins."""
    return HotUpdates(Inherited(str(folder), str(directory.path), **handed), directory, [], lambda workers: True)


def test_updates_are_in_force_with_their_first_commit_or_undone_with_those_that_hold_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    with RunDir.create(shape(), "demo") as directory:
        directory.say = said.append

        def ask(*overrides):
            change = RecipeChange(0, overrides)
            guard.request(directory.path, Update(change, {"a": "a is new"}, 8, True, "me", utc_now()))

        def states():
            directory.flush()
            return [(one.state, one.step) for one in read_updates(directory.path)]

        controller(tmp_path, directory)
        ask("optimizer.lr=1")
        tries = controller(tmp_path, directory, change=RecipeChange(1, ("optimizer.lr=1",)), tried=1)
        tries.begin(4)
        ask("optimizer.lr=1", "optimizer.lr=2")
        assert not tries.waiting() and states() == [("waiting", 0), ("waiting", 0)]
        tries.finish()
        assert states() == [("in force", 4), ("waiting", 0)] and (tmp_path / supervisor.TAKEN).exists()
        assert [one.number for one in tries.waiting()] == [2]
        ask("optimizer.lr=3")
        back = controller(tmp_path, directory, change=RecipeChange(1, ("optimizer.lr=1",)), tried=2, undone="a mistake")
        back.begin(5)
        assert states() == [("in force", 4), ("undone", 5), ("undone", 5)] and not back.waiting()
        assert "built on update 2: a mistake" in read_updates(directory.path)[2].why
        assert read_state(directory.path)["change"]["overrides"] == ["optimizer.lr=1"]
    assert said[0].startswith("going on after step 4 with update 1")
    assert ["is undone" in text for text in said] == [False, True, True]


def test_changes_of_tables_are_allowed_by_the_table():
    after = shape("cluster.pools={a=1,b=1}", "rollout.pool=b", "policy.layout.fsdp=1")
    changes = all_differences(shape(), after)
    assert set(allowed(changes)) == {"cluster.pools", "rollout.pool", "policy.layout.fsdp"}
    check(shape(), after, changes)


def test_an_update_is_json_and_back(active):
    guard.update(GuardUpdateCommand(active, ["optimizer.lr=0.5"], now=True))
    (one,) = read_updates(active)
    assert json.loads(path_of(active, 1).read_text())["change"]["overrides"] == ["optimizer.lr=0.5"]
    assert one.change == RecipeChange(1, ("optimizer.lr=0.5",), ("optimizer.lr",))
    assert abs(one.age) < 60 and datetime.fromisoformat(one.time).tzinfo == UTC


class Asked:
    """Controllers of a supervisor, by their exit codes; the one that tries an update is asked to end, or fails."""

    def __init__(self, one, active, asked):
        self.one, self.active, self.asked, self.handed = one, active, asked, []

    def __call__(self, handover):
        self.handed.append(handover)
        Inherited(handover.folder).enter(self.active)
        if len(self.handed) == 1:
            state = json.loads((self.active / "run.json").read_text()) | {"attempts": [{"state": "running"}]}
            (self.active / "run.json").write_text(json.dumps(state))
            return LEFT, ""
        if len(self.handed) == 2 and self.asked:
            Inherited(handover.folder).ask(signal.SIGTERM)
        return (143 if self.asked else 1 if len(self.handed) == 2 else 0), ""


def is_subreaper():
    """PR_GET_CHILD_SUBREAPER: 1 if this process takes the orphans among its descendants."""
    found = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(found)) == 0
    return found.value


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_that_is_asked_to_end_while_it_tries_an_update_does_not_undo_it(active, monkeypatch, asked):
    guard.update(GuardUpdateCommand(active, ["optimizer.lr=0.5"], now=True))
    one = supervisor_in(active)
    controllers = Asked(one, active, asked)
    for name, what in (("_serve", Server), ("_wait", lambda: 0), ("_control", controllers)):
        monkeypatch.setattr(one, name, what)
    before = is_subreaper()
    assert one.run(0) == (143 if asked else 0)
    assert is_subreaper() == before
    assert len(controllers.handed) == (2 if asked else 3)
    assert controllers.handed[1].change.overrides == ("optimizer.lr=0.5",)
    (update,) = read_updates(active)
    assert update.state == "waiting"  # the third controller calls it undone
    assert asked or (controllers.handed[2].tried == 1 and "exit code 1" in controllers.handed[2].undone)


def test_limits_of_an_update_are_those_of_the_supervisor_too(supervised, active):
    guard.update(GuardUpdateCommand(active, ["guard.hang_after=33"], now=True))
    handed = supervised._with_updates(Inherited(str(active), str(active)))
    assert (supervised._recovery.restarts, supervised._hang_after) == (3, 33.0)
    supervised._with_updates(supervised._undo(supervised._trying, "it is broken"))
    assert (supervised._recovery.restarts, supervised._hang_after) == (8, 120.0)
    state = json.loads((active / "run.json").read_text()) | {"change": asdict(handed.change)}
    (active / "run.json").write_text(json.dumps(state))
    for number in (1, 2):
        made = read_updates(active)[number - 1]
        path_of(active, number).write_bytes(replace(made, state="in force").dump())
    another = supervisor_in(active)
    another._inherit()  # the command that began the run, given again
    assert another._with_updates(Inherited(str(active), str(active))).change == another._change == handed.change
    assert (another._recovery.restarts, another._hang_after) == (3, 33.0)
    assert "hang_after" not in json.loads(path_of(active, 1).read_text())["changes"]


def test_a_module_that_has_changed_is_no_plugin_to_go_back_from(tmp_path, monkeypatch):
    (tmp_path / "mod.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = []
    with RunDir.create(shape(), "demo") as directory:
        guard.request(directory.path, Update(RecipeChange(0, ("optimizer.lr=1",)), {}, 8, True, "me", utc_now()))
        updates = HotUpdates(Inherited(str(tmp_path), change=NONE), directory, ["mod"], lambda workers: True)
        updates._taken = True
        going = SimpleNamespace(say=said.append, state=SimpleNamespace(step=4))
        assert not updates._refused(going, updates.waiting())
        (tmp_path / "mod.py").write_text("A = 2\n")
        assert updates._refused(going, updates.waiting()) and not updates.waiting()
        directory.flush()
    (update,) = read_updates(directory.path)
    assert update.state == "undone" and "mod of plugins has changed" in update.why == said[0].partition(": ")[2]
