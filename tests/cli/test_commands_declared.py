"""Commands of one's own: from a plain file, listed with the others, with errors as theirs."""

import pytest
from typer.testing import CliRunner

from tests.config.test_plugins import _nothing_left_behind, forget, write  # noqa: F401  (a fixture)
from tilth.cli.main import app

MINE = """
import tilth
from tilth.core.errors import DataError

@tilth.command("greet")
def greet(name: str, times: int = 1):
    "Say hello."
    if times < 1:
        raise DataError(f"times = {times}: there is nothing to say")
    print("hello " * times + name)
"""


def run(*words):
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.exit_code, found.output


def test_a_command_is_called_with_its_arguments_and_listed(tmp_path):
    path = write(tmp_path, MINE)
    assert run("--plugins", path, "greet", "you", "--times", "2") == (0, "hello hello you\n")
    code, out = run("--plugins", path, "--help")
    assert code == 0 and "greet" in out and "Say hello." in out and "doctor" in out
    code, out = run("--plugins", path, "greet", "--help")
    assert code == 0 and "--times" in out


def test_without_its_plugin_there_is_no_such_command(tmp_path):
    run("--plugins", write(tmp_path, MINE), "greet", "you")
    code, out = run("greet", "you")
    assert code == 2 and "greet" in out


def test_what_goes_wrong_ends_in_a_line(tmp_path):
    path = write(tmp_path, MINE)
    code, out = run("--plugins", path, "greet", "you", "--times", "0")
    assert code == 2 and out == "error: times = 0: there is nothing to say\n"
    code, out = run("--plugins", path, "greet", "you", "--times", "x")
    assert code == 2 and "times" in out and out.count("\n") == 1
    code, out = run("--plugins", tmp_path / "none.py", "greet")
    assert code == 2 and "none.py" in out and out.count("\n") == 1


def test_what_a_command_raises_names_its_file_and_line_and_its_own_exit_code_stays(tmp_path):
    for error in ("KeyError('who')", "RuntimeError('who')", "OSError('who')"):
        path = write(tmp_path, MINE.replace("DataError(f", f"{error} or DataError(f"), f"mine_{error[:3]}.py")
        code, out = run("--plugins", path, "greet", "you", "--times", "0")
        assert code == 2 and out.count("\n") == 1 and f"command 'greet' ({path.name}:5): {error[:3]}" in out
        assert "who" in out and f"at {path.name}:9" in out
        forget()
    path = write(tmp_path, MINE.replace("raise DataError", "import typer; raise typer.Exit(7) if times else DataError"))
    assert run("--plugins", path, "greet", "you", "--times", "-1") == (7, "")


def test_a_name_that_comes_with_tilth_is_refused(tmp_path):
    path = write(tmp_path, MINE.replace('"greet"', '"doctor"'))
    code, out = run("--plugins", path, "doctor")
    assert code == 2 and "mine.py:" in out and out.count("\n") == 1


@pytest.mark.parametrize("words", [("--version",), ("algorithms", "dapo", "grpo")])
def test_others_are_as_before_beside_plugins(tmp_path, words):
    assert run("--plugins", write(tmp_path, MINE), *words) == run(*words)
