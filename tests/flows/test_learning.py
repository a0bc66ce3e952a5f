"""The benchmark of learning curves: what is counted, how curves become verdicts, and what its variants are."""

import json
import math
import signal
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flows import tiny
from tests.scripts import SCRIPTS, script
from tilth.config.load import from_dict
from tilth.launch.checks import check_algorithm
from tilth.rewards.verifiers import builtin

sorting = builtin("sorting")
figures, runs, task, variants = (
    script(f"learning_{name}.py") for name in ("figures", "run", "task", "variants")
)  # fmt: skip


@pytest.fixture
def learning(monkeypatch):
    """The script itself, which finds those beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield script("learning.py")
    for name in set(sys.modules) - before:
        if name.startswith("learning_"):
            del sys.modules[name]


# ---- curves ----


def curves(ends=100.0):
    """(tokens, accuracy) of evaluations, the first at 0 and the last beyond ``ends``."""
    steps = st.lists(st.floats(0.5, 40.0), min_size=1, max_size=8)
    xs = steps.map(lambda gaps: [0.0, *np.cumsum(gaps).tolist(), sum(gaps) + ends])
    return xs.flatmap(lambda x: st.lists(st.floats(0, 1), min_size=len(x), max_size=len(x)).map(lambda y: [*zip(x, y)]))


@given(curves(), st.floats(0, 100))
def test_between_evaluations_it_is_numpys_line(points, tokens):
    xs, ys = zip(*points)
    assert figures.at(points, tokens) == pytest.approx(np.interp(tokens, xs, ys), abs=1e-12)


@pytest.mark.parametrize("tokens", [-1.0, 10.1])
def test_nothing_is_guessed_beyond_the_last_evaluation(tokens):
    with pytest.raises(ValueError, match="they go from 0 to 10"):
        figures.at([(0.0, 0.1), (10.0, 0.2)], tokens)


@given(curves())
def test_the_area_is_the_integral(points):
    xs, ys = zip(*points)
    places = np.union1d(np.linspace(0, 100, 101), [x for x in xs if x < 100])
    values = np.interp(places, xs, ys)
    expected = ((values[1:] + values[:-1]) / 2 * np.diff(places)).sum() / 100
    assert figures.area(points, 100.0) == pytest.approx(expected, abs=1e-9)


def test_what_comes_after_the_budget_does_not_matter():
    short, long = [(0.0, 0.0), (10.0, 1.0)], [(0.0, 0.0), (10.0, 1.0), (20.0, 0.0)]
    assert figures.area(short, 10.0) == figures.area(long, 10.0) == 0.5
    assert figures.area(long, 20.0) == 0.5 and figures.at(long, 20.0) == 0.0


def test_value_pre_training_counts_or_does_not():
    points = [(0.0, 0.0, 0.4), (30.0, 30.0, 0.4), (80.0, 30.0, 0.9)]
    assert figures.curve(points) == [(0.0, 0.4), (30.0, 0.4), (80.0, 0.9)]
    assert figures.curve(points, counted=False) == [(0.0, 0.4), (50.0, 0.9)]


def test_a_band_is_the_mean_and_the_range_over_seeds():
    band = figures.band([[(0.0, 0.0), (10.0, 1.0)], [(0.0, 0.0), (20.0, 1.0)]], 10.0, count=2)
    assert band == [(0.0, 0.0, 0.0, 0.0), (5.0, 0.375, 0.25, 0.5), (10.0, 0.75, 0.5, 1.0)]


# ---- verdicts ----


def spread(*values):
    return figures.Spread(values)


def test_a_difference_by_hand():
    """Variances 0.01 and 0.04, pooled 0.025; the error of a difference of two means of three is sqrt(0.025 * 2 / 3)."""
    found = figures.difference(spread(0.7, 0.8, 0.9), spread(0.3, 0.5, 0.7))
    assert found.value == pytest.approx(0.3)
    assert found.pooled == pytest.approx(math.sqrt(0.025))
    assert found.error == pytest.approx(math.sqrt(0.05 / 3))
    assert found.verdict == "better" and found.value / found.error == pytest.approx(2.3238, abs=1e-4)


@pytest.mark.parametrize(
    "value, said",
    [(0.201, "better"), (-0.201, "worse"), (0.199, "no difference"), (-0.199, "no difference"), (0, "no difference")],
)
def test_below_two_standard_errors_there_is_no_difference(value, said):
    assert figures.Difference(value, 0.1, 0.1).verdict == said


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_the_other_way_round_the_verdict_turns(mine, parent):
    turned = {"better": "worse", "worse": "better", "no difference": "no difference"}
    here, there = figures.difference(spread(*mine), spread(*parent)), figures.difference(spread(*parent), spread(*mine))
    assert turned[here.verdict] == there.verdict and here.pooled == pytest.approx(there.pooled)


def test_equal_runs_are_no_difference_and_one_seed_knows_nothing():
    assert figures.difference(spread(0.5, 0.5), spread(0.5, 0.5)).verdict == "no difference"
    assert figures.difference(spread(0.9), spread(0.1, 0.2)).verdict == "not known"


# ---- the table ----


def result(final, **changes):
    figures_of_a_run = dict.fromkeys(("value_tokens", "greedy_tokens", "dropped", "clipped"), 0.0)
    rest = {"wall_seconds": 20.0, "cpu_seconds": 15.0, "steps": 28, "tokens": 110.0}
    return {"points": [[0.0, 0.0, 0.4], [100.0, 0.0, final]], **figures_of_a_run, **rest, **changes}


PARENTS = {"GRPO": "", "DAPO": "GRPO", "ReMax": "GRPO"}


def some_runs():
    return {
        "GRPO": [result(0.50), result(0.52), result(0.54)],
        "DAPO": [result(0.80, dropped=0.48), result(0.82, dropped=0.5), result(0.84, dropped=0.52)],
        "ReMax": [result(0.51, greedy_tokens=55.0), result(0.53, greedy_tokens=55.0), result(0.52, greedy_tokens=55.0)],
    }


def test_a_table_compares_each_with_its_parent():
    plain, better, same = figures.table(some_runs(), PARENTS, 100.0)
    assert "difference" not in plain["final"]
    assert better["final"]["difference"] == pytest.approx(0.3) and better["final"]["verdict"] == "better"
    assert better["area"]["difference"] == pytest.approx(0.15) and better["area"]["verdict"] == "better"
    assert better["final"]["pooled"] == pytest.approx(0.02)
    assert (better["final"]["low"], better["final"]["high"]) == (0.80, 0.84)
    assert same["final"]["verdict"] == "no difference" and same["final"]["difference"] == pytest.approx(0, abs=1e-12)
    assert figures.elsewhere(better) == "50 % thrown away" and figures.elsewhere(same) == "50 % greedy"
    assert figures.elsewhere(plain) == "-"


def test_a_variant_whose_runs_failed_has_no_row_and_one_whose_parent_failed_no_verdict():
    rows = figures.table(some_runs() | {"GRPO": []}, PARENTS, 100.0)
    assert [row["title"] for row in rows] == ["DAPO", "ReMax"]
    assert all("verdict" not in row["final"] for row in rows)
    assert "better" not in figures.markdown(rows, PARENTS)


def test_the_table_is_markdown_and_its_rows_are_json():
    rows = figures.table(some_runs(), PARENTS, 100.0)
    lines = figures.markdown(rows, PARENTS).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + len(rows)
    assert "| DAPO | 82.0 ± 2.0 (80.0 to 84.0) |" in lines[3] and "+30.0 (seed 2.0): better" in lines[3]
    one = figures.table({name: some[:1] for name, some in some_runs().items()}, PARENTS, 100.0)
    assert json.loads(json.dumps(one, allow_nan=False))[1]["final"]["std"] is None
    assert "not known" in figures.markdown(one, PARENTS)


# ---- what a run counts ----


def record(phase, phase_step, generated, accuracy=None, **more):
    found = {"phase": phase, "phase_step": phase_step, "tokens/generated": generated, **more}
    return found if accuracy is None else {**found, runs.ACCURACY: accuracy}


RECORDS = [
    record("values", 1, 10, 0.4),
    record("values", 2, 10),
    record("vapo", 1, 7, 0.4, samples=8, **{"samples/trained": 8}),
    record("vapo", 2, 7, 0.6, samples=8, **{"samples/trained": 4}),
    record("vapo", 3, 7, 0.7, samples=8, clip_low=0.01, clip_high=0.03, **{"samples/trained": 6}),
]


def test_points_are_where_the_accuracy_was_measured():
    """The accuracy of a phase's first record is that before its first step."""
    assert runs.points(RECORDS) == [(0, 0, 0.4), (20, 20, 0.4), (34, 20, 0.6), (41, 20, 0.7)]


def test_greedy_answers_count_and_a_metric_that_is_missing_is_none():
    assert runs.tokens_of({"tokens/generated": 5.0, "tokens/baseline": 3.0}) == 8.0
    assert runs.tokens_of({"tokens/generated": None}) == 0.0


def test_totals_are_of_the_main_phase_but_for_tokens():
    found = runs.totals(RECORDS)
    assert (found["steps"], found["value_steps"], found["tokens"], found["value_tokens"]) == (3, 2, 41, 20)
    assert found["dropped"] == pytest.approx(1 - 18 / 24)
    assert found["clipped"] == pytest.approx(0.04) and runs.totals(RECORDS[:3])["clipped"] == 0


def test_a_run_stops_at_the_first_evaluation_after_its_budget(monkeypatch):
    struck = []
    monkeypatch.setattr(signal, "raise_signal", struck.append)
    budget = runs.Budget(10)
    for done, sent in zip(RECORDS, [0, 0, 0, 1, 2]):
        budget.on_step_end(None, 1, done)
        assert len(struck) == sent
    assert set(struck) == {signal.SIGINT}
    endless = runs.Budget(0)
    endless.on_step_end(None, 1, RECORDS[-1])
    assert len(struck) == 2


def test_the_greedy_answers_of_remax_are_counted_by_the_run(tmp_path):
    watcher = tiny.Recorder()
    settings = tiny.settings(tmp_path, flow="remax", supervised={"steps": 0}, algorithm={"steps": 2})
    settings["algorithm"] = {"steps": 2}
    settings["rollout"]["group"] = 1
    tiny.run(from_dict(settings), callbacks=[watcher])
    for done in watcher.records:
        assert 0 < done["tokens/baseline"] <= 6 * 4
        assert runs.tokens_of(done) == done["tokens/generated"] + done["tokens/baseline"]


# ---- the variants ----


def recipe_of(variant, folder=Path("nowhere")):
    return nested(task.base(task.Task(), folder) | variants.keys_of(variant, 1e-4))


def nested(keys):
    found = {}
    for name, value in keys.items():
        section, _, key = name.partition(".")
        if key:
            found.setdefault(section, {})[key] = value
        else:
            found[section] = value
    return from_dict(found)


@pytest.mark.parametrize("variant", variants.VARIANTS, ids=lambda v: v.slug)
def test_every_variant_is_a_recipe_whose_updates_are_equally_large(variant, tmp_path):
    made = recipe_of(variant, tmp_path)
    check_algorithm(made)
    how, rollout = made.algorithm, made.rollout
    assert rollout.prompts * rollout.group / how.minibatches == variants.SAMPLES / variants.UPDATES
    assert made.flow not in ("rloo", "remax") or how.minibatches == 1
    assert how.epochs == 1 and how.kl_coef == 0 and made.optimizer.schedule == "constant"
    assert made.run.eval_every >= 2, "an evaluation after the first step would replace the one before it"
    assert made.critic.lr == 2 * made.optimizer.lr


@pytest.mark.parametrize(
    "title, keys",
    [
        ("DAPO without clip-higher", {"algorithm.clip_high"}),
        ("DAPO without token mean", {"algorithm.aggregation"}),
        ("DAPO without dynamic sampling", {"algorithm.refill", "run.eval_every"}),
        ("DAPO without overlong shaping", {"algorithm.overlong_buffer"}),
        ("VAPO without value pre-training", {"critic.steps"}),
        ("VAPO without decoupled GAE", {"algorithm.options"}),
        ("VAPO without length-adaptive GAE", {"algorithm.options"}),
        ("VAPO without clip-higher", {"algorithm.clip_high"}),
        ("VAPO without token mean", {"algorithm.aggregation"}),
        ("VAPO without positive NLL", {"algorithm.nll_coef"}),
        ("VAPO without group sampling", {"rollout.group", "rollout.prompts"}),
    ],
)
def test_an_ablation_changes_one_thing(title, keys):
    known = {variant.title: variant for variant in variants.VARIANTS}
    mine, parent = recipe_of(known[title]), recipe_of(known[known[title].parent])
    changed = {
        f"{section}.{key}"
        for section, values in mine.dump().items()
        if isinstance(values, dict)
        for key, value in values.items()
        if value != parent.dump()[section][key]
    }
    assert changed == keys and mine.flow == parent.flow == title.split()[0].lower()


def test_no_ablation_is_left_out():
    ablations = [v for v in variants.VARIANTS if " without " in v.title]
    assert len(ablations) == 11 and len(variants.VARIANTS) == 19
    assert len({v.slug for v in variants.VARIANTS}) == 19
    assert {v.parent for v in variants.VARIANTS} == {"", "GRPO", "DAPO", "VAPO"}
    flows = {v.keys["flow"] for v in variants.VARIANTS}
    assert flows == {"grpo", "dapo", "ppo", "vapo", "rloo", "reinforce_pp", "remax"}


def test_some_variants_come_with_their_parents():
    found = variants.chosen(["vapo_without_clip-higher", "remax"])
    assert [v.title for v in found] == ["GRPO", "VAPO", "VAPO without clip-higher", "ReMax"]
    with pytest.raises(SystemExit, match=r"--only grop: no such variant; there are grpo, dapo"):
        variants.chosen(["grop"])


# ---- the task ----


SMALL = replace(task.QUICK, train=300, heldout=50)


@pytest.mark.parametrize("of", [SMALL, replace(task.Task(), train=300, heldout=50)], ids=["quick", "whole"])
def test_what_is_held_out_is_not_trained_on_and_every_answer_is_right_and_fits(of, tmp_path):
    task.write(of, tmp_path)
    train, held = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    assert (len(train), len(held)) == (300, 50)
    assert len({r["prompt"] for r in train + held}) == 350
    for asked in train + held:
        assert sorting(asked["prompt"], asked["answer"], asked)["correct"] == 1
        assert len(asked["answer"]) + 1 <= of.longest
    sizes = {asked["answer"].count(",") + 1 for asked in train}
    assert sizes == set(range(of.lists[0], of.lists[1] + 1))


def test_the_data_are_the_same_every_time():
    assert task.lists(SMALL, 40) == task.lists(SMALL, 60)[:40]


def test_the_longest_right_answers_are_in_the_overlong_buffer():
    """Otherwise overlong shaping would have nothing to do on this task."""
    whole = task.Task()
    right = whole.lists[1] * 2 + whole.lists[1]
    assert 0.8 * whole.longest < right < whole.longest


def test_the_warm_up_is_a_recipe(tmp_path):
    made = nested(task.warm_up(task.Task(), tmp_path))
    assert made.flow == "sft" and made.run.name == task.WARM and made.supervised.until < 1


# ---- the script ----


def test_a_run_is_kept_only_if_it_is_the_very_same(learning, tmp_path):
    found, keys = tmp_path / "r.json", {"seed": 1, "rollout.stop": ("a",)}
    assert not learning.kept(found, keys, 10)
    found.write_text(json.dumps({"keys": keys, "budget": 10.0}))
    assert learning.kept(found, keys, 10)
    assert not learning.kept(found, keys | {"seed": 2}, 10) and not learning.kept(found, keys, 11)


def test_a_run_that_fails_says_so_and_how_to_run_it_again(learning, tmp_path):
    with pytest.raises(RuntimeError, match=r"odd failed: .*flow.*\n  again: .*learning_run.py"):
        learning.run(tmp_path, "odd", {"flow": "grop"}, 10)


def test_quick_is_a_part_of_the_whole(learning, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["learning.py", "--quick"])
    quick = learning.planned(learning.options(), tmp_path)
    monkeypatch.setattr(sys, "argv", ["learning.py"])
    whole = learning.planned(learning.options(), tmp_path)
    assert [v.title for v in quick.variants] == list(variants.QUICK) and len(quick.seeds) == 1
    assert len(whole.variants) == 19 and whole.seeds == (0, 1, 2) and whole.budget > quick.budget


def test_tables_and_picture_of_whatever_runs_there_are(learning, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["learning.py", "--seeds", "2"])
    plan = replace(learning.planned(learning.options(), tmp_path), budget=100)
    values = {"value_tokens": 30.0, "points": [[0, 0, 0.4], [30, 30, 0.4], [150, 30, 0.9]]}
    made = [
        {
            "title": v.title,
            "seed": seed,
            **result(0.5 + 0.01 * i + 0.001 * seed),
            **(values if "VAPO" in v.title else {}),
        }
        for i, v in enumerate(plan.variants)
        for seed in plan.seeds
    ]
    made[0] = {"title": "GRPO", "seed": 0, "error": "went wrong"}
    found = learning.tell(plan, made)
    said = capsys.readouterr().out
    assert len(found["rows"]) == 19 and found["rows"][0]["seeds"] == 1
    assert "(the same in all runs)" in said and "value pre-training are not counted" in said
    assert {row["title"].split()[0] for row in found["uncounted"]} == {"GRPO", "VAPO"}
    rows = json.loads(json.dumps(learning.as_rows(found), allow_nan=False))
    assert len(rows) == len(found["rows"]) + len(found["uncounted"]) + len(made)
    assert {row["table"] for row in rows} == {"all tokens", "without value pre-training", "runs"}
    check_picture(learning.picture(plan, made))


def check_picture(text):
    """Well-formed; a large panel of 8 algorithms and 11 of two lines; nothing outside; each line with its band."""
    root = ElementTree.fromstring(text)
    paths = [node for node in root.iter() if node.tag.endswith("path")]
    lines = [node for node in paths if node.get("fill") == "none"]
    assert len(lines) == 8 + 2 * 11 and len(paths) == 2 * len(lines)
    titles = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert sum(" without " in (title or "") for title in titles) == 11
    wide, high = float(root.get("width")), float(root.get("height"))
    for node in paths:
        numbers = [float(n) for n in node.get("d").replace("M", " ").replace("L", " ").replace("Z", " ").split()]
        assert 0 <= min(numbers) and max(numbers[::2]) <= wide and max(numbers[1::2]) <= high
