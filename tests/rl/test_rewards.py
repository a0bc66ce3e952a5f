"""Loading reward functions and reading their results: what is wrong is named, what is no number is missing."""

import math
import re
import sys
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch

from tilth.core.errors import RewardError
from tilth.rl import rewards
from tilth.rl.rewards import load_reward, normalise


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
    "spec, message",
    [
        ("additon", "did you mean 'addition'"),
        ("", "give FILE.py:function or module:function"),
        ("my_rewards.py", "give FILE.py:function"),
        ("my_reward.py:brevity", "no file .*my_reward.py; did you mean 'my_rewards.py'"),
        ("nowhere/x.py:f", "no file .*nowhere/x.py"),
        ("my_rewards.py:brevty", "has no 'brevty'; did you mean 'brevity'"),
        ("my_rewards.py:zzz", "has no 'zzz'; there are accuracy, brevity"),
        ("neighbour.py:f", "has no 'f'; it has no function"),
        ("my_rewards.py:CONSTANT", "is a int, not a function"),
        ("broken.py:f", "importing .*broken.py failed: ValueError: no licence at broken.py:2"),
        ("leaves.py:f", "importing .*leaves.py failed: SystemExit: 3"),
        ("broken:f", "importing broken failed: ValueError: no licence"),
        ("no_such_package.sub:f", "no module 'no_such_package'"),
        ("math:nothing", "math has no 'nothing'"),
        (f"{__name__}:NUMBER", "is a int, not a function"),
        (f"{__name__}:too_few", "must take .prompt, completion, info.: too many positional"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, spec, message):
    with pytest.raises(RewardError, match=message) as error:
        load_reward(spec)
    assert "\n" not in str(error.value) and repr(spec) in str(error.value)


def test_a_callable_with_the_wrong_arguments():
    with pytest.raises(RewardError, match="'too_few' must take"):
        load_reward(too_few)


def test_describe_is_one_short_line():
    try:
        raise ValueError("a\nb" * 500)
    except ValueError as error:
        text = rewards.describe(error)
    assert "\n" not in text and len(text) < 320 and "test_rewards.py:" in text
    assert rewards.describe(KeyError()) == "KeyError"
