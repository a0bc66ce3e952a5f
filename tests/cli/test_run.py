"""``tilth run``: how it begins, how it ends, and what it says."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from tests import forked
from tests.patience import patience
from tilth.cli.main import app
from tilth.cli.run import closing
from tilth.cluster.controller import launcher
from tilth.config.load import load_recipe
from tilth.core.errors import StorageError
from tilth.runs.signals import Interrupted

SUMMARY = {
    "steps": 650,
    "seconds": 151.0,
    "phases": [
        {"phase": "warmup", "steps": 250, "seconds": 31.0, "metric": "accuracy/heldout", "first": None, "last": 0.62},
        {"phase": "grpo", "steps": 400, "seconds": 120.0, "metric": "accuracy/heldout", "first": 0.62, "last": 0.973},
    ],
    "tokens_per_second_generate": 12345.6,
    "tokens_per_second_train": 30000.0,
    "memory_peak": 9 * 10**8,
    "memory_predicted": 10**9,
    "mismatch_max": 3.2e-6,
}


def said(recipe=(), **changes):
    made = load_recipe("addition-grpo", ["data.digits=2", *recipe])  # few prompts
    lines = closing(made, "addition-grpo", SUMMARY | changes, Path("runs/a"), Path("runs/a/report.html"))
    return "\n".join(lines)


def test_closing_says_what_was_learned_where_to_look_and_what_to_try():
    text = said()
    assert text.splitlines()[:3] == [
        "Accuracy on problems it never trained on:",
        "  after warm-up (250 steps, 0:31 min)  62.0 %",
        "  after GRPO (400 steps, 2:00 min)     97.3 %",
    ]
    assert "650 steps in 2:31 min" in text
    assert "memory at most 900 MB (predicted 1 GB)" in text and "mismatch at most 3.2e-06" in text
    assert "report: runs/a/report.html" in text
    for command in (
        "tilth generate runs/a ",
        "tilth show runs/a",
        "tilth export runs/a",
        "tilth eval runs/a --k 1,8 --limit 512\n",
        "data.digits=3",
    ):
        assert command in text
    assert "tilth chat" not in text and "tilth chat runs/a" in said(["data.template=chatml"])
    assert "tilth eval" not in said(["flow=sft"])
    assert "tilth eval runs/a --k 1,8\n" in said(["data.digits=1"])  # of 10 prompts or so


def test_closing_gives_intervals_and_says_what_they_cannot_show():
    warm = SUMMARY["phases"][0] | {"range": (0.57, 0.67), "prompts": 300.0, "change": None}
    main = SUMMARY["phases"][1] | {"last": 0.64, "range": (0.59, 0.69), "prompts": 300.0, "change": (-0.01, 0.05)}
    assert said(phases=[warm, main]).splitlines()[:3] == [
        "Accuracy on problems it never trained on (95 % intervals):",
        "  after warm-up (250 steps, 0:31 min)  62.0 % (57 to 67 %)",
        "  after GRPO (400 steps, 2:00 min)     64.0 % (59 to 69 %): no change that 300 prompts can show",
    ]


def test_one_step_is_no_steps():
    assert "\n1 step in 2:31 min; " in said(steps=1)


def test_the_question_to_try_was_held_out():
    from tilth.data.prompts import load_source

    recipe = load_recipe("addition-grpo", ["data.digits=2"])
    line = next(line for line in said().splitlines() if "tilth generate" in line)
    _, held = load_source(recipe.data).split(recipe.data.holdout)
    assert shlex.split(line)[3] in {prompt.text for prompt in held.subset(10)}


def test_what_to_try_next_is_a_valid_recipe():
    line = next(line for line in said().splitlines() if "tilth run" in line)
    _, _, name, *overrides = line.split()
    load_recipe(name, overrides)


def test_closing_without_measurements():
    empty = dict.fromkeys(SUMMARY) | {"steps": 3, "seconds": 1.0}
    assert said(**empty).startswith("Trained for 3 steps, 0:01 min.\n")


def test_a_reward_that_is_no_accuracy_is_told_as_a_reward():
    phase = {"phase": "ppo", "steps": 1, "seconds": 61.0, "metric": "reward/heldout", "first": -0.5, "last": 0.25}
    text = said(phases=[phase], best={"step": 1, "metric": "reward/heldout", "value": 0.25})
    assert text.splitlines()[:4] == [
        "Mean reward on problems it never trained on:",
        "  before the first step         -0.5",
        "  after PPO (1 step, 1:01 min)  0.25",
        "best at step 1: held-out mean reward 0.25",
    ]
    assert "ccuracy" not in text and "25.0 %" not in text


def test_closing_of_a_run_on_text(tmp_path):
    (tmp_path / "d.txt").write_text("<|endoftext|>\n".join(f"{i} bottles of beer on the wall\n" for i in range(99)))
    learned = {"phases": [], "mismatch_max": None}
    learned |= {"loss_heldout_first": 7.6, "loss_heldout_last": 3.25, "bits_per_byte": 2.5}
    learned["best"] = {"step": 300, "metric": "loss/heldout", "value": 3.2}
    recipe = load_recipe("pretrain", [f"data.source={tmp_path / 'd.txt'}", "data.holdout=0.3"])
    lines = closing(recipe, "pretrain", SUMMARY | learned, Path("runs/a"), Path("runs/a/report.html"))
    assert lines[:2] == [
        "Held-out loss went from 7.600 to 3.250 nats per token (2.500 bits per byte) in 650 steps, 2:31 min.",
        "best at step 300: held-out loss 3.2000 nats per token",
    ]
    (line,) = [line for line in lines if "tilth generate" in line]
    assert shlex.split(line)[3].endswith("bottles of beer on")
    learned |= {"bits_per_byte": None, "best": None}
    lines = closing(recipe, "pretrain", SUMMARY | learned, Path("runs/a"), Path("runs/a/report.html"))
    assert lines[0].endswith("to 3.250 nats per token in 650 steps, 2:31 min.") and "tokens/s" in lines[1]


def test_the_harder_task_is_for_the_recipe_that_ran():
    recipe = load_recipe("addition-ppo", ["data.digits=2"])
    text = "\n".join(closing(recipe, "my recipes/ppo.toml", SUMMARY, Path("runs/a"), Path("r.html")))
    assert "tilth run 'my recipes/ppo.toml' data.digits=3" in text and "addition-grpo" not in text


def test_closing_names_the_best_checkpoint():
    best = {"step": 400, "metric": "accuracy/heldout", "value": 0.981}
    assert said(best=best).splitlines()[3] == "best at step 400: held-out accuracy 98.1 %"
    assert "best" not in said()


def test_data_without_a_held_out_prompt_that_fits(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "two\\nlines"}\n' * 3)
    text = said([f"data.source={path}", "data.holdout=0.0", "supervised.until=1.0"])
    assert "tilth generate" not in text and "digits" not in text


# -- the command, with everything behind it replaced -----------------------------------------------------------------


@pytest.fixture
def behind(monkeypatch, tmp_path):
    """Puts a stand-in where the run would be; the returned namespace says what it does and what it was given."""
    seen = SimpleNamespace(
        outcome=SimpleNamespace(directory=tmp_path, summary=SUMMARY, report=tmp_path / "report.html"),
        asked=None,
        stops=[],
    )

    def run_recipe(recipe, *, name, callbacks, allow, fallback, handed, replay):
        seen.asked, seen.how, seen.replay = (recipe, name, callbacks), (list(allow), fallback), replay
        if isinstance(seen.outcome, BaseException):
            raise seen.outcome
        return seen.outcome

    def live(recipe):
        return SimpleNamespace(recipe=recipe, start=lambda: None, stop=lambda: seen.stops.append(1))

    for name, content in {
        "tilth.api": {"run_recipe": run_recipe},
        "tilth.ui.live": {"Live": live},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def call(*arguments):
    return CliRunner().invoke(app, ["run", "addition-grpo", "data.digits=2", *arguments])


def test_recipe_name_and_observer_are_handed_over(behind, tmp_path):
    result = call("seed=7", "run.name=x")
    recipe, name, callbacks = behind.asked
    assert result.exit_code == 0 and (recipe.seed, recipe.run.name, name) == (7, "x", "addition-grpo")
    assert [o.recipe for o in callbacks] == [recipe] and behind.stops
    assert f"report: {tmp_path}/report.html" in result.stdout and behind.how == ([], False)


def test_how_a_run_may_go_on_is_handed_over(behind):
    assert call("--allow", "optimizer.lr", "--fallback", "--allow", "run").exit_code == 0
    assert behind.how == (["optimizer.lr", "run"], True) and behind.replay is None
    assert call("--replay", "runs/mine-001").exit_code == 0 and behind.replay == Path("runs/mine-001")
    behind.asked = None
    result = call("--allow", "optimizer.rl")
    assert result.exit_code == 2 and "--allow optimizer.rl: no such key or section" in result.stderr
    assert behind.asked is None


def test_interrupted_says_how_to_go_on(behind):
    behind.outcome = Interrupted("stopped after step 3; the same command continues")
    result = call()
    assert behind.stops and result.exit_code == 130
    assert result.stderr == "stopped after step 3; the same command continues\n"


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_end_as_ctrl_c_does_and_another_changes_nothing(behind, monkeypatch, first):
    def thrice(*_, **__):
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)

    def survived(number, frame):
        """The signal must not end the tests."""

    monkeypatch.setattr(sys.modules["tilth.api"], "run_recipe", thrice)
    both = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, survived) for number in both]
    try:
        result = call()
        assert behind.stops and [signal.getsignal(number) for number in both] == [survived, survived]
    finally:
        for number, handler in zip(both, before):
            signal.signal(number, handler)
    assert (result.exit_code, result.stderr) == (128 + first, "interrupted; whatever a run has saved is intact\n")


def test_a_hangup_that_is_ignored_stays_so(behind, monkeypatch):
    def hung_up(*_, **__):
        signal.raise_signal(signal.SIGHUP)
        return behind.outcome

    monkeypatch.setattr(sys.modules["tilth.api"], "run_recipe", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert call().exit_code == 0 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


STARTING = """
import sys, time
from types import ModuleType, SimpleNamespace
from tilth.cluster.controller.cluster import open_cluster
def run_recipe(*_, **__):
    with open_cluster("local", 2):
        raise AssertionError("it has started")
api, live = ModuleType("tilth.api"), ModuleType("tilth.ui.live")
api.run_recipe, live.Live = run_recipe, lambda recipe: SimpleNamespace(start=lambda: None, stop=lambda: None)
sys.modules |= {"tilth.api": api, "tilth.ui.live": live}
from tilth.cluster.backends.local import LocalBackend
def accept(self, door, timeout):
    print(*(process.pid for process in self._processes.values()), self._reaper.pid, flush=True)
    time.sleep(60)
LocalBackend._accept = accept
from tilth.cli.main import app
app(["run", "addition-grpo"])
"""


def test_sigterm_while_workers_start_leaves_none():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*forked.python(), "-c", STARTING], **pipes) as process:
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=patience(30))
        assert len(started) == 3 and not any(worker.is_running() for worker in started)
    assert (process.returncode, told) == (143, "interrupted; whatever a run has saved is intact\n")


def test_under_a_launcher_the_recipe_has_its_processes_as_workers(behind, monkeypatch):
    job = {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "_waiting", [])
    result = call("cluster.backend=local", "policy.layout.fsdp=2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert behind.asked[0].cluster.workers == 2 and len(launcher._waiting) == 1
    assert "cluster.backend = 'inline': torchrun started 2 processes" in call().stderr


def test_an_error_of_the_run(behind):
    behind.outcome = StorageError("disk full")
    result = call()
    assert behind.stops and (result.exit_code, result.stderr) == (2, "error: disk full\n")


def test_a_wrong_recipe_is_told_before_torch_is_imported():
    code = (
        "import sys; from typer.testing import CliRunner; from tilth.cli.main import app\n"
        "r = CliRunner().invoke(app, ['run', 'addition-grpo', 'seed=x']); assert r.exit_code == 2, r\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hints_can_be_pasted_where_a_name_has_spaces():
    made = load_recipe("addition-grpo", ["data.digits=2"])
    lines = closing(made, "addition-grpo", SUMMARY, Path("runs/live run"), Path("r.html"))
    hints = [shlex.split(line) for line in lines if line.startswith("  tilth ") and "live run" in line]
    assert len(hints) >= 4 and all("runs/live run" in words for words in hints)
