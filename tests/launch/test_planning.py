"""``cluster.search``: a run takes the pools and layouts that the search finds, and goes on with them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.errors import raises
from tilth.api import run_recipe
from tilth.config.load import from_dict, load_recipe
from tilth.core.errors import DataError, RecipeError
from tilth.core.media import MediaItem
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.launch import planning
from tilth.launch.build import prompt_checks
from tilth.plan.devices import DEVICES
from tilth.plan.search import policy_options

SMALL = {
    "flow": "sft",
    "model": {"hidden": 32, "layers": 2, "heads": 2, "context": 64},
    "data": {"digits": 1},
    "supervised": {"steps": 2, "batch": 8},
    "train": {"device": "cpu", "threads": 1},
    "optimizer": {"name": "adamw"},
}
REWARD = {"function": "exact"}


def recipe_in(folder, **cluster):
    run = {"dir": str(folder), "eval_prompts": 4}
    return from_dict({**SMALL, "run": run, "cluster": cluster})


def test_a_run_records_what_the_search_found_and_the_same_command_finds_the_same(tmp_path):
    recipe, note = planning.with_found_layouts(recipe_in(tmp_path, backend="local", workers=2, search=True))
    assert note.startswith("cluster.search: ") and not recipe.cluster.search
    assert planning.with_found_layouts(recipe_in(tmp_path, backend="local", workers=2, search=True))[0] == recipe
    assert sum(recipe.cluster.pools.values()) in (0, 2) and recipe.cluster.workers == 2


def test_the_search_knows_the_lengths_of_given_answers_and_divides_the_longest(tmp_path):
    rows = [{"prompt": "a", "answer": "b" * (3900 if i % 8 == 0 else 15)} for i in range(64)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, train = {"source": str(tmp_path / "long.jsonl")}, {**SMALL["train"], "micro_tokens": 2048}
    given = {**SMALL, "data": data, "train": train, "model": {**SMALL["model"], "context": 4096}}
    recipe = from_dict({**given, "cluster": {"backend": "local", "workers": 2, "search": True}})
    lengths = planning.sequence_lengths(recipe)
    assert len(lengths) == 64 and (lengths > 3900).sum() == 8
    found = planning.searched(recipe, DEVICES["cpu"], 2, whole=True).given
    assert any(option.layout.hdp == 2 for option in policy_options(found))


def test_the_search_knows_the_longest_given_answer_of_a_warm_up(tmp_path):
    answers = [{"prompt": "a", "answer": "b" * (9 if i else 700)} for i in range(16)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    given = {**SMALL, "flow": "grpo", "data": {"source": str(tmp_path / "d.jsonl")}, "reward": REWARD}
    given |= {"model": {**SMALL["model"], "context": 1000}, "train": {**SMALL["train"], "micro_tokens": 512}}
    assert planning.sequence_lengths(from_dict(given)).max() > 700
    assert planning.sequence_lengths(from_dict({**given, "supervised": {"steps": 0}})).max() < 700


LONG = [{"prompt": f"{i:02}" + "a" * (800 if i % 8 == 7 else 1), "chosen": "c" * i, "rejected": "d"} for i in range(32)]
WRITTEN = [{"text": "ab" * (800 if i % 8 == 7 else 8)} for i in range(32)]


def lengths_of(folder, records, **given):
    """Lengths that the search knows, and the layouts of two workers that it tries, of ranks that hold 512 tokens."""
    (folder / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train = {**SMALL["train"], "micro_tokens": 512}
    model, cluster = {**SMALL["model"], "context": 1000}, {"backend": "local", "workers": 2, "search": True}
    common = {
        **SMALL,
        "data": {"source": str(folder / "d.jsonl"), "holdout": 0},
        "train": train,
        "model": model,
        "cluster": cluster,
    }
    recipe = from_dict({**common, **given, "data": {**common["data"], **given.get("data", {})}})
    found = planning.searched(recipe, DEVICES["cpu"], 2, whole=True).given
    return found.lengths, [option.layout for option in policy_options(found)]


def test_the_search_divides_the_longest_of_pairs_documents_and_rollouts(tmp_path):
    pairs, layouts = lengths_of(tmp_path, LONG, flow="dpo")
    long = np.array([2 + (800 if i % 8 == 7 else 1) for i in range(32)])
    assert pairs[::2].tolist() == (long + np.arange(32) + 1).tolist() and pairs[1::2].tolist() == (long + 2).tolist()
    assert any(layout.hdp == 2 for layout in layouts)
    pieces, layouts = lengths_of(tmp_path, WRITTEN, flow="pretrain")
    assert pieces.tolist() == ([17] * 7 + [1000, 601]) * 4 and any(layout.hdp == 2 for layout in layouts)
    sampled, layouts = lengths_of(tmp_path, LONG, flow="grpo", rollout={"max_tokens": 100, "group": 2}, reward=REWARD)
    assert sampled.tolist() == np.repeat(long + 100, 2).tolist() and any(layout.hdp == 2 for layout in layouts)


def test_the_search_divides_nothing_where_the_run_would_refuse_it(tmp_path):
    alone, layouts = lengths_of(tmp_path, WRITTEN, flow="pretrain", data={"packing": "none"})
    assert alone.max() == 1000 and not any(layout.hdp > 1 for layout in layouts)
    model = {**SMALL["model"], "context": 1100}  # of two ranks with 512 tokens each
    pieces, layouts = lengths_of(tmp_path, [{"text": "a" * 800}], flow="pretrain", model=model)
    assert pieces.tolist() == [801] and layouts and not any(layout.hdp > 1 for layout in layouts)


def test_the_search_measures_with_a_tokenizer_as_the_run_will_train(tmp_path):
    for flow, records in {"sft": [{"prompt": r["text"], "answer": "b"} for r in WRITTEN], "pretrain": WRITTEN}.items():
        plain, _ = lengths_of(tmp_path, records, flow=flow)
        merged, _ = lengths_of(tmp_path, records, flow=flow, data={"tokenizer": "bpe:300"})
        assert plain.max() == 1000 if flow == "pretrain" else plain.max() == 1602
        assert 1 < merged.max() < 500


@pytest.mark.parametrize("flow", ["sft", "dpo", "grpo"])
def test_the_search_divides_nothing_where_a_sequence_outside_of_its_sample_is_too_long(tmp_path, monkeypatch, flow):
    """Two ranks hold 1,024 tokens: of characters of four bytes 600 make the longest text, and 1,500 others the most
    tokens."""
    monkeypatch.setattr(planning, "SAMPLED", 4)
    sides, count = {"dpo": (["rejected", "chosen"], 10), "grpo": (["answer"], 5 * 2 + 1)}.get(flow, (["answer"], 5))
    long = {6: "\U00010348" * 600, 13: "b" * 1500}
    records = [{"prompt": f"{i:02}", **dict.fromkeys(sides, "c"), sides[0]: long.get(i, "b")} for i in range(32)]
    how = {"flow": flow, "model": {**SMALL["model"], "context": 1600}, "supervised": {"steps": 2, "batch": 1}}
    how |= {"reward": REWARD, "rollout": {"prompts": 2, "group": 2, "max_tokens": 4}} if flow == "grpo" else {}
    lengths, layouts = lengths_of(tmp_path, records, **how)
    assert lengths.max() == lengths[-1] == 1503 and layouts and not any(layout.hdp > 1 for layout in layouts)
    records[13][sides[0]] = "b"
    lengths, layouts = lengths_of(tmp_path, records, **how)
    assert lengths.max() == 603 and len(lengths) == count and any(layout.hdp == 2 for layout in layouts)


def test_the_search_leaves_out_held_out_answers_that_no_warm_up_learns_from(tmp_path):
    records = [{"prompt": f"{i:02}", "answer": "b"} for i in range(8)]
    held = [{"prompt": "p"}, {"prompt": "q", "answer": "b" * 700}]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(record) + "\n" for record in held))
    how = {"reward": REWARD, "rollout": {"prompts": 2, "group": 2, "max_tokens": 4}}
    lengths, _ = lengths_of(tmp_path, records, flow="grpo", data={"heldout": str(tmp_path / "held.jsonl")}, **how)
    assert lengths.max() < 100


def test_the_longest_text_is_among_those_that_the_search_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "SAMPLED", 4)
    records = [{"prompt": "a", "answer": "b" * (700 if i == 6 else 1)} for i in range(32)]
    lengths, _ = lengths_of(tmp_path, records)
    assert len(lengths) == 5 and lengths.max() > 700


@pytest.mark.slow
def test_a_run_with_the_search(tmp_path):
    result = run_recipe(recipe_in(tmp_path, search=True), name="found")
    written = load_recipe(str(result.directory / "recipe.toml"))
    assert not written.cluster.search and written.policy.layout.dp == 1
    assert "cluster.search: policy" in (result.directory / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_on_two_workers_with_the_search(tmp_path):
    result = run_recipe(recipe_in(tmp_path, backend="local", workers=2, search=True), name="found")
    written = load_recipe(str(result.directory / "recipe.toml"))
    sizes, pools = written.policy.layout, written.cluster.pools
    assert sizes.dp * sizes.fsdp * sizes.tp == 2 or sum(pools.values()) == 2
    assert result.summary["steps"] == 2


def test_a_short_profile_measures_compute_memory_and_gloo():
    recipe = from_dict(SMALL)
    found, base = planning.chosen_device("here", recipe, 2), planning.published(recipe, 2)
    assert "gloo measured" in found.source and found.memory == base.memory
    for name in ("hop", "far", "intra", "inter", "memory_bandwidth"):
        assert 0 < getattr(found, name) != getattr(base, name), name
    assert set(found.flops.values()) != set(base.flops.values()) and found.bandwidth(range(2)) < 1e12


def test_a_gpu_is_known_by_its_name_and_has_its_own_memory(monkeypatch):
    recipe = from_dict({**SMALL, "train": {"device": "cuda"}})
    with raises(RecipeError, "cluster.search.device"):
        planning.published(recipe, 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: SimpleNamespace(total_memory=84_987_740_160))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: "NVIDIA A100-SXM4-80GB")
    found = planning.published(recipe, 1)
    assert (found.name, found.memory) == ("a100-80g", 84_987_740_160)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i: "Voodoo 2")
    with raises(RecipeError, "cluster.search.device"):
        planning.published(recipe, 1)


def checks_of(records, **keys):
    recipe = from_dict({"data": {"holdout": 0.5}, **keys})
    return prompt_checks(
        recipe, PromptSet.of(records), make_template("", Tokenizer.characters("0123456789=")), generates=True
    )


def test_media_have_places_in_their_prompts_and_flows_that_leave_them_out_refuse_them():
    item = MediaItem("eye", 0, 1, b"1")
    records = [{"prompt": f"{i}=", "answer": "1", "media": [item]} for i in range(20)]
    assert [check() for check in checks_of(records)]
    with raises(DataError, "media.0"):
        [check() for check in checks_of([{**records[0], "media": [item._replace(start=2)]}, *records])]
    for keys in ({"flow": "dpo", "supervised": {"steps": 1}}, {"rollout": {"environment": "calculator"}}):
        with raises(DataError, "data.media"):
            next(checks_of(records, **keys))
