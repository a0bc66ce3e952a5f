"""The command line starts fast, and every mistake is one line on stderr with exit code 2."""

import ast
import inspect
import os
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

import tilth
from tests import forked
from tilth.cli import main
from tilth.cli.main import app
from tilth.config.code import parse
from tilth.config.errors import TilthError
from tilth.config.roles import resolve


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


COMMANDS = ("run", "ls", "generate", "chat", "eval", "export", "report", "show", "ckpt", "trace", "doctor")


def test_help_names_every_command():
    result = call("--help")
    assert result.exit_code == 0
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name):
    result = call(name, "--help")
    assert result.exit_code == 0 and "Usage" in result.stdout


@pytest.mark.parametrize(
    "option", ["--n", "--temperature", "--top-p", "--top-k", "--max-tokens", "--stop", "--logprobs", "--json", "--seed"]
)
def test_options_of_generate(option):
    assert option in call("generate", "--help").stdout


def declarations():
    """Each class of ``cli.main`` that declares a command, the name of its body, and if a function is asked before."""
    for node in parse(inspect.getsource(main)).body:
        if isinstance(node, ast.ClassDef):
            (decorator,) = node.decorator_list
            given = dict(zip(("name", "target", "parent", "first"), decorator.args))
            given |= {one.arg: one.value for one in decorator.keywords}
            yield getattr(main, node.name), given["target"].value, "first" in given


def test_the_body_of_each_command_takes_what_its_class_declares():
    commands = list(declarations())
    assert len(commands) > 30
    for declared, target, first in commands:
        package = "tilth_studies" if target.startswith("studies.") else "tilth.cli"
        body = resolve(f"{package}.{target.removeprefix('studies.')}")
        asked, *found = inspect.signature(body, eval_str=True).parameters.values()
        assert asked.annotation is declared and len(found) == first, target


def test_no_arguments_show_help():
    assert "Commands" in call().output


def test_start_is_fast_and_imports_nothing_heavy(capsys):
    code = (
        "import sys; sys.argv = ['tilth', '--help']\n"
        "from tilth.cli.main import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'pydantic', 'numpy', 'rich', 'transformers') if m in sys.modules])\n"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    with capsys.disabled():
        print(f"\ntilth --help: {time.perf_counter() - start:.2f} s")
    assert result.returncode == 0 and result.stdout.endswith("[]\n")


OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def test_idle_threads_do_not_spin_and_segments_expand_unless_asked_otherwise():
    code = f"import os, tilth; print(os.environ['GOMP_SPINCOUNT'], os.environ.get('{NEW}'))"
    expands = "expandable_segments:True"
    for environment, expected in (
        ({}, f"1000 {expands}"),
        ({"GOMP_SPINCOUNT": "5", NEW: "backend:native"}, "5 backend:native"),
        ({OLD: "backend:native"}, "1000 None"),
    ):
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": ":".join(sys.path)} | environment,
        )
        assert result.stdout.strip() == expected


LATE = """
import sys
import tilth.rewards.functions  # in processes that score
assert not {"torch", "numpy"} & set(sys.modules)
assert "grpo" in tilth.rl.names()["advantages"] and "torch" in sys.modules
from tilth.cli import ckpt
assert "tilth.models.decoder" not in sys.modules
assert callable(tilth.train) and tilth.__version__
"""


@pytest.mark.slow  # imports torch
def test_what_is_costly_is_imported_late():
    subprocess.run([sys.executable, "-c", LATE], check=True)


def test_a_name_that_the_package_has_not_is_no_attribute():
    with pytest.raises(AttributeError):
        tilth.nothing


# -- mistakes --------------------------------------------------------------------------------------------------------


def failure(*arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "adition-grpo"], "no recipe 'adition-grpo'; did you mean addition-grpo?"),
        (["run", "none.toml"], "no recipe file 'none.toml'"),
        (["run", "addition-grpo", "rollout.grup=3"], "did you mean rollout.group?"),
        (["run", "addition-grpo", "rollout.group=0"], "rollout.group = 0 is not an integer above 0"),
        (["run", "addition-grpo", "rollout.group"], "not of the form key=value"),
        (
            ["run", "addition-grpo", "data.source=x.jsonl", "reward.function=tilth.rewards.functions:addition"],
            "neither a task nor a file",
        ),
        (["run", "addition-grpo", "data.tokenizer=none"], "no tokenizer at 'none'"),
        (["run", "addition-grpo", "model.path=none"], "none"),
        (["run", "addition-grpo", "reward.function=none.py:f"], "none.py"),
        (["run", "addition-grpo", "model.context=15", "rollout.max_tokens=8"], "has 8 tokens"),
        (["generate", "none", "1+1="], "none"),
        (["export", "none", "out"], "none"),
        (["show", "none"], "no run at 'none'"),
        (["report", "none"], "no run at 'none'"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in failure(*arguments)


LATE_ERRORS = """
import sys
from typer.testing import CliRunner
from tilth.cli.main import app
for line in sys.stdin.read().splitlines():
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 2 and found.stderr.startswith("error: "), (line, found.output)
    assert "torch" not in sys.modules, line
    assert "none" in found.stderr or "--search" in found.stderr, (line, found.stderr)
"""


def test_what_is_nowhere_is_told_before_torch_is_imported(tmp_path):
    lines = """
eval none
generate none 1+1=
chat none
serve none
export none out
expand none out
algorithms none
layout none
layout addition-grpo model.path=none
layout addition-grpo --devices 4
layout addition-grpo --search --device-type none
data show none
data tokenize none
run addition-grpo --replay none
ckpt ls none
ckpt show none@3
ckpt verify none
ckpt diff none none
ckpt export none out
ckpt prune none
show none
top none
trace none"""
    done = subprocess.run(
        [sys.executable, "-c", LATE_ERRORS], input=lines.strip(), text=True, cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_empty_dataset(tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    arguments = ["run", "addition-grpo", f"data.source={tmp_path}/d.jsonl", f"run.dir={tmp_path}/runs"]
    assert "is empty" in failure(*arguments, "reward.function=tilth.rewards.functions:addition")


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["run"], ["show", "x", "--what"], ["generate", "m", "p", "--n", "0"]]
)
def test_wrong_usage(arguments):
    assert call(*arguments).exit_code == 2


def test_the_installed_script_ends_in_code_2():
    result = subprocess.run(
        [*forked.python(), "-c", "from tilth.cli.main import main; main()", "run", "nothing"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def failing(error):
    def body() -> None:
        raise error

    broken = typer.Typer(cls=type(typer.main.get_command(app)))
    broken.callback()(lambda: None)
    broken.command("fail")(body)
    return CliRunner().invoke(broken, ["fail"])


def test_an_error_of_several_lines_is_printed_in_one():
    result = failing(TilthError("first\n  second"))
    assert (result.exit_code, result.stderr) == (2, "error: first second\n")


def test_ctrl_c():
    result = failing(KeyboardInterrupt())
    assert result.exit_code == 130 and result.stderr.startswith("interrupted")


def test_a_bug_is_not_hidden():
    assert isinstance(failing(ZeroDivisionError()).exception, ZeroDivisionError)


def test_help_is_a_command_too():
    result = call("help")
    assert result.exit_code == 0 and result.stdout == call("--help").stdout


def test_a_missing_name_is_answered_with_those_that_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "addition-grpo" in (said := call("run").stderr) and ".;" not in said
    assert "has none" in call("show").stderr
    (tmp_path / "runs" / "mine-001").mkdir(parents=True)
    (tmp_path / "runs" / "mine-001" / "run.json").write_text("{}")
    result = call("show")
    assert result.exit_code == 2 and "runs/mine-001" in result.stderr


def test_a_key_whose_values_plugins_add_says_how():
    assert "@tilth.tracker" in call("run", "addition-grpo", 'run.track=["neptune"]').stderr
    assert "@tilth" not in call("run", "addition-grpo", "optimizer.name=adma").stderr


def test_commands_need_no_package_of_servers_but_those_that_serve():
    code = (
        "import importlib, pkgutil, sys, tilth.cli\n"
        "sys.modules |= dict.fromkeys(['starlette', 'fastapi', 'uvicorn'])\n"
        "for module in pkgutil.iter_modules(tilth.cli.__path__, 'tilth.cli.'):\n"
        "    if module.name != 'tilth.cli.serve': importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
