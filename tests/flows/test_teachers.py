"""Distillation from several teachers, each with the prompts of its sources: whole runs."""

import signal

import pytest

from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_teacher import LEARNS, ONCE, STUDENT, numbers, sampled
from tilth.core.errors import DataError, ModelError, RecipeError
from tilth.data.prompts import PromptSet
from tilth.launch.build import followed_teachers
from tilth.runs.readers import read_state
from tilth.runs.signals import Interrupted

TOKENS = {**LEARNS, "options": {}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two runs with the student's tokens, and one whose tokens are numbers."""
    folder = tmp_path_factory.mktemp("teachers")
    numbers().save(folder / "numbers")
    more = {"numbers": {"tokenizer": str(folder / "numbers")}}
    made = {}
    for seed, name in enumerate(("a", "b", "numbers")):
        learned = {"steps": 2 * seed + 2, "lr": 1e-2, "check_every": 40}
        one = tiny.recipe(folder / name, flow="sft", seed=seed, data=more.get(name, {}), supervised=learned, run=ONCE)
        made[name] = str(tiny.run(one).directory)
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A mixture of two files, which between them have the characters of the teachers' data."""
    folder = tmp_path_factory.mktemp("sources")
    parts = {"low": tiny.SUMS[:50], "high": tiny.SUMS[50:]}
    named = {name: tiny.write(folder / f"{name}.jsonl", rows) for name, rows in parts.items()}
    return {"source": "", "mixture": tuple({"name": name, "source": file} for name, file in named.items())}


def student(folder, data, reference, callbacks=(), prompts=None, reward=tiny.close_enough, **sections):
    algorithm = {**TOKENS, **sections.pop("algorithm", {})}
    made = tiny.recipe(
        folder, **{**STUDENT, "data": data, "reference": reference, "algorithm": algorithm, "run": ONCE, **sections}
    )
    return tiny.run(made, callbacks=callbacks, prompts=prompts, reward=reward).directory


def two(low, high, **more):
    return {"teachers": {"l": {"path": low, "sources": ("low",)}, "h": {"path": high, "sources": ("high",), **more}}}


def by_teacher(record):
    return {name: record.pop(name) for name in list(record) if name.startswith("reference/")}


def test_two_teachers_that_are_one_model_are_one_teacher_bit_for_bit(tmp_path, models, sources):
    how, watcher = {"train": {"parity": True}}, tiny.Recorder()
    one = student(tmp_path / "one", sources, {"path": models["a"]}, **how)
    both = student(tmp_path / "both", sources, two(models["a"], models["a"]), [watcher], **how)
    assert tiny.weights(one) == tiny.weights(both)
    records = sampled(both)
    measured = [by_teacher(record) for record in records]
    assert tiny.same(records, sampled(one))
    assert all(m["reference/rows/l"] + m["reference/rows/h"] == 24 for m in measured)
    assert all(m["reference/rows/l"] == 4 * r["mixture/low"] for m, r in zip(measured, records))
    keys = [f"reference.teachers.{name}.path" for name in "lh"]
    inputs = read_state(both)["inputs"]
    assert [inputs[key] for key in keys] == [read_state(one)["inputs"]["reference.path"]] * 2
    assert [f"{key}: {inputs[key]}" for key in keys] == [m for m in watcher.messages if m.startswith("reference.t")]
    assert not [*(both / "checkpoints").rglob("*reference*")]


def test_a_run_with_two_tokenizers_goes_on_bit_for_bit(tmp_path, models, sources):
    how = {"algorithm": LEARNS}
    teachers = two(models["a"], models["numbers"])
    teachers["teachers"]["l"]["align"] = "tokens"
    whole = student(tmp_path / "whole", sources, teachers, **how)
    stop = tiny.Recorder(lambda record: signal.raise_signal(signal.SIGINT) if record["step"] == 3 else None)
    with pytest.raises(Interrupted):
        student(tmp_path / "again", sources, teachers, [stop], **how)
    again = student(tmp_path / "again", sources, teachers, **how)
    assert tiny.weights(again) == tiny.weights(whole) and tiny.same(tiny.numbers(again), tiny.numbers(whole))
    for record in sampled(whole):
        assert record["reference/unaligned/l"] == 0 <= record["reference/unaligned/h"] < 1
        assert record["reference/unaligned"] <= record["reference/unaligned/h"]


def test_a_field_of_the_record_chooses_the_teacher(tmp_path, models):
    records = [{**record, "kind": "odd" if int(record["answer"]) % 2 else "even"} for record in tiny.SUMS]
    table = {"l": {"path": models["a"], "sources": ("odd",)}, "h": {"path": models["b"], "sources": ("even",)}}
    directory = student(tmp_path, {}, {"field": "kind", "teachers": table}, prompts=PromptSet.of(records))
    found = sampled(directory)
    assert all(record["reference/rows/l"] % 4 == 0 for record in found)
    assert {record["reference/rows/l"] + record["reference/rows/h"] for record in found} == {24}
    made = tiny.recipe(tmp_path, flow="distill", data={}, reference={"field": "kind", "teachers": table})
    prompts = PromptSet.of(records)
    followed, (train, held) = followed_teachers(made, prompts), prompts.split(made.data.holdout)
    assert [("odd", "even")[followed[i]] for i in train.rows] == [records[i]["kind"] for i in train.rows]
    assert (followed[held.rows] == -1).all()
    nested = PromptSet.of([{**record, "meta": {"kind": record.pop("kind")}} for record in map(dict, records)])
    assert (followed_teachers(made.replaced("reference", field="meta.kind"), nested) == followed).all()


@pytest.mark.parametrize("rollout", [{}, {"staleness": 1}], ids=str)
def test_a_run_without_a_reward_learns_what_one_with_a_reward_does(tmp_path, models, sources, rollout):
    how = {"rollout": {"max_tokens": 6, **rollout}, "run": {**ONCE, "eval_every": 2}}
    scored = student(tmp_path / "scored", sources, two(models["a"], models["b"]), **how)
    free = student(tmp_path / "free", sources, two(models["a"], models["b"]), reward=None, **how)
    assert tiny.weights(free) == tiny.weights(scored)
    measured = {name for record in sampled(free) for name in record}
    assert measured < {name for record in sampled(scored) for name in record}
    assert {name for name in measured if name.startswith(("reward/", "groups/", "accuracy"))} == {
        "reward/missing",
        "reward/timeout",
    }
    assert not any(record["reward/missing"] for record in sampled(free))


@pytest.mark.slow
@pytest.mark.dist
def test_on_two_data_ranks_it_is_the_same(tmp_path, models, sources):
    teachers = two(models["a"], models["b"])
    one = sampled(student(tmp_path / "one", sources, teachers))
    cluster = {"backend": "local", "workers": 2}
    two_ranks = sampled(student(tmp_path / "two", sources, teachers, cluster=cluster, train={"threads": 1}))
    for a, b in zip(two_ranks, one, strict=True):
        assert a["reference/rows/l"] == b["reference/rows/l"]
        for name in ("kl_ref", "reference/kl/l", "reference/kl/h"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-5)


# ---- refused ----


@pytest.mark.parametrize(
    "reference, key",
    [
        ({"path": "x", "teachers": {"l": {"path": "x", "sources": ("low", "high")}}}, "reference.path.teachers"),
        ({"teachers": {"l": {"path": "x", "sources": ("low",)}}}, "reference.teachers.sources"),
        (two("", "x"), "reference.teachers.l.path"),
        (two("x", "x", sources=()), "reference.teachers.h.sources"),
        (two("x", "x", sources=("high", "low")), "reference.teachers.h.sources.twice"),
        (two("x", "x", sources=("high", "higher")), "reference.teachers.h.sources.higher"),
        (two("x", "x", align="characters"), "reference.teachers.h.align"),
        ({"path": "x", "field": "kind"}, "reference.field.unused"),
        ({"teachers": {"l!": {"path": "x", "sources": ("low", "high")}}}, "reference.teachers.l!.name"),
        ({}, "reference.path"),
    ],
)
def test_a_source_has_one_teacher_and_a_teacher_a_source(tmp_path, sources, reference, key):
    with raises(RecipeError, key):
        tiny.recipe(tmp_path, flow="distill", data=sources, reference=reference)


def test_teachers_of_another_flow_are_refused(tmp_path, sources):
    with raises(RecipeError, "reference.teachers.unused"):
        tiny.recipe(tmp_path, data=sources, reference=two("x", "x"), algorithm={"kl_coef": 0.1})


def test_models_that_cannot_teach_are_refused(tmp_path, models, sources):
    with raises(ModelError, "reference.teachers.h.path"):
        student(tmp_path, sources, two(models["a"], str(tmp_path / "none")))
    with raises(RecipeError, "reference.teachers.h.path.tokenizer"):
        student(tmp_path, sources, two(models["a"], models["numbers"]))
    with raises(RecipeError, "reference.teachers.h.path.tokenizer"):
        student(tmp_path, sources, two(models["a"], models["numbers"], align="tokens"), algorithm=LEARNS)


@pytest.mark.parametrize(
    "record, key, error",
    [
        ({}, "reference.field", DataError),
        ({"kind": "third"}, "reference.field.third", DataError),
        ({"kind": "odd"}, "reference.teachers.h.sources.empty", RecipeError),
    ],
)
def test_a_record_without_a_teacher_is_refused(tmp_path, record, key, error):
    table = {"l": {"path": "x", "sources": ("odd",)}, "h": {"path": "x", "sources": ("even",)}}
    made = tiny.recipe(tmp_path, flow="distill", reference={"field": "kind", "teachers": table})
    with raises(error, key):
        followed_teachers(made, PromptSet.of([{**one, **record} for one in tiny.SUMS]))


def test_the_option_to_align_is_refused_where_no_teacher_aligns(tmp_path, models, sources):
    tokens = {name: {**one, "align": "tokens"} for name, one in two(models["a"], models["b"])["teachers"].items()}
    with raises(RecipeError, "algorithm.options.align.unused"):
        student(tmp_path, sources, {"teachers": tokens}, algorithm={"options": {"align": "characters"}})


def test_a_target_of_answers_that_nothing_scores_is_refused(tmp_path, models, sources):
    how = {"reward": None, "supervised": {"steps": 2, "until": 0.5}}
    with raises(RecipeError, "supervised.until.unscored"):
        student(tmp_path, sources, {"path": models["a"]}, **how)
