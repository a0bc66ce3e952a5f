"""Loading reward functions and reading their results: what is wrong is named, what is no number is missing."""

import math
import re
import sys
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError, RewardError
from tilth.rewards import functions
from tilth.rewards.functions import LARGEST, Score, Weighted, check_answers, check_place, load_reward, normalise
from tilth.rewards.verifiers import verifier_specs


def graded(prompt, completion, info):
    return len(completion)


def too_few(prompt, completion):
    return 0.0


NUMBER = 3


class Judge:
    def grade(self, prompt, completion, info):
        return 1.0

    def __call__(self, prompt, completion, info):
        return 2.0


judge = Judge()


@pytest.mark.parametrize(
    "completion, answer, right",
    [
        ("579", "579", 1),
        ("0579", "579", 1),
        ("579", "0579", 1),
        (" 579\n", 579, 1),
        ("0", "0000", 1),
        ("-0", "0", 1),
        ("-12", "-012", 1),
        ("9" * 6000, "9" * 6000, 1),
        ("580", "579", 0),
        ("5 79", "579", 0),
        ("+579", "579", 0),
        ("579.0", "579", 0),
        ("579 is it", "579", 0),
        ("5_79", "579", 0),
        ("٥٧٩", "579", 0),
        ("", "579", 0),
        ("-579", "579", 0),
        ("5790", "579", 0),
    ],
)
def test_addition(completion, answer, right):
    assert load_reward("addition")("123+456=", completion, {"answer": answer}) == right


@pytest.mark.parametrize(
    "result, value",
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array([2.0]), 2.0),
        (torch.tensor(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        ({"reward": 2}, 2.0),
    ],
)
def test_numbers(result, value):
    assert normalise(result) == (value, {}, "")


@pytest.mark.parametrize(
    "result, reason",
    [
        (float("nan"), "returned nan"),
        (math.inf, "returned inf"),
        (-math.inf, "returned -inf"),
        (None, "returned None"),
        ("1.0", "returned a str, not a number"),
        ([1.0], "returned a list, not a number"),
        (1j, "returned a complex, not a number"),
        (10**400, "too large"),
        (1e300, "1e.300, more than"),
        (-1e200, "more than"),
        (1.0001e18, "more than"),
        (Fraction(10**19), "more than"),
        (np.float64(1e39), "more than"),
        ({"reward": 1e300, "style": 1.0}, "more than"),
        (np.array([1.0, 2.0]), "returned a ndarray that is not one number"),
        (torch.zeros(2), "returned a Tensor that is not one number"),
        ({}, "without 'reward' .keys: none"),
        ({"score": 1}, "without 'reward' .keys: score"),
        ({"reward": None, "style": 1.0}, "returned None"),
        ({"reward": float("nan")}, "returned nan"),
    ],
)
def test_anything_else_is_missing(result, reason):
    score = normalise(result)
    assert score.value is None and score.parts == {}

    assert re.search(reason, score.reason)


def test_parts_are_kept_and_bad_parts_are_nan():
    score = normalise(OrderedDict([("reward", 1), ("length", True), ("style", "good"), (3, math.inf)]))
    assert score.value == 1 and score.reason == ""
    assert score.parts["length"] == 1 and math.isnan(score.parts["style"]) and math.isnan(score.parts["3"])


def test_load_by_value_and_by_module(monkeypatch):
    assert load_reward(graded) is graded
    assert load_reward(judge) is judge
    assert load_reward(f"{__name__}:graded") is graded
    assert load_reward(f"{__name__}:judge.grade")("", "", {}) == 1
    assert load_reward("math:hypot") is math.hypot


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour.py").write_text("BONUS = 3.0\n")
    (tmp_path / "my_rewards.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour import BONUS\n"
        "@dataclass\nclass Config:\n    scale: float = 2.0\n"
        "def brevity(prompt, completion, info):\n    return BONUS * Config().scale\n"
        "def accuracy(prompt, completion, info):\n    return 1.0\n"
        "CONSTANT = 4\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\nraise ValueError('no licence')\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith(("my_rewards", "neighbour"))]:
        del sys.modules[name]


def test_load_from_a_file(folder):
    function = load_reward("my_rewards.py:brevity")
    assert function("", "", {}) == 6
    assert load_reward(f"{folder}/my_rewards.py:brevity") is function


def test_load_a_module_of_the_working_folder(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert load_reward("my_rewards:brevity")("", "", {}) == 6


@pytest.mark.parametrize(
    "spec, key, hint",
    [
        ("additon", "additon", "did you mean 'addition'"),
        ("additon", "additon", "countdown:CREDIT"),
        ("gsm9k", "gsm9k", "; did you mean 'gsm8k'"),
        ("regx:a+", "regx", "did you mean 'regex'"),
        ("countdwn:0.1", "countdwn", "did you mean 'countdown'"),
        ("exact:1", "exact:1", ""),
        ("regex:(a", "regex.pattern", "at character 1"),
        ("gsm8k:2", "gsm8k.credit", ""),
        ("", "reward.function", ""),
        ("my_rewards.py", "my_rewards.py", ""),
        ("my_reward.py:brevity", "my_reward.py", "did you mean 'my_rewards.py'"),
        ("nowhere/x.py:f", "x.py", "nowhere/x.py"),
        ("my_rewards.py:brevty", "my_rewards.py:brevty", "did you mean 'brevity'"),
        ("my_rewards.py:zzz", "my_rewards.py:zzz", "accuracy, brevity"),
        ("neighbour.py:f", "neighbour.py:f", "no function"),
        ("my_rewards.py:CONSTANT", "my_rewards.py:CONSTANT.type", ""),
        ("broken.py:f", "broken.py.import", "ValueError: no licence at broken.py:2"),
        ("leaves.py:f", "leaves.py.import", "SystemExit: 3"),
        ("broken:f", "broken.import", "ValueError: no licence"),
        ("no_such_package.sub:f", "no_such_package.sub", "'no_such_package'"),
        ("math:nothing", "math:nothing", ""),
        (f"{__name__}:NUMBER", f"{__name__}:NUMBER.type", ""),
        (f"{__name__}:too_few", f"{__name__}:too_few.arguments", "not (prompt, completion)"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, spec, key, hint):
    with raises(RewardError, key) as error:
        load_reward(spec)
    assert "\n" not in str(error.value) and repr(spec) in str(error.value) and hint in str(error.value)


def test_a_callable_with_the_wrong_arguments():
    with raises(RewardError, "too_few.arguments"):
        load_reward(too_few)


def test_describe_is_one_short_line():
    try:
        raise ValueError("a\nb" * 500)
    except ValueError as error:
        text = functions.describe(error)
    assert "\n" not in text and len(text) < 320 and "test_functions.py:" in text
    assert functions.describe(KeyError()) == "KeyError"


def test_describe_says_what_was_noted():
    error = ValueError("too much")
    error.add_note("in reward style")
    assert functions.describe(error) == "ValueError: too much (in reward style)"


# ---- several rewards ----


def style(prompt, completion, info):
    return {"reward": len(completion) / 10, "words": len(completion.split()), "format": 0.5}


def judged(prompt, completion, info):
    return {"reward": 0.5, "correct": 0.25}


def gone(prompt, completion, info):
    return None


def failing(prompt, completion, info):
    raise ValueError("no licence")


HERE = __name__


def score(spec, completion, **info):
    return normalise(load_reward(spec)("prompt", completion, info))


def test_a_weighted_sum_keeps_each_by_name():
    spec = {"gsm8k": 1.0, "regex:####": 0.1, f"{HERE}:graded": -0.01}
    found = score(spec, "#### 5", answer="#### 5")
    assert found == Score(
        pytest.approx(1 + 0.1 - 0.06), {"gsm8k": 1, "regex": 1, "graded": 6, "correct": 1, "format": 1}, ""
    )
    wrong = score(spec, "#### 6", answer="#### 5")
    assert wrong.value == pytest.approx(0.1 - 0.06) and wrong.parts["correct"] == 0 and wrong.parts["format"] == 1


def test_parts_are_named_apart_only_where_they_would_be_the_same():
    found = score({"gsm8k": 1, f"{HERE}:style": 1.0, f"{HERE}:judged": 2}, "#### 5", answer="#### 5")
    assert found.value == 1 + 0.6 + 1
    assert found.parts == {
        **{"gsm8k": 1, "style": 0.6, "judged": 0.5, "words": 2},
        **{"gsm8k/correct": 1, "judged/correct": 0.25, "gsm8k/format": 1, "style/format": 0.5},
    }
    alone = score({"gsm8k:0.5": 3}, "#### 6", answer="#### 5")
    assert alone == Score(1.5, {"gsm8k": 0.5, "correct": 0, "format": 1}, "")


def test_a_part_that_is_called_as_a_member_is():
    def exact(prompt, completion, info):
        return {"reward": 1.0, "regex": 0.5}

    one = Weighted({"regex:a": 1.0})
    one.members.append(("mine", exact, 1.0))
    assert one("", "a", {}).parts == {"regex": 1.0, "mine": 1.0, "mine/regex": 0.5}


@pytest.mark.parametrize("spec, completion", [("exact", "yes"), ("addition", "7")])
def test_what_is_right_or_wrong_by_nature_is_the_accuracy(spec, completion):
    for said, right in ((completion, 1), ("no", 0)):
        found = score({spec: 2.0, "regex:^.": 0.5}, said, answer=completion)
        assert found == Score(2 * right + 0.5, {spec: right, "regex": 1, "correct": right}, "")


def test_two_of_a_name_go_by_their_whole_names():
    found = score({"regex:a": 1, "regex:b": 10}, "b")
    assert found == Score(10, {"regex:a": 0, "regex:b": 1}, "")


def test_missing_if_any_is_missing_and_it_is_named():
    assert score({"regex:a": 1, f"{HERE}:gone": 1}, "a") == Score(None, {}, "gone: returned None")
    with pytest.raises(ValueError, match="no licence") as error:
        score({"regex:a": 1, f"{HERE}:failing": 1}, "a")
    assert functions.describe(error.value).endswith("(in reward failing)")


def huge(prompt, completion, info):
    return 1e308


def test_a_member_that_is_too_large_is_named_and_makes_the_sum_missing():
    for others in ({}, {f"{HERE}:graded": 1}):
        value, parts, reason = score({f"{HERE}:huge": 1e-300, **others}, "")
        assert (value, parts) == (None, {}) and reason.startswith("huge: returned 1e+308, more than")


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=6))
def test_the_sum_is_that_of_the_products(pairs):
    one = Weighted({"regex:a": 1.0})
    one.members = [(f"m{i}", lambda p, c, info, v=value: v, weight) for i, (value, weight) in enumerate(pairs)]
    found = one("", "", {})
    assert found.value == pytest.approx(math.fsum(v * w for v, w in pairs), abs=1e-9)
    assert found.parts == {f"m{i}": value for i, (value, _) in enumerate(pairs)}


def test_a_nan_part_stays_nan():
    found = score({f"{HERE}:nan_part": 1}, "a")
    assert found.value == 1 and math.isnan(found.parts["doubt"])


def nan_part(prompt, completion, info):
    return {"reward": 1, "doubt": None}


@pytest.mark.parametrize(
    "spec, key",
    [
        ({}, "reward.function"),
        ({"gsm8k": math.inf}, "reward.function.gsm8k"),
        ({"gsm8k": "1"}, "reward.function.gsm8k"),
        ({"gsm8k": True}, "reward.function.gsm8k"),
        ({"gsm8k": 1, "gsm9k": 1}, "gsm9k"),
    ],
)
def test_a_table_that_is_none(spec, key):
    with raises(RewardError, key):
        load_reward(spec)


# ---- given answers ----


class Record:
    def __init__(self, index, text, **info):
        self.index, self.text, self.info = index, text, info


def records(*answers):
    return [Record(i, f"question {i}?", answer=a) for i, a in enumerate(answers)]


def test_answers_that_can_be_judged_pass():
    check_answers("gsm8k", records("#### 1", "so\n#### 2", "3"))
    check_answers({"gsm8k": 1.0, "regex:x": 0.1, "nowhere.py:f": 1.0}, records("#### 1"))
    check_answers("nowhere.py:f", records(None))  # only its own process imports a file
    check_answers(graded, records(None))
    check_answers("countdown", [Record(0, "1,2=3:")])


@pytest.mark.parametrize(
    "spec", ["gsm8k", "gsm8k:0.1", {"regex:x": 0.1, "gsm8k": 1.0}, load_reward("gsm8k"), load_reward({"gsm8k": 1.0})]
)
def test_the_record_with_a_bad_answer_is_named(spec):
    with pytest.raises(DataError) as error:
        check_answers(spec, records("#### 1", "I do not know " * 9, "#### 2"))
    said = str(error.value)
    assert said.startswith("record 2 of the data (prompt 'question 1?'): ") and "the answer has no number" in said
    assert said.endswith("its answer begins " + repr(("I do not know " * 9)[:60])) and "\n" not in said


def test_a_record_without_answer_or_with_another_mistake():
    for spec, record, found in (
        ("exact", Record(0, "q"), "record 1 of the data (prompt 'q'): "),
        ("countdown", Record(0, "make 5 of 2 and 3"), "columns numbers"),
        ("countdown", Record(0, "2,3=5:", answer="2*3"), "5 of 2, 3; its answer begins '2*3'"),
    ):
        with raises(DataError, "answer") as caught:
            check_answers(spec, [record])
        assert found in str(caught.value)


def test_a_function_of_ones_own_may_check_too():
    class Mine:
        def __call__(self, prompt, completion, info):
            return 1.0

        def check(self, info):
            return "" if info["prompt"].endswith("?") else "that is no question"

    check_answers(Mine(), [Record(0, "why?")])
    with raises(DataError, "answer") as caught:
        check_answers(Mine(), [Record(0, "because")])
    assert "that is no question" in str(caught.value)


def test_all_names_are_in_the_list():
    assert {s.partition(":")[0] for s in verifier_specs()} == {
        "addition",
        "calculator",
        "https",
        "json",
        "math_equal",
        "code_sandbox",
        "retrieval",
        "unit_tests",
        "word_game",
        "countdown",
        "sorting",
        "chain",
        "flaws",
        "exact",
        "gsm8k",
        "regex",
    }


@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=2, max_size=64))
def test_fp32_can_work_with_whatever_is_a_reward(values):
    assert all(normalise(value) == (value, {}, "") for value in values)
    column = np.array(values, np.float32)
    with np.errstate(over="raise"):
        assert np.isfinite(np.square(column[:, None] - column[None]).sum(1, dtype=np.float32)).all()


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_part_is_a_number_that_fp32_can_work_with_or_none(value):
    (part,) = normalise({"reward": 1.0, "part": value}).parts.values()
    assert part == value if abs(value) <= LARGEST else math.isnan(part)


@pytest.mark.parametrize("weight", [1e300, -1e300, 2.0])
def test_a_weighted_sum_that_is_too_large_is_missing(weight):
    value, parts, reason = load_reward({"regex:b": weight})("a", "b", {})
    assert (value, parts) == ((2.0, {"regex": 1.0}) if weight == 2.0 else (None, {}))
    assert bool(reason) == (value is None) and (not reason or "weighted sum" in reason)


def test_a_missing_answer_names_the_column_to_take_it_from():
    with raises(DataError, "answer") as caught:
        check_answers("exact", [Record(0, "1+1=", target="2")])
    assert "data.columns.answer=target" in str(caught.value)


@pytest.mark.parametrize("text", ["from other import *", "def __getattr__(name): ...", "globals()['sc' + 'ore'] = len"])
def test_a_function_that_code_may_make_is_left_to_its_import(tmp_path, text):
    file = tmp_path / "mine.py"
    file.write_text(text)
    check_place(f"{file}:score")
    file.write_text("def other(prompt, completion, info): ...")
    with raises(RewardError, "mine.py:score"):
        check_place(f"{file}:score")
