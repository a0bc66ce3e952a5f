"""Commands about flows that learn from pairs: what a model will see, what stands where, what is said at the end."""

import json

import pytest

from tests.flows import tiny
from tilth.cli import data, layout
from tilth.cli.run import closing
from tilth.config.load import from_dict
from tilth.launch import data_view

FLOWS = ("dpo", "reward_model")


def recipe(folder, flow, **sections):
    return tiny.recipe(folder, flow=flow, **sections)


@pytest.mark.parametrize("flow", FLOWS)
def test_data_shows_both_answers_of_a_pair(tmp_path, flow):
    view = data_view.look(recipe(tmp_path, flow), 1)
    chosen, rejected = view.examples
    assert chosen.tokens[:4] == rejected.tokens[:4] and chosen.tokens != rejected.tokens
    assert chosen.mask == [0] * 4 + [1] * 3 and not view.problems
    assert view.lengths["chosen"].most == view.lengths["rejected"].most == 3
    assert any(line.startswith("rejected length least 3") for line in data.lines(view))


def test_data_says_what_would_stop_the_run(tmp_path):
    file = tmp_path / "pairs.jsonl"
    records = [{"prompt": f"Why {i}?", "chosen": "So.", "rejected": "No. " * (1 + 9 * (i == 7))} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, records)))
    given = {"source": str(file), "digits": 1, "holdout": 0.2}
    view = data_view.look(recipe(tmp_path, "reward_model", data=given, model={"context": 24}), 0)
    assert view.longer["example"] == 1
    assert any("pairs.jsonl:8, rejected with its answer has" in said for said in view.problems)


@pytest.mark.parametrize("flow, roles", [("dpo", {"reference", "rollout", "reward"}), ("reward_model", set())])
def test_layout_has_the_roles_of_the_flow(tmp_path, flow, roles):
    plan = layout.look(recipe(tmp_path, flow))
    assert set(plan.placed) == {"policy", "loader"} | roles
    items = {item.name for item in plan.workers[0].memory.items}
    assert ("reference model" in items) == (flow == "dpo")
    free = layout.look(recipe(tmp_path, flow, preference={"loss": "simpo"})) if flow == "dpo" else plan
    assert "reference" not in free.placed


def test_layout_counts_both_answers_and_a_reward_model(tmp_path):
    one, two = (layout.look(recipe(tmp_path, flow)) for flow in ("sft", "dpo"))
    rows = [layout.tokens_of_rank(plan.recipe, plan.placed["policy"], 1) for plan in (one, two)]
    assert rows[1] == 2 * rows[0]
    scores = tiny.run(recipe(tmp_path / "scores", "reward_model", supervised={"steps": 1}), reward=None)
    learned = layout.look(recipe(tmp_path, "grpo", reward={"model": str(scores.directory)}))
    assert "reward model" in {item.name for item in learned.workers[0].memory.items}


def test_at_the_end_a_reward_model_is_something_to_learn_from(tmp_path):
    made = from_dict({"flow": "reward_model", "supervised": {"steps": 1}})
    summary = {"steps": 4, "seconds": 2.0, "pairs_heldout_last": 0.75}
    said = "\n".join(closing(made, "reward-model", summary, tmp_path, tmp_path / "report.html"))
    assert "75.0 % of the held-out pairs" in said
    assert f"reward.model={tmp_path}@best" in said and "tilth generate" not in said
