"""The page for those who come from elsewhere names keys that exist, and its recipes are recipes."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import tilth.rl as rl
from tilth.config.errors import RecipeError
from tilth.config.keys import keys, sections
from tilth.config.load import LIBRARIES, from_dict, load_recipe
from tilth.config.schema import DataConfig, Recipe
from tilth.data.prompts import load_source
from tilth.launch.checks import check_algorithm
from tilth.rewards.functions import check_answers, load_reward

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


def of_rows():
    """Their library and names, and our keys, of each row; a value (``loss_type="dapo"``) is of its key's name."""
    rows = []
    for library, part in zip(("TRL", "TRL", "TRL", "verl"), re.split(r"^## (?=TRL: |verl$)", PROSE, flags=re.M)[1:]):
        for row in (row for row in ROWS if f"| {' | '.join(row)} |".replace("  ", " ") in part.replace("  ", " ")):
            theirs = [name.partition("=")[0] for name in TICKED.findall(row[0]) if not name.startswith('"')]
            rows.append((library, theirs, {name for name in TICKED.findall(row[1]) if name in keys()}))
    return rows


def test_the_table_says_what_the_page_says_and_the_page_what_the_table_says():
    rows = of_rows()
    assert len(rows) == len(ROWS)
    for library, table in LIBRARIES.items():
        own = [(theirs, ours) for where, theirs, ours in rows if where == library]
        assert set(table) == {name for theirs, _ in own for name in theirs}
        for theirs, ours in own:
            said = {key for name in theirs for key in table[name].split(", ") if key}
            assert not theirs or ours <= said, theirs
        for name, said in table.items():
            there = set().union(*(ours for theirs, ours in own if name in theirs))
            assert set(filter(None, said.split(", "))) <= there, name


def answer(*overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe("addition-grpo", overrides)
    return str(error.value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_of_their_names_is_answered_with_ours(library):
    for name, said in LIBRARIES[library].items():
        typed = name.replace("*", "gpu_memory_utilization")
        if typed in keys():
            continue
        message = answer(f"{typed}=1")
        assert typed in message and "\n" not in message
        if typed in sections():
            continue
        assert library in message, message
        assert all(key in message for key in said.split(", ")), message


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("learning_rate=1e-6", "optimizer.lr"),
        ("optimizer.learning_rate=1e-6", "optimizer.lr"),
        ("rollout.n=5", "rollout.group"),
        ("rollout.num_generations=5", "rollout.group"),
        ("train_batch_size=5", "rollout.prompts"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_coef"),
        ("reward_model.overlong_buffer.len=9", "algorithm.overlong_buffer"),
        ("actor_rollout_ref.rollout.n=5", "rollout.group"),
        ("actor_rollout_ref={rollout = {n = 5}}", "rollout.group"),
        ("beta=0.1", "algorithm.kl_coef"),
        ("beta=0.1", "preference.beta"),
    ],
)
def test_names_of_theirs_in_any_form(typed, ours):
    assert ours in answer(typed)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [("rollout.grup=3", "rollout.group"), ("reward_model.pol=a", "reward_model.pool"),
     ("rollout.path=x", "rollout.draft.path"), ("algorithm.temperature=1", "rollout.temperature")],
)  # fmt: skip
def test_a_mistyped_key_of_ours_is_answered_as_such(typed, ours):
    message = answer(typed)
    assert ours in message and "TRL" not in message and "verl" not in message


def test_from_python_too():
    with pytest.raises(RecipeError) as caught:
        from_dict({"learning_rate": 1e-6})
    assert "learning_rate" in str(caught.value)


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
    prompts = load_source(DataConfig(source=str(tmp_path / "train.jsonl"), columns=columns))
    assert dict(prompts[0].messages[0])["content"] == "How many are 40 and 32?"
    assert prompts[0].info["answer"] == "72"
    check_answers("gsm8k", prompts)
    scored = load_reward("gsm8k")("", "so #### 72", prompts[0].info)
    assert scored["correct"] == 1.0
