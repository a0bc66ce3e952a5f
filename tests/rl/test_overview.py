"""The table of algorithms: what the recipes of the flows have, current in the documents, with what plugins declare."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tilth.cli.main import app
from tilth.config.flows import FLOWS
from tilth.config.load import load_recipe, names
from tilth.core.errors import RecipeError
from tilth.rl.overview import COLUMNS, overview, reference, row

MINE = """
import tilth

@tilth.advantage("mine_first")
def mine_first(rewards, groups): return rewards

@tilth.flow("mine_flow", title="Mine", defaults={"algorithm": {"advantage": "mine_first", "loss": "gspo"}})
def mine_flow(run): pass
"""


def run(*words):
    found = CliRunner().invoke(app, ["algorithms", *words])
    return found.exit_code, found.output


def test_the_table_of_the_page_is_current():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (part,) = re.findall(r"<!-- python -m tilth.rl.overview -->\n(.*?)<!-- end -->", page, re.S)
    assert part == reference(), "put what python -m tilth.rl.overview prints between the two comments"


@pytest.mark.parametrize("name", names())
def test_shipped_recipes_differ_from_the_table_only_where_they_say_so(name):
    recipe = load_recipe(name)
    facts = overview([recipe.flow])[recipe.flow]
    said = recipe.algorithm.model_fields_set
    for key in (key for key in facts if key in type(recipe.algorithm).model_fields):
        if key not in said and key not in ("aggregation", "drop_flat") and facts[key] not in (None, "likelihood"):
            if recipe.flow_spec.samples and not (said & {"advantage", "loss"}):
                assert facts[key] == (getattr(recipe.algorithm, key) or facts[key]), key


def test_everything_is_listed_and_of_several_only_what_differs():
    code, out = run()
    assert code == 0 and all(f"\n{flow} " in out or flow in out.split() for flow in FLOWS)
    code, out = run("dapo", "grpo")
    assert code == 0 and "refill" in out and "gamma" not in out and "aggregation" not in out
    assert json.loads(run("dapo", "--json")[1])["algorithms"]["dapo"]["clip_high"] == 0.28


def test_json_has_every_key_for_every_flow_and_the_words_follow_from_it():
    code, out = run("--json")
    found = json.loads(out)
    assert code == 0 and list(found["algorithms"]) == list(FLOWS)
    assert len({tuple(facts) for facts in found["algorithms"].values()}) == 1
    assert set(found["entries"]) >= {"advantages", "losses", "aggregations", "kl"}
    for facts in found["algorithms"].values():
        words = row(facts)
        assert tuple(words) == COLUMNS and (words["critic"] == "yes") == facts["critic"]


def test_overrides_hold_for_each(tmp_path):
    found = overview(["dapo", "grpo"], {"algorithm": {"loss": "gspo", "kl_coef": 0.1}})
    assert {facts["loss"] for facts in found.values()} == {"gspo"}
    assert found["grpo"]["clip_low"] == 3e-4 and found["grpo"]["aggregation"] == "seq-mean-token-mean"
    assert found["grpo"]["drop_flat"] is False and "off" not in row(found["grpo"])["KL"]


def test_what_a_plugin_declares_is_there_with_its_line(tmp_path):
    path = write(tmp_path, MINE)
    code, out = run(f'plugins=["{path}"]', "--json")
    found = json.loads(out)
    assert code == 0 and found["algorithms"]["mine_flow"]["advantage"] == "mine_first"
    assert (found["algorithms"]["mine_flow"]["loss"], found["algorithms"]["mine_flow"]["clip_low"]) == ("gspo", 3e-4)
    assert "mine_first (mine.py:4)" in found["entries"]["advantages"]


@pytest.mark.parametrize(
    ("words", "word"),
    [(["gro"], "grpo"), (["grpo", "algorithm.loss=gsp"], "gspo"), (["grpo", "algorithm.clip=1"], "clip")],
)
def test_a_wrong_name_ends_in_a_line(words, word):
    code, out = run(*words)
    assert code == 2 and word in out and out.count("\n") == 1


def test_a_flow_that_is_none_is_an_error_with_the_nearest():
    with raises(RecipeError, "flows"):
        overview(["dapoo"])
