"""``tilth trace costs``: table, JSON, the file, and bad input in one line."""

import json

import pytest
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.plan.costs import load_costs
from tilth.trace import recorder, span


def call(*arguments):
    return CliRunner().invoke(app, ["trace", "costs", *map(str, arguments)])


def record(run, steps=10, rank=0, squares=0, group=(0, 1)):
    """Steps of spans without work: their times mean nothing, their amounts do."""
    with recorder.to(run / "events", rank=rank, interval=60):
        for step in range(1, steps + 1):
            with span("step", step=step):
                for i in (1, 2):
                    with span("forward", micro_batch=i, tokens=100 * i, squares=squares * i**3, where=("policy", "")):
                        sum(range(1000 * i))
                with span("optimizer", where=("policy", "")):
                    sum(range(1000))
                number = step - 1
                with span("all_reduce", bytes=8 if step % 2 else 8000, detail=",".join(map(str, group)), seq=number):
                    pass
                if step < 4:
                    with span("decode", tokens=7, where=("rollout", "")):
                        pass


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    record(folder)
    record(folder, rank=1)
    return folder


def test_the_table(run):
    text = call(run).stdout
    assert "policy forward" in text and "100 to 200" in text and "all_reduce" in text and "8 to 8,000" in text
    assert "slowest rank" in text and ("0: 1." in text or "1: 1." in text)
    assert "too few: decode of rollout: 6 of 8 spans" in text
    assert "ns/square" not in text and "*" not in text  # no column that says nothing, no error of fitted steps


def test_squares_have_a_column_where_there_are_some(tmp_path):
    record(tmp_path, squares=5)
    text = call(tmp_path).stdout
    assert "ns/square" in text and "slowest" not in text  # a single rank has no peers


def test_json_and_file_say_the_same(run, tmp_path):
    path = tmp_path / "costs.json"
    result = call(run, "--save", path, "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert list(said) == ["format", "version", "about", "compute", "links", "left", "ring"]
    assert said == json.loads(path.read_text())
    assert [(c["role"], c["op"], c["count"]) for c in said["compute"]] == [
        ("policy", "forward", 40), ("policy", "optimizer", 20),
    ]  # fmt: skip
    assert said["about"] == {"run": "run", "attempt": 0, "steps": 10}
    costs = load_costs(path)
    assert float(costs.of("forward", "policy").seconds(150)) > 0
    assert f"saved: {path}" in call(run, "--save", path).stdout


def test_the_machine_is_told(run):
    state = {"recipe": "small", "state": "finished", "digest": "", "plan": {"parameters": 7}}
    state["environment"] = {"cpu": "x", "memory": 5}
    (run / "run.json").write_text(json.dumps(state))
    about = json.loads(call(run, "--json").stdout)["about"]
    assert (about["recipe"], about["parameters"], about["machine"]) == ("small", 7, {"cpu": "x"})


def test_some_steps(run):
    assert json.loads(call(run, "--steps", "1:6", "--json").stdout)["compute"][0]["count"] == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "no event file or folder at nowhere"),
        (("run", "--steps", "3"), "run: too little data to fit costs"),
        (("run", "--steps", "90:95"), "has no events of steps 90:95; its steps are 1 to 10"),
        (("run", "--save", "none/costs.json"), "cannot write none/costs.json"),
    ],
)
def test_bad_input_is_one_line(run, monkeypatch, arguments, message):
    monkeypatch.chdir(run.parent)
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
