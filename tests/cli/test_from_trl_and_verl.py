"""The page for those who come from elsewhere names keys that exist, and its recipes are recipes."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import tilth.rl as rl
from tilth.config.keys import keys, sections
from tilth.config.load import from_dict
from tilth.config.schema import Data, Recipe
from tilth.data.prompts import load_source
from tilth.flows.checks import check_algorithm
from tilth.rl.rewards import check_answers, load_reward

PAGE = (Path(__file__).parents[2] / "docs" / "from-trl-and-verl.md").read_text()
RECIPES = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
PROSE = re.sub(r"```.*?```", "", PAGE, flags=re.S)
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PROSE.splitlines()
    if line.startswith("| ") and not line.startswith(("| TRL ", "| verl "))
]
TICKED = re.compile(r"`([^`]+)`")
THEIRS = {name for row in ROWS for name in TICKED.findall(row[0])}
NAMES = {name for kind in rl.names().values() for name in kind}


def unknown(text, allowed=frozenset()):
    """Ticked names that look like keys of ours and are none."""
    ours = re.compile(rf"({'|'.join(sections())})\.\w+")
    return [n for n in TICKED.findall(text) if ours.fullmatch(n) and n not in keys() and n not in allowed]


def test_every_row_has_three_cells():
    assert len(ROWS) > 80 and {len(row) for row in ROWS} <= {2, 3}  # the last may be empty


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_the_keys_of_a_row_exist(row):
    named = TICKED.findall(row[1])
    assert named or row[1] == "–"
    for name in named:
        assert name in keys() or name in NAMES, name


def test_keys_in_prose_exist():
    assert not unknown(PROSE, THEIRS | {"rollout.n"})


def test_a_wrong_key_would_be_seen():
    assert unknown("`rollout.grup` and `rollout.group`") == ["rollout.grup"]


def test_defaults_that_are_named_are_the_schema_s():
    """As in ``optimizer.lr`` (1e-4)."""
    told = {}
    for row in ROWS:
        told.update(re.findall(r"`([\w.]+)` \(([^)]+)\)", row[1]))
    recipe = Recipe().model_dump()
    checked = 0
    for name, value in told.items():
        if name in NAMES:
            continue
        section, key = name.split(".")
        default = recipe[section][key]
        if isinstance(default, tuple):
            assert ", ".join(map(str, default)) == value
        elif isinstance(default, bool):
            assert str(default).lower() == value
        else:
            assert default == value or float(value) == default, name
        checked += 1
    assert checked >= 10


def test_names_of_estimators_and_aggregations_exist():
    for row in ROWS:
        for value in re.findall(r"= `([\w-]+)`", row[1]):
            assert value in NAMES


@pytest.mark.parametrize("text", RECIPES)
def test_its_recipes_are_recipes(text):
    recipe = from_dict(tomllib.loads(text))
    check_algorithm(recipe)
    load_reward(recipe.reward.function)
    assert recipe.model.context >= recipe.rollout.max_tokens * 1.4


def test_the_arithmetic_of_batches():
    trl, verl = (from_dict(tomllib.loads(text)) for text in RECIPES)
    assert trl.rollout.prompts * trl.rollout.group == 16 * 8 and trl.algorithm.minibatches == 1
    assert verl.rollout.prompts == 1024 and verl.rollout.prompts // verl.algorithm.minibatches == 256


def test_verl_s_own_records_are_read(tmp_path):
    record = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many are 40 and 32?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0},
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    columns = tomllib.loads(RECIPES[1])["data"]["columns"]
    prompts = load_source(Data(source=str(tmp_path / "train.jsonl"), columns=columns))
    assert dict(prompts[0].messages[0])["content"] == "How many are 40 and 32?"
    assert prompts[0].info["answer"] == "72"
    check_answers("gsm8k", prompts)
    scored = load_reward("gsm8k")("", "so #### 72", prompts[0].info)
    assert scored["correct"] == 1.0
