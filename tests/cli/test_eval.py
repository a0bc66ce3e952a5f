"""``tilth eval``: what is asked reaches the engine, what comes out is told in full, mistakes are one line."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import tilth
from tests.cli import speaking
from tests.errors import raises
from tests.flows import tiny
from tilth.cli import eval as command
from tilth.cli.eval import judge, plan, table
from tilth.cli.main import EvalCommand, app
from tilth.config.load import from_dict
from tilth.core.errors import RewardError
from tilth.data.prompts import PromptSet, load_source
from tilth.data.tokenizer import Tokenizer
from tilth.engines.request import SamplingParams
from tilth.launch.evaluate import EvalSettings, evaluate
from tilth.rewards.process_pool import RewardPool
from tilth.runs.models import load_model

REWARD = """
def score(prompt, completion, info):
    if info["answer"] == "6":
        raise ValueError("six")
    return {"reward": len(completion), "correct": len(completion) > 4, "format": completion[:1] == "1"}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, data with a column of another name, and a reward."""
    folder = tmp_path_factory.mktemp("eval")
    speaking.directory(folder / "m", tokenizer=Tokenizer.characters("0123456789+="), context=48)
    records = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10)]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "r.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = tiny.recipe(
        folder, supervised={"steps": 1}, algorithm={"steps": 2}, run={"eval_prompts": 2, "save_every": 1}
    )
    return tiny.run(made).directory


def call(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def ask(place, *options):
    arguments = [place / "m", place / "d.jsonl", "--reward", f"{place}/r.py:score", "--columns", "prompt=question"]
    result = call(*arguments, "--max-tokens", 6, *options)
    assert result.exit_code == 0, result.output
    return result


def test_the_numbers_are_those_of_the_flow(place):
    found = json.loads(ask(place, "--k", "1,3", "--n", "4", "--seed", "5", "--json").stdout)
    prompts = PromptSet.of([{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10)])
    how = EvalSettings((1, 3), 4, SamplingParams(max_tokens=6), seed=5)
    with RewardPool(f"{place}/r.py:score") as pool:
        expected = evaluate(load_model(place / "m"), prompts, pool, how).summary()
    for name in expected.keys() - {"seconds", "tokens_per_second"}:
        assert found[name] == json.loads(json.dumps(expected[name])), name
    assert found["missing"] == 4 and found["pass"]["1"]["prompts"] == 9


def test_all_is_told_in_words(place):
    said = ask(place, "--k", "1,3").stdout
    assert "10 prompts, 3 samples of each, temperature 1, seed 0" in said
    for line in ("k = 1 ", "k = 3 ", "reward ", "correct ", "format ", "length ", "speed "):
        assert f"\n{line}" in said
    assert "3 of 30 rewards are missing (0 timed out) and count nowhere; of 10 prompts pass@1 is over 9" in said
    assert "ValueError: six" in said and "pass@k and avg@k are of the part correct" in said
    assert "cut at 6" in said and "95 % intervals over prompts" in said
    assert "\nright   (answer: " in said and "\n  → " in said


def test_a_mean_reward_is_a_number_and_a_share_of_right_answers_a_percentage(place):
    (place / "near.py").write_text("def score(prompt, completion, info):\n    return 0.25 + len(completion) % 2\n")
    common = (place / "m", place / "d.jsonl", "--columns", "prompt=question", "--max-tokens", 4)
    near = call(*common, "--reward", f"{place}/near.py:score").stdout
    row = next(line for line in near.splitlines() if line.startswith("k = 1"))
    assert row.count("%") in (1, 3) and "avg@k is the mean reward" in near  # pass@1 with its interval, or alone
    assert "%" not in next(line for line in near.splitlines() if line.startswith("reward"))
    exact = call(*common, "--reward", "exact").stdout
    row = next(line for line in exact.splitlines() if line.startswith("k = 1"))
    assert row.count("%") == 6 and "mean reward" not in exact


def test_greedy_is_said_and_one_sample_is_the_default(place):
    said = ask(place).stdout
    assert "one sample of each, greedy" in said
    assert ask(place).stdout.split("speed")[0] == said.split("speed")[0]


def test_how_much_is_ahead_is_said_first_and_never_on_stdout(place):
    result = ask(place, "--k", "1,3", "--json")
    assert json.loads(result.stdout)["prompts"] == 10
    assert result.stderr == "10 prompts x 3 samples: 30 completions to generate\n30 of 30 completions\n"


@pytest.mark.parametrize(
    ("terminal", "written"),
    [
        (False, "2 of 3 completions\n3 of 3 completions\n"),
        (True, "\r1 of 3 completions\r2 of 3 completions\r3 of 3 completions\n"),
    ],
)
def test_how_far_it_is_is_said_without_a_terminal_too_but_seldom(monkeypatch, terminal, written):
    clock = iter([0.0, 20.0, 40.0, 60.0])
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    stderr.isatty = lambda: terminal
    show = command._progress(1)
    for done in range(1, 4):
        show(done, 3)
    assert stderr.getvalue() == written


def test_completions_are_kept(place, tmp_path):
    ask(place, "--n", "2", "--limit", "4", "--out", tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and len({line["prompt"] for line in lines}) == 4
    assert {line["sample"] for line in lines} == {0, 1}


def test_several_rewards_are_added_and_told_apart(place):
    reward = ["--reward", "regex:1", "--reward", "exact"]
    result = call(place / "m", place / "d.jsonl", *reward, "--columns", "prompt=question", "--max-tokens", 4, "--json")
    found = json.loads(result.stdout)
    assert {"reward", "regex", "exact"} <= found["parts"].keys()
    total = found["parts"]["regex"]["value"] + found["parts"]["exact"]["value"]
    assert found["parts"]["reward"]["value"] == pytest.approx(total)


# ---- runs ----


def test_a_run_is_asked_what_it_held_out_by_its_own_reward(run):
    found = json.loads(call(run, "--json", "--k", "2").stdout)
    data = tiny.recipe("x").data
    _, held = load_source(data).split(data.holdout)
    assert (found["prompts"], found["step"], found["trained_on"]) == (len(held), 3, 0)
    assert (found["reward"], found["sampling"]["max_tokens"]) == ("addition", 4)
    assert json.loads(call(f"{run}@2", "--json", "--limit", "2").stdout)["step"] == 2


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-6), pytest.param("bf16", 0.11, marks=pytest.mark.slow)])
def test_what_the_run_said_of_itself_is_found_again(tmp_path, precision, near):
    """Its last held-out accuracy, in its own precision; in bf16 other company may turn two of 20 answers."""
    made = tiny.recipe(
        tmp_path, supervised={"steps": 25, "check_every": 25, "lr": 2e-2}, algorithm={"steps": 1},
        run={"eval_prompts": 1000}, train={"precision": precision},
    )  # fmt: skip
    done = tiny.run(made, reward=None)
    found = json.loads(call(done.directory, "--json").stdout)
    assert 0 < done.accuracy < 1 and found["avg"]["1"]["value"] == pytest.approx(done.accuracy, abs=near)


def test_prompts_that_the_run_trained_on_are_counted(run):
    data = tiny.recipe("x").data
    train, held = load_source(data).split(data.holdout)
    result = call(run, "addition", "--json")
    found = json.loads(result.stdout)
    assert (found["prompts"], found["trained_on"]) == (len(train) + len(held), len(train))
    said = call(run, "addition", "--limit", "30").stdout
    assert "of these prompts are among those that the run trained on" in said


@pytest.mark.slow
def test_a_run_whose_prompts_came_from_elsewhere_asks_for_data(tmp_path):
    """Its recipe names the task that is the default; these are not the prompts that it held out."""
    prompts = PromptSet.of([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)])
    made = tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 1}, run={"eval_prompts": 2})
    directory = tiny.run(made, prompts=prompts).directory
    result = call(directory)
    assert result.exit_code == 2 and "came from tilth.train, or files have changed; name the data" in result.stderr
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    asked = directory, tmp_path / "d.jsonl", "--reward", "exact"
    assert json.loads(call(*asked, "--json").stdout)["trained_on"] is None
    assert "trained on these prompts is unknown" in call(*asked).stdout


def test_a_run_of_records_is_not_judged_as_the_task_that_is_the_default(tmp_path):
    made = tiny.settings(tmp_path, supervised={"steps": 0}, algorithm={"steps": 1}, run={"eval_prompts": 2})
    del made["data"]
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    directory = tilth.train(sums, tiny.close_enough, live=False, **made).directory
    (tmp_path / "d.csv").write_text("prompt,answer\n1+2=,3\n")
    assert (call(directory).exit_code, call(directory, tmp_path / "d.csv").exit_code) == (2, 2)
    assert "name one: --reward" in call(directory, tmp_path / "d.csv").stderr
    assert "came from tilth.train" in call(directory, "--reward", "exact").stderr
    asked = json.loads(call(directory, tmp_path / "d.csv", "--reward", "exact", "--json").stdout)
    assert (asked["prompts"], asked["trained_on"]) == (1, None)


def sums(path, numbers):
    records = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_what_a_run_of_a_mixture_held_out_is_found(tmp_path, monkeypatch):
    parts = [
        {"name": n, "source": str(sums(tmp_path / f"{n}.jsonl", range(at, at + 5)))} for n, at in (("a", 1), ("b", 6))
    ]
    recipe = from_dict({"data": {"mixture": parts, "holdout": 0.3}, "reward": {"function": "exact"}})
    prompts = load_source(recipe.data)
    train, held = prompts.split(0.3)
    state = {"plan": {"train_prompts": len(train), "heldout_prompts": len(held)}, "data": prompts.fingerprint()}
    monkeypatch.setattr(command, "load_recipe_of", lambda run: recipe)
    monkeypatch.setattr(command, "read_state", lambda run: state)
    found = command._own(tmp_path)
    assert found is not None and [list(one) for one in found] == [list(train), list(held)]


def test_prompts_are_known_by_their_texts_however_their_file_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"source": str(sums(tmp_path / "tr.jsonl", range(6))), "heldout": str(sums(tmp_path / "te.jsonl", [7, 8]))}
    made = tiny.recipe(
        tmp_path, supervised={"steps": 1}, algorithm={"steps": 1}, data=data, run={"eval_prompts": 2},
        reward={"function": "exact"},
    )  # fmt: skip
    directory = tiny.run(made, reward=None).directory

    def seen(*arguments):
        return json.loads(call(directory, *arguments, "--max-tokens", 1, "--json").stdout)["trained_on"]

    some = (tmp_path / "tr.jsonl").read_text().splitlines(keepends=True)[:5]
    (tmp_path / "copy.jsonl").write_text("".join(some) + (tmp_path / "te.jsonl").read_text())
    names = ["tr.jsonl", tmp_path / "tr.jsonl", "copy.jsonl", "te.jsonl"]
    assert [seen(name) for name in names] == [36, 36, 5, 0] and seen() == 0
    sums(tmp_path / "tr.jsonl", range(1, 7))  # as many others: the counts are the same
    assert seen("te.jsonl") is None and call(directory).exit_code == 2
    (tmp_path / "tr.jsonl").unlink()
    assert seen("te.jsonl") is None


MIXED = {"source": "", "mixture": [{"name": "sums", "source": "tr.jsonl"}]}


@pytest.mark.parametrize("data", [{"source": "tr.jsonl"}, pytest.param(MIXED, marks=pytest.mark.slow)])
def test_held_out_prompts_are_found_in_the_folder_where_the_run_began(tmp_path, monkeypatch, data):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    sums(tmp_path / "here" / "tr.jsonl", range(6))
    monkeypatch.chdir(tmp_path / "here")
    made = tiny.recipe(
        tmp_path, supervised={"steps": 1}, algorithm={"steps": 1}, data=data, run={"eval_prompts": 2},
        reward={"function": "exact"},
    )  # fmt: skip
    directory = tiny.run(made, reward=None).directory.resolve()
    alike = call(directory, "--json").stdout
    monkeypatch.chdir(tmp_path / "there")
    assert json.loads(call(directory, "--json").stdout)["prompts"] == json.loads(alike)["prompts"]
    (tmp_path / "here" / "tr.jsonl").unlink()
    assert call(directory).exit_code == 2


def test_a_model_of_elsewhere_has_seen_what_nobody_knows(place):
    assert json.loads(ask(place, "--json").stdout)["trained_on"] is None


def test_what_the_run_says_holds_unless_the_command_says_otherwise(place):
    model = load_model(place / "m")
    settings = {
        "rollout": {"max_tokens": 7, "stop": ["+"]},
        "data": {"template": "chatml"},
        "reward": {"function": "exact"},
    }
    made = model._replace(settings=settings, run=place)
    how = plan(EvalCommand("m"), made)
    assert (how.sampling.max_tokens, how.sampling.stop, how.template) == (7, ("+",), "model")
    assert how.sampling.temperature == 0 and plan(EvalCommand("m", n=2), made).sampling.temperature == 1
    how = plan(EvalCommand("m", max_tokens=3, stop=("=",), template="", temperature=0.5), made)
    assert (how.sampling.max_tokens, how.sampling.stop, how.template, how.sampling.temperature) == (3, ("=",), "", 0.5)
    assert command.reward_of(EvalCommand("m", "d.jsonl"), made) == "exact"
    assert command.reward_of(EvalCommand("m", "countdown"), made) == "countdown"
    assert command.reward_of(EvalCommand("m", reward=("exact", "gsm8k")), made) == {"exact": 1.0, "gsm8k": 1.0}


# ---- mistakes ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "d.jsonl"], "none"),
        (["m", "none.jsonl", "--reward", "exact"], "'none.jsonl'"),
        (["m", "d.jsonl"], "name one: --reward"),
        (["m", "--reward", "exact"], "has no held-out prompts; name the data"),
        (["m", "addition", "--limit", "2", "--reward", "exakt"], "exact"),
        (["m", "addition", "--limit", "2", "--reward", "r.py:nothing"], "has no 'nothing'"),
        (["m", "d.jsonl", "--reward", "exact"], "no column 'prompt'; there is 'question'"),
        (["m", "d.jsonl", "--reward", "exact"], "try --columns prompt=question"),
        (["m", "addition", "--limit", "2", "--timeout", "0"], "--timeout"),
        (["m", "addition", "--limit", "2", "--timeout", "-1"], "--timeout"),
        (["m", "d.jsonl", "--reward", "exact", "--columns", "question"], "is not of the form prompt=NAME"),
        (["m", "d.jsonl", "--reward", "exact", "--columns", "promt=question"], "promt"),
        (["m", "d.jsonl", "--reward", "exact", "--k", "1,x"], "--k 1,x: it must be whole numbers"),
        (["m", "d.jsonl", "--reward", "exact", "--k", "4", "--n", "2"], "needs at least 4 samples"),
        (
            ["m", "d.jsonl", "--reward", "exact", "--k", "4", "--temperature", "0"],
            "temperature 0 gives 4 equal samples",
        ),
        (["m", "d.jsonl", "--reward", "exact", "--out", "x.csv"], "must end in .jsonl or .parquet"),
        (["m@best", "d.jsonl", "--reward", "exact"], "is no run, so it has no @best"),
        (["m", "addition", "--limit", "4", "--template", "model"], "no chat template"),
    ],
)
def test_mistakes(place, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    result = call(*arguments)
    (error,) = result.stderr.splitlines()
    assert result.exit_code == 2 and error.startswith("error: ") and message in error


@pytest.mark.slow
def test_a_syntax_error_in_the_reward_is_at_the_users_line(place, tmp_path):
    (tmp_path / "typo.py").write_text("x = 1\ndef score(p, c, i:\n    return 1\n")
    result = call(place / "m", "addition", "--limit", 2, "--reward", f"{tmp_path}/typo.py:score")
    assert result.exit_code == 2 and result.stderr.endswith(" (typo.py, line 2)\n"), result.stderr
    assert result.stderr.count("\n") == 1


def test_answers_that_no_verifier_can_read_are_told_before(place, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "answer": "two"}\n')
    result = call(place / "m", tmp_path / "d.jsonl", "--reward", "addition")
    assert result.exit_code == 2 and "d.jsonl:1" in result.stderr and "'two'" in result.stderr


def test_what_a_model_says_does_not_steer_the_terminal():
    assert command._short("a\x1b[2Jb\nc") == "a�[2Jb⏎c"
    assert len(command._short("x" * 1000)) < 310


def test_unknown_intervals_are_left_out():
    found = {"value": 0.5, "low": float("nan"), "high": float("nan"), "prompts": 1}
    assert command._ranged(found) == "50.0 %"
    assert command._ranged({**found, "value": float("nan")}) == "–"


def test_the_table_is_aligned():
    one = {"value": 0.5, "low": 0.4, "high": 0.6, "prompts": 9}
    length = {"mean": 2.0, "max": 3, "cut": 0.0}
    summary = {
        "model": "m", "step": None, "data": "d", "prompts": 9, "samples": 1, "seed": 0,
        "pass": {"1": one}, "avg": {"1": one}, "parts": {"reward": one}, "missing": 0, "trained_on": 0, "graded": False,
        "length": length, "tokens": 18, "tokens_per_second": 9.0,
        "seconds": {"generate": 2.0, "score": 0.0}, "sampling": {"temperature": 0.0, "max_tokens": 4},
    }  # fmt: skip
    lines = table(summary)
    head, row = (next(line for line in lines if line.startswith(name)) for name in (" " * 12, "k = 1"))
    assert head.index("avg@k") == row.rindex("50.0 %")
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.dist
def test_a_run_with_an_environment_plays_episodes(place, monkeypatch):
    rollout = {"environment": "word_game", "turns": 2, "turn_seconds": 10.0, "max_tokens": 4}
    loaded = load_model(place / "m")._replace(settings={"rollout": rollout})
    monkeypatch.setattr(command, "load_model", lambda name: loaded)
    (place / "games.jsonl").write_text('{"prompt": "1", "answer": "bat"}\n{"prompt": "2", "answer": "bak"}\n')
    with raises(RewardError, "reward"):  # the game's letters are none of this model's
        judge(EvalCommand(str(place / "m"), str(place / "games.jsonl")))
    rollout["environment"] = f"{place / 'sums.py'}:Sums"
    (place / "sums.py").write_text(SUMS)
    found = json.loads(call(place / "m", place / "games.jsonl", "--json").stdout)
    assert found["parts"]["turns"]["value"] == 1.0 and found["reward"].endswith(":Sums") and found["prompts"] == 2
    by_reward = json.loads(call(place / "m", place / "games.jsonl", "--json", "--reward", f"{place}/r.py:score").stdout)
    assert "turns" not in by_reward["parts"]


SUMS = """
import tilth

class Sums(tilth.Environment):
    def step(self, message):
        return [{"role": "user", "content": "1+1="}], False

    def reward(self):
        return 1.0
"""
