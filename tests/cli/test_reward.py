"""``tilth reward try``: what it says of good, useless, failing, slow and unsteady rewards."""

import json
import re

import psutil
import pytest
from typer.testing import CliRunner

from tests.errors import raises
from tilth.cli import reward
from tilth.cli.main import app
from tilth.core.errors import RecipeError

QUESTIONS = [{"prompt": f"How many are {n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(1, 31)]
MINE = """
import itertools, time

count = itertools.count()

def constant(prompt, completion, info):
    return 0.5

def brevity(prompt, completion, info):
    return -len(completion)

def strict(prompt, completion, info):
    return float(completion.split("####")[1] == info["answer"].split("####")[1])

def never(prompt, completion, info):
    return {"score": 1.0}

def moody(prompt, completion, info):
    return {"reward": (completion == info["answer"]) + next(count) / 1e6, "mood": None}

def hangs(prompt, completion, info):
    time.sleep(0 if completion else 60)
    return float(completion == info["answer"])

def slow(prompt, completion, info):
    time.sleep(0.02)
    return float(completion == info["answer"])

def late(prompt, completion, info):
    if not next(count):
        time.sleep(0.5)
    return float(completion == info["answer"])

def raises(prompt, completion, info):
    raise ValueError("always")

def none(prompt, completion, info):
    return None

def nan(prompt, completion, info):
    return float("nan")

def endless(prompt, completion, info):
    time.sleep(60)

def noisy(prompt, completion, info):
    print("hello")
    return float(completion == info["answer"])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, ["reward", "try", *map(str, arguments)])


def said(*arguments):
    result = call(*arguments)
    assert result.exit_code == ("broken" in result.stdout), result.output  # 1 for that verdict, else 0
    return result.stdout


def found(*arguments):
    return json.loads(said(*arguments, "--json"))


def test_a_good_reward(folder):
    text = said("gsm8k", "sums.jsonl", "--n", 5)
    lines = text.splitlines()
    assert lines[:2] == ["reward   gsm8k", "data     sums.jsonl: 5 of 30 records, spread evenly"]
    assert lines[3].split() == "completion calls missing mean least most correct format ms a call slowest".split()
    assert lines[4].split()[:9] == "own answer 5 0 1 1 1 1 1".split()
    assert lines[5].split()[:9] == "another's answer 5 0 0 0 0 0 1".split()
    assert lines[6].split()[:8] == "empty 5 0 0 0 0 0 0".split()
    assert "verdict  works" in text and "earns more than another record's in 5 of 5 records" in text
    assert "earns more than none at all in 5 of 5 records" in text and "None of 20 calls failed" in text
    assert "calls a second in one process" in text and "mean of its part 'correct'" in text
    assert " failed\n" not in text and '"How many are 1 and 1?"' in text


def test_json_says_the_same(folder):
    one = found("gsm8k", "sums.jsonl", "--n", 3)
    assert (one["reward"], one["data"], one["records"], one["verdict"]) == ("gsm8k", "sums.jsonl", 30, "works")
    assert [t["record"] for t in one["tried"]] == [1, 15, 30] or [t["record"] for t in one["tried"]] == [1, 16, 30]
    assert one["tried"][0]["prompt"] == QUESTIONS[0]["prompt"]
    outcomes = one["tried"][0]["completions"]
    assert list(outcomes) == ["right", "other", "empty", "again"]
    assert [outcomes[c]["value"] for c in outcomes] == [1, 0, 0, 1]
    assert outcomes["other"]["parts"] == {"correct": 0, "format": 1} and outcomes["right"]["seconds"] > 0
    assert outcomes["right"]["status"] == "ok" and outcomes["right"]["reason"] == ""


def test_a_completion_of_ones_own(folder):
    one = found("gsm8k", "sums.jsonl", "--n", 30, "--completion", "#### 10")
    values = {t["record"]: t["completions"]["given"]["value"] for t in one["tried"]}
    assert values == {n: float(n == 5) for n in range(1, 31)}
    assert "--completion" in said("gsm8k", "sums.jsonl", "--completion", "#### 10")


def test_several_with_their_weights(folder):
    one = found('{gsm8k = 1.0, "regex:####" = 0.1}', "sums.jsonl", "--n", 4)
    assert one["verdict"] == "works"
    assert [c["value"] for c in one["tried"][0]["completions"].values()] == pytest.approx([1.1, 0.1, 0, 1.1])


BARE = ["gsm8k", '{gsm8k = 1.0, "regex:####" = 0.1}', pytest.param("gsm8k:0.1", marks=pytest.mark.slow)]


@pytest.mark.parametrize("function", BARE)
def test_answers_that_are_bare_numbers_are_put_as_gsm8k_reads_them(folder, function):
    """As in the files of verl, whose ground truth is 10 and not #### 10."""
    rows = [{"prompt": f"p{n}", "answer": str(n)} for n in range(10, 16)]
    (folder / "bare.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    one = found(function, "bare.jsonl", "--n", 3)
    assert one["verdict"] == "works" and one["tried"][0]["completions"]["other"]["parts"]["format"] == 1
    put = "Bare answers were scored in the form that the reward reads, as in '#### 10'."
    assert put in one["sentences"] and put not in found("exact", "bare.jsonl")["sentences"]
    assert not any("bare numbers" in s for s in found(function, "sums.jsonl", "--n", 3)["sentences"])


def test_a_slow_first_call_is_told_apart(folder):
    """Such as of a function that imports torch in its body."""
    one = found("mine.py:late", "sums.jsonl", "--n", 2)
    (speed,) = (s for s in one["sentences"] if "calls a second" in s)
    assert one["verdict"] == "works", speed
    took = re.search(r" The first call, not counted here, took (\d\.\d+) s\.$", speed)
    assert took and float(took[1]) >= 0.5, speed
    assert "first call" not in said("mine.py:slow", "sums.jsonl", "--n", 2)


@pytest.mark.parametrize("function", ["raises", "none", "nan", pytest.param("endless", marks=pytest.mark.slow)])
def test_nothing_is_said_of_the_second_call_where_every_call_failed(folder, function):
    text = said(f"mine.py:{function}", "sums.jsonl", "--n", 1, "--timeout", 0.3)
    assert "Every one of 4 calls failed." in text and "scored twice" not in text


def test_a_syntax_error_is_at_the_users_line(folder):
    (folder / "typo.py").write_text("x = 1\ndef score(p, c, i:\n    return 1\n")
    result = call("typo.py:score", "sums.jsonl")
    assert result.exit_code == 2 and result.stderr.endswith(" (typo.py, line 2)\n"), result.stderr


def test_a_task(folder):
    one = found("addition", "addition", "--n", 3, "--digits", 2)
    assert one["verdict"] == "works" and one["records"] == 10_000
    assert one["tried"][0]["prompt"] == "00+00="
    assert "of 10,000 prompts" in said("addition", "addition", "--digits", 2)


@pytest.mark.parametrize(
    "function, word, sentences",
    [
        (
            "constant",
            "broken",
            [
                "Every call gave 0.5: a reward that never differs teaches nothing.",
                "earns more than another record's in 0 of 6 records, as much in 6.",
            ],
        ),
        ("brevity", "broken", ["earns more than none at all in 0 of 6 records.", "its mean is a reward"]),
        ("never", "broken", ["Every one of 24 calls failed."]),
        (
            "strict",
            "doubtful",
            [
                "6 of 24 calls failed, none of them on the right answer",
                "where a bad answer is meant to earn nothing, return 0",
            ],
        ),
        ("moody", "doubtful", ["scored twice earned two different rewards in 6 of 6 records"]),
        ("slow", "doubtful", ["more reward.workers share that"]),
    ],
)
def test_the_verdict_in_words(folder, function, word, sentences):
    one = found(f"mine.py:{function}", "sums.jsonl", "--n", 6)
    assert one["verdict"] == word
    assert all(any(sentence in s for s in one["sentences"]) for sentence in sentences), one["sentences"]


def test_failures_are_told_with_their_reason_and_first_record(folder):
    text = said("mine.py:strict", "sums.jsonl", "--n", 4)
    assert "      4  IndexError: list index out of range at mine.py:13 (first: record 1, empty)" in text
    assert text.count("error  ") >= 4 and "verdict  doubtful" in text


def test_no_text_of_data_or_failures_controls_the_terminal(folder):
    (folder / "loud.py").write_text(
        "def score(prompt, completion, info):\n    raise ValueError('\\x1b]0;e\\x07\\x9b2J')\n"
    )
    (folder / "loud.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}\x9b2J", "answer": "x"}) + "\n" for n in "ab")
    )
    said = call("loud.py:score", "loud.jsonl").output
    assert "\ufffd]0;e\ufffd\ufffd2J" in said and "a\ufffd2J" in said
    assert not re.search("[\x1b\x07\x9b]", said)


def test_what_hangs_is_a_timeout_and_leaves_nothing(folder):
    before = psutil.Process().children()
    text = said("mine.py:hangs", "sums.jsonl", "--n", 2, "--timeout", 0.3)
    assert "      2  took longer than 0.3 s (first: record 1, empty)" in text and "timeout" in text
    assert psutil.Process().children() == before


def test_doubtful_records_come_first(folder):
    records = [{"prompt": f"p{i}", "answer": "same" if i in (5, 6) else f"a{i}"} for i in range(10)]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "odd.py").write_text("def odd(p, c, i):\n    return float(c == i['answer'] and p != 'p7')\n")
    text = said("odd.py:odd", "d.jsonl", "--n", 10)
    table = text[text.index("\n record  ") + 1 :].splitlines()
    assert table[1].split()[0] == "8" and "earns more than another record's in 9 of 10 records" in text


def test_another_s_answer_is_another_one(folder):
    records = [{"prompt": f"p{i}", "answer": "yes" if i else "no"} for i in range(6)]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    one = found("exact", "d.jsonl", "--n", 6)
    assert [t["completions"]["other"]["value"] for t in one["tried"]] == [0] * 6


def test_data_without_answers(folder):
    (folder / "d.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    one = found("regex:a", "d.jsonl", "--completion", "a")
    assert [list(t["completions"]) for t in one["tried"]] == [["empty", "given"]] * 2
    assert one["verdict"] == "doubtful" and "The data has no answers" in one["sentences"][0]


def test_what_the_function_prints_is_not_in_the_way_of_json(folder):
    assert found("mine.py:noisy", "sums.jsonl", "--n", 2)["verdict"] == "works"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gsm9k", "sums.jsonl"], "did you mean 'gsm8k'"),
        (["mine.py:strct", "sums.jsonl"], "did you mean 'strict'"),
        (["nowhere.py:f", "sums.jsonl"], "no file"),
        (["regex:(a", "sums.jsonl"], "at character 1 of the pattern"),
        (["gsm8k", "none.jsonl"], "none.jsonl"),
        (["addition", "sums.jsonl"], "sums.jsonl:1 (prompt 'How many are 1 and 1?'): the answer is no integer"),
        (["{gsm8k = }", "sums.jsonl"], "is no table of names and weights"),
        (["{gsm8k = 'x'}", "sums.jsonl"], "weight of reward 'gsm8k' is 'x'"),
        (["gsm8k", "sums.jsonl", "--columns", "prompt"], "not of the form prompt=NAME"),
        (["gsm8k", "sums.jsonl", "--columns", "promt=question"], "--columns promt: there is prompt, answer"),
        (["gsm8k", "sums.jsonl", "--n", "0"], "--n"),
    ],
)
def test_bad_input_is_one_line_and_code_2(folder, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and message in result.stderr, result.output


def test_a_broken_reward_fails_the_command(folder):
    codes = [call(f"mine.py:{name}", "sums.jsonl").exit_code for name in ("constant", "strict")]
    assert [*codes, call("gsm8k", "sums.jsonl").exit_code, call("mine.py:never", "sums.jsonl").exit_code] == [
        1,
        0,
        0,
        1,
    ]


def test_the_hint_names_the_option_of_this_command(folder):
    (folder / "q.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    result = call("exact", "q.jsonl")
    assert result.exit_code == 2 and "try --columns prompt=question" in result.stderr
    assert "data.columns" not in result.stderr


def test_columns_of_another_name(folder):
    rows = [{"question": q["prompt"], "solution": q["answer"]} for q in QUESTIONS]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    columns = ["--columns", "prompt=question", "--columns", "answer=solution"]
    assert found("gsm8k", "d.jsonl", *columns)["verdict"] == "works"
    assert found("gsm8k", "d.jsonl", "--columns", "prompt=question,answer=solution")["verdict"] == "works"


def test_columns_as_a_table():
    assert reward.columns_of([]) == {}
    assert reward.columns_of(["prompt=a,answer=b", "text=c"]) == {"prompt": "a", "answer": "b", "text": "c"}
    with raises(RecipeError, "--columns"):
        reward.columns_of(["=a"])


def test_help_names_the_options():
    text = CliRunner().invoke(app, ["reward", "try", "--help"]).stdout
    assert all(option in text for option in ("--columns", "--n", "--completion", "--timeout", "--json", "--digits"))
    assert "try" in CliRunner().invoke(app, ["reward"]).output


# ---- Countdown, from its task to a run ----


@pytest.mark.slow  # a task is made whole before it is used
def test_countdown_judges_its_own_task(folder):
    one = found("countdown:0.1", "countdown", "--digits", 1, "--n", 12)
    assert one["verdict"] == "works" and all(t["completions"]["right"]["value"] == 1 for t in one["tried"])
    assert all(t["completions"]["other"]["value"] in (0, 0.1) for t in one["tried"])


@pytest.mark.slow
def test_the_recipe_of_countdown_runs(folder):
    records = [
        {"prompt": f"{a},{b},2={a * b - 2}:", "answer": f"{a}*{b}-2"} for a in range(3, 20) for b in range(3, 20)
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    small = ["model.hidden=32", "model.layers=1", "model.heads=2", "data.source=d.jsonl", "reward.function=countdown"]
    short = ["supervised.steps=2", "supervised.batch=8", "rollout.prompts=4", "rollout.group=2", "algorithm.steps=2"]
    result = CliRunner().invoke(
        app, ["run", "countdown-grpo", *small, *short, "run.eval_prompts=8", "train.threads=1", "train.precision=fp32"]
    )
    assert result.exit_code == 0, result.output
    metrics = [json.loads(line) for line in (folder / "runs/countdown-grpo-001/metrics.jsonl").read_text().splitlines()]
    assert [m["phase"] for m in metrics] == ["warmup"] * 2 + ["grpo"] * 2
    assert all(0 <= m["reward/part/correct"] <= m["reward/part/format"] <= 1 for m in metrics[2:])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["prompt=question,answer=a b"], {"prompt": "question", "answer": "a b"}),
        (["prompt=Q: {question}, please", "answer=a"], {"prompt": "Q: {question}, please", "answer": "a"}),
    ],
)
def test_a_pattern_of_columns_may_have_commas(words, found):
    assert reward.columns_of(words) == found
